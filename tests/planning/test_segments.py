"""Buckets of several segments: which are chosen, how they are moved, and that they train."""

from functools import partial
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from legality import draw_tensors, lies_legally
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import vfsdp_optim
from benchmarks.planner_figures import Model, segments, specs
from ranks import assert_as_one_process, collectives, distributed_examples, on_ranks, run_ranks
from sharding import fully_shard
from sharding.fsdp.buffer import DistributedBuffer, Workspace
from sharding.fsdp.gradient_slots import GradientSlots
from sharding.fsdp.module_state import state_of
from sharding.planning.granule import Granule
from sharding.planning.negotiation import ParamSpec, negotiate
from sharding.planning.planner import ALIGN, SegmentPlan, TensorSpec, lower_bound, plan_segment
from sharding.planning.segments import least_total_shard, plan_segments
from sharding.planning.structure import Blocks, Demand, FullMatrix, RowPanels, Structure
from sharding.transport.collectives import Transport, next_tag

MANY = settings(max_examples=max(100, settings.default.max_examples))


def assert_lies_legally(segment: SegmentPlan, align: int) -> None:
    shard, end = segment.shard_numel, 0
    assert shard % align == 0
    for i in segment.order:
        tensor, offset = segment.tensors[i], segment.offsets[i]
        if not tensor.numel:
            continue
        assert offset >= end
        assert offset % align == 0
        end = offset + tensor.numel
        assert lies_legally(tensor, offset, shard, segment.world_size)


@MANY
@given(
    st.integers(0, 2**32),
    st.sampled_from([1, 2, 3, 4, 7, 64, 1000]),
    st.integers(1, 4),
    st.sampled_from([0.0, 0.01, 0.1]),
)
def test_segments_hold_every_tensor_once_and_save_what_they_should(seed, world_size, most, gain):
    tensors = draw_tensors(seed, most=9, unit=8)
    parts = plan_segments(tensors, world_size, most=most, gain=gain, align=8)
    assert sorted(i for members, _ in parts for i in members) == list(range(len(tensors)))
    assert all(list(members) == sorted(members) for members, _ in parts)
    for members, segment in parts:
        assert segment.tensors == tuple(tensors[i] for i in members)
        assert_lies_legally(segment, align=8)
    single = plan_segment(tensors, world_size, align=8)
    assert len(parts) <= most
    total = sum(segment.shard_numel for _, segment in parts)
    if len(parts) == 1:
        assert parts[0][1] == single
    else:
        assert world_size * (single.shard_numel - total) > gain * (len(parts) > 1) * single.numel
    assert least_total_shard(tensors, world_size, align=8) <= total
    assert least_total_shard(tensors, world_size, most=1, align=8) == lower_bound(
        tensors, world_size, align=8
    )


@pytest.mark.parametrize(
    "model",
    ["gpt_oss_120b", "llama3_70b", "llama3_8b", "qwen3_30b_a3b_perexpert", "deepseek_v3_fused"],
)
def test_segments_pad_real_models_as_little_as_the_study_found(model):
    table = Model.load(model)
    for name, granularity, world_size, figures in segments():
        if name != model or world_size not in (64, 256, 1024):
            continue
        for most, figure in zip((1, 2, 4), figures, strict=False):
            padding = numel = 0
            for count, shapes in table.buckets:
                parts = plan_segments(
                    specs(shapes, granularity),
                    world_size,
                    most=most,
                    gain=0.0,
                    align=1,
                    shard_align=64,
                )
                padding += count * sum(segment.padding for _, segment in parts)
                numel += count * sum(segment.numel for _, segment in parts)
            error = max(0.2, 0.5 if "." not in figure else 0.0)
            assert 100 * padding / numel <= float(figure) + error, (granularity, world_size, most)


def test_experts_of_gpt_oss_need_two_segments_at_256_ranks():
    # Blocks of 128 rows: one S must be a multiple of the blocks of both expert stacks.
    ((_, shapes),) = [b for b in Model.load("gpt_oss_120b").buckets if b[0] == 36]
    tensors = specs(shapes, "e128")
    ((_, single),) = plan_segments(tensors, 256, most=1)
    parts = plan_segments(tensors, 256)
    assert single.padding_ratio < 0.0587
    assert len(parts) == 2
    assert sum(segment.padding for _, segment in parts) < 0.008 * single.numel
    assert len(plan_segments(tensors, 256, gain=0.06)) == 1


def several_segments() -> list[ParamSpec]:
    """Two matrices whose panels divide different S, of each of two dtypes, in mixed order."""

    def panels(rows: int) -> tuple[Demand, ...]:
        return (Demand(RowPanels(rows), "stored", "test"),)

    return [
        ParamSpec("up", (6, 256), "float32", panels(3)),
        ParamSpec("up16", (6, 256), "bfloat16", panels(3)),
        ParamSpec("down", (256, 12), "float32", panels(128)),
        ParamSpec("bias", (700,), "float32"),
        ParamSpec("down16", (256, 12), "bfloat16", panels(128)),
    ]


