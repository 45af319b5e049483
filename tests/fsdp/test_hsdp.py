"""HSDP: `fully_shard` over a 2-D mesh, whose dim 0 replicates and whose dim 1 shards."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate

import sharding.transport.collectives as collectives_of_sharding
import training
from ranks import collectives, on_ranks, run_ranks
from sharding import FullMatrix, MixedPrecisionPolicy, RaggedShard, fully_shard, layout
from sharding.transport.collectives import PendingMean, Transport
from training import Run, mesh_of

RUN = Run(optimizer="torch_adamw", mesh=(2, 2), steps=4)


def train_natively(run: Run) -> tuple[list[float], list[Tensor], list[Tensor]]:
    """By the backend's own collectives, as above 16 ranks; also gradients without all-reduce."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collectives_of_sharding, "PAIRWISE_MAX_RANKS", 0)
        losses, model = training.train_model(run)
        pieces = [p.to_local().detach() for p in model.parameters()]
        return losses, pieces, accumulated("ra", fully_shard)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_backends_own_collectives_train_alike(dtype: str) -> None:
    run = replace(RUN, compute_dtype=dtype)
    expected = training.train(replace(RUN, mesh=()))
    sums = [sum(addend(rank, i) for rank in range(4)) / 4 for i in range(2)]
    results = run_ranks(train_natively, 4, run)
    for rank, (losses, pieces, (first, second)) in enumerate(results):
        assert losses == pytest.approx(expected, abs=1e-5 if dtype == "float32" else 0.04)
        for piece, twin in zip(pieces, results[rank % 2][1], strict=True):
            assert torch.equal(piece, twin)
        assert first is None
        torch.testing.assert_close(second, sums[0] + sums[1], atol=1e-4, rtol=1e-5)


class Vector(nn.Module):
    """The gradient of `weight` is the input."""

    def __init__(self, numel: int = 700) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(numel))
        self.unused = nn.Parameter(torch.zeros(3))

    def forward(self, x: Tensor, use_all: bool = False) -> Tensor:
        loss = (self.weight * x).sum()
        return loss + 8 * self.unused.sum() if use_all else loss


def addend(rank: int, micro_batch: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(100 * micro_batch + rank)
    return torch.randn(700, generator=generator) * 3.0**rank


def gradient_of(mesh: tuple[int, int], dtype: torch.dtype | None, whole: bool) -> Tensor:
    """The full averaged gradient; `whole` puts all of it on one rank."""
    model = Vector()

    def structure(fqn: str, parameter: Tensor) -> FullMatrix | None:
        return FullMatrix("n -> n 1") if whole and fqn == "weight" else None

    policy = MixedPrecisionPolicy(reduce_dtype=dtype)
    fully_shard(model, mesh=mesh_of(mesh), mp_policy=policy, structure=structure)
    assert model.weight.placement.local_units.count(0) == (mesh[1] - 1 if whole else 0)
    model(addend(dist.get_rank())).backward()
    assert model.unused.grad is None
    assert model.weight.grad.placements == (Replicate(), model.weight.placement)
    return model.weight.grad.full_tensor()


@pytest.mark.parametrize(
    ("mesh", "dtype"),
    [((2, 2), None), ((2, 2), torch.bfloat16), ((3, 2), None), ((2, 1), torch.float16)],
)
def test_average_is_summed_in_rank_order_and_divided_once(mesh, dtype):
    """pytorch#155903: what HSDP divided by differed from FSDP.

    Shard ranks are added first, then replicas, in fp32 whatever the dtype on the wire, wherever
    an element lies.
    """
    replicas, shards = mesh
    total = torch.zeros(())
    for replica in range(replicas):
        of_replica = torch.zeros(())
        for shard in range(shards):
            one = addend(replica * shards + shard)
            of_replica = of_replica + (one if dtype is None else one.to(dtype).float())
        total = total + of_replica
    for whole in (False, True):
        for average in run_ranks(gradient_of, replicas * shards, mesh, dtype, whole):
            assert torch.equal(average, total / (replicas * shards))


def accumulated(modes: str, shard: Callable[..., nn.Module]) -> list[Tensor | None]:
    """The full gradient after each micro-batch: "." without sync, "r" without all-reduce."""
    model = Vector()
    shard(model, mesh=mesh_of((2, 2)))
    gradients = []
    for i, mode in enumerate(modes):
        model.set_requires_gradient_sync(mode != ".")
        if mode == "r":
            model.set_requires_all_reduce(False)
        model(addend(dist.get_rank(), i)).backward()
        grad = model.weight.grad
        gradients.append(None if grad is None else grad.full_tensor().clone())
        if i == 0:
            model.zero_grad()  # what users see; what waits for a reduction stays
    return gradients


@pytest.mark.parametrize("modes", ["rra", ".ra", "r.ra", "ara", "ra.a"])
def test_reductions_without_all_reduce_accumulate_as_torchs(modes: str) -> None:
    both = (fully_shard, torch_fsdp.fully_shard)
    ours, torchs = (run_ranks(accumulated, 4, modes, shard) for shard in both)
    for gradients, expected in zip(ours, torchs, strict=True):
        for gradient, other in zip(gradients, expected, strict=True):
            assert (gradient is None) == (other is None)
            if gradient is not None:  # of about 40; torch adds in another order
                torch.testing.assert_close(gradient, other, atol=1e-4, rtol=1e-5)
        for gradient, of_first in zip(gradients, ours[0], strict=True):
            assert gradient is None or torch.equal(gradient, of_first)


class Optional(nn.Module):
    """The second layer runs when it is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(20, 20, bias=False), nn.Linear(20, 20, bias=False)

    def forward(self, x: Tensor, both: bool) -> Tensor:
        return self.b(self.a(x)) if both else self.a(x)


def gradients_of_a_step_that_ends_without_a_module(later: str) -> list[Tensor]:
    """The full gradients of the module's weight after two steps of two micro-batches."""
    torch.manual_seed(0)
    model = Optional()
    for part in (model.a, model.b, model):
        fully_shard(part, mesh=mesh_of((2, 2)))
    gradients = []
    for _ in range(2):
        for both in (True, False):
            getattr(model, later)(not both)
            model(torch.ones(2, 20) * (1 + dist.get_rank()), both).sum().backward()
        gradients.append(model.b.weight.grad.full_tensor())
        model.zero_grad()
    return gradients


def test_sums_that_wait_for_replicas_are_in_the_step_whose_last_micro_batch_leaves_a_module_out():
    """torch 2.13 adds them to the gradient of the next step."""
    names = "set_requires_all_reduce", "set_requires_gradient_sync"
    results = [run_ranks(gradients_of_a_step_that_ends_without_a_module, 4, n) for n in names]
    for waited, synced in zip(*results, strict=True):
        assert waited[0].any()
        for gradient, expected in zip(waited, synced, strict=True):
            torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-5)


