"""A gradient that only some ranks have counts as zero on the others; one that none has, nowhere."""

import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor

from ranks import assert_as_one_process, on_ranks, run_ranks
from sharding.tensor.ragged_tensor import RaggedDTensor, distribute_ragged
from vfsdp_optim import Muon, fully_shard
from vfsdp_optim.testing.shardings import random_placements

# On 3 ranks: cut in all ways, whole on a rank, empty on some, stacked matrices of which one is cut.
SHAPES = [(40, 33), (7, 5), (2, 9), (60, 20), (1, 12), (150, 9)]
# Large enough for 8-bit states; the first is small.
LARGE = [(7, 5), (64, 72), (90, 50), (60, 70), (16, 256), (150, 40)]
STEPS = 5


def full_tensors(seed: int, shapes: list[tuple[int, int]] = SHAPES) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def present(step: int, shard: int, index: int) -> bool:
    """Whether the ranks of a shard have a gradient; in some steps none has."""
    if step == 3 and index in (1, 3, 5):
        return False
    return random.Random(f"{step} {shard} {index}").random() < 0.6


def groups_of(params: list[nn.Parameter]) -> list[dict[str, Any]]:
    named = [(f"w{i}", p) for i, p in enumerate(params)]
    return [{"params": named[:-1]}, {"params": named[-1:], "matrices": "(e m) n -> e m n; e=5"}]


def range_of(param: Tensor) -> tuple[int, int]:
    """Return the range of the flattened parameter that this rank holds."""
    if isinstance(param, RaggedDTensor):
        return param.bounds
    rows = torch.arange(param.shape[0])
    local = distribute_tensor(rows, param.device_mesh, param.placements, src_data_rank=None)
    held = local.to_local().tolist()
    row = param.numel() // param.shape[0]
    return (held[0] * row, (held[-1] + 1) * row) if held else (0, 0)


def place(gradient: Tensor, param: Tensor) -> Tensor:
    if isinstance(param, RaggedDTensor):
        start, stop = param.bounds
        local = gradient.reshape(-1)[start:stop].clone()
        return RaggedDTensor.from_local(local, param.device_mesh, param.placement, param.shape)
    return distribute_tensor(gradient, param.device_mesh, param.placements, src_data_rank=None)


def shard(layout: str) -> tuple[list[nn.Parameter], int]:
    """Return the parameters and the number of this rank's shard."""
    model, rank = nn.Module(), dist.get_rank()
    model.ws = nn.ParameterList(full_tensors(0))
    if layout == "ragged":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        cuts = random_placements(SHAPES, mesh.size(), seed=2)
        pieces = zip(full_tensors(0), cuts, strict=True)
        return [nn.Parameter(distribute_ragged(w, mesh, cut)) for w, cut in pieces], rank
    if layout == "fsdp2":
        torch_fsdp.fully_shard(model)
    else:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        torch_fsdp.fully_shard(model, mesh=mesh)
        rank = mesh.get_local_rank("shard")
    return list(model.parameters()), rank


def train(
    layout: str, max_exchange_bytes: int, on_nonfinite: str = "ignore"
) -> tuple[list[list[Tensor]], list[Any], int]:
    """Return full parameters and momenta after each step, this rank's ranges, and the waves."""
    params, shard_rank = shard(layout)
    optimizer = Muon(
        groups_of(params), lr=0.1, max_exchange_bytes=max_exchange_bytes, on_nonfinite=on_nonfinite
    )
    optimizer._nonfinite.host_devices = frozenset()  # as on CUDA
    after = []
    for step in range(STEPS):
        for i, (param, gradient) in enumerate(zip(params, full_tensors(step + 1), strict=True)):
            has = present(step, shard_rank, i)
            param.grad = place(gradient, param) if has else None
        optimizer.step()
        after.append([whole(p) for p in params] + [whole(momentum(optimizer, p)) for p in params])
    return after, [(shard_rank, *range_of(p)) for p in params], optimizer.plan().waves


def momentum(optimizer: Muon, param: nn.Parameter) -> Tensor:
    return optimizer.state[param]["momentum_buffer"]


def whole(tensor: Tensor) -> Tensor:
    assert isinstance(tensor, DTensor)
    return tensor.detach().full_tensor().clone()


def train_alone(ranges: list[list[Any]]) -> list[list[Tensor]]:
    """Train full tensors with zeros where a rank had no gradient."""
    params = [nn.Parameter(w) for w in full_tensors(0)]
    optimizer = Muon(groups_of(params), lr=0.1)
    after = []
    for step in range(STEPS):
        for i, (param, gradient) in enumerate(zip(params, full_tensors(step + 1), strict=True)):
            flat, some = gradient.reshape(-1), False
            for shard_rank, start, stop in (of_rank[i] for of_rank in ranges):
                has = present(step, shard_rank, i)
                some |= has and stop > start
                if not has:
                    flat[start:stop] = 0
            param.grad = gradient if some else None
        optimizer.step()
        after.append(
            [p.detach().clone() for p in params] + [momentum(optimizer, p).clone() for p in params]
        )
    return after


