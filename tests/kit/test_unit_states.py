"""States that a unit has on its owner, in an algorithm as users write them, through the kit."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from panel_gram import PanelGram
from ranks import run_ranks
from vfsdp_optim import SOAP, Shampoo
from vfsdp_optim.algorithm import UnitContext
from vfsdp_optim.optimizer import StructuredOptimizer
from vfsdp_optim.testing import assert_resume_is_exact, assert_sharded_equals_unsharded

# Rows that no number of ranks divides, two panels a rank and more, one that is kept in 8 bits.
SHAPES = [(37, 7), (19, 3), (96, 64)]
LAYOUTS = ("ours", "negotiated", "fsdp2", "hsdp", "ours_hsdp", "replicated")


def make_gram(module: nn.Module, **options: Any) -> StructuredOptimizer:
    return StructuredOptimizer(module.named_parameters(), PanelGram(**options))


def make_8bit_gram(module: nn.Module) -> StructuredOptimizer:
    return make_gram(module, states="8bit")


@pytest.mark.parametrize(
    ("make_optimizer", "layouts"), [(make_gram, LAYOUTS), (make_8bit_gram, LAYOUTS[::2])]
)
def test_states_of_units_are_exact_in_every_layout(make_optimizer, layouts):
    assert_sharded_equals_unsharded(
        make_optimizer, shapes=SHAPES, layouts=layouts, world_sizes=(3, 4)
    )
    assert_resume_is_exact(make_optimizer, shapes=SHAPES, layouts=("ours", "fsdp2", "ours_hsdp"))


def test_states_of_units_are_there_from_the_first_look_under_the_number_of_the_unit():
    param = nn.Parameter(torch.ones(12, 4))
    optimizer = StructuredOptimizer([param], PanelGram())
    keys = ["step", *(f"{key}.{unit}" for unit in (0, 1) for key in ("gram", "moment", "largest"))]
    assert list(optimizer.state[param]) == keys
    assert optimizer.state[param]["gram.1"].shape == (4, 4)
    param.grad = torch.ones(12, 4)
    optimizer.step()
    gram = optimizer.state[param]["gram.1"]
    torch.testing.assert_close(gram, torch.full((4, 4), 0.05 * 4))
    assert optimizer.state_dict()["state"][0]["gram.1"] is gram
    gram.zero_()
    optimizer.step()
    torch.testing.assert_close(gram, torch.full((4, 4), 0.05 * 4))


def held(optimizer: StructuredOptimizer) -> dict[str, Tensor]:
    (state, *_) = optimizer.state.values()
    return {key: value.clone() for key, value in state.items()}


@pytest.mark.parametrize("states", ["32bit", "8bit"])
def test_step_that_a_device_skips_leaves_states_of_units_as_they_were(states):
    param = nn.Parameter(torch.ones(96, 64))
    optimizer = StructuredOptimizer([param], PanelGram(states=states), on_nonfinite="skip")
    optimizer._nonfinite.host_devices = frozenset()  # as if the flag were known to a GPU alone
    param.grad = torch.randn(96, 64, generator=torch.Generator().manual_seed(1))
    optimizer.step()
    before, weights = held(optimizer), param.detach().clone()
    param.grad = param.grad.clone()
    param.grad[90, 3] = torch.inf
    optimizer.step()
    assert optimizer.skipped_steps == 1
    assert torch.equal(param, weights)
    after = held(optimizer)
    assert all(torch.equal(after[key], before[key]) for key in before)
    param.grad.fill_(0.5)
    optimizer.step()
    assert not torch.equal(held(optimizer)["gram.0"], before["gram.0"])


def blocked_run(kind: type, bad: int | None, *, host: bool) -> Iterator[dict[str, Tensor]]:
    """States and weights after each of 6 steps; in step `bad` a gradient is not finite."""
    param = nn.Parameter(torch.ones(40, 24))
    optimizer = kind([param], block_size=(16, 8), precondition_frequency=2, on_nonfinite="skip")
    if not host:
        optimizer._nonfinite.host_devices = frozenset()  # as if the flag were known to a GPU alone
    generator = torch.Generator().manual_seed(1)
    for step in range(6):
        param.grad = torch.randn(40, 24, generator=generator)
        if step == bad:
            param.grad[17, 9] = torch.nan
        optimizer.step()
        yield {**held(optimizer), "weight": param.detach()}


@pytest.mark.parametrize("kind", [Shampoo, SOAP])
def test_step_of_blocks_that_a_device_skips_is_that_which_a_host_leaves_out(kind):
    for bad in (None, 0, 2, 3):
        runs = (blocked_run(kind, bad, host=host) for host in (True, False))
        for step, (ours, theirs) in enumerate(zip(*runs, strict=True)):
            wrong = [key for key in ours if not torch.equal(ours[key], theirs[key])]
            assert not wrong, (bad, step)


@pytest.mark.parametrize("kind", [Shampoo, SOAP])
def test_device_that_may_skip_keeps_copies_of_what_changes_in_each_step_alone(kind):
    """All states were copied in every step: roots and bases change in the turn of a block."""
    copied = 0

    def clone(tensor: Tensor, original: Any = Tensor.clone) -> Tensor:
        nonlocal copied
        copied += tensor.numel()
        return original(tensor)

    with patch.object(Tensor, "clone", clone):
        *_, last = blocked_run(kind, None, host=False)
    numels = {key: value.numel() for key, value in last.items()}
    copied -= 6 * (sum(numels.values()) - numels["weight"])  # by `held`
    changing = ("exp_avg", "exp_avg_sq", "left", "right")
    expected = sum(numel for key, numel in numels.items() if key.split(".")[0] in changing)
    # Beside them weights, before the decay and before the update.
    assert 6 * expected <= copied <= 6 * (expected + 3 * numels["weight"])


def test_states_of_units_stay_when_a_group_comes_or_a_parameter_is_frozen():
    param, other = nn.Parameter(torch.ones(12, 4)), nn.Parameter(torch.ones(8, 4))
    optimizer = StructuredOptimizer([param], PanelGram())
    param.grad = torch.ones(12, 4)
    optimizer.step()
    before = held(optimizer)
    optimizer.add_param_group({"params": [other]})
    assert all(torch.equal(held(optimizer)[key], before[key]) for key in before)
    param.requires_grad_(False)
    param.grad = None
    other.grad = torch.ones(8, 4)
    optimizer.step()
    assert all(torch.equal(held(optimizer)[key], before[key]) for key in before)


def planned_and_held() -> tuple[tuple[int, ...], int, str]:
    """Bytes of states of units by rank, as planned; those here; the table."""
    param = nn.Parameter(
        distribute_tensor(torch.ones(96, 64), init_device_mesh("cpu", (2,)), [Shard(0)])
    )
    optimizer = StructuredOptimizer([("w", param)], PanelGram(states="8bit"))
    plan = optimizer.plan()
    (state,) = optimizer.state.values()
    of_units = [value.to_local() for key, value in state.items() if key != "step"]
    assert plan.rows[0].unit_state_bytes == sum(plan.unit_state_bytes)
    return plan.unit_state_bytes, sum(local.nbytes for local in of_units), str(plan)


def test_plan_shows_the_bytes_of_states_of_units_on_their_owners():
    results = run_ranks(planned_and_held, 2)
    for rank, (planned, held, table) in enumerate(results):
        assert planned[rank] == held > 0
        assert f"at most {max(planned):,} a rank" in " ".join(table.split())
        assert planned == results[0][0]


class Fails(PanelGram):
    """What is computed of the first matrix fails for good."""

    def matrix_update(
        self, group: dict[str, Any], matrix: Tensor, context: UnitContext, scratch: Any
    ) -> Tensor:
        if context.index == 0:
            context.fail("no root")
        return super().matrix_update(group, matrix, context, scratch)


def fail_on_one_rank(choice: str) -> str:
    """The error of the step after the one in which the first rank's panel failed."""
    mesh = init_device_mesh("cpu", (2,))
    param = nn.Parameter(distribute_tensor(torch.ones(16, 4), mesh, [Shard(0)]))
    optimizer = StructuredOptimizer([("w", param)], Fails(), on_nonfinite=choice)
    optimizer._nonfinite.host_devices = frozenset()  # as if the flag were known to a GPU alone
    param.grad = torch.ones_like(param)
    optimizer.step()
    before = param.to_local().clone()
    if choice != "raise":  # which waits for the device; others hear of it in the step after
        optimizer.step()
        assert dist.get_rank() or optimizer.state  # one that looks alone does not hang
    with pytest.raises(RuntimeError) as error:
        optimizer.step()
    if choice != "ignore":
        assert torch.equal(param.to_local(), before)
    return str(error.value)


