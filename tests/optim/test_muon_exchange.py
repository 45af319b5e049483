"""What Muon's exchange moves, computes and allocates, counted in real steps; and in which order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from ranks import on_ranks, run_ranks
from sharding import fully_shard
from sharding.transport.exchange import Exchange
from vfsdp_optim import Muon
from vfsdp_optim.muon import MuonAlgorithm
from vfsdp_optim.step.sharded_units import ShardedMatrices
from vfsdp_optim.testing.wire import WireBytes

Shape = tuple[int, int]

TWELVE: list[Shape] = [(64, 64), (128, 64), (192, 64), (256, 64)] * 3
CUT: list[Shape] = [(50, 30)] * 9  # in one bucket: most are cut on 2 ranks or more


def model_of(shapes: Sequence[Shape]) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(cols, rows, bias=False) for rows, cols in shapes])


def full_gradients(shapes: Sequence[Shape]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def sharded(shapes: Sequence[Shape], **options: Any) -> Muon:
    """Muon of a sharded model whose gradients are set."""
    model = model_of(shapes)
    for i in range(0, len(shapes), 3):
        fully_shard(list(model[i : i + 3]))
    for p, full in zip(model.parameters(), full_gradients(shapes), strict=True):
        p.grad = torch.zeros_like(p)
        p.grad.copy_(full)
    return Muon(model.named_parameters(), **options)


def parts_of(optimizer: Muon) -> list[ShardedMatrices]:
    return [part for part in optimizer._working_set.matrices if isinstance(part, ShardedMatrices)]


def count_bytes(shapes: Sequence[Shape], ns_dtype: torch.dtype) -> tuple[float, int, int, int]:
    """Return (bytes sent by this rank, least of all ranks, collectives, waves) of one step."""
    optimizer = sharded(shapes, ns_dtype=ns_dtype)
    optimizer.step()
    with WireBytes(dist.get_rank(), dist.get_world_size()) as counter:
        optimizer.step()
    assert not counter.unknown
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        optimizer.step()
    calls = sum(e.count for e in profiler.key_averages() if e.key.startswith("c10d::"))
    params = dict(
        zip(optimizer.param_groups[0]["param_names"], optimizer.param_groups[0]["params"])  # noqa: B905
    )
    least, plan = 0, optimizer.plan()
    for row in plan.rows:
        (owner,), p = row.owners, params[row.fqn]
        start, stop = p.placement.all_bounds(p.numel())[owner]
        least += 2 * (p.numel() - (stop - start)) * ns_dtype.itemsize
    assert plan.moved_bytes == least
    return counter.sent, least, calls, plan.waves


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("ns_dtype", [torch.bfloat16, torch.float32])
def test_muon_sends_no_more_than_owners_lack_and_twice_a_wave(world_size, ns_dtype):
    results = run_ranks(count_bytes, world_size, TWELVE, ns_dtype)
    least = results[0][1]
    assert least > 0
    assert least <= sum(sent for sent, *_ in results) <= 1.02 * least
    for _, _, calls, waves in results:
        assert 0 < calls <= 2 * waves


def test_muon_of_a_model_whose_matrices_are_all_resident_sends_nothing():
    # 2 matrices of 256 elements a bucket: one on each rank.
    results = run_ranks(count_bytes, 2, [(16, 16)] * 2, torch.float32)
    assert results == [(0.0, 0, 0, 0)] * 2


def plan_of(shapes: Sequence[Shape]) -> tuple[str, float, float, int, int]:
    plan = sharded(shapes).plan()
    return str(plan), plan.skew, plan.largest_share, plan.moved_bytes, plan.saved_bytes


def bytes_of(shapes: Sequence[Shape]) -> tuple[str, Any, int, list[int], int, int, int]:
    optimizer = sharded(shapes, states="8bit")
    plan, params = optimizer.plan(), optimizer.param_groups[0]["params"]
    states = [s for p in params for s in optimizer.state[p].values() if isinstance(s, DTensor)]
    weights, moments = (sum(t.to_local().nbytes for t in each) for each in (params, states))
    for param in params:
        param.grad = torch.zeros_like(param)
    optimizer.step()
    slots = sum(part._exchange.allocated_bytes for part in parts_of(optimizer))
    held = sum(p.to_local().numel() for p in params)
    return str(plan), plan.memory, plan.slot_bytes, [slots], weights, moments, held


def test_plan_of_muon_says_what_a_rank_holds():
    # 8-bit: the first alone is large enough.
    for text, memory, slot_bytes, (slots,), weights, states, held in run_ranks(
        bytes_of, 3, [(80, 64), (50, 30)]
    ):
        assert (memory.weights, memory.gradients) == (weights, weights)
        assert (memory.states, memory.states_32bit) == (states, 4 * held)
        assert memory.states < memory.states_32bit
        assert 0 <= slots - slot_bytes <= 4 * 3 * 128  # marks of who has a gradient
        total = 2 * weights + states + slot_bytes
        assert f"of states ({4 * held:,} in 32 bits), {slot_bytes:,} of slots" in text
        assert f"travel: {total:,}." in text
        assert "lr scale: what lr is multiplied by" in text


def test_plan_of_muon_says_what_a_matrix_larger_than_a_share_costs():
    text, skew, largest, *_ = run_ranks(plan_of, 3, [(50, 30)])[0]
    assert skew == largest == 3.0
    assert "The largest matrix is 3.00 times a rank's equal share of the work" in text
    assert "skew 3.00" in text


def test_plan_of_muon_shows_the_bytes_that_residency_saves():
    # Two matrices of 256 elements, one on each rank; cut evenly, half of each would go and return.
    text, skew, _, moved, saved = run_ranks(plan_of, 2, [(16, 16)] * 2)[0]
    assert (skew, moved, saved) == (1.0, 0, 2 * 2 * 128 * 4)
    assert "2,048" in text
    assert "largest matrix" not in text


def count_flops(shapes: Sequence[Shape]) -> int:
    optimizer = sharded(shapes)
    with FlopCounterMode(display=False) as counter:
        optimizer.step()
    return counter.get_total_flops()


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_muon_computes_every_matrix_once_over_all_ranks(world_size):
    # torch under FSDP2 computes every one on every rank.
    shapes = [*TWELVE, *CUT]
    params = [nn.Parameter(torch.zeros(shape)) for shape in shapes]
    for p, full in zip(params, full_gradients(shapes), strict=True):
        p.grad = full
    with FlopCounterMode(display=False) as counter:
        Muon(params).step()
    # Five steps of three products: x x^T, its square, and a product with x.
    expected = sum(
        5 * 2 * (2 * min(s) ** 2 * max(s) + min(s) ** 3) for s in shapes
    )  # fmt: skip
    assert counter.get_total_flops() == expected
    flops = run_ranks(count_flops, world_size, shapes)
    assert sum(flops) == expected
    assert max(flops) <= 1.25 * expected / world_size


EVENTS: list[tuple[str, int]] = []


class _RecordingExchange(Exchange):
    def start_gather(self, wave: int) -> None:
        EVENTS.append(("gather", wave))
        super().start_gather(wave)

    def wait_gather(self, wave: int) -> None:
        super().wait_gather(wave)
        EVENTS.append(("gathered", wave))

    def start_return(self, wave: int) -> None:
        EVENTS.append(("return", wave))
        super().start_return(wave)

    def wait_return(self, wave: int) -> None:
        super().wait_return(wave)
        EVENTS.append(("returned", wave))


class _RecordingMuon(MuonAlgorithm):
    def matrix_update(self, group: Any, matrix: Tensor, context: Any, scratch: Any) -> Tensor:
        EVENTS.append(("compute", -1))
        return super().matrix_update(group, matrix, context, scratch)


def record(shapes: Sequence[Shape]) -> tuple[list[tuple[str, int]], int, int]:
    """Return the events of a step, its waves, and the most collectives in flight."""
    # Room for two matrices that a rank owns and two pieces that it sends.
    optimizer = sharded(shapes, max_exchange_bytes=4 * 4 * 50 * 30)
    optimizer.step()
    (part,) = parts_of(optimizer)
    part._exchange.__class__ = _RecordingExchange
    optimizer._algorithms["muon"].__class__ = _RecordingMuon
    EVENTS.clear()
    optimizer.step()
    flying, most = 0, 0
    for name, _ in EVENTS:
        flying += {"gather": 1, "return": 1, "gathered": -1, "returned": -1}.get(name, 0)
        most = max(most, flying)
    return list(EVENTS), len(part.plan.waves), most


def test_exchange_of_muon_is_in_flight_while_matrices_are_computed():
    for events, waves, most in run_ranks(record, 2, CUT * 4):
        assert waves >= 3
        assert most <= 2 + 1  # a wait of what has arrived already counts until it is called
        at = {event: i for i, event in enumerate(events) if event[0] != "compute"}
        computed = [i for i, (name, _) in enumerate(events) if name == "compute"]

        def overlaps(start: int, stop: int, computed=computed) -> bool:
            return any(start < i < stop for i in computed)

        for wave in range(waves - 1):
            # The next wave is sent before the last matrix of this one, and awaited after it.
            assert at["gather", wave + 1] < at["return", wave] < at["gathered", wave + 1]
            assert overlaps(at["gather", wave + 1], at["gathered", wave + 1])
            # Updates return while the first matrices of the next wave are computed.
            assert overlaps(at["return", wave], at["returned", wave])
            # Two slots: a wave is sent when the one before the last has returned.
            if wave > 0:
                assert at["returned", wave - 1] < at["gather", wave + 1]


class _Allocations(TorchDispatchMode):
    """The bytes of every storage that an operator makes."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(cls, DTensor) for cls in types):
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        given = {x.untyped_storage()._cdata for x in pytree.tree_leaves((args, kwargs))
                 if isinstance(x, Tensor)}  # fmt: skip
        for x in pytree.tree_leaves(out):
            if isinstance(x, Tensor) and x.untyped_storage()._cdata not in given:
                self.largest = max(self.largest, x.untyped_storage().nbytes())
        return out


