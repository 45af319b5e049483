"""What a report says: where the first difference is, and a script that shows it again."""

import runpy
import sys
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import Phase, given, settings
from mutants import make_mutant
from torch import Tensor, nn

from sharding import RaggedDTensor, RaggedShard
from vfsdp_optim.testing import (
    RankError,
    assert_op_cut_invariant,
    assert_program_is_exact,
    assert_resume_is_exact,
    assert_sharded_equals_unsharded,
    assert_training_matches,
    step_programs,
)
from vfsdp_optim.testing.differences import DifferenceError
from vfsdp_optim.testing.programs import Freeze, Load, Program, Save, SetLr, Step
from vfsdp_optim.testing.reproduce import MAX_LINES, script


class Sgd(torch.optim.Optimizer):
    """x <- x - lr g with one state, the gradient before; `fault` is planted on shards."""

    def __init__(self, params: Any, fault: str = "") -> None:
        super().__init__(params, dict(lr=0.5))
        self.fault, self.steps = fault, 0

    @torch.no_grad()
    def step(self) -> None:
        self.steps += 1
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(group["lr"] * p.grad)
                    self.state[p]["before"] = p.grad.clone()
                    if isinstance(p, RaggedDTensor):
                        self.plant(p, self.state[p])

    def plant(self, p: RaggedDTensor, state: dict[str, Any]) -> None:
        """Do something wrong in step 2, or later if nothing else is said."""
        start, stop = p.bounds
        if self.fault == "element 17" and self.steps == 2 and start <= 17 < stop:
            p.to_local()[17 - start] += 1.0
        if self.fault == "state of rank 1" and dist.get_rank() == 1:
            del state["before"]
        if self.fault == "half" and self.steps == 3:
            state["before"] = state["before"].to(torch.bfloat16)
        if self.fault == "extra":
            state["after"] = torch.zeros(())
        if self.fault == "sums of rows":
            state["before"] = p.to_local().new_ones(p.to_local().numel() // 5)
        if self.fault == "padding beside nothing" and start == stop:
            piece = p.to_local()
            length = piece.untyped_storage().nbytes() // piece.element_size()
            piece.as_strided((length,), (1,), 0).fill_(1.0)
        if self.fault == "forgets its shard" and self.steps == 2:
            state["before"] = local_ones(p) if dist.get_rank() else state["before"]


def local_ones(p: RaggedDTensor) -> Tensor:
    """A plain tensor, as an optimizer keeps that knows of no DTensor."""
    return torch.ones_like(p.to_local())


def make_sgd(fault: str, module: nn.Module) -> torch.optim.Optimizer:
    return Sgd(module.named_parameters(), fault)


CUTS = (RaggedShard((0, 1), (10, 0, 20)), RaggedShard((0,), (2, 2, 1)))


def gradient(step: int, name: str, shape: torch.Size) -> Tensor:
    return torch.full(shape, float(step))


def report_of(fault: str) -> str:
    """Return the report on a fault in a layout that is known."""
    with pytest.raises(DifferenceError) as error:
        assert_sharded_equals_unsharded(
            partial(make_sgd, fault),
            shapes=[(6, 5), (5,)],
            world_sizes=[3],
            layouts=CUTS,
            steps=4,
            gradients=gradient,
        )
    return str(error.value)


def test_sgd_without_a_fault_is_exact():
    shapes = [(6, 5), (5,)]
    assert_sharded_equals_unsharded(
        partial(make_sgd, ""), shapes=shapes, world_sizes=[3], layouts=CUTS
    )
    # Neither is it changed by what is only ever wrong on shards.
    assert_sharded_equals_unsharded(
        partial(make_sgd, "element 17"), shapes=shapes, world_sizes=[2], layouts="fsdp2"
    )


def test_report_names_step_parameter_index_values_rank_and_layout():
    lines = report_of("element 17").splitlines()
    assert lines[0] == "Sgd on 3 ranks in layout drawn RaggedShards is not the unsharded optimizer"
    assert lines[1] == "first difference: step 2, parameter 'p0', the parameter itself"
    assert lines[2] == "  index      (3, 2) of shape (6, 5), element 17"
    # (1 - 0.5 - 1) from the initial value; the sharded one is 1 above.
    sharded, unsharded = (float(line.split()[1]) for line in lines[3:5])
    assert sharded == pytest.approx(unsharded + 1, abs=1e-6)
    assert lines[5] == (
        "  held by    rank 2: elements 10 to 30 of "
        "RaggedShard(dims=(0, 1), local_units=(10, 0, 20), unit_numel=1)"
    )
    assert lines[6].startswith("  in all     1 of 30 elements differ, on rank 2, by at most 1")
    assert lines[7] == "  nothing else differs then"


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("state of rank 1", ["step 1, parameter 'p0', state 'before'", "not on rank 1"]),
        ("extra", ["state 'after'", "it exists on ranks 0, 1, 2 and not in the unsharded run"]),
        ("half", ["step 3", "sharded    bfloat16 of shape (6, 5) on rank 0", "unsharded  float32"]),
        ("forgets its shard", ["step 2", "held by    rank 2", "a plain tensor; its parameter is"]),
        (
            "sums of rows",
            ["'before'", "on rank 0 of a plain tensor, not of the shape of this rank's"],
        ),
    ],
)
def test_report_names_what_is_missing_or_of_another_kind(fault, words):
    report = report_of(fault)
    for text in words:
        assert text in report, report


