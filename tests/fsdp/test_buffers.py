"""The flat buffers: what is written, what stays zero, what is freed."""

import gc
import weakref

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from ranks import on_ranks, run_ranks, unannounced
from sharding import fully_shard, layout
from sharding.fsdp.bucket import Bucket, ShardedState
from sharding.fsdp.buffer import Workspace, slot_pieces
from sharding.fsdp.module_state import state_of
from sharding.transport.collectives import PendingMean, Transport
from training import Run, build_model, build_optimizer, shard, tokens_of


def buckets_of(model: nn.Module) -> list[Bucket]:
    """All buckets below a model."""
    states = [state_of(module) for module in model.modules()]
    return [state.bucket for state in states if state is not None and state.bucket is not None]


@on_ranks(2)
def test_unshard_writes_only_the_own_shard():
    model = build_model(Run())
    shard(model, Run())
    result = []
    for bucket in buckets_of(model):
        dist.barrier()
        with (
            unannounced(),
            profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler,
        ):
            bucket.unshard()
            bucket.wait_for_unshard()
        writes = [
            (event.name, event.input_shapes[0])
            for event in profiler.events()
            if event.name.startswith("aten::")
            and any(verb in event.name for verb in ("copy", "clone", "cat", "zero", "fill", "add"))
            and event.name != "aten::_unsafe_view"
        ]
        result.append((writes, bucket.plan.segments[0].shard_numel))
        bucket.reshard()
    assert len(result) == 4
    for writes, shard_numel in result:
        assert writes == [("aten::copy_", [shard_numel])]


def check_padding_and_states() -> int:
    """Trains a few steps; asserts zero padding and sharded buckets after every operation."""
    run = Run(optimizer="muon")
    model = build_model(run)
    shard(model, run)
    optimizer = build_optimizer(model, run)
    gaps = 0
    for step in range(3):
        tokens = tokens_of(step).chunk(dist.get_world_size())[dist.get_rank()]
        loss = model(tokens[:, :-1]).logsumexp(-1).mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        for bucket in buckets_of(model):
            assert bucket.state is ShardedState.SHARDED
            for buffer in bucket.buffers:
                assert buffer.unsharded.untyped_storage().size() == 0
                assert buffer.grad_slots is None
        optimizer.step()
        for bucket in buckets_of(model):
            grads = [p.sharded.grad for p in bucket.parameters]
            for buffer in bucket.buffers:
                assert buffer.shard_grad is None, "kept by the gradients alone"
            for grad, parameter in zip(grads, bucket.parameters, strict=True):
                buffer = bucket.buffers[parameter.segment]
                buffer.open_reduced(grad._local_tensor)
                assert buffer.local_grad_view(parameter.index).equal(grad._local_tensor)
                for low, high in buffer._gaps:
                    gaps += high - low
                    assert not buffer.shard[low:high].any()
                    assert not buffer.reduced()[low:high].any()
                buffer.close_reduced()
        optimizer.zero_grad()
    return gaps


def test_padding_stays_zero_and_nothing_stays_unsharded() -> None:
    for world_size in (1, 3):
        assert all(gaps > 0 for gaps in run_ranks(check_padding_and_states, world_size))


@given(offset=st.integers(0, 50), numel=st.integers(0, 100), shard_numel=st.integers(1, 20))
def test_slot_pieces_tile_the_tensor(offset: int, numel: int, shard_numel: int) -> None:
    seen = []
    pieces = slot_pieces(offset, numel, shard_numel)
    for piece in pieces:
        assert piece.column + piece.width <= shard_numel
        for row in range(piece.rows):
            start = (piece.row + row) * shard_numel + piece.column
            for j in range(piece.width):
                seen.append((piece.source + row * piece.width + j, start + j))
    assert seen == [(i, offset + i) for i in range(numel)]
    assert len(pieces) <= 3


def test_workspace_reuses_what_fits_and_keeps_few() -> None:
    workspace, cpu = Workspace(), torch.device("cpu")
    small = workspace.borrow(10, torch.float32, cpu)
    large = workspace.borrow(100, torch.float32, cpu)
    workspace.give_back([large, small])
    assert workspace.borrow(8, torch.float32, cpu) is small
    assert workspace.borrow(60, torch.bfloat16, cpu) is not large
    assert workspace.borrow(10, torch.float32, cpu) is not large, "ten times too long"
    assert workspace.borrow(60, torch.float32, cpu) is large
    workspace.give_back([large])
    workspace.give_back([torch.empty(10) for _ in range(Workspace.MAX_KEPT)])
    assert workspace.borrow(60, torch.float32, cpu) is not large
    workspace.give_back([torch.empty(10, device="meta")])
    workspace.release()  # the page faults of a CPU are dear, devices have allocators that cache
    assert workspace.kept_bytes == 4 * 10 * (Workspace.MAX_KEPT - 1)


class Adapted(nn.Module):
    """A frozen layer with a trainable adapter of low rank beside it, all of one dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(64, 64).requires_grad_(False)
        self.down, self.up = nn.Linear(64, 4), nn.Linear(4, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def reduced_numels() -> tuple[list[int], list[str], float]:
    """Elements of each reduction; the base thaws for the last step. The layout's dtypes."""
    torch.manual_seed(0)
    model = fully_shard(Adapted())
    reduce_scatter, numels = Transport.reduce_scatter_, []

    def noted(self: Transport, buffer: Tensor, *others: object) -> PendingMean:
        numels.append(buffer.numel())
        return reduce_scatter(self, buffer, *others)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Transport, "reduce_scatter_", noted)
        for thaw in (False, True):
            model.base.requires_grad_(thaw)
            model(torch.full((2, 64), 1.0 + dist.get_rank())).sum().backward()
    dtypes = [
        line.split("│")[4].strip() for line in str(layout(model)).splitlines() if "root" in line
    ]
    return numels, dtypes, float(model.base.bias.grad.full_tensor()[0])


def test_gradients_of_a_frozen_base_are_not_reduced() -> None:
    """UniRL#321: LoRA on a frozen base moved the base's gradients, too."""
    trainable = sum(p.numel() for p in Adapted().parameters() if p.requires_grad)
    for (adapter, *thawed), dtypes, bias_grad in run_ranks(reduced_numels, 2):
        assert trainable <= adapter < 64 * 64
        assert adapter in thawed
        assert len(thawed) == 2
        assert dtypes == ["float32 frozen + float32"]
        assert bias_grad == 2.0


@on_ranks(2)
def test_a_model_that_nobody_refers_to_is_freed():
    """A hook that autograd holds is hidden from garbage collection; a cycle through it leaks."""
    run = Run(optimizer="muon")
    model = build_model(run)
    shard(model, run)
    optimizer = build_optimizer(model, run)
    model(tokens_of(0)[:, :-1]).logsumexp(-1).mean().backward()
    optimizer.step()
    watched = [model, optimizer, *buckets_of(model), *(b.buffers[0] for b in buckets_of(model))]
    watched = [weakref.ref(thing) for thing in watched]
    del model, optimizer
    gc.collect()
    assert [type(thing()).__name__ for thing in watched if thing() is not None] == []
