"""Ranks that do not do the same are told so, on every rank, before or one step after."""

import os
import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import training
from ranks import RankError, run_ranks
from sharding import fully_shard, load_full_state_dict
from sharding.fsdp.module_state import state_of
from sharding.fsdp.proofs import NUMEL, _left_zero, columns
from small_models import Parallel, build, loss_of, make_optimizer, shard
from vfsdp_optim import Muon, QKHeads, param_groups


def on_one_rank() -> bool:
    return dist.get_rank() == 1


def as_on_a_device(model: nn.Module) -> None:
    """The host reads what reductions prove a step later, as it does for a GPU."""
    model(torch.ones(2, 20)) if isinstance(model, Parallel) else loss_of(model, 0)
    context = state_of(model).context
    assert context is not None
    context.proofs.host_devices = frozenset()
    for bucket in context.buckets:
        bucket.transport.heralds = None  # nothing is announced there


def raised(steps: Callable[[int], None]) -> tuple[int, str]:
    """The first step that raises, and its error; every rank has to get there."""
    for step in range(6):
        try:
            steps(step)
        except RuntimeError as error:
            return step, str(error)
    raise AssertionError("nothing was raised")


def swapped() -> tuple[int, str]:
    torch.manual_seed(0)
    model = Parallel(backwards=False)
    for part in (model.a, model.b, model):
        fully_shard(part)
    as_on_a_device(model)

    def step(i: int) -> None:
        model.backwards = i >= 1 and on_one_rank()
        model(torch.ones(2, 20)).sum().backward()

    return raised(step)


def test_ranks_that_gather_in_other_orders_raise_on_every_device() -> None:
    """Two ranks on GPUs computed with each other's weights, without an error."""
    for step, report in run_ranks(swapped, 2, timeout=30):
        assert step == 2
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
def test_ranks_whose_optimizers_are_told_other_things_raise(optimizer, how, late):
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


def sharded(model: nn.Module) -> nn.Module:
    """Over all ranks; 4 are two replicas of two."""
    mesh = training.mesh_of((2, 2)) if dist.get_world_size() == 4 else None
    for part in (*model.children(), model):
        fully_shard(part, mesh=mesh)
    return model


def plan_differs(here: bool) -> None:
    sharded(nn.Sequential(nn.Linear(20, 20 + 4 * here)))(torch.ones(2, 20))


def order_differs(here: bool) -> None:
    torch.manual_seed(0)
    sharded(Parallel(backwards=here))(torch.ones(2, 20)).sum().backward()


def a_bit_differs(here: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 20))
    with torch.no_grad():
        model[0].bias[3] += 1e-6 * here
    sharded(model)(torch.ones(2, 20))


def seed_differs(here: bool) -> None:
    torch.manual_seed(int(here))
    sharded(nn.Sequential(nn.Linear(20, 20)))(torch.ones(2, 20))


def heads_differ(here: bool) -> None:
    optimizer = Muon(param_groups(sharded(nn.Sequential(nn.Linear(20, 20)))))
    optimizer.qk_clip({QKHeads("0.weight", heads=2, head_dim=2 + here): torch.zeros(2)})


def with_fault(fault: Callable[[bool], None], ranks: tuple[int, ...], debug: bool) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VFSDP_DEBUG", "1" if debug else "0")
        fault(dist.get_rank() in ranks)


PLAN = ("weight shape=(20, 20)", "weight shape=(24, 20)", "the sharding plan differs between ranks")
SWAP = ("in different orders", "bucket 'a'", "bucket 'b'")


