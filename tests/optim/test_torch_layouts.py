"""Our optimizers on what others laid out: torch's FSDP2, HSDP, DDP and other DTensors."""

import itertools
import math
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from ranks import on_ranks, run_ranks
from sharding.tensor.ragged_tensor import distribute_ragged
from small_models import build, loss_of
from torch_layouts import LAYOUTS, Matrices, cut_like, full, full_tensors, muon_of, step
from vfsdp_optim import SOAP, AdamW, Muon, Shampoo, fully_shard, param_groups
from vfsdp_optim.testing.shardings import random_placements
from vfsdp_optim.testing.wire import wire_bytes

SIZES = [(64, 64), (128, 64), (256, 64), (64, 128)] * 3
R, S0, S1 = Replicate(), Shard(0), Shard(1)


def collectives(function: Callable[[], object]) -> int:
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        function()
    return sum(event.name.startswith("c10d::") for event in profiler.events())


def costs_of_a_step(layout: str) -> tuple[int, float, int, int, int]:
    """Return collectives, bytes sent, planned bytes of all ranks, waves and FLOPs of this rank."""
    optimizer = muon_of(layout, SIZES)
    step(optimizer, 1)  # compares plans between ranks
    count = collectives(optimizer.step)
    sent, unknown = wire_bytes(optimizer.step, dist.get_rank(), dist.get_world_size())
    assert not list(unknown)
    with FlopCounterMode(display=False) as counter:
        optimizer.step()
    plan = optimizer.plan()
    return count, sent, plan.moved_bytes, plan.waves, counter.get_total_flops()


@pytest.mark.parametrize(
    ("layout", "world_size"),
    [("fsdp2", 2), ("hsdp", 4), ("ours_hsdp", 4), ("replicated", 3), ("boxes", 4)],
)
def test_muon_step_computes_each_matrix_once_and_moves_the_least(layout, world_size):
    """VeOmni#1011: an HSDP mesh made each step gather every parameter, unnoticed."""
    results = run_ranks(costs_of_a_step, world_size, layout)
    numel = sum(m * n for m, n in SIZES)
    waves = results[0][3]
    # To owners from the other rank of the same copy, and back to all that are not the owner.
    least = {"fsdp2": numel, "hsdp": 2 * numel, "replicated": 2 * numel, "boxes": 1.5 * numel}
    least = least.get(layout, 0) * 4
    if layout == "ours_hsdp":  # some matrices lie whole on a rank of each replica, and return once
        least = results[0][2]
        assert numel * 4 < least < 2 * numel * 4
    assert {waves for *_, waves, _ in results} == {waves}
    assert waves >= 1
    assert max(count for count, *_ in results) <= 2 * waves
    assert sum(sent for _, sent, *_ in results) <= 1.02 * least
    assert results[0][2] == least
    # Newton-Schulz: on all ranks together what one process does.
    alone = Muon([(str(i), nn.Parameter(w)) for i, w in enumerate(full_tensors(SIZES, 0))], lr=0.1)
    with FlopCounterMode(display=False) as counter:
        step(alone, 1)
    assert sum(flops for *_, flops in results) == counter.get_total_flops() > 0
    assert max(flops for *_, flops in results) < 1.2 * counter.get_total_flops() / world_size


@on_ranks(2)
def test_adamw_communicates_nothing():
    counts = []
    for layout in LAYOUTS:
        model = LAYOUTS[layout](Matrices([(6, 4), (5,)]))
        group = dist.group.WORLD if layout == "replicated" else None
        optimizer = AdamW(model.named_parameters(), process_group=group)
        step(optimizer, 1)
        counts.append(collectives(optimizer.step))
    assert counts == [0] * len(LAYOUTS)


