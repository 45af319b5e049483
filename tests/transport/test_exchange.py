"""Units travel to their owners whole and in order, and back to where they came from."""

import random

import pytest
import torch
import torch.distributed as dist

from ranks import run_ranks
from sharding.planning.holders import Grid, HeldUnit
from sharding.planning.ownership import OwnerPlan, plan_owners
from sharding.transport.exchange import Exchange


def units_of(
    seed: int, world_size: int, count: int, grid: Grid | None = None
) -> tuple[HeldUnit, ...]:
    """Return units of which some ranks may hold nothing at all."""
    draw = random.Random(seed)
    shards = world_size if grid is None else grid.shards
    ranks = sorted(draw.sample(range(shards), draw.randint(1, shards)))
    units = []
    for i in range(count):
        numel = draw.randint(len(ranks), 60)
        holders = sorted(draw.sample(ranks, draw.randint(1, len(ranks))))
        cuts = sorted(draw.sample(range(1, numel), len(holders) - 1))
        held = [b - a for a, b in zip([0, *cuts], [*cuts, numel], strict=True)]
        spread = tuple(zip(holders, held, strict=True))
        units.append(HeldUnit(f"w{i}", 0, numel, numel, spread, grid))
    return tuple(units)


def full_unit(unit: int, numel: int, round_: int) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(unit + 1000 * round_))


def travel(plan: OwnerPlan, dtype: torch.dtype) -> tuple[int, int]:
    """Run two steps of all waves, overlapped as an optimizer does; return (allocated, moved)."""
    rank = dist.get_rank()
    parameters = [i // 2 for i in range(len(plan.units))]
    device = torch.device("cpu")
    exchange = Exchange(plan, rank, dist.group.WORLD, parameters, dtype=dtype, device=device)
    waves = len(plan.waves)
    for step in range(2):
        for wave in range(waves + 1):
            if 0 <= wave - 2:
                check_returned(exchange, wave - 2, step, dtype)
            if wave < waves:
                for unit in exchange.sent_units(wave):
                    spec = plan.units[unit]
                    start, stop = held(spec, rank)
                    exchange.piece(unit).copy_(full_unit(unit, spec.numel, step)[start:stop])
                if wave == 0:
                    exchange.write_marks(missing(rank, parameters) if step else ())
                exchange.start_gather(wave)
                if wave == 0:
                    exchange.wait_gather(0)
                    assert exchange.read_marks() == heard(plan, rank, parameters, step)
            if 0 <= wave - 1:
                compute(exchange, wave - 1, step, dtype)
        if waves:
            check_returned(exchange, waves - 1, step, dtype)
    ways = 1 if any(unit.replicas > 1 for unit in plan.units) else 2
    marks = ways * len(exchange.marks.peers) * exchange.marks.numel * dtype.itemsize
    return exchange.allocated_bytes // dtype.itemsize, exchange.moved_bytes - marks


def missing(rank: int, parameters: list[int]) -> list[int]:
    return [p for p in sorted(set(parameters)) if (p + rank) % 3 == 0]


def heard(plan: OwnerPlan, rank: int, parameters: list[int], step: int) -> frozenset[int]:
    """Return the parameters that a rank should know others to have a gradient of."""
    known: set[int] = set()
    for parameter in {parameters[i] for wave in plan.waves for i in wave}:
        units = [i for i, p in enumerate(parameters) if p == parameter]
        holders = {r for i in units for r, _, _ in plan.units[i].all_pieces()}
        hear = holders | {plan.owners[i] for i in units}
        others = holders - {rank} if rank in hear else set()
        if any(not step or parameter not in missing(other, parameters) for other in others):
            known.add(parameter)
    return frozenset(known)


def held(spec: HeldUnit, rank: int) -> tuple[int, int]:
    return next((start, stop) for holder, start, stop in spec.all_pieces() if holder == rank)


def compute(exchange: Exchange, wave: int, step: int, dtype: torch.dtype) -> None:
    exchange.wait_gather(wave)
    owned = exchange.owned_units(wave)
    assert set(owned) == {u for u in exchange.plan.waves[wave]
                          if exchange.plan.owners[u] == exchange.rank}  # fmt: skip
    for unit in owned:
        parts = exchange.parts(unit)
        expected = full_unit(unit, exchange.plan.units[unit].numel, step).to(dtype)
        assert torch.equal(torch.cat([part for _, part in parts]), expected)
        update = expected.mul_(2).add_(torch.arange(expected.numel()))
        for start, result in exchange.results(unit):
            result.copy_(update[start : start + result.numel()])
    exchange.start_return(wave)


def check_returned(exchange: Exchange, wave: int, step: int, dtype: torch.dtype) -> None:
    exchange.wait_return(wave)
    for unit in exchange.held_units(wave):
        spec = exchange.plan.units[unit]
        start, stop = held(spec, exchange.rank)
        expected = (
            full_unit(unit, spec.numel, step).to(dtype).mul_(2).add_(torch.arange(spec.numel))
        )
        assert torch.equal(exchange.update(unit), expected[start:stop])


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_units_reach_their_owner_and_return(world_size, dtype):
    waves = 0
    for seed in range(3):
        units = units_of(seed, world_size, count=9)
        plan = plan_owners(units, world_size, slot_numel=120)
        results = run_ranks(travel, world_size, plan, dtype)
        # What leaves all ranks is what is moved, there and back, and not an element more.
        travelled = plan.gathered_numel + plan.returned_numel
        assert sum(moved for _, moved in results) == travelled * dtype.itemsize
        waves += len(plan.waves)
    assert (waves > 0) == (world_size > 1)


@pytest.mark.parametrize(
    "grid", [Grid(2, 2), Grid(2, 2, stride=2), Grid(1, 3), Grid(3, 2), Grid(1, 1)]
)
def test_units_of_several_copies_travel_to_one_owner_and_return_to_all(grid):
    world_size = grid.size
    copied = units_of(0, world_size, count=6, grid=grid)
    single = units_of(1, world_size, count=3)  # of the same group, on all of its ranks
    plan = plan_owners(copied + single, world_size, slot_numel=1000)
    results = run_ranks(travel, world_size, plan, torch.float32)
    travelled = plan.gathered_numel + plan.returned_numel
    assert sum(moved for _, moved in results) == travelled * 4
    assert (travelled > 0) == (world_size > 1)
    fewest = sum(
        (1 + u.replicas) * u.numel - 2 * max(u.held_by(r) for r in range(world_size))
        for u in plan.units
    )
    assert travelled >= fewest


def test_memory_is_that_of_two_waves_however_many_there_are():
    units = tuple(HeldUnit(f"w{i}", 0, 128, 1, ((0, 64), (1, 64))) for i in range(40))
    plan = plan_owners(units, 2, slot_numel=384)
    assert len(plan.waves) >= 10
    for allocated, _ in run_ranks(travel, 2, plan, torch.float32):
        # Two units for each of two owners a wave: this rank sends 128, and owns 2 units of 128.
        # Before both lies one element of marks, and parts start at multiples of 64.
        assert allocated == 2 * (192 + 1 + 256)


def test_resident_units_need_no_memory_and_no_exchange():
    plan = plan_owners((HeldUnit("w", 0, 10, 1, ((1, 10),)),), 2, slot_numel=100)
    assert plan.waves == ()
    assert run_ranks(travel, 2, plan, torch.float32) == [(0, 0), (0, 0)]