@pytest.mark.parametrize(
    ("fault", "world_size", "ranks", "debug", "words"),
    [
        (plan_differs, 3, (1,), False, (*PLAN, "ranks 0 and 1: ")),
        # Also where it is the same within every replica, or within every group of replicas.
        (plan_differs, 4, (2, 3), False, (*PLAN, "ranks 0 and 2: ")),
        (plan_differs, 4, (3,), False, (*PLAN, "ranks 0 and 3: ")),
        (plan_differs, 4, (0, 2), False, (*PLAN, "ranks 0 and 1: ")),
        (plan_differs, 4, (1,), False, (*PLAN, "ranks 0 and 1: ")),
        # Two ranks that gather equal layers in other orders swap them.
        (order_differs, 2, (1,), False, SWAP),
        (order_differs, 4, (2, 3), False, SWAP),
        (order_differs, 3, (1,), True, ("order of collectives", "'a'", "'b'")),
        (heads_differ, 3, (1,), True, ("order of collectives", "head_dim=2", "head_dim=3")),
        (a_bit_differs, 3, (1,), True, ("bias", "ranks 0 and 1")),
        # torch's FSDP2 keeps such replicas apart for ever.
        (seed_differs, 4, (2, 3), False, ("weight was another one on rank 2 than on rank 0",)),
        (
            seed_differs,
            4,
            (2, 3),
            True,
            ("differs between ranks 0 and 2: 'initial values of",),
        ),
    ],
)
def test_fault_is_reported_on_every_rank(fault, world_size, ranks, debug, words):
    """Megatron-LM#2218: collectives in the order of a set, another on each rank, hung at times."""
    with pytest.raises(RankError) as error:
        run_ranks(with_fault, world_size, fault, ranks, debug, timeout=30)
    assert len(error.value.reports) == world_size
    for report in error.value.reports.values():
        assert report.startswith("raised RuntimeError")
        assert all(word in report for word in words), report


def test_a_difference_within_one_replica_is_named_there() -> None:
    with pytest.raises(RankError) as error:
        run_ranks(with_fault, 4, order_differs, (3,), False, timeout=30)
    reports = error.value.reports  # the other replica learns that its peers are gone
    assert all(all(word in reports[rank] for word in SWAP) for rank in (2, 3)), reports


class Seeing(nn.Module):
    """An encoder that runs where there is an image, and a model of language."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(size, size), nn.Linear(size, size // 2)

    def forward(self, x: Tensor, has_image: bool) -> Tensor:
        return self.b(self.a(x) if has_image else x)


def encoder_for_some(size: int, late: bool) -> None:
    """One rank has an image, from the first step on or in the second, and the other has none."""
    torch.manual_seed(0)
    model = sharded(Seeing(size))
    for step in range(2):
        has_image = late > step or not on_one_rank()
        model(torch.ones(2, size), has_image).sum().backward()


@pytest.mark.parametrize(("size", "late"), [(24, False), (24, True), (1536, False)])
def test_an_encoder_that_some_ranks_skip_is_named(size: int, late: bool) -> None:
    """torchtitan#4777: gloo ended the process, or a rank waited until the timeout."""
    with pytest.raises(RankError) as error:
        run_ranks(encoder_for_some, 2, size, late, timeout=60)
    for report in error.value.reports.values():
        assert "ranks run modules in different orders: rank 0 is at the " in report


def train_in_debug_mode(run: training.Run, debug: str) -> list[float]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VFSDP_DEBUG", debug)
        return training.train(run)


def test_debug_mode_is_silent_where_all_ranks_agree() -> None:
    run = training.Run(steps=2, optimizer="muon")
    late = replace(run, mesh=(2, 2), micro_batches=2, all_reduce_every_micro_batch=False)
    for each, ranks in ((run, 2), (late, 4)):
        on, off = (run_ranks(train_in_debug_mode, ranks, each, debug) for debug in "10")
        assert on == off


def one_rank_dies() -> None:
    torch.manual_seed(0)
    model = fully_shard(nn.Linear(20, 20))
    for step in range(3):
        if step == 2 and dist.get_rank() == 1:
            os._exit(3)
        model(torch.ones(2, 20)).sum().backward()


def test_peers_of_a_dead_rank_say_which_collective_failed() -> None:
    with pytest.raises(RankError) as error:
        run_ranks(one_rank_dies, 3, timeout=30)
    assert "died with exit code 3" in error.value.reports[1]
    peers = [error.value.reports[rank] for rank in (0, 2)]
    told = r"of bucket 'root' did not complete; ranks? (0, )?1(, 2)? did not say so too: stopped"
    assert any(re.search(told, report) for report in peers), peers
