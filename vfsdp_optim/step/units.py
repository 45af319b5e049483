"""The units of an optimizer's parameters: how each is updated, and which rank is to do it.

Touches local tensors when an update is computed or applied; communicates nothing. Plans come from
shapes and layouts alone, so every rank of a group makes the same ones.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import Any

import torch
from torch import Tensor

from sharding.planning.boxes import places_of_parts
from sharding.planning.holders import Grid, HeldUnit
from sharding.planning.ownership import OwnerPlan, plan_owners
from sharding.planning.structure import Structure, Unit
from sharding.planning.turns import Ordinals, Recurring, due_work, turns_of
from vfsdp_optim.algorithm import Algorithm, MatrixAlgorithm, UnitContext, UnitState
from vfsdp_optim.parameters.param_shard import ParamShard, Ranks
from vfsdp_optim.states.formats import parts_of
from vfsdp_optim.states.scratch import Scratch
from vfsdp_optim.states.weights import MASTER
from vfsdp_optim.step.member import Member
from vfsdp_optim.step.nonfinite import Failure, Skip, undo
from vfsdp_optim.step.runs import pieces


def usable_structure(
    algorithm: Algorithm, group: dict[str, Any], param: Tensor, fqn: str
) -> Structure:
    """Return what an algorithm declares of a parameter, and check that it can use it.

    Raises:
        TypeError: it declares whole units and has no part that would update them.
    """
    structure = algorithm.structure(group, param.shape)
    if structure.has_units and not isinstance(algorithm, MatrixAlgorithm):
        raise TypeError(
            f"{fqn}: algorithm {algorithm.name!r} declares {structure!r}, whose units nothing "
            f"would update; derive {type(algorithm).__name__} from MatrixAlgorithm, or declare "
            "Elementwise()"
        )
    return structure


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """One unit of one parameter, and how to compute its update.

    Attributes:
        member: the parameter.
        algorithm: the rule of its group.
        group: the group, live: hyper-parameters are read at each step.
        structure: cuts the parameter into matrices.
        unit: the run of the flattened parameter.
        start: where the local elements of the unit start in the local piece of the parameter.
        numel: how many of its elements are local.
        scratch: working memory.
        number: of the unit in the parameter.
        index: of its first matrix among all of the optimizer.
        ordinal: of its first matrix, by which parts have their turns; see [Note: turns] in
            sharding/planning/turns.py.
        owner: rank that has the unit's states already; None where none has.
    """

    member: Member
    algorithm: MatrixAlgorithm
    group: dict[str, Any]
    structure: Structure
    unit: Unit
    start: int
    numel: int
    scratch: Scratch
    number: int = 0
    index: int = 0
    ordinal: int = 0
    owner: int | None = None

    @property
    def unit_states(self) -> dict[str, UnitState]:
        """What the algorithm keeps of the unit, all of its matrices together."""
        specs = dict(self.algorithm.unit_states(self.group, self.unit))
        if self.unit.batch > 1:
            batch = (self.unit.batch,)
            return {k: replace(spec, shape=batch + spec.shape) for k, spec in specs.items()}
        return specs

    @property
    def state_bytes(self) -> int:
        """Bytes of the unit's states, on whichever rank has them."""
        formats = self.member.unit_formats
        return sum(
            formats[f"{key}.{self.number}"].nbytes(prod(spec.shape))
            for key, spec in self.unit_states.items()
        )

    @property
    def cost(self) -> int:
        """Work of all matrices of the unit."""
        return self.unit.batch * self.algorithm.cost(self.group, self.unit.rows, self.unit.cols)

    @property
    def recurring(self) -> Recurring | None:
        """What parts of each of its matrices do in turn."""
        return self.algorithm.recurring(self.group, self.unit.rows, self.unit.cols)

    @property
    def scale(self) -> float:
        """What the learning rate is multiplied by."""
        return self.algorithm.scale(self.group, self.unit.rows, self.unit.cols)

    def room(self, wire: torch.dtype, device: torch.device) -> Tensor:
        """Return memory for the input of the whole unit, until the next one."""
        return self.scratch.take(self.unit.numel, wire, device, "inputs")

    def pieces_of(
        self, whole: Tensor, pieces: Iterable[tuple[int, Tensor]]
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the elements of each piece in the 1-D tensor of the whole unit, beside the piece.

        Args:
            whole: of the unit.
            pieces: (start, elements) of what shards hold, as the exchange counts them.
        """
        boxes, start_and_numel = self.member.shard.boxes, (self.unit.start, self.unit.numel)
        if boxes is None:
            for start, piece in pieces:
                yield whole[start : start + piece.numel()], piece
            return
        run = whole.view(boxes.run_shape(*start_and_numel))
        places = places_of_parts(boxes, *start_and_numel)
        for start, piece in pieces:
            part = run[places[start]]
            yield part, piece.view(part.shape)

    def write_input(self, grad: Tensor, out: Tensor) -> None:
        """Write the input of the local elements; `grad` is the local gradient of the parameter,
        contiguous."""
        grad = grad.view(-1)
        held = self.member.states
        packed = any(state.packed for state in held.values())
        # Plain states are read where they are, in one call.
        ranges = pieces(self.numel, out.device, copied=True) if packed else [(0, self.numel)]
        for first, last in ranges:
            start, stop = self.start + first, self.start + last
            # What is kept, rounding included: so it does not depend on where units lie.
            states = {k: s.read(start, stop, self.scratch, f"read {k}") for k, s in held.items()}
            self.algorithm.write_input(self.group, grad[start:stop], states, out[first:last])

    def update(self, inputs: Tensor, scratch: Scratch, skip: Skip) -> Tensor:
        """Return the update of the whole unit, 1-D as its input is, in the same dtype.

        It lies in scratch memory, until the next one. States of the unit advance, but not where
        `skip` is set.
        """
        unit, shape = self.unit, self.member.param.shape
        matrices = self.structure.matrices(inputs, unit, shape)  # (batch, rows, cols)
        with self._contexts(scratch, skip) as contexts:
            first = self.algorithm.matrix_update(self.group, matrices[0], contexts[0], scratch)
            updates = first.unsqueeze(0)
            if unit.batch > 1 or updates.dtype != inputs.dtype or not updates.is_contiguous():
                updates = scratch.take(unit.numel, inputs.dtype, inputs.device, "updates")
                updates = updates.view(unit.batch, unit.rows, unit.cols)
                updates[0].copy_(first)
                for i in range(1, unit.batch):
                    context = contexts[i]
                    matrix = self.algorithm.matrix_update(self.group, matrices[i], context, scratch)
                    updates[i].copy_(matrix)
        return self.structure.flatten(updates, unit, shape)

    @contextmanager
    def _contexts(self, scratch: Scratch, skip: Skip) -> Iterator[list[UnitContext]]:
        """Hand out what the update of each matrix may know, and keep what it writes."""
        count = self.member.count
        step = 0 if count is None else int(count)
        specs = self.unit_states
        states = {key: self.member.unit_states[f"{key}.{self.number}"] for key in specs}
        # What is opened is written back in any case.
        parts = parts_of({k: s for k, s in states.items() if s.packed or not specs[k].guarded})
        kept = [part.clone() for part in parts] if isinstance(skip, Tensor) else []
        numbers = {key: state.open(scratch, f"unit {key}") for key, state in states.items()}
        whole = {key: numbers[key].view(spec.shape) for key, spec in specs.items()}
        batch, recurring = self.unit.batch, self.recurring
        parts_and_period = recurring and (len(recurring.works), recurring.period)
        yield [
            UnitContext(
                self.index + i,
                step,
                _nth(whole, i) if batch > 1 else whole,
                turns_of(self.ordinal + 2 * i, *parts_and_period) if parts_and_period else (),
                self._fail,
                skip,
            )
            for i in range(batch)
        ]
        for key, state in states.items():
            state.close(numbers[key], (), scratch)
        for old, new in zip(kept, parts, strict=False):
            undo(skip, old, new)

    def _fail(self, text: str, happened: Tensor | bool = True) -> None:
        self.member.failures.append(Failure(f"{self.member.fqn}: {text}", happened))

    def apply(self, param: Tensor, update: Tensor, skip: Skip) -> None:
        """Add the update to the local elements; `param` is the local piece of the parameter,
        1-D. Nothing is added where `skip` is set."""
        factor = self.algorithm.factor(self.group, self.unit.rows, self.unit.cols)
        if param.dtype.itemsize < 4:
            # On the CPU, a + alpha * b in bfloat16 rounds in another way at the ends of a tensor
            # than inside; in float32, rounded once, it does not depend on where a shard is cut.
            update = update.float()
        rule, device = self.member.weights, param.device
        ranges = pieces(self.numel, device, copied=True) if rule.draws else [(0, self.numel)]
        for first, last in ranges:
            start, stop = self.start + first, self.start + last
            self._apply(param[start:stop], update[first:last], factor, start, skip)

    def _apply(self, param: Tensor, update: Tensor, factor: float, start: int, skip: Skip) -> None:
        """Add to the local elements from `start` on, `param`."""
        stop, rule = start + param.numel(), self.member.weights
        state = self.member.states.get(MASTER)
        master = None if state is None else state.read(start, stop, self.scratch, MASTER)
        written = [param] if master is None else [param, master]
        kept = [tensor.clone() for tensor in written] if isinstance(skip, Tensor) else []
        weights = rule.open(param, master, self.scratch)
        weights.add_(update, alpha=factor)
        places = [self.member.place(start, stop, update=1)] if rule.draws else []
        rule.close(param, weights, places, self.scratch)
        for old, new in zip(kept, written, strict=False):
            undo(skip, old, new)


def _nth(tensors: Mapping[str, Tensor], i: int) -> dict[str, Tensor]:
    return {key: tensor[i] for key, tensor in tensors.items()}


def make_jobs(
    member: Member,
    algorithm: MatrixAlgorithm,
    group: dict[str, Any],
    structure: Structure,
    scratch: Scratch,
    index: int = 0,
    ordinals: Ordinals | None = None,
) -> list[Job]:
    """Return one job for each unit of a parameter, the units this rank holds nothing of too.

    Args:
        member: the parameter.
        algorithm: of its group.
        group: its group.
        structure: cuts it into units.
        scratch: working memory.
        index: number of the first matrix.
        ordinals: of matrices.
    """
    ordinals = ordinals or Ordinals()
    member.shard.check_has_units(member.fqn)
    jobs = []
    for number, unit in enumerate(structure.units(member.param.shape)):
        local = member.shard.local_part(unit.start, unit.numel)
        owner = member.owners[number] if member.owners else None
        recurring = algorithm.recurring(group, unit.rows, unit.cols)
        ordinal = ordinals.take(recurring, unit.batch)
        place = *local, scratch, number, index, ordinal, owner
        jobs.append(Job(member, algorithm, group, structure, unit, *place))
        index += unit.batch
    return jobs


def cost_and_state_numel(job: Job) -> tuple[int, int]:
    """Return the work of a unit, and the elements that its owner keeps for it."""
    return job.cost, sum(prod(spec.shape) for spec in job.unit_states.values())


def held_unit(
    job: Job,
    parts: Iterable[tuple[int, int, int]],
    grid: Grid | None,
    needs: tuple[int, int] | None = None,
) -> HeldUnit:
    """Return a job as the owner plan sees it.

    Args:
        job: of the unit.
        parts: (shard, start, stop) of what shards hold of it, as `held_parts` returns them.
        grid: of all copies.
        needs: its `cost_and_state_numel`, where that is known.
    """
    fqn, numel = job.member.fqn, job.unit.numel
    cost, kept = needs or cost_and_state_numel(job)
    holders = tuple([(shard, stop - start) for shard, start, stop in parts])
    due = due_work(job.recurring, job.ordinal, job.unit.batch)
    return HeldUnit(fqn, job.number, numel, cost, holders, grid, kept, job.owner, *due)


def jobs_by_ranks(
    members: Iterable[Member],
    groups: Sequence[dict[str, Any]],
    algorithms: Mapping[str, Algorithm],
    scratch: Scratch,
) -> dict[tuple[Ranks, torch.dtype] | None, list[Job]]:
    """Return all units by (ranks, dtype on the wire); by None what no other rank holds."""
    jobs: dict[tuple[Ranks, torch.dtype] | None, list[Job]] = {}
    index, ordinals = 0, Ordinals()
    for member in members:
        group = groups[member.group]
        algorithm = algorithms[group["algorithm"]]
        if not isinstance(algorithm, MatrixAlgorithm):
            continue
        key = None
        if member.shard.ranks is not None:
            key = member.shard.ranks, algorithm.wire_dtype(group, member.param.device)
        structure = algorithm.structure(group, member.param.shape)
        made = make_jobs(member, algorithm, group, structure, scratch, index, ordinals)
        index += sum(job.unit.batch for job in made)
        if made:  # a parameter without elements has no matrices
            jobs.setdefault(key, []).extend(made)
    return jobs


def plan_jobs(jobs: Sequence[Job], max_exchange_bytes: int) -> OwnerPlan:
    """Return the owner plan of jobs of the same ranks and wire dtype, in which unit i is jobs[i].

    Raises:
        ValueError: a matrix that other ranks hold too is larger than `max_exchange_bytes`.
    """
    two_ways = any(_copies(job.member.shard) > 1 for job in jobs)
    units: list[HeldUnit] = []
    previous, slot_numel = None, 1
    checked: set[object] = set()  # equal parameters of a group are checked once
    known: dict[object, tuple[int, int]] = {}  # and need the same
    for job in jobs:
        unit, shard = job.unit, job.member.shard
        if job.member is not previous:
            previous, param = job.member, job.member.param
            kind = job.member.group, param.shape, param.device, shard.ranks is None, shard.grid
            if kind not in checked:
                checked.add(kind)
                wire = job.algorithm.wire_dtype(job.group, param.device)
                limits = wire, max_exchange_bytes
                check_exchange(shard, previous.fqn, job.structure, *limits, two_ways=two_ways)
                slot_numel = max(slot_numel, max_exchange_bytes // wire.itemsize)
        if shard.ranks is None:  # never travels
            slot_numel = max(slot_numel, unit.numel)
        parts = shard.held_parts(unit.start, unit.numel)
        which = job.member.group, job.member.param.shape, job.number
        needs = known.get(which) or known.setdefault(which, cost_and_state_numel(job))
        units.append(held_unit(job, parts, shard.grid, needs))
    ranks = jobs[0].member.shard.ranks if jobs else None
    return plan_owners(tuple(units), ranks.size if ranks else 1, slot_numel=slot_numel)


def _copies(shard: ParamShard) -> int:
    return 1 if shard.grid is None else shard.grid.replicas


def check_exchange(
    shard: ParamShard,
    fqn: str,
    structure: Structure,
    wire: torch.dtype,
    max_exchange_bytes: int,
    *,
    two_ways: bool = False,
) -> None:
    """Check that every matrix of a parameter fits into a slot, wherever it is cut.

    Args:
        shard: the parameter.
        fqn: its name.
        structure: cuts it into matrices.
        wire: dtype on the wire.
        max_exchange_bytes: that a slot may take.
        two_ways: whether it travels beside parameters with copies, whose way back, and so its own,
            has slots apart.

    Raises:
        ValueError: one does not.
    """
    largest = None if shard.ranks is None else _largest_unit(structure, shard.param.shape)
    if largest is None:
        return
    copies = _copies(shard)
    unit = HeldUnit(fqn, 0, largest.numel, 0, (), shard.grid)
    needed = wire.itemsize * unit.least_slot(two_ways=two_ways or copies > 1)
    if needed > max_exchange_bytes:
        matrices = "a matrix" if largest.batch == 1 else f"{largest.batch} matrices"
        beside = " beside parameters with more" if two_ways and copies == 1 else ""
        raise ValueError(
            f"{fqn}: to exchange {matrices} of {largest.rows} x {largest.cols} as a whole, in "
            f"{wire} and with {copies} cop{'y' if copies == 1 else 'ies'}{beside}, takes {needed} "
            f"bytes, more than max_exchange_bytes={max_exchange_bytes!r}; pass max_exchange_bytes="
            f"{needed} or more"
        )


@lru_cache(maxsize=1024)
def _largest_unit(structure: Structure, shape: torch.Size) -> Unit | None:
    return max(structure.units(shape), key=lambda unit: unit.numel, default=None)