SHAPES = [(7, 5), (2, 9), (16, 4), (1, 12)]
EXACT: list[tuple[tuple[int, ...], tuple[Placement, ...]]] = [
    ((3,), (S0,)),
    ((3,), (R,)),
    ((2, 2), (R, S0)),
    ((2, 2), (S0, R)),
    ((2, 2), (R, R)),
    ((2, 2), (S0, S0)),
    ((2, 1, 2), (R, Shard(1), S0)),
    ((1, 2, 2), (S0, S0, R)),
    ((3,), (S1,)),
    ((2, 2), (S0, S1)),
    ((2, 2), (S1, S0)),
    ((2, 2), (R, S1)),
    ((2, 2), (S1, R)),
    ((2, 2), (S1, S1)),
    ((2, 1, 2), (S1, R, S0)),
]


def distributed(mesh: DeviceMesh, placements: tuple[Placement, ...]) -> list[nn.Parameter]:
    return [
        nn.Parameter(distribute_tensor(w, mesh, placements, src_data_rank=None))
        for w in full_tensors(SHAPES, 0)
    ]


def named(params: list[nn.Parameter]) -> list[tuple[str, nn.Parameter]]:
    return [(f"w{i}", param) for i, param in enumerate(params)]


def train(optimizer: torch.optim.Optimizer, params: list[nn.Parameter]) -> list[Tensor]:
    for seed in range(1, 4):
        step(optimizer, seed)
    states = [optimizer.state[p] for p in params]
    return [full(p) for p in params] + [full(s[k]) for s in states for k in s if k != "step"]


def train_with(mesh_shape: tuple[int, ...], placements: tuple[Placement, ...]) -> list[Tensor]:
    params = distributed(init_device_mesh("cpu", mesh_shape), placements)
    optimizer = Muon(named(params), lr=0.1)
    result = train(optimizer, params)
    for param in params:
        assert optimizer.state[param]["momentum_buffer"].placements == param.placements
    return result


def train_with_all(cases: list[Any]) -> list[list[Tensor]]:
    return [train_with(*case) for case in cases]


@pytest.mark.parametrize("world_size", [3, 4])
def test_muon_keeps_its_bits_however_axes_cut_its_matrices(world_size):
    params = [nn.Parameter(w) for w in full_tensors(SHAPES, 0)]
    expected = train(Muon(named(params), lr=0.1), params)
    cases = [case for case in EXACT if math.prod(case[0]) == world_size]
    for results in run_ranks(train_with_all, world_size, cases):
        for case, result in zip(cases, results, strict=True):
            assert all(map(torch.equal, result, expected)), case


def tensor_parallel(shard: Callable[..., Any]) -> tuple[nn.Module, nn.Module]:
    """A model on a fully_shard over tensor parallelism, and itself in one process."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 8))
    alone = deepcopy(model)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    shard(model, mesh=mesh["dp"])
    assert len({p.placements for p in model.parameters()}) == 3
    return model, alone


def differences_in_training(
    model: nn.Module,
    alone: nn.Module,
    optimizer: torch.optim.Optimizer,
    reference: torch.optim.Optimizer,
) -> list[float]:
    """Largest differences after steps by the gradients of the sharded model, and a load."""
    for (x,) in (full_tensors([(4, 8)], seed) for seed in range(3)):
        model(x).square().sum().backward()
        for theirs, ours in zip(alone.parameters(), model.parameters(), strict=True):
            theirs.grad = full(ours.grad)
        optimizer.step()
        optimizer.zero_grad()
        optimizer.load_state_dict(optimizer.state_dict())
        reference.step()
    pairs = zip(model.parameters(), alone.parameters(), strict=True)
    return [float((full(a) - b).detach().abs().max()) for a, b in pairs]


@on_ranks(4)
def test_adamw_runs_beside_tensor_parallelism():
    model, alone = tensor_parallel(torch_fsdp.fully_shard)
    optimizer = AdamW(model.named_parameters(), lr=0.1)
    reference = torch.optim.AdamW(alone.parameters(), lr=0.1)
    assert differences_in_training(model, alone, optimizer, reference) == [0.0] * 4


def groups_by_dim(model: nn.Module) -> list[dict[str, Any]]:
    params = list(model.named_parameters())
    matrices = [(name, param) for name, param in params if param.dim() == 2]
    others = [(name, param) for name, param in params if param.dim() != 2]
    return [{"params": matrices}, {"params": others, "algorithm": "adamw"}]


@on_ranks(4)
def test_optimizers_of_matrices_run_on_fully_shard_over_tensor_parallelism():
    """torchtitan#4122: whole matrices are put together from columns and strided rows of ranks."""
    shards = torch_fsdp.fully_shard, fully_shard
    for kind, shard in itertools.product((Muon, Shampoo, SOAP), shards):
        model, alone = tensor_parallel(shard)
        optimizer, reference = (kind(groups_by_dim(m), lr=0.1) for m in (model, alone))
        assert differences_in_training(model, alone, optimizer, reference) == [0.0] * 4, kind


