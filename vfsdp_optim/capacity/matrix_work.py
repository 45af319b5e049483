"""What the matrix part of an optimizer's step takes on each rank: work, slots, traffic.

Makes the `OwnerPlan` that the optimizer would make for the whole model, and asks it and the
exchange what every rank sends, reserves and computes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from sharding.planning.holders import Grid, HeldUnit
from sharding.planning.negotiation import BucketPlan
from sharding.planning.ownership import OwnerPlan, plan_owners
from sharding.planning.turns import Ordinals, due_work
from sharding.transport.exchange import slot_numels
from vfsdp_optim.capacity.optimizers import BlockOptimizer
from vfsdp_optim.capacity.update_scratch import Need, Needs, most, unit_scratch
from vfsdp_optim.step.units import Job, held_unit


@dataclass(frozen=True, slots=True)
class Block:
    """Equal blocks of a model on one mesh: their layout, their optimizer, how many there are."""

    plan: BucketPlan
    optimizer: BlockOptimizer
    count: int

    def wires(self) -> dict[torch.dtype, None]:
        """Return the dtypes in which its units travel."""
        jobs = (job for each in self.optimizer.jobs.values() for job in each)
        return dict.fromkeys(self.optimizer.wire(job) for job in jobs)


@dataclass(frozen=True, slots=True)
class MatrixWork:
    """The matrix part of a step on one mesh, by shard; of several copies, the one that has most.

    Attributes:
        matrices: How many there are.
        work: Of all of them.
        busiest: Work of the busiest rank, wave by wave: ranks meet in every wave.
        largest_cost: Work of the largest unit.
        slots: Bytes of the exchange's reserved memory.
        moved: Bytes that leave, to owners and back.
        states: Bytes of the states that units have on their owners.
        scratch: Elements that matrices are computed in.
    """

    matrices: int
    work: int
    busiest: int
    largest_cost: int
    slots: tuple[int, ...]
    moved: tuple[int, ...]
    states: tuple[int, ...]
    scratch: Mapping[Need, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class _OfBlock:
    """A unit of a block, who holds it, and the bytes of its states."""

    block: BlockOptimizer
    job: Job
    held: HeldUnit
    state_bytes: int

    def numbered(self, ordinals: Ordinals) -> "_OfBlock":
        """Return that of the next equal block: what it does in turn has other turns there."""
        if not self.held.due:
            return self
        recurring, matrices = self.job.recurring, self.job.unit.batch
        period, due = due_work(recurring, ordinals.take(recurring, matrices), matrices)
        return replace(self, held=replace(self.held, period=period, due=due))


def matrix_work(blocks: Sequence[Block], shards: int, copies: int, wire: torch.dtype) -> MatrixWork:
    """Plan the units of the blocks of one mesh that travel in one dtype.

    Args:
        blocks: All of the mesh.
        shards: Ranks that hold one copy.
        copies: Of all shards; a matrix is computed once for all of them.
        wire: The dtype.

    Raises:
        ValueError: A matrix is larger than the optimizer's `max_exchange_bytes`.
    """
    grid = Grid(shards, copies) if copies > 1 else None
    units: list[_OfBlock] = []
    limits = []
    ordinals = Ordinals()
    for block in blocks:
        once = _units(block, wire, grid)
        for _ in range(block.count):
            units += [unit.numbered(ordinals) for unit in once]
        if block.optimizer.optimizer is not None:
            limits.append(block.optimizer.optimizer.max_exchange_bytes // wire.itemsize)
    specs = tuple(unit.held for unit in units)
    plan = plan_owners(specs, shards * copies, slot_numel=min(limits))
    fold = grid or Grid(shards)
    kept = [0] * plan.world_size
    for unit, owner in zip(units, plan.owners, strict=True):
        kept[owner] += unit.state_bytes
    return MatrixWork(
        matrices=sum(unit.job.unit.batch for unit in units),
        work=sum(plan.loads),
        busiest=sum(plan.wave_loads),
        largest_cost=max((spec.cost for spec in specs), default=0),
        slots=_most_by_shard([wire.itemsize * numel for numel in slot_numels(plan)], fold),
        moved=_most_by_shard([wire.itemsize * numel for numel in plan.sent_numels], fold),
        states=_most_by_shard(kept, fold),
        scratch={need: _most_by_shard(v, fold) for need, v in _scratch(units, plan).items()},
    )


def _most_by_shard(values: Sequence[int], grid: Grid) -> tuple[int, ...]:
    return tuple(
        max(values[grid.rank(replica, shard)] for replica in range(grid.replicas))
        for shard in range(grid.shards)
    )


def _units(block: Block, wire: torch.dtype, grid: Grid | None) -> list[_OfBlock]:
    """Return the units of one block, with who holds them."""
    result = []
    for i, jobs in sorted(block.optimizer.jobs.items()):
        which, index = block.plan.location[i]
        segment = block.plan.segments[which]
        for job in jobs:
            if block.optimizer.wire(job) != wire:
                continue
            start, stop = job.unit.start, job.unit.start + job.unit.numel
            spec = held_unit(job, segment.ranges(index, start, stop), grid)
            result.append(_OfBlock(block.optimizer, job, spec, job.state_bytes))
    return result


def _scratch(units: Sequence[_OfBlock], plan: OwnerPlan) -> Needs:
    """Return what each rank needs for the units that it computes."""
    needs: Needs = {}
    seen: dict[object, Mapping[Need, int]] = {}
    owned: dict[tuple[object, int], None] = {}
    key: object
    for each, owner in zip(units, plan.owners, strict=True):
        block, job, unit = each.block, each.job, each.job.unit
        key = id(block), job.member.group, tuple(job.member.param.shape), unit.rows, unit.cols
        if key not in seen:
            seen[key] = unit_scratch(block, job)
        owned[key, owner] = None
    for key, owner in owned:
        most(needs, seen[key], owner, plan.world_size)
    return needs
