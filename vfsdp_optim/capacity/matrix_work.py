"""What the matrix part of an optimizer's step takes on each rank: work, slots, traffic.

Pure integers: makes the `OwnerPlan` that the optimizer would make for the whole model, and counts
what its exchange and its Newton-Schulz need on every rank.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from sharding.planning.negotiation import BucketPlan
from sharding.planning.ownership import OwnerPlan, plan_owners
from sharding.planning.structure import Unit
from sharding.planning.units import Grid, UnitSpec
from sharding.transport.exchange import SLOT_ALIGN, SLOTS

Cost = Callable[[int, int], int]


@dataclass(frozen=True, slots=True)
class MatrixWork:
    """The matrix part of a step on one mesh, by shard; of several copies, the one that has most.

    Attributes:
        matrices: How many there are.
        work: Of all of them.
        busiest: Work of the busiest rank, wave by wave: ranks meet in every wave.
        largest_cost: Work of the largest unit.
        slots: Elements of the exchange's reserved memory.
        moved: Elements that leave, to owners and back.
        scratch: Elements that matrices are computed in, by purpose.
    """

    matrices: int
    work: int
    busiest: int
    largest_cost: int
    slots: tuple[int, ...]
    moved: tuple[int, ...]
    scratch: Mapping[str, tuple[int, ...]]


def matrix_work(
    buckets: Sequence[tuple[BucketPlan, int]],
    shards: int,
    copies: int,
    *,
    slot_numel: int,
    cost: Cost,
) -> MatrixWork:
    """Plans the matrix part of the buckets of one mesh.

    Args:
        buckets: Each with the number of blocks that have it.
        shards: Ranks that hold one copy.
        copies: Of all shards; a matrix is computed once for all of them.
        slot_numel: Elements that a rank may send, receive and keep for one wave.
        cost: (rows, cols) -> work of one matrix.

    Raises:
        ValueError: A matrix is larger than `slot_numel`.
    """
    grid = Grid(shards, copies) if copies > 1 else None
    units: list[tuple[Unit, UnitSpec]] = []
    for bucket, count in buckets:
        units += _units(bucket, cost, grid) * count
    specs = tuple(spec for _, spec in units)
    plan = plan_owners(specs, shards * copies, slot_numel=slot_numel)
    slots, moved = _traffic(plan)
    fold = grid or Grid(shards)
    return MatrixWork(
        matrices=sum(unit.batch for unit, _ in units),
        work=sum(plan.loads),
        busiest=sum(plan.wave_loads),
        largest_cost=max((spec.cost for spec in specs), default=0),
        slots=_most_by_shard(slots, fold),
        moved=_most_by_shard(moved, fold),
        scratch={
            purpose: _most_by_shard(values, fold)
            for purpose, values in _scratch([unit for unit, _ in units], plan).items()
        },
    )


def _most_by_shard(values: Sequence[int], grid: Grid) -> tuple[int, ...]:
    return tuple(
        max(values[grid.rank(replica, shard)] for replica in range(grid.replicas))
        for shard in range(grid.shards)
    )


def _units(bucket: BucketPlan, cost: Cost, grid: Grid | None) -> list[tuple[Unit, UnitSpec]]:
    """The units of one block, with who holds them."""
    result = []
    for i, param in enumerate(bucket.params):
        which, index = bucket.location[i]
        segment = bucket.segments[which]
        for number, unit in enumerate(param.step_units):
            holders = tuple(
                (rank, stop - start)
                for rank, start, stop in segment.ranges(index, unit.start, unit.start + unit.numel)
            )
            work = unit.batch * cost(unit.rows, unit.cols)
            spec = UnitSpec(param.fqn, number, unit.numel, work, holders, grid)
            result.append((unit, spec))
    return result


def _scratch(units: Sequence[Unit], plan: OwnerPlan) -> dict[str, list[int]]:
    """Elements by purpose and rank of what Newton-Schulz computes in.

    The input of a unit; the matrix, twice, and its short side squared, twice; and the updates,
    where they are several or of a tall matrix, which is computed transposed.
    """
    most: dict[str, list[int]] = {}
    for unit, owner in zip(units, plan.owners, strict=True):
        matrix, square = unit.rows * unit.cols, min(unit.rows, unit.cols) ** 2
        needs = {"inputs": unit.numel, "even": matrix, "odd": matrix}
        needs |= {"gram": square, "polynomial": square}
        if unit.batch > 1 or unit.rows > unit.cols:
            needs["updates"] = unit.numel
        for purpose, numel in needs.items():
            values = most.setdefault(purpose, [0] * plan.world_size)
            values[owner] = max(values[owner], numel)
    return most


def _traffic(plan: OwnerPlan) -> tuple[list[int], list[int]]:
    """Elements by rank: of the slots that the largest wave needs, and that leave in a step.

    The bits that say who has a gradient, a few elements for each peer, are left out.
    """
    copies = any(plan.units[i].replicas > 1 for wave in plan.waves for i in wave)
    slots = [0] * plan.world_size
    moved = [0] * plan.world_size
    for back in (False, True) if copies else (False,):  # each way has its own, or both share
        largest = [0] * plan.world_size
        for wave in plan.waves:
            for rank, numel in _wave_slots(plan, wave, all_copies=back).items():
                largest[rank] = max(largest[rank], numel)
        slots = [a + b for a, b in zip(slots, largest, strict=True)]
    for i in (i for wave in plan.waves for i in wave):
        unit, owner = plan.units[i], plan.owners[i]
        moved[owner] += unit.returned(owner)
        for rank, start, stop in unit.pieces(unit.replica_of(owner)):
            if rank != owner:
                moved[rank] += stop - start
    count = min(SLOTS, len(plan.waves))
    return [count * numel for numel in slots], moved


def _wave_slots(plan: OwnerPlan, wave: Sequence[int], *, all_copies: bool) -> dict[int, int]:
    """Elements of a slot by rank: what it sends, aligned, and what it owns."""
    held: dict[int, int] = {}
    owned: dict[int, int] = {}
    for i in wave:
        unit, owner = plan.units[i], plan.owners[i]
        pieces = unit.all_pieces() if all_copies else unit.pieces(unit.replica_of(owner))
        for rank, start, stop in pieces:
            owned[owner] = owned.get(owner, 0) + stop - start
            if rank != owner:
                held[rank] = held.get(rank, 0) + stop - start
    return {
        rank: -(-held.get(rank, 0) // SLOT_ALIGN) * SLOT_ALIGN + owned.get(rank, 0)
        for rank in held.keys() | owned.keys()
    }