def refuse() -> list[str]:
    mesh, errors = init_device_mesh("cpu", (2,)), []
    for make, placement in (
        (Muon, _StridedShard(0, split_factor=2)),
        (Muon, Partial()),
        (AdamW, Partial()),
    ):
        param = nn.Parameter(DTensor.from_local(torch.ones(4, 2), mesh, [placement]))
        with pytest.raises(NotImplementedError) as error:
            make([("layer.w", param)])
        errors.append(str(error.value))
    uneven = torch.ones(1 + 4 * dist.get_rank(), 2)
    param = nn.Parameter(DTensor.from_local(uneven, mesh, [S0], shape=(6, 2), stride=(2, 1)))
    with pytest.raises(NotImplementedError) as error:
        Muon([("layer.w", param)])
    return [*errors, str(error.value)]


def test_other_placements_are_refused_by_name_with_cures():
    ours, theirs = run_ranks(refuse, 2)
    assert ours[:3] == theirs[:3]
    strided, partial_sums, partial_too, uneven = ours
    assert strided.startswith("layer.w: matrices of a parameter with placements (_StridedShard(")
    assert "not known which rank holds which elements" in strided
    assert "Replicate(), Shard(dim) or RaggedShard on neighbouring axes" in strided
    assert 'algorithm="adamw"' in strided
    assert partial_sums == partial_too
    assert "layer.w: a parameter with placements (Partial(sum),) is a sum over ranks" in partial_too
    assert "layer.w: expected 6 elements on this rank" in uneven
    assert "got 2" in uneven


def outside_of_the_mesh() -> str | None:
    mesh = DeviceMesh("cpu", [0, 1])
    if dist.get_rank() < 2:
        return None
    with pytest.raises(ValueError, match="this rank is not in the mesh") as error:
        AdamW([("layer.w", nn.Parameter(distribute_tensor(torch.ones(4), mesh, [S0])))])
    return str(error.value)


def test_parameter_of_a_mesh_without_this_rank_is_refused_by_name():
    assert "layer.w: this rank is not in the mesh" in run_ranks(outside_of_the_mesh, 3)[2]


def train_on_a_part_of_the_world() -> list[Tensor] | None:
    mesh = DeviceMesh("cpu", [[0, 1], [3, 4]], mesh_dim_names=("r", "s"))
    if dist.get_rank() == 2:
        return None  # takes no part in anything that follows
    params = distributed(mesh, (R, S0))
    first = train(Muon(named(params), lr=0.1), params)
    params = distributed(mesh, (R, S0))
    again = train(Muon(named(params), lr=0.1, on_nonfinite="raise"), params)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    return first


def test_hsdp_mesh_needs_no_rank_outside_of_it():
    params = [nn.Parameter(w) for w in full_tensors(SHAPES, 0)]
    expected = train(Muon(named(params), lr=0.1), params)
    results = run_ranks(train_on_a_part_of_the_world, 5)
    assert results[2] is None
    for result in results[:2] + results[3:]:
        for tensor, alone in zip(result, expected, strict=True):
            assert torch.equal(tensor, alone)