@on_ranks(2)
def test_steps_of_muon_allocate_nothing():
    limit = 4 * 3 * 50 * 30
    optimizer = sharded(CUT, max_exchange_bytes=limit)
    for _ in range(2):
        optimizer.step()
    with _Allocations() as allocations:
        optimizer.step()
    reserved = sum(part._exchange.allocated_bytes for part in parts_of(optimizer))
    assert 0 < reserved <= 2 * limit + 2 * 4 * 64  # `owned` starts at a multiple of 64
    assert allocations.largest <= 64  # numbers, no matrix of 6000 bytes


def largest_allocation(dtype: torch.dtype, options: dict[str, Any]) -> int:
    model = model_of(CUT).to(dtype)
    fully_shard(model)
    optimizer = Muon(model.named_parameters(), max_exchange_bytes=4 * 3 * 50 * 30, **options)
    for p, full in zip(model.parameters(), full_gradients(CUT), strict=True):
        p.grad = torch.zeros_like(p)
        p.grad.copy_(full)
    for _ in range(2):
        optimizer.step()
    with _Allocations() as allocations:
        optimizer.step()
    return allocations.largest


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_steps_of_muon_in_bfloat16_allocate_a_piece_of_one_matrix_at_most(dtype):
    """As on CUDA: bfloat16 on the wire."""
    for largest in run_ranks(largest_allocation, 2, dtype, {"ns_dtype": torch.bfloat16}):
        assert largest <= 4 * 50 * 30


