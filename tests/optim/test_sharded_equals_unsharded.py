"""For the same full gradients, a sharded step gives the bits of the unsharded one, whatever the layout."""

import math
import random
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.profiler import ProfilerActivity, profile

from sharding.placement import RaggedShard
from sharding.ragged_tensor import RaggedDTensor
from vfsdp_optim.adamw import AdamW
from vfsdp_optim.muon import Muon
from vfsdp_optim.optimizer import StructuredOptimizer

CONV = "o ... -> o (...)"
EXPERTS = "e m n -> e m n"
COLUMN_HEADS = "m (h d) -> h m d; h=3"
ROW_HEADS = "(h d) n -> h d n; h=3"
# Cut by rank edges, smaller than a shard, on few ranks, vectors both ways, and every way to say matrices.
PARAMETERS = [
    ((13, 8), "muon", None),
    ((1, 40), "muon", None),
    ((40, 1), "muon", None),
    ((60, 33), "muon", None),
    ((33, 60), "muon", None),
    ((6, 3, 3, 2), "muon", CONV),
    ((5, 7, 6), "muon", EXPERTS),
    ((12, 9), "muon", COLUMN_HEADS),
    ((12, 9), "muon", ROW_HEADS),
    ((14, 5), "muon", "m n -> m n; row_splits=9,4,1"),
    ((300,), "adamw", None),
    ((20, 11), "adamw", None),
    ((1,), "adamw", None),
    ((), "adamw", None),
]


@dataclass(frozen=True)
class Case:
    """One training run of a few steps; the same on every rank and in the parent."""

    world_size: int
    seed: int
    layout: str = "buffer"  # "buffer": one flat buffer; "units": any cuts, every tensor on its own
    optimizer: str = "muon"
    dtype: torch.dtype = torch.float32
    steps: int = 3
    parameters: tuple[tuple[tuple[int, ...], str, str | None], ...] = tuple(PARAMETERS)
    missing: float = 0.0  # share of gradients that are None in a step
    options: dict[str, Any] = field(default_factory=dict)


def full_tensors(case: Case, step: int) -> list[Tensor]:
    """Return parameters (step 0) or gradients of step 1, 2, ...; full, one for each parameter."""
    generator = torch.Generator().manual_seed(case.seed * 1000 + step)
    return [
        torch.randn(shape, generator=generator).to(case.dtype) for shape, _, _ in case.parameters
    ]


def present(case: Case, step: int) -> list[bool]:
    draw = random.Random(case.seed * 1000 + step)
    return [draw.random() >= case.missing for _ in case.parameters]


def make_optimizer(case: Case, params: list[nn.Parameter]) -> StructuredOptimizer:
    named = [(f"p{i}", p) for i, p in enumerate(params)]
    if case.optimizer == "adamw":
        return AdamW(named, lr=0.1, weight_decay=0.7, **case.options)
    groups: dict[tuple[str, str | None], dict[str, Any]] = {}
    for (_, algorithm, matrices), item in zip(case.parameters, named, strict=True):
        group = {"params": [], "algorithm": algorithm}
        if algorithm == "muon":
            group["matrices"] = matrices
        groups.setdefault((algorithm, matrices), group)["params"].append(item)
    for group in groups.values():
        if group["algorithm"] == "adamw":
            group.update(lr=0.1, weight_decay=0.6)
    return Muon(list(groups.values()), lr=0.1, weight_decay=0.5, **case.options)