def refuse_process_groups() -> list[str]:
    param = nn.Parameter(torch.ones(4, 4))
    other = dist.new_group([0])
    errors = []
    with pytest.raises(TypeError) as error:
        Muon([param], process_group="world")
    errors.append(str(error.value))
    if dist.get_rank() == 1:
        with pytest.raises(ValueError, match="process_group: this rank is not in it") as outside:
            Muon([param], process_group=other)
        errors.append(str(outside.value))
    optimizer = muon_of("fsdp2", [(4, 4)], process_group=dist.group.WORLD)
    with pytest.raises(RuntimeError) as error:
        step(optimizer, 1)
    return [*errors, str(error.value)]


def test_process_group_that_is_none_or_does_nothing_is_an_error():
    wrong_type, outside, useless = run_ranks(refuse_process_groups, 2)[1]
    assert wrong_type == (
        "process_group: expected a torch.distributed.ProcessGroup, got 'world'; pass "
        "model.process_group of DistributedDataParallel, or mesh.get_group() of a mesh"
    )
    assert "model.process_group of DistributedDataParallel" in outside
    assert "process_group is for plain parameters" in useless
    assert "leave it out" in useless


@on_ranks(2)
def test_ddp_training_has_the_bits_of_every_rank_computing_everything():
    model = DistributedDataParallel(build())
    alone = build()
    options = dict(adamw=dict(lr=0.01))
    optimizer = Muon(param_groups(model, **options), lr=0.02, process_group=model.process_group)
    reference = Muon(param_groups(alone, **options), lr=0.02)
    copied = deepcopy(optimizer)
    assert copied.plan().loads == optimizer.plan().loads
    assert len(copied.plan().loads) == 2
    for seed in range(3):
        loss_of(model, seed + 10 * dist.get_rank()).backward()
        for theirs, ours in zip(alone.parameters(), model.parameters(), strict=True):
            theirs.grad = ours.grad.clone()
        optimizer.step()
        optimizer.zero_grad()
        reference.step()
    pairs = list(zip(model.parameters(), alone.parameters(), strict=True))
    moved = any(not torch.equal(a, b) for a, b in zip(pairs[0], build().parameters(), strict=False))
    assert moved
    assert all(torch.equal(a, b) for a, b in pairs)


def train_shards_beside_replicas() -> list[Tensor]:
    """Step shards of ours, torch's rows and plain copies in one optimizer, on the same ranks."""
    mesh = init_device_mesh("cpu", (3,))
    weights = full_tensors(SHAPES * 3, 0)
    cuts = random_placements(SHAPES, 3, seed=1)
    params = [
        *(distribute_ragged(w, mesh, cut) for w, cut in zip(weights[:4], cuts, strict=True)),
        *(distribute_tensor(w, mesh, [S0], src_data_rank=None) for w in weights[4:8]),
        *weights[8:],
    ]
    params = [nn.Parameter(p) for p in params]
    optimizer = Muon(named(params), lr=0.1, process_group=dist.group.WORLD)
    assert len(optimizer.plan().loads) == 3
    for seed in range(1, 4):
        for param, gradient in zip(params, full_tensors(SHAPES * 3, seed), strict=True):
            param.grad = cut_like(gradient, param)
        optimizer.step()
    return [full(p) for p in params]


def test_one_optimizer_balances_shards_and_replicas_of_the_same_ranks_together():
    params = [nn.Parameter(w) for w in full_tensors(SHAPES * 3, 0)]
    optimizer = Muon(named(params), lr=0.1)
    for seed in range(1, 4):
        step(optimizer, seed)
    for result in run_ranks(train_shards_beside_replicas, 3):
        for tensor, alone in zip(result, params, strict=True):
            assert torch.equal(tensor, alone)