def test_padding_of_a_rank_that_holds_nothing_is_read():
    with pytest.raises(DifferenceError, match=r"padding .* not zero:\n .*256 elements of rank 1 "):
        assert_sharded_equals_unsharded(
            partial(make_sgd, "padding beside nothing"), shapes=[(5,)], world_sizes=[2], steps=1
        )


def test_difference_after_a_load_says_so():
    program = Program(
        ((30, 11),), 2, "ragged", (Step(), SetLr(0.5), Save(), Load(3, "ours"), Step())
    )
    with pytest.raises(DifferenceError) as error:
        assert_program_is_exact(partial(make_mutant, "LearningRateOfTheConstructor"), program)
    lost = "first difference: the save after step 1, parameter 'p0', option 'lr' of its group"
    assert lost in str(error.value)
    assert "the ranks had loaded what others saved" in str(error.value)


def make_that_raises(module: nn.Module) -> torch.optim.Optimizer:
    if isinstance(next(module.parameters()), RaggedDTensor):
        raise KeyError("mine")
    return torch.optim.SGD(module.parameters())


def test_error_on_ranks_names_the_layout_and_is_shown_once():
    with pytest.raises(RankError) as error:
        assert_sharded_equals_unsharded(
            make_that_raises, shapes=[(6, 5)], world_sizes=[3], layouts=["fsdp2", "ragged"]
        )
    assert error.value.__notes__ == ["this was SGD on 3 ranks in layout 'ragged'"]
    assert str(error.value).count("--- ranks 0, 1, 2: raised KeyError") == 1
    assert str(error.value).count("Traceback") == 1
    model = partial(nn.Linear, 6, 5)
    with pytest.raises(RankError) as error:
        assert_training_matches(
            model, make_that_raises, [torch.ones(4, 6)], loss=lambda m, x: m(x).sum()
        )
    assert error.value.__notes__ == ["this was SGD on 2 ranks in layout 'ours'"]


class Louder(torch.optim.SGD):
    """Doubles gradients on shards."""

    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            if isinstance(p, RaggedDTensor):
                p.grad.mul_(2)
        super().step()


def make_louder(module: nn.Module) -> torch.optim.Optimizer:
    return Louder(module.parameters(), lr=0.1)