def gradient_of_unused(used_on: list[list[int]]) -> Tensor | None:
    """What `unused` got when a step's micro-batches used it on these ranks."""
    model = Vector()
    fully_shard(model, mesh=mesh_of((2, 2)))
    for i, ranks in enumerate(used_on):
        model.set_requires_all_reduce(i == len(used_on) - 1)
        model(addend(dist.get_rank(), i), use_all=dist.get_rank() in ranks).backward()
    return None if model.unused.grad is None else model.unused.grad.full_tensor()


@pytest.mark.parametrize("used_on", [[[3]], [[0]], [[1], []], [[2], [2]], [[], [0, 1, 2, 3]]])
def test_gradient_is_none_only_where_no_rank_of_any_replica_has_one(used_on):
    """pytorch#158719, over both dims: one rank that used a parameter is enough for all."""
    expected = torch.full((3,), 8.0 * sum(map(len, used_on)) / 4)
    for gradient in run_ranks(gradient_of_unused, 4, used_on):
        assert torch.equal(gradient, expected)
    assert run_ranks(gradient_of_unused, 4, [[] for _ in used_on]) == [None] * 4


def calls_of_a_step(all_reduce: bool) -> list[str]:
    model = training.build_model(RUN)
    training.shard(model, RUN)
    tokens = training.tokens_of(0)
    for _ in range(2):
        model.set_requires_all_reduce(all_reduce)
        loss = model(tokens).square().mean()
        calls = collectives(loss.backward)
    return calls


def test_replicas_add_one_exchange_per_bucket() -> None:
    """Over gloo a gather of two ranks is a receive and a send, as is the exchange of replicas."""
    with_all_reduce = run_ranks(calls_of_a_step, 4, True)
    without = run_ranks(calls_of_a_step, 4, False)
    assert all(calls == with_all_reduce[0] for calls in with_all_reduce)
    assert set(with_all_reduce[0]) == set(without[0])
    assert len(with_all_reduce[0]) == len(without[0]) + 4 * 2


def order_of_steps() -> list[str]:
    steps = []

    def noted(name: str) -> Callable[..., PendingMean]:
        method = getattr(Transport, name)

        def note(self: Transport, *args: object) -> PendingMean:
            steps.append(name)
            return method(self, *args)

        return note

    model = training.build_model(RUN)
    training.shard(model, RUN)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("reduce_scatter_", "all_reduce_"):
            patch.setattr(Transport, name, noted(name))
        model(training.tokens_of(0)).square().mean().backward()
    return steps


def test_a_bucket_is_averaged_over_replicas_while_the_next_one_is_reduced() -> None:
    reduce, average = "reduce_scatter_", "all_reduce_"
    for steps in run_ranks(order_of_steps, 4):
        assert steps == [reduce, reduce, average, reduce, average, reduce, average, average]


@on_ranks(4)
def test_two_dims_of_a_bigger_mesh_serve():
    whole = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("dp", "tp", "fsdp"))
    model = fully_shard(Vector(), mesh=whole["dp", "fsdp"])
    model(torch.ones(700) * dist.get_rank()).backward()
    placement = model.weight.placement
    assert isinstance(model.weight.device_mesh, DeviceMesh)
    assert isinstance(placement, RaggedShard)
    assert model.weight.bounds == placement.bounds(dist.get_rank() % 2, 700)
    title, placements, average = (
        str(layout(model)).splitlines()[0].strip(),
        str(model.weight.placements),
        float(model.weight.grad.full_tensor()[0]),
    )
    assert title == "layout on 2 ranks, 2 replicas"
    assert placements == "(Replicate(), RaggedShard(dims=(0,), local_units=(2, 1), unit_numel=256))"
    assert average == 1.5


@on_ranks(4)
def test_reset_forgets_sums_that_wait_for_replicas():
    model = Vector()
    fully_shard(model, mesh=mesh_of((2, 2)))
    model.set_requires_all_reduce(False)
    model(addend(dist.get_rank())).backward()
    model.reset_iter_state()
    model.set_requires_all_reduce(True)
    model(torch.ones(700)).backward()
    gradient = model.weight.grad.full_tensor()
    assert torch.equal(gradient, torch.ones(700))