@pytest.mark.parametrize("choice", ["raise", "skip", "ignore"])
def test_failure_on_one_rank_raises_on_all_and_none_hangs(choice):
    """A rank that does not read the flag would not have raised with the one that failed."""
    expected = "the update of some matrices failed: w: no root"
    assert run_ranks(fail_on_one_rank, 2, choice) == [expected] * 2


class ForgetsOnLoad(StructuredOptimizer):
    """Planted: states of units are lost on resume."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        for state in self.state.values():
            state["gram.0"].zero_()


class FollowsItsPanel(PanelGram):
    """Planted: each rank has a state of its own, as where rows are cut and nothing is exchanged."""

    def matrix_update(
        self, group: dict[str, Any], matrix: Tensor, context: UnitContext, scratch: Any
    ) -> Tensor:
        if context.index == 1 and torch.distributed.get_world_size() > 1:
            context.states["moment"].mul_(0.5)
        return super().matrix_update(group, matrix, context, scratch)


class CountsFromOne(PanelGram):
    """Planted: the number of a matrix is that among this rank's, so turns differ by rank."""

    def matrix_update(
        self, group: dict[str, Any], matrix: Tensor, context: UnitContext, scratch: Any
    ) -> Tensor:
        index = context.index % torch.distributed.get_world_size()
        return super().matrix_update(group, matrix, replace(context, index=index), scratch)


def test_planted_faults_in_states_of_units_are_caught():
    def forgets(module: nn.Module) -> StructuredOptimizer:
        return ForgetsOnLoad(module.named_parameters(), PanelGram())

    with pytest.raises(AssertionError, match="gram"):
        assert_resume_is_exact(forgets, shapes=SHAPES[:1], layouts="ours")
    for algorithm in (FollowsItsPanel, CountsFromOne):
        with pytest.raises(AssertionError):
            assert_sharded_equals_unsharded(
                lambda module, kind=algorithm: StructuredOptimizer(
                    module.named_parameters(), kind()
                ),
                shapes=SHAPES[:1],
                layouts="ours",
            )