def placements(case: Case) -> tuple[list[RaggedShard], int]:
    """Return a legal layout, and the length of a rank's shard where there is one buffer."""
    draw = random.Random(case.seed)
    numels = [math.prod(shape) for shape, _, _ in case.parameters]
    if case.layout == "units":
        result = []
        for (shape, _, _), numel in zip(case.parameters, numels, strict=True):
            cuts = sorted(draw.randint(0, numel) for _ in range(case.world_size - 1))
            units = [b - a for a, b in zip([0, *cuts], [*cuts, numel], strict=True)]
            result.append(RaggedShard(tuple(range(len(shape))), units))
        return result, 0
    order = list(range(len(numels)))
    draw.shuffle(order)
    offset, offsets = 0, {}
    for i in order:
        offsets[i] = offset
        offset += -(-numels[i] // 256) * 256 + 256 * (draw.random() < 0.2)
    shard = -(-offset // case.world_size // 256) * 256
    return [
        RaggedShard.from_range(len(shape), numel, offsets[i], shard, case.world_size)
        for i, ((shape, _, _), numel) in enumerate(zip(case.parameters, numels, strict=True))
    ], shard


class Shards:
    """This rank's parameters and gradients, as a bucket would lay them out."""

    def __init__(self, case: Case, mesh: DeviceMesh) -> None:
        self.case, self.mesh = case, mesh
        self.rank = mesh.get_local_rank()
        self.placements, self.shard = placements(case)
        self.params_flat = torch.zeros(self.shard, dtype=case.dtype)
        self.grads_flat = torch.zeros(self.shard, dtype=case.dtype)
        self.params = [
            nn.Parameter(self.cut(i, full, self.params_flat))
            for i, full in enumerate(full_tensors(case, 0))
        ]

    def cut(self, i: int, full: Tensor, flat: Tensor) -> RaggedDTensor:
        """Return this rank's piece of parameter i, in the flat buffer if there is one."""
        placement = self.placements[i]
        start, stop = placement.bounds(self.rank, full.numel())
        piece = full.reshape(-1)[start:stop].clone()
        if self.case.layout == "buffer" and start < stop:
            before = 0 if start else self.offset_in_shard(i)
            view = flat[before : before + piece.numel()]
            piece = view.copy_(piece)
        return RaggedDTensor.from_local(piece, self.mesh, placement, full.shape)

    def offset_in_shard(self, i: int) -> int:
        draw = random.Random(self.case.seed)
        order = list(range(len(self.case.parameters)))
        draw.shuffle(order)
        offset = 0
        for j in order:
            if j == i:
                return offset % self.shard
            numel = math.prod(self.case.parameters[j][0])
            offset += -(-numel // 256) * 256 + 256 * (draw.random() < 0.2)
        raise AssertionError("every parameter has an offset")

    def set_gradients(self, step: int) -> None:
        self.grads_flat.zero_()
        here = present(self.case, step)
        for i, full in enumerate(full_tensors(self.case, step)):
            self.params[i].grad = self.cut(i, full, self.grads_flat) if here[i] else None


def gather(optimizer: StructuredOptimizer, params: list[nn.Parameter]) -> list[dict[str, Tensor]]:
    """Return parameters and states in full."""
    result = []
    for p in params:
        tensors = {"param": p.detach(), **optimizer.state[p]}
        result.append(
            {
                key: t.full_tensor() if isinstance(t, RaggedDTensor) else t.clone()
                for key, t in tensors.items()
            }
        )
    return result


def train_sharded(case: Case) -> list[dict[str, Tensor]]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    shards = Shards(case, mesh)
    optimizer = make_optimizer(case, shards.params)
    for step in range(1, case.steps + 1):
        shards.set_gradients(step)
        optimizer.step()
        check_padding(shards)
    return gather(optimizer, shards.params)


def check_padding(shards: Shards) -> None:
    padding = torch.ones(shards.shard, dtype=torch.bool)
    for p in shards.params:
        local = p._local_tensor
        padding[local.storage_offset() : local.storage_offset() + local.numel()] = False
    if shards.case.layout == "buffer":
        assert not shards.params_flat[padding].any()


def train_unsharded(case: Case) -> list[dict[str, Tensor]]:
    params = [nn.Parameter(full) for full in full_tensors(case, 0)]
    optimizer = make_optimizer(case, params)
    for step in range(1, case.steps + 1):
        here = present(case, step)
        for i, grad in enumerate(full_tensors(case, step)):
            params[i].grad = grad if here[i] else None
        optimizer.step()
    return gather(optimizer, params)


def assert_same_bits(case: Case) -> None:
    expected = train_unsharded(case)
    for rank, actual in enumerate(run_ranks(train_sharded, case.world_size, case)):
        for i, (a, b) in enumerate(zip(actual, expected, strict=True)):
            assert a.keys() == b.keys()
            for key in a:
                assert torch.equal(a[key], b[key]), (rank, case.parameters[i], key)


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
@pytest.mark.parametrize("layout", ["buffer", "units"])
@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_sharded_step_has_the_bits_of_the_unsharded_one(world_size, layout, optimizer):
    for seed in range(3):
        assert_same_bits(Case(world_size, seed, layout, optimizer))