def test_pytest_shows_the_report_and_not_the_code_of_the_kit():
    program = Program(((30, 11),))
    model = partial(nn.Linear, 6, 5)
    batches = [torch.ones(4, 6)]
    wrong_loss = lambda m, x: m(x).sum()  # noqa: E731  (not the mean over samples)
    calls = [
        lambda: assert_sharded_equals_unsharded(make_louder, shapes=[(6, 5)], layouts="ours"),
        lambda: assert_sharded_equals_unsharded(make_that_raises, shapes=[(6, 5)]),
        lambda: assert_resume_is_exact(make_louder, shapes=[(6, 5)]),
        lambda: assert_resume_is_exact(lambda module: None, shapes=[(6, 5)]),
        lambda: assert_program_is_exact(make_louder, program),
        lambda: assert_training_matches(model, make_louder, batches, loss=wrong_loss),
        lambda: assert_op_cut_invariant(lambda x: x / x.norm()),
    ]
    for call in calls:
        with pytest.raises((DifferenceError, RankError)) as error:
            call()
        shown = [str(entry.path) for entry in error.traceback.filter(error)]
        assert shown == [__file__] * 2, shown


def script_in(message: str) -> str:
    """Return the script at the end of a message."""
    return message.partition("this script shows it again:\n\n")[2]


def test_script_of_a_failure_fails_alike_without_hypothesis(tmp_path):
    program = Program(((60, 33), (300,)), 3, "ours", (Step("sparse"), Freeze(1), Step()))
    with pytest.raises(DifferenceError) as error:
        assert_program_is_exact(partial(make_mutant, "OwnerForgetsOneMatrix"), program)
    text = script_in(str(error.value))
    assert len(text.splitlines()) <= MAX_LINES
    assert "hypothesis" not in text
    path = tmp_path / "again.py"
    path.write_text(text)
    with pytest.raises(DifferenceError) as again:
        runpy.run_path(str(path), run_name="__main__")
    assert str(again.value).partition("\n\n")[0] == str(error.value).partition("\n\n")[0]


@given(program=step_programs(max_steps=12))
def test_script_has_few_lines_and_makes_the_same_program(program):
    scope: dict[str, Any] = {}
    text = script(partial(make_mutant, "NoiseOfTheRank"), program, "why " * 100)
    assert len(text.splitlines()) <= MAX_LINES
    exec(text.rpartition("\n")[0], scope)  # all but the last line, which runs it
    assert scope["program"] == program
    assert scope["make_optimizer"].func is make_mutant


def test_script_carries_functions_that_cannot_be_imported():
    scale = 0.25
    text = script(lambda module: scale * 2, Program(((3,),)), "why")
    assert len(text.splitlines()) <= MAX_LINES
    scope: dict[str, Any] = {}
    exec(text.rpartition("\n")[0], scope)
    assert scope["make_optimizer"](None) == 0.5
    text = script(partial(torch.optim.SGD, lr=0.5), Program(((3,),)), "why")
    assert "sys.path" not in text  # what is installed is found without


def test_script_finds_modules_that_a_pickled_function_uses(tmp_path, monkeypatch):
    (tmp_path / "optimizers_of_a_user.py").write_text("scale = 0.25\n")
    monkeypatch.syspath_prepend(tmp_path)
    import optimizers_of_a_user as theirs

    text = script(lambda module: theirs.scale, Program(((3,),)), "why")
    del sys.modules["optimizers_of_a_user"]
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path != str(tmp_path)])
    scope: dict[str, Any] = {}
    exec(text.rpartition("\n")[0], scope)
    assert scope["make_optimizer"](None) == 0.25


def test_failing_programs_shrink_to_something_readable():
    failing: list[Program] = []

    @settings(max_examples=100, phases=[Phase.generate, Phase.shrink])
    @given(program=step_programs())
    def is_exact(program):
        try:
            assert_program_is_exact(partial(make_mutant, "PaddingNotZero"), program)
        except DifferenceError:
            failing.append(program)
            raise

    with pytest.raises(DifferenceError):
        is_exact()
    smallest = failing[-1]
    # Padding needs two parameters on one rank; everything else is gone.
    assert len(smallest.shapes) == 2
    assert sum(len(shape) for shape in smallest.shapes) <= 3
    assert [type(instruction) for instruction in smallest.instructions] == [Step]
    assert smallest.instructions == (Step(),)