def test_negotiation_lays_each_dtype_out_in_segments():
    params = several_segments()
    plan = negotiate("b", params, 2)
    assert plan.dtypes == ("float32",) * 3 + ("bfloat16",) * 2
    for (which, index), param in zip(plan.location, params, strict=True):
        assert plan.segments[which].tensors[index].fqn == param.fqn
        assert plan.dtypes[which] == param.dtype
    assert sorted(plan.location) == [
        (s, i) for s in range(5) for i in range(len(plan.segments[s].tensors))
    ]
    assert "segment 4: dtype=bfloat16" in plan.describe()
    one = negotiate("b", params, 2, segment_gain=1e9)
    assert one.dtypes == ("float32", "bfloat16")
    assert one.padding_ratio > plan.padding_ratio + 0.01
    assert one.digest() != plan.digest()
    with pytest.raises(ValueError, match=r"segment_gain must be >= 0, got -0\.1"):
        negotiate("b", params, 2, segment_gain=-0.1)


def test_residency_raises_granules_that_one_segment_could_not_take():
    # The second matrix whole on a rank would make every shard of one segment a multiple of both.
    muon = (Demand(FullMatrix("e m n -> e m n"), "step", "Muon"),)
    params = [
        ParamSpec("gate_up", (128, 2880, 576), "bfloat16", muon),
        ParamSpec("down", (128, 2880, 288), "bfloat16", muon),
        ParamSpec("bias", (128, 576), "bfloat16"),
    ]
    plan = negotiate("experts", params, 64, resident_padding=0.02)
    assert len(plan.segments) > 1
    assert plan.owned_numel == 0
    assert plan.padding_ratio <= 0.02


