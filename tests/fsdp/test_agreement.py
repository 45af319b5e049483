"""Ranks that do not do the same are told so, on every rank, before or one step after."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from ranks import run_ranks
from sharding import fully_shard, load_full_state_dict
from sharding.fsdp.module_state import state_of
from sharding.fsdp.proofs import NUMEL, _left_zero, columns
from small_models import Parallel, build, loss_of, make_optimizer, shard


def on_one_rank() -> bool:
    return dist.get_rank() == 1


def as_on_a_device(model: nn.Module) -> None:
    """The host reads what reductions prove a step later, as it does for a GPU."""
    model(torch.ones(2, 20)) if isinstance(model, Parallel) else loss_of(model, 0)
    context = state_of(model).context
    assert context is not None
    context.proofs.host_devices = frozenset()


def raised(steps: Callable[[int], None]) -> tuple[int, str]:
    """The first step that raises, and its error; every rank has to get there."""
    for step in range(6):
        try:
            steps(step)
        except RuntimeError as error:
            return step, str(error)
    raise AssertionError("nothing was raised")


def swapped(late: bool) -> tuple[int, str]:
    torch.manual_seed(0)
    model = Parallel(backwards=False)
    for part in (model.a, model.b, model):
        fully_shard(part)
    if late:
        as_on_a_device(model)

    def step(i: int) -> None:
        model.backwards = i >= 1 and on_one_rank()
        model(torch.ones(2, 20)).sum().backward()

    return raised(step)


@pytest.mark.parametrize("late", [False, True])
def test_ranks_that_gather_in_other_orders_raise_on_every_device(late: bool) -> None:
    """Two ranks on GPUs computed with each other's weights, without an error."""
    for step, report in run_ranks(swapped, 2, late, timeout=30):
        assert step == (2 if late else 1)
        assert report.startswith("ranks gathered buckets in different orders before the reduction")


def diverging(optimizer_name: str, how: str, late: bool) -> tuple[int, str]:
    """Four steps; from the second on one rank is told something else, or nothing."""
    model = shard(build())
    if optimizer_name == "torch":
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    else:
        optimizer = make_optimizer(optimizer_name, model)
    if late:
        as_on_a_device(model)

    def step(i: int) -> None:
        loss_of(model, i).backward()
        if i == 1 and on_one_rank() and how != "skip":
            optimizer.param_groups[-1][how] = (0.5, 0.9) if how == "betas" else 0.025
        if not (i == 1 and on_one_rank() and how == "skip"):
            optimizer.step()
        optimizer.zero_grad()

    return raised(step)


@pytest.mark.parametrize(
    ("optimizer", "how", "late"),
    [
        ("adamw", "skip", False),
        ("adamw", "lr", True),
        ("muon", "weight_decay", False),
        ("torch", "lr", False),
        ("torch", "skip", True),
        ("adamw", "betas", False),
    ],
)
def test_ranks_whose_optimizers_are_told_other_things_raise(
    optimizer: str, how: str, late: bool
) -> None:
    """A scheduler on one rank, or a step that one rank skips, were silent."""
    for step, report in run_ranks(diverging, 2, optimizer, how, late, timeout=30):
        assert step == (3 if late else 2)
        assert report.startswith("what steered the last updates differs between ranks 0 and 1: ")
        if how == "skip":
            assert f"'update {step} of this bucket, " in report
            assert "is on rank 0 only" in report
        else:
            assert "update 2 of this bucket, " in report
            assert f"{how}=0.025" in report or "betas=(0.5, 0.9)" in report


def given(what: str) -> str:
    torch.manual_seed(dist.get_rank() if what != "policy" else 0)
    with torch.device("meta" if what == "meta" else "cpu"):
        model = nn.Sequential(nn.Linear(20, 40), nn.Linear(40, 20, bias=False))
    half = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)
    options = {"mp_policy": half} if what == "policy" and on_one_rank() else {}
    if what == "reshard":
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(20, 40), nn.Linear(40, 20, bias=False))
        options = {"reshard_after_forward": on_one_rank()}
    full = {name: torch.full(p.shape, 0.5) for name, p in model.named_parameters()}
    fully_shard(model[0], **options)
    fully_shard(model)
    if what == "meta":
        model.to_empty(device="cpu")
        for p in model.parameters():
            nn.init.constant_(p, 0.5)
    if what == "load":
        model.load_state_dict(full)
    if what == "rank 0":
        load_full_state_dict(
            model, state=full if dist.get_rank() == 0 else {}, broadcast_from_rank0=True
        )
    if what == "data":
        for p in model.parameters():
            p.to_local().data.fill_(0.5)
    try:
        model(torch.ones(2, 20))
    except RuntimeError as error:
        return str(error)
    return ""


def test_what_steers_collectives_is_compared_before_the_first_one() -> None:
    """Another seed, policy or option on one rank was silent, or a collective of other sizes."""
    for report in run_ranks(given, 2, "seed"):
        assert report == (
            "1.weight was another one on rank 1 than on rank 0 when fully_shard cut it, so that "
            "ranks would train a mixture of models; build the model from one seed on all ranks "
            "(torch.manual_seed), broadcast it, or load a checkpoint before the first forward"
        )
    for report in run_ranks(given, 2, "policy"):
        assert report.startswith("the sharding plan differs between ranks 0 and 1: ")
        assert "reduce_dtype=torch.bfloat16" in report
    for report in run_ranks(given, 2, "reshard"):
        assert "reshard_after_forward=False" in report
    for replaced in ("meta", "load", "rank 0", "data"):
        assert run_ranks(given, 2, replaced) == ["", ""], replaced


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_proof_does_not_depend_on_how_sums_are_rounded(dtype: torch.dtype) -> None:
    """An average of 251 over 6 ranks is not 251 in bfloat16."""
    cpu = torch.device("cpu")

    def averaged(numbers: list[tuple[int, int]]) -> Tensor:
        total = torch.zeros(NUMEL, dtype=dtype)
        for each in numbers:  # as NCCL: each addend is divided, every sum is rounded
            total += columns(each, dtype, cpu) / len(numbers)
        return total

    alike = [(251, 77)] * 6
    assert not torch.dot(averaged(alike), _left_zero(alike[:1], dtype, cpu))
    for other in ((250, 77), (251, 78), (0, 77), (251, 255)):
        for mine in (alike[0], other):
            assert torch.dot(averaged([*alike, other]), _left_zero([mine], dtype, cpu)) > 0