@on_ranks(2)
def test_exchange_smaller_than_the_largest_matrix_of_muon_is_an_error_on_every_rank():
    model = model_of([(50, 30), (20, 20)])
    fully_shard(model)
    message = (
        r"0\.weight: to exchange a matrix of 50 x 30 as a whole, in torch\.float32 and with 1 "
        r"copy, takes 6000 bytes, more than max_exchange_bytes=5999; pass "
        r"max_exchange_bytes=6000 or more"
    )
    with pytest.raises(ValueError, match=message):
        Muon(model.named_parameters(), max_exchange_bytes=5999)
    Muon(model.named_parameters(), max_exchange_bytes=6000)
    # Sharded after the optimizer was built: found before the first step changes anything.
    model = model_of([(50, 30), (20, 20)])
    optimizer = Muon(model.named_parameters(), max_exchange_bytes=5999)
    fully_shard(model, optimizer=optimizer)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    before = [p.full_tensor().detach() for p in model.parameters()]
    for act in (optimizer.step, optimizer.plan, optimizer.state_dict):
        with pytest.raises(ValueError, match=message):
            act()
    for p, old in zip(model.parameters(), before, strict=True):
        assert torch.equal(p.full_tensor(), old)


@pytest.mark.parametrize("value", [0, -1, 1.5, None])
def test_exchange_of_no_bytes_is_an_error(value):
    with pytest.raises(ValueError, match="max_exchange_bytes: expected a positive number"):
        Muon([nn.Parameter(torch.ones(2, 2))], max_exchange_bytes=value)


def test_plain_matrices_of_muon_travel_nowhere_and_need_no_room():
    p = nn.Parameter(torch.ones(8, 8))
    p.grad = torch.ones(8, 8)
    optimizer = Muon([p], max_exchange_bytes=1)
    optimizer.step()
    assert optimizer.plan().moved_bytes == 0
    assert not torch.equal(p, torch.ones(8, 8))