@pytest.mark.parametrize(
    ("layout", "ranks", "max_exchange_bytes", "on_nonfinite"),
    [
        ("ragged", 3, 1 << 20, "ignore"),
        ("ragged", 3, 5400, "skip"),
        ("fsdp2", 3, 1 << 20, "skip"),
        ("fsdp2", 2, 5400, "raise"),
        ("hsdp", 4, 1 << 20, "ignore"),
        ("hsdp", 4, 16000, "skip"),
    ],
)
def test_gradients_that_some_ranks_lack_count_as_zero_there(
    layout, ranks, max_exchange_bytes, on_nonfinite
):
    """dion skipped such a matrix on the ranks without it, and the stacks that ranks exchanged
    differed; torchtitan's distributed Muon raised."""
    results = run_ranks(train, ranks, layout, max_exchange_bytes, on_nonfinite)
    expected = train_alone([ranges for _, ranges, _ in results])
    waves = {waves for *_, waves in results}
    assert len(waves) == 1
    assert (waves.pop() > 1) == (max_exchange_bytes < 1 << 20)
    for after, _, _ in results:
        for step, (sharded, alone) in enumerate(zip(after, expected, strict=True)):
            for i, (a, b) in enumerate(zip(sharded, alone, strict=True)):
                assert torch.equal(a, b), (step, i)


def states_of(optimizer: Muon, params: list[nn.Parameter]) -> list[Tensor]:
    """Copies of the parameters' and states' pieces on this rank, or of all of them."""
    tensors = [*params, *(value for p in params for value in optimizer.state[p].values())]
    return [
        (x._local_tensor if isinstance(x, DTensor) else x).detach().flatten().clone()
        for x in tensors
    ]


def train_8bit(
    on_nonfinite: str, ranges: list[list[Any]] | None = None
) -> tuple[list[Tensor], list[Any]]:
    """Return the pieces on this rank after all steps, and its ranges; with the `ranges` of all
    ranks train full tensors."""
    model = nn.Module()
    model.ws = nn.ParameterList(full_tensors(0, LARGE))
    if ranges is None:
        fully_shard(model)
    params = list(model.parameters())
    optimizer = Muon(
        groups_of(params),
        lr=0.1,
        states="8bit",
        max_exchange_bytes=4 * 6000,
        on_nonfinite=on_nonfinite,
    )
    optimizer._nonfinite.host_devices = frozenset()
    rank = dist.get_rank() if ranges is None else 0
    for step in range(STEPS):
        for i, (p, gradient) in enumerate(zip(params, full_tensors(step + 1, LARGE), strict=True)):
            if ranges is None:
                p.grad = place(gradient, p) if present(step, rank, i) else None
                continue
            held = [(r, start, stop) for r, start, stop in (each[i] for each in ranges)]
            for r, start, stop in held:
                gradient.view(-1)[start:stop] *= present(step, r, i)
            has = any(present(step, r, i) and stop > start for r, start, stop in held)
            p.grad = gradient if has else None
        optimizer.step()
    own = [(rank, *range_of(p)) for p in params] if ranges is None else []
    return states_of(optimizer, params), own


@pytest.mark.parametrize("on_nonfinite", ["ignore", "skip", "raise"])
def test_gradients_that_some_ranks_lack_count_as_zero_in_8bit_states(on_nonfinite):
    results = run_ranks(train_8bit, 3, on_nonfinite)
    expected, _ = train_8bit(on_nonfinite, [ranges for _, ranges in results])
    assert sum(x.dtype == torch.uint8 for x in expected) == 5
    for i, full in enumerate(expected):
        pieces = torch.cat([pieces[i] for pieces, _ in results])
        assert torch.equal(pieces, full), i


def train_replicas() -> list[Tensor]:
    params = [nn.Parameter(w) for w in full_tensors(0)]
    group = dist.group.WORLD if dist.is_initialized() else None
    optimizer = Muon(groups_of(params), lr=0.1, process_group=group)
    for step in range(STEPS):
        for i, (param, gradient) in enumerate(zip(params, full_tensors(step + 1), strict=True)):
            param.grad = gradient if present(step, 0, i) else None
        optimizer.step()
    return [p.detach().clone() for p in params]


def test_gradients_that_no_replica_has_are_left_out():
    assert_as_one_process(train_replicas, [3], atol=0, rtol=0)


@on_ranks(2)
def test_replica_without_a_gradient_does_not_make_the_others_wait():
    params = [nn.Parameter(w) for w in full_tensors(0)]
    optimizer = Muon(groups_of(params), lr=0.1, process_group=dist.group.WORLD)
    for param, gradient in zip(params, full_tensors(1), strict=True):
        param.grad = None if dist.get_rank() == 1 else gradient
    optimizer.step()
    params, finite = [p.detach() for p in params], all(p.isfinite().all() for p in params)
    assert finite
    assert all(not torch.equal(p, w) for p, w in zip(params, full_tensors(0), strict=True))