def needs_room_beside_copies() -> str:
    mesh = init_device_mesh("cpu", (2,))
    rows = nn.Parameter(distribute_tensor(torch.ones(10, 10), mesh, [S0], src_data_rank=None))
    copy = nn.Parameter(torch.ones(4, 4))
    params = [("rows", rows), ("copy", copy)]
    group = dist.group.WORLD
    Muon(params[:1], max_exchange_bytes=400).plan()  # alone, updates return where inputs came from
    optimizer = Muon(params, max_exchange_bytes=400, process_group=group)
    with pytest.raises(ValueError, match="rows") as error:
        step(optimizer, 1)
    assert torch.equal(full(rows), torch.ones(10, 10))
    assert torch.equal(copy, torch.ones(4, 4))
    optimizer = Muon(params, max_exchange_bytes=800, process_group=group)
    step(optimizer, 1)
    assert not torch.equal(full(rows), torch.ones(10, 10))
    return str(error.value)


def test_muon_matrix_that_finds_no_room_beside_copies_is_an_error_with_the_size_it_needs():
    assert (
        run_ranks(needs_room_beside_copies, 2)
        == [
            "rows: to exchange a matrix of 10 x 10 as a whole, in torch.float32 and with 1 copy "
            "beside parameters with more, takes 800 bytes, more than max_exchange_bytes=400; pass "
            "max_exchange_bytes=800 or more"
        ]
        * 2
    )


def step_without_elements(layout: str) -> Tensor:
    optimizer = muon_of(layout, [(0, 5), (4, 0)])
    model = LAYOUTS[layout](Matrices([(3, 5)]))
    # With another dtype on the wire the matrix travels apart from those without elements.
    other = {"params": list(model.named_parameters()), "ns_dtype": torch.bfloat16}
    step(optimizer, 1)
    assert optimizer.plan().moved_bytes == 0
    optimizer.add_param_group(other)
    step(optimizer, 2)
    return full(model.ws[0])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_muon_steps_parameters_without_elements(layout):
    alone = nn.Parameter(full_tensors([(3, 5)], 0)[0])
    alone.grad = full_tensors([(0, 5), (4, 0), (3, 5)], 2)[2]
    Muon([alone], ns_dtype=torch.bfloat16, lr=0.1).step()
    for result in run_ranks(
        step_without_elements, 2 if layout in ("fsdp2", "replicated") else 4, layout
    ):
        assert torch.equal(result, alone)


def channels_last() -> list[Tensor]:
    shapes = [(8, 3, 3, 3), (5, 8, 1, 1), (6, 2, 5, 4)]
    return [w.to(memory_format=torch.channels_last) for w in full_tensors(shapes, 0)]


def train_channels_last(kind: str) -> list[Tensor]:
    weights, group = channels_last(), None
    if kind == "replicated":
        group = dist.group.WORLD
    else:  # torch's fully_shard refuses such parameters; distribute_tensor does not
        mesh = init_device_mesh("cpu", (2,))
        weights = [distribute_tensor(w, mesh, [S0], src_data_rank=None) for w in weights]
    params = [nn.Parameter(w) for w in weights]
    strides = [p.stride() for p in params]
    matrices = "o ... -> o (...)"
    conv = {"params": named(params), "matrices": matrices}
    result = train(Muon([conv], lr=0.1, process_group=group), params)
    assert [p.stride() for p in params] == strides
    return result


@pytest.mark.parametrize("kind", ["rows", "replicated"])
def test_channels_last_does_not_matter(kind):
    params = [nn.Parameter(w.contiguous()) for w in channels_last()]
    conv = {"params": named(params), "matrices": "o ... -> o (...)"}
    expected = train(Muon([conv], lr=0.1), params)
    for result in run_ranks(train_channels_last, 2, kind):
        for tensor, alone in zip(result, expected, strict=True):
            assert torch.equal(tensor, alone)


def differing_plans() -> str:
    rank = dist.get_rank()
    param = nn.Parameter(torch.ones(4, 4))
    optimizer = Muon([("layer.w", param)], ns_steps=5 + rank, process_group=dist.group.WORLD)
    param.grad = torch.ones(4, 4)
    with pytest.raises(RuntimeError, match="differs between ranks 0 and 1") as error:
        optimizer.step()
    return str(error.value)


def test_replicas_with_other_settings_are_an_error_on_every_rank():
    for error in run_ranks(differing_plans, 2):
        assert "ns_steps=5" in error
        assert "ns_steps=6" in error
