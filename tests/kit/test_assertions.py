"""The assertions on models with several buckets, with tolerances, and across a save and a load."""

from functools import partial

import pytest
import torch
from mutants import make_mutant
from torch import nn

from vfsdp_optim import AdamW, Muon, param_groups
from vfsdp_optim.testing import RankError, assert_resume_is_exact, assert_sharded_equals_unsharded
from vfsdp_optim.testing.differences import DifferenceError


class Model(nn.Module):
    """An embedding, two blocks in a list, a tied head: three buckets."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(30, 20)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(20, 50), nn.ReLU(), nn.Linear(50, 20)) for _ in range(2)
        )
        self.head = nn.Linear(20, 30, bias=False)
        self.head.weight = self.embedding.weight


def make_muon(module: nn.Module) -> torch.optim.Optimizer:
    return Muon(param_groups(module, adamw=dict(lr=0.01)), lr=0.1)


@pytest.mark.parametrize("model", [Model, Model()], ids=["function", "module"])
def test_model_with_buckets_and_tied_weights_is_exact(model):
    assert_sharded_equals_unsharded(
        make_muon, model=model, world_sizes=(2, 3), layouts=("ours", "negotiated", "ragged")
    )


def test_model_is_exact_when_resumed_on_other_ranks():
    for checkpoint in ("dcp", "state_dict"):
        assert_resume_is_exact(make_muon, model=Model, resumed_on=4, checkpoint=checkpoint)


@pytest.mark.parametrize("name", ["StateByPosition", "StepCountStartsAgain"])
def test_wrong_load_is_found_after_the_save(name):
    with pytest.raises(DifferenceError, match="on 3 ranks in layout 'ragged'") as error:
        assert_resume_is_exact(
            partial(make_mutant, name),
            shapes=[(20, 9), (70,)],
            layouts="ragged",
            checkpoint="state_dict",
        )
    assert "first difference: the save after step 3" in str(error.value)
    assert "the ranks had loaded what others saved" in str(error.value)


class Wide(AdamW):
    """On shards, adds 1e-4 to every parameter in each step."""

    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                if hasattr(p, "to_local"):
                    p.add_(1e-4)


def make_sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (dict(world_sizes=[]), "world_sizes: expected some positive numbers, got \\[\\]"),
        (dict(world_sizes=2), "world_sizes: expected some positive numbers, got 2"),
        (dict(steps=0), "steps: expected at least 1, got 0"),
        (dict(layouts=[]), "layouts: expected 'any', some of"),
        (dict(shapes=[]), "shapes: expected one for each parameter, got \\[\\]"),
        (dict(shapes=(3, 2)), "shapes: expected one for each parameter, got \\(3, 2\\)"),
    ],
)
def test_nothing_to_compare_is_no_success(arguments, words):
    with pytest.raises(ValueError, match=words):
        assert_sharded_equals_unsharded(make_sgd, **{"shapes": [(3, 2)], **arguments})


def test_optimizer_that_never_steps_is_no_success():
    with pytest.raises(ValueError, match="in 5 unsharded steps SGD changed none by more than"):
        assert_sharded_equals_unsharded(
            lambda module: torch.optim.SGD(module.parameters(), lr=0.0), shapes=[(3, 2)]
        )


def test_optimizer_that_was_not_returned_is_named():
    with pytest.raises(RankError, match="make_optimizer: expected it to return an optimizer"):
        assert_sharded_equals_unsharded(lambda module: None, shapes=[(3, 2)])


def test_dtype_may_be_of_torch():
    def gradient(step: int, name: str, shape: torch.Size) -> torch.Tensor:
        return torch.ones(shape, dtype=torch.bfloat16)  # refused by parameters of another dtype

    assert_sharded_equals_unsharded(
        make_sgd, shapes=[(3, 2)], dtype=torch.bfloat16, world_sizes=[2], gradients=gradient
    )


def test_tolerance_is_a_limit():
    options = dict(shapes=[(20, 9)], world_sizes=[2], steps=3, exact=False, rtol=0.0)
    make = partial(Wide, lr=0.1)
    assert_sharded_equals_unsharded(lambda m: make(m.parameters()), **options, atol=3.5e-4)
    with pytest.raises(DifferenceError, match="step 3"):
        assert_sharded_equals_unsharded(lambda m: make(m.parameters()), **options, atol=2.5e-4)


def gradient_of_p1_in_step_2(step: int, name: str, shape: torch.Size) -> torch.Tensor | None:
    return torch.arange(float(shape[0])) if (step, name) == (2, "p1") else None


def test_gradients_of_the_user_reach_the_optimizer():
    with pytest.raises(DifferenceError) as error:
        assert_sharded_equals_unsharded(
            partial(make_mutant, "DividedByTheLocalMean"),
            shapes=[(900,), (900,)],
            world_sizes=[2],
            layouts="ragged",
            gradients=gradient_of_p1_in_step_2,
        )
    assert "first difference: step 2, parameter 'p1', state 'exp_avg'" in str(error.value)