def values(numel: int, seed: int) -> Tensor:
    """(numel,) whole numbers, so that sums and means over 4 ranks are exact in bfloat16."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-20, 20, (numel,), generator=generator).float()


def execute(parts: list[SegmentPlan], native: bool) -> None:
    """Scatters, gathers and reduces tensors laid out by `parts`; everything comes back exactly."""
    transport = Transport(dist.group.WORLD, "cpu")
    transport.pairwise = transport.pairwise and not native
    rank, world_size = transport.rank, transport.world_size
    buffers = []
    for s, segment in enumerate(parts):
        dtype = torch.bfloat16 if s % 3 == 1 else torch.float32
        options = dict(dtype=dtype, compute_dtype=dtype, reduce_dtype=dtype)
        buffers.append(DistributedBuffer(segment, rank, device=torch.device("cpu"), **options))
    tensors = [
        (s, i, values(tensor.numel, 100 * s + i))
        for s, segment in enumerate(parts)
        for i, tensor in enumerate(segment.tensors)
    ]
    for s, i, full in tensors:
        buffers[s].copy_from_full(i, full)
    unsharded = [buffer.allocate_unsharded() for buffer in buffers]
    transport.all_gather_(unsharded, next_tag(dist.group.WORLD), "gather").wait("it")
    covered = [torch.zeros_like(buffer, dtype=torch.bool) for buffer in unsharded]
    for s, i, full in tensors:
        start = parts[s].offsets[i]
        assert torch.equal(unsharded[s][start : start + full.numel()].float(), full)
        covered[s][start : start + full.numel()] = True
    for buffer, mask in zip(unsharded, covered, strict=True):
        assert not buffer[~mask].any()
    workspace = Workspace()
    by_dtype: dict[torch.dtype, list[int]] = {}
    for s, buffer in enumerate(buffers):
        by_dtype.setdefault(buffer.dtype, []).append(s)
    packs = [GradientSlots(segments, buffers) for segments in by_dtype.values()]
    for pack in packs:
        pack.borrow(workspace)
    for s, i, full in tensors:
        buffers[s].write_grad(i, full * (2 * rank), accumulate=False)
    for pack in packs:
        mean = pack.reduce(transport, workspace, "reduction")
        mean.wait("the reduction")
        for buffer, first in zip(pack.buffers, pack.first_columns, strict=False):
            buffer.open_reduced(None)
            mean.write_into(buffer.reduced(), first, accumulate=False)
            buffer.zero_grad_padding()
    for s, i, full in tensors:
        low, high = buffers[s].local_ranges[i]
        start = rank * parts[s].shard_numel + low - parts[s].offsets[i]
        expected = full[start : start + high - low] * (world_size - 1)
        assert torch.equal(buffers[s].local_grad_view(i).float(), expected)
    for buffer in buffers:
        for low, high in buffer._gaps:
            assert not buffer.reduced()[low:high].any()
            assert not buffer.shard[low:high].any()


@distributed_examples
@given(st.integers(0, 2**32), st.sampled_from([2, 3, 4]))
def test_random_plans_give_every_tensor_back_bit_for_bit(seed, world_size):
    tensors = draw_tensors(seed, most=8, unit=ALIGN)
    # Apart by granule, so that there are several segments however little they save.
    by_granule: dict[Granule, list[TensorSpec]] = {}
    for tensor in tensors:
        by_granule.setdefault(tensor.granule, []).append(tensor)
    apart = [plan_segment(tuple(group), world_size) for group in by_granule.values()]
    chosen = [segment for _, segment in plan_segments(tensors, world_size, gain=0.0)]
    for parts in (apart, chosen):
        for segment in parts:
            assert_lies_legally(segment, ALIGN)
        run_ranks(execute, world_size, parts, False)
    run_ranks(execute, world_size, apart, True)


class Panels(nn.Module):
    """Two matrices whose panels do not divide one S, and a vector."""

    def __init__(self, rows: int, inner: int) -> None:
        super().__init__()
        self.inner = inner
        self.up = nn.Linear(256, rows, bias=False)
        self.down = nn.Linear(inner, 256, bias=False)
        self.norm = nn.RMSNorm(256)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(self.norm(x))
        return x + self.down(F.gelu(torch.cat([y] * self.inner, -1)[..., : self.inner]))


def panels(panel: int, fqn: str, parameter: Tensor) -> Structure:
    """`panel` rows of `up`, half of `down`."""
    if "up" in fqn:
        return RowPanels(panel)
    return RowPanels(128) if "down" in fqn else Blocks(ALIGN)


def train(optimizer: str, rows: int, panel: int, inner: int, to_double: bool) -> dict[str, Tensor]:
    """Full parameters after a few steps; on ranks each takes its part of the batch."""
    torch.manual_seed(0)
    model = nn.Sequential(Panels(rows, inner), Panels(rows, inner))
    rank, world_size = 0, 1
    if dist.is_initialized():
        rank, world_size = dist.get_rank(), dist.get_world_size()
        for block in model:
            fully_shard(block, structure=partial(panels, panel))
            assert len(state_of(block).bucket.plan.segments) > 1
        fully_shard(model)
    if to_double:
        model.double()
    if optimizer == "muon":
        made = vfsdp_optim.Muon(vfsdp_optim.param_groups(model, adamw=dict(lr=1e-2)), lr=0.02)
    else:
        made = vfsdp_optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(4):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(12, 256, generator=generator).to(next(model.parameters()).dtype)
        (model(x.chunk(world_size)[rank]) - 1).square().mean().backward()
        made.step()
        made.zero_grad()
    return {
        name: p.full_tensor().detach() if isinstance(p, DTensor) else p.detach()
        for name, p in model.named_parameters()
    }


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize(
    ("world_size", "shape"), [(2, (4, 2, 12)), (3, (9, 3, 4)), (4, (12, 3, 4))]
)
def test_a_bucket_of_segments_trains_as_one_process(optimizer, world_size, shape):
    # Gradients are summed in another order.
    close = {"atol": 1e-5, "rtol": 1e-4}
    assert_as_one_process(train, [world_size], optimizer, *shape, False, **close)


def test_a_bucket_of_segments_is_converted_as_a_whole_and_trains_on():
    assert_as_one_process(train, [3], "adamw", 9, 3, 4, True, atol=1e-12, rtol=1e-10)


@on_ranks(2)
def test_segments_add_no_reduction():
    torch.manual_seed(0)
    model = Panels(4, 12)
    fully_shard(model, structure=partial(panels, 2))
    assert len(state_of(model).bucket.plan.segments) == 2
    model(torch.randn(2, 256)).sum().backward()
    names = collectives(lambda: model(torch.randn(2, 256)).sum().backward())
    # Each segment is received and sent once (the root keeps its parameters), one reduction.
    assert names == ["c10d::alltoall_base_"] + ["c10d::recv_", "c10d::send"] * 2


@on_ranks(2)
def test_converting_one_segment_of_a_dtype_raises() -> None:
    model = Panels(4, 12)
    fully_shard(model, structure=partial(panels, 2))
    model.up.double()
    with pytest.raises(
        RuntimeError, match=r"of one dtype and device are not any more: .*up\.weight"
    ):
        model(torch.randn(2, 256))


def test_ties_do_not_depend_on_names():
    tensors = draw_tensors(7, most=9, unit=8)
    renamed = tuple(
        TensorSpec(f"layers.1.{t.fqn}", t.numel, t.granule, t.group_key) for t in tensors
    )
    first = plan_segments(tensors, 6, gain=0.0, align=8)
    second = plan_segments(renamed, 6, gain=0.0, align=8)
    assert [(m, p.shard_numel, p.offsets) for m, p in first] == [
        (m, p.shard_numel, p.offsets) for m, p in second
    ]
    assert all(a < b for (a, _), (b, _) in pairwise(first))
