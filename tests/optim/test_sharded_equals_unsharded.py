"""For the same full gradients a sharded step has the bits of the unsharded one, cut anywhere."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from ranks import collectives, on_ranks, run_ranks
from sharding.tensor.placement import RaggedShard
from sharding.tensor.ragged_tensor import distribute_ragged
from torch_layouts import full, full_tensors, step
from vfsdp_optim import AdamW, Muon
from vfsdp_optim.testing import assert_sharded_equals_unsharded
from vfsdp_optim.testing.shardings import random_placements

BF16 = torch.bfloat16
# Cut by rank edges or whole, on few ranks, vectors both ways, every way to say matrices.
PARAMETERS = [
    ((13, 8), None), ((1, 40), None), ((40, 1), None), ((60, 33), None), ((33, 60), None),
    ((6, 3, 3, 2), "o ... -> o (...)"), ((5, 7, 6), "e m n -> e m n"),
    ((12, 9), "m (h d) -> h m d; h=3"), ((12, 9), "(h d) n -> h d n; h=3"),
    ((14, 5), "m n -> m n; row_splits=9,4,1"),
    ((300,), "adamw"), ((20, 11), "adamw"), ((1,), "adamw"), ((), "adamw"),
]  # fmt: skip


def make_muon(module: nn.Module, **options: Any) -> Muon:
    groups: dict[str | None, dict[str, Any]] = {}
    for (_, matrices), item in zip(PARAMETERS, module.named_parameters(), strict=True):
        adamw = {"algorithm": "adamw", "lr": 0.1, "weight_decay": 0.6}
        kind = adamw if matrices == "adamw" else {"matrices": matrices}
        groups.setdefault(matrices, {"params": [], **kind})["params"].append(item)
    return Muon(list(groups.values()), lr=0.1, weight_decay=0.5, **options)


def make_adamw(module: nn.Module, **options: Any) -> AdamW:
    return AdamW(module.named_parameters(), lr=0.1, weight_decay=0.7, **options)


@pytest.mark.parametrize(
    ("make", "dtype", "options", "world_sizes"),
    [
        (make_muon, torch.float32, {}, (1, 2, 3, 5)),
        (make_muon, torch.float32, {"ns_dtype": BF16}, (3,)),  # bfloat16 on the wire
        # torch's bfloat16 a + alpha * b depends on the place of an element in its tensor.
        (make_muon, BF16, {"ns_dtype": BF16, "nesterov": False}, (3,)),
        (make_muon, BF16, {"ns_dtype": torch.float32}, (3,)),
        (make_muon, BF16, {"state_dtype": torch.float32}, (3,)),
        (make_adamw, torch.float32, {}, (1, 2, 3, 5)),
        (make_adamw, torch.float32, {"amsgrad": True, "maximize": True}, (3,)),
        (make_adamw, torch.float32, {"eps": 0.0}, (3,)),
    ],
)
def test_sharded_step_has_the_bits_of_the_unsharded_one(make, dtype, options, world_sizes):
    shapes = [shape for shape, _ in PARAMETERS]
    assert_sharded_equals_unsharded(
        partial(make, **options), shapes=shapes, dtype=dtype, layouts=("ours", "ragged"),
        world_sizes=world_sizes, steps=3,
    )  # fmt: skip


def ragged_muon(shapes: list[tuple[int, ...]], **options: Any) -> Muon:
    """Muon of matrices that lie anywhere on the ranks, after a step (which compares plans)."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    cuts = random_placements(shapes, mesh.size(), seed=2)
    pieces = zip(full_tensors(shapes, 0), cuts, strict=True)
    params = [nn.Parameter(distribute_ragged(w, mesh, cut)) for w, cut in pieces]
    optimizer = Muon(params, lr=0.1, weight_decay=0.5, **options)
    step(optimizer, 1)
    return optimizer


def reference_muon(shapes: list[tuple[int, ...]], steps: range) -> list[Tensor]:
    """Return the parameters after training, by float64 arithmetic on whole matrices."""
    params = [x.double() for x in full_tensors(shapes, 0)]
    momenta = [torch.zeros_like(x) for x in params]
    for seed in steps:
        for x, m, g in zip(params, momenta, full_tensors(shapes, seed), strict=True):
            m.lerp_(g.double(), 1 - 0.95)
            u, s, vt = torch.linalg.svd(g.double().lerp(m, 0.95), full_matrices=False)
            s = s / s.norm()
            for _ in range(5):
                s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
            x.mul_(1 - 0.1 * 0.5).sub_(0.1 * max(1, x.size(0) / x.size(1)) ** 0.5 * (u * s) @ vt)
    return params


def train_ragged(shapes: list[tuple[int, ...]]) -> list[Tensor]:
    optimizer = ragged_muon(shapes)
    step(optimizer, 2)
    return [full(p) for p in optimizer.param_groups[0]["params"]]


def test_cut_matrices_are_orthogonalized_whole():
    """DeepSpeed#7807, Moonlight#27: orthogonalizing each rank's rows for itself also moves every
    parameter, the wrong way."""
    shapes = [(16, 16), (13, 8), (40, 12), (1, 30)]
    expected = reference_muon(shapes, range(1, 3))
    for actual, wanted in zip(run_ranks(train_ragged, 3, shapes)[0], expected, strict=True):
        # Five Newton-Schulz steps amplify float32's rounding by about 1e3.
        torch.testing.assert_close(actual.double(), wanted, atol=1e-3, rtol=0)


def calls_of_a_step(matrices: int, **options: Any) -> list[str]:
    return collectives(ragged_muon([(9, 7)] * matrices, **options).step)


@on_ranks(3)
def test_wave_has_one_exchange_each_way_whatever_it_holds_and_bounds_what_travels():
    optimizer = ragged_muon([(9, 7)])
    if dist.get_rank() == 0:  # memory that moves on one rank alone
        local = optimizer.param_groups[0]["params"][0]._local_tensor
        local.set_(local.clone())
    moved = collectives(optimizer.step)
    narrow = calls_of_a_step(12, max_exchange_bytes=9 * 7 * 4)
    few, many, moved, narrow = calls_of_a_step(2), calls_of_a_step(14), moved, narrow
    assert few == many == moved == ["c10d::alltoall_base_"] * 2
    # 12 cut matrices for 3 owners, at most one an owner and wave: 4 waves or more.
    assert len(narrow) >= 2 * 4


@on_ranks(2)
def test_plans_that_differ_and_gradients_of_another_layout_raise_on_every_rank():
    mesh, placement = init_device_mesh("cpu", (2,)), RaggedShard((0, 1), (8, 8))
    p = nn.Parameter(distribute_ragged(torch.ones(4, 4), mesh, placement))
    p.grad = torch.ones_like(p)
    optimizer = Muon([("layer.w", p)], ns_steps=4 + dist.get_rank())
    with pytest.raises(RuntimeError, match=r"optimizer's plan .*layer\.w.*ns_steps=4.*ns_steps=5"):
        optimizer.step()
    p.grad = distribute_ragged(torch.ones(4, 4), mesh, RaggedShard((0, 1), (16, 0)))
    with pytest.raises(TypeError, match=r"w: expected a gradient laid out as its parameter"):
        Muon([("w", p)]).step()
