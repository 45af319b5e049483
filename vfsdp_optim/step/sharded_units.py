"""The matrix part of a step: which matrices are computed where, and their journey there and back.

Touches local tensors and, through `sharding.transport.exchange`, one process group. Plans come
from shapes and layouts alone, so every rank of a group makes the same ones.
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sharding.planning.ownership import OwnerPlan, plan_owners
from sharding.planning.structure import FullMatrix, Unit
from sharding.planning.units import UnitSpec
from sharding.transport.exchange import Exchange
from vfsdp_optim.algorithm import MatrixAlgorithm
from vfsdp_optim.parameters.param_shard import ParamShard, Ranks
from vfsdp_optim.states.scratch import Scratch
from vfsdp_optim.states.weights import MASTER
from vfsdp_optim.step.nonfinite import Skip, undo
from vfsdp_optim.step.runs import Member, pieces


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
    """

    member: Member
    algorithm: MatrixAlgorithm
    group: dict[str, Any]
    structure: FullMatrix
    unit: Unit
    start: int
    numel: int
    scratch: Scratch

    @property
    def cost(self) -> int:
        """Work of all matrices of the unit."""
        return self.unit.batch * self.algorithm.cost(self.group, self.unit.rows, self.unit.cols)

    @property
    def scale(self) -> float:
        """What the learning rate is multiplied by."""
        return self.algorithm.scale(self.group, self.unit.rows, self.unit.cols)

    def write_input(self, grad: Tensor, out: Tensor) -> None:
        """Write the input of the local elements; `grad` is the local gradient of the parameter,
        1-D."""
        held = self.member.states
        packed = any(state.packed for state in held.values())
        # Plain states are read where they are, in one call.
        ranges = pieces(self.numel, out.device, copied=True) if packed else [(0, self.numel)]
        for first, last in ranges:
            start, stop = self.start + first, self.start + last
            # What is kept, rounding included: so it does not depend on where units lie.
            states = {k: s.read(start, stop, self.scratch, f"read {k}") for k, s in held.items()}
            self.algorithm.write_input(self.group, grad[start:stop], states, out[first:last])

    def update(self, inputs: Tensor, scratch: Scratch) -> Tensor:
        """Return the update of the whole unit, 1-D as its input is, in the same dtype.

        It lies in scratch memory, until the next one.
        """
        unit, shape = self.unit, self.member.param.shape
        matrices = self.structure.matrices(inputs, unit, shape)  # (batch, rows, cols)
        updates = self.algorithm.matrix_update(self.group, matrices[0], scratch).unsqueeze(0)
        if unit.batch > 1 or updates.dtype != inputs.dtype or not updates.is_contiguous():
            first = updates[0]
            updates = scratch.take(unit.numel, inputs.dtype, inputs.device, "updates")
            updates = updates.view(unit.batch, unit.rows, unit.cols)
            updates[0].copy_(first)
            for i in range(1, unit.batch):
                matrix = self.algorithm.matrix_update(self.group, matrices[i], scratch)
                updates[i].copy_(matrix)
        return self.structure.flatten(updates, unit, shape)

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


def make_jobs(
    member: Member,
    algorithm: MatrixAlgorithm,
    group: dict[str, Any],
    structure: FullMatrix,
    scratch: Scratch,
) -> list[Job]:
    """Return one job for each unit of a parameter, the units this rank holds nothing of too."""
    _, (first, last) = member.shard.check_has_ranges(member.fqn)
    jobs = []
    for unit in structure.units(member.param.shape):
        start = min(max(unit.start, first), last)
        stop = max(min(unit.start + unit.numel, last), start)
        numel = stop - start
        jobs.append(Job(member, algorithm, group, structure, unit, start - first, numel, scratch))
    return jobs


def unit_spec(job: Job, index: int) -> UnitSpec:
    """Return a job as the owner plan sees it."""
    shard = job.member.shard
    all_bounds, _ = shard.check_has_ranges(job.member.fqn)
    start, stop = job.unit.start, job.unit.start + job.unit.numel
    first = bisect_right(all_bounds, start, key=lambda bounds: bounds[1])
    holders = []
    for i in range(first, len(all_bounds)):
        a, b = all_bounds[i]
        if a >= stop:
            break
        if b > a:
            holders.append((i, min(stop, b) - max(start, a)))
    return UnitSpec(job.member.fqn, index, job.unit.numel, job.cost, tuple(holders), shard.grid)


class AbsentGradients:
    """Parameters without a gradient on this rank, stepped with zeros until others are heard of.

    See [Note: marks] in sharding/transport/gradient_marks.py. Where no other rank has a gradient
    either, the step of the parameter is undone.

    Args:
        members: those parameters.
        grads: by member number; zeros are put in.
        steps: by member number, before they are counted.
    """

    def __init__(
        self, members: Iterable[Member], grads: list[Tensor | None], steps: Tensor
    ) -> None:
        self._kept = {m.number: (m, m.kept(), float(steps[m.number])) for m in members}
        self._grads, self._steps = grads, steps
        for number, (member, *_) in self._kept.items():
            param = member.param
            grads[number] = torch.zeros(member.numel, dtype=param.dtype, device=member.device)

    def __contains__(self, number: int) -> bool:
        """Return whether the gradient of a member is absent."""
        return number in self._kept

    def undo(self, number: int) -> None:
        """Leave a member as it was before the step, and out of the rest of it."""
        member, kept, step = self._kept[number]
        member.restore(kept)
        self._steps[number] = step
        self._grads[number] = None


class LocalMatrices:
    """Jobs whose units lie whole on this rank; nothing moves."""

    def __init__(self, jobs: Iterable[Job], scratch: Scratch) -> None:
        self._by_member: dict[int, list[Job]] = {}
        for job in jobs:
            self._by_member.setdefault(job.member.number, []).append(job)
        self._scratch = scratch

    def waits_for(self, number: int) -> bool:
        """Return False: no other rank has these matrices."""
        return False

    def step(
        self,
        grads: Sequence[Tensor | None],
        skip: Skip,
        absent: AbsentGradients | None = None,
    ) -> None:
        """Compute and apply every update; `grads` by member number, nothing is `absent`."""
        for number, jobs in self._by_member.items():
            grad = grads[number]
            if grad is None:
                continue
            member = jobs[0].member
            param = member.open()
            for job in jobs:
                wire = job.algorithm.wire_dtype(job.group, param.device)
                inputs = self._scratch.take(job.numel, wire, param.device, "inputs")
                job.write_input(grad, inputs)
                job.apply(param, job.update(inputs, self._scratch), skip)
            member.close(param)


@dataclass(frozen=True, slots=True)
class _Work:
    """What this rank computes beside one wave, before and after the next wave is sent.

    Attributes:
        early_residents: units that stay.
        early_owned: units of the wave.
        late_residents: units that stay.
        late_owned: units of the wave.
    """

    early_residents: LocalMatrices
    early_owned: tuple[int, ...]
    late_residents: LocalMatrices
    late_owned: tuple[int, ...]


class ShardedMatrices:
    """Jobs of the parameters that the same ranks hold, with one dtype on the wire.

    Args:
        jobs: of all those parameters, in the same order on every rank.
        plan: of those jobs.
        ranks: those ranks. Making their process group may be a collective.
        wire: dtype on the wire.
        scratch: working memory.
    """

    def __init__(
        self,
        jobs: list[Job],
        plan: OwnerPlan,
        ranks: Ranks,
        wire: torch.dtype,
        scratch: Scratch,
    ) -> None:
        self._jobs = jobs
        self._scratch = scratch
        self.plan = plan
        self.group = ranks.group()
        rank = dist.get_rank(self.group)
        device = jobs[0].member.param.device
        numbers = dict.fromkeys(job.member.number for job in jobs)
        index = {number: i for i, number in enumerate(numbers)}
        parameters = [index[job.member.number] for job in jobs]
        self._exchange = Exchange(plan, rank, self.group, parameters, dtype=wire, device=device)
        # Members whose ranks hear of each other's gradients -> their number in the exchange.
        self._heard = {n: i for n, i in index.items() if self._exchange.marks.travels(i)}
        self._work = [self._divide(wave) for wave in range(len(plan.resident_waves))]

    def waits_for(self, number: int) -> bool:
        """Return whether other ranks tell this one if they have a gradient of a member."""
        return number in self._heard

    def step(
        self, grads: Sequence[Tensor | None], skip: Skip, absent: AbsentGradients | None
    ) -> None:
        """Compute and apply every update.

        Args:
            grads: by member number; None is taken out again for what is absent on all ranks.
            skip: of every update.
            absent: members whose gradients are zeros only because this rank has none.

        While the first half of a wave is computed, the updates of the one before return; then those
        are applied, the next wave is sent into their slot, and arrives during the second half. The
        waves are the same in every step, whatever gradients there are, so that ranks cannot wait
        for each other in vain. See [Note: marks] in sharding/transport/gradient_marks.py for
        gradients that a rank lacks.
        """
        waves = len(self.plan.waves)
        if waves:
            self._write_marks(grads, absent)
            self._send(0, grads)
        if waves and absent is not None:
            self._hear(absent)
        for wave, work in enumerate(self._work):
            work.early_residents.step(grads, skip)
            if work.early_owned:
                self._exchange.wait_gather(wave)
            for unit in work.early_owned:
                self._compute(unit, grads)
            if wave > 0:
                self._apply(wave - 1, grads, skip)
            if wave + 1 < waves:
                self._send(wave + 1, grads)
            work.late_residents.step(grads, skip)
            if waves:
                self._exchange.wait_gather(wave)
            for unit in work.late_owned:
                self._compute(unit, grads)
            if waves:
                self._exchange.start_return(wave)
        if waves:
            self._apply(waves - 1, grads, skip)

    def _write_marks(self, grads: Sequence[Tensor | None], absent: AbsentGradients | None) -> None:
        self._exchange.write_marks(
            [
                i
                for number, i in self._heard.items()
                if grads[number] is None or (absent is not None and number in absent)
            ]
        )

    def _hear(self, absent: AbsentGradients) -> None:
        """Undo the step of what no rank has a gradient of."""
        own = [number for number in self._heard if number in absent]
        if own:
            self._exchange.wait_gather(0)
            elsewhere = self._exchange.read_marks()
            for number in own:
                if self._heard[number] not in elsewhere:
                    absent.undo(number)

    def _divide(self, wave: int) -> _Work:
        """Cut what is computed beside a wave in halves of equal work, resident units first."""
        rank = self._exchange.rank
        residents = [i for i in self.plan.resident_waves[wave] if self.plan.owners[i] == rank]
        owned = list(self._exchange.owned_units(wave)) if self.plan.waves else []
        half = sum(self._jobs[i].cost for i in [*residents, *owned]) / 2
        early: set[int] = set()
        for i in [*residents, *owned]:
            half -= self._jobs[i].cost
            if half < 0:
                break
            early.add(i)
        return _Work(
            LocalMatrices([self._jobs[i] for i in residents if i in early], self._scratch),
            tuple(i for i in owned if i in early),
            LocalMatrices([self._jobs[i] for i in residents if i not in early], self._scratch),
            tuple(i for i in owned if i not in early),
        )

    def _send(self, wave: int, grads: Sequence[Tensor | None]) -> None:
        for unit in self._exchange.sent_units(wave):
            job = self._jobs[unit]
            grad = grads[job.member.number]
            if grad is not None:
                job.write_input(grad, self._exchange.piece(unit))
        self._exchange.start_gather(wave)

    def _compute(self, unit: int, grads: Sequence[Tensor | None]) -> None:
        job = self._jobs[unit]
        if grads[job.member.number] is None:  # on every rank
            return
        parts = self._exchange.parts(unit)
        like = parts[0][1]
        inputs = self._scratch.take(job.unit.numel, like.dtype, like.device, "inputs")
        for start, part in parts:
            inputs[start : start + part.numel()].copy_(part)
        update = job.update(inputs, self._scratch)
        for start, result in self._exchange.results(unit):
            result.copy_(update[start : start + result.numel()])

    def _apply(self, wave: int, grads: Sequence[Tensor | None], skip: Skip) -> None:
        self._exchange.wait_return(wave)
        for unit in self._exchange.held_units(wave):
            job = self._jobs[unit]
            if grads[job.member.number] is not None:
                param = job.member.open()
                job.apply(param, self._exchange.update(unit), skip)
                job.member.close(param)


def plan_jobs(jobs: Sequence[Job], max_exchange_bytes: int) -> OwnerPlan:
    """Return the owner plan of jobs of the same ranks and wire dtype, in which unit i is jobs[i].

    Raises:
        ValueError: a matrix that other ranks hold too is larger than `max_exchange_bytes`.
    """
    two_ways = any(_copies(job.member.shard) > 1 for job in jobs)
    units: list[UnitSpec] = []
    previous, index, slot_numel = None, 0, 1
    for job in jobs:
        index = index + 1 if job.member is previous else 0
        if job.member is not previous:
            previous, shard = job.member, job.member.shard
            wire = job.algorithm.wire_dtype(job.group, job.member.param.device)
            fqn = job.member.fqn
            check_exchange(shard, fqn, job.structure, wire, max_exchange_bytes, two_ways=two_ways)
            slot_numel = max(slot_numel, max_exchange_bytes // wire.itemsize)
        if job.member.shard.ranks is None:  # never travels
            slot_numel = max(slot_numel, job.unit.numel)
        units.append(unit_spec(job, index))
    ranks = jobs[0].member.shard.ranks if jobs else None
    return plan_owners(tuple(units), ranks.size if ranks else 1, slot_numel=slot_numel)


def _copies(shard: ParamShard) -> int:
    return 1 if shard.grid is None else shard.grid.replicas


def check_exchange(
    shard: ParamShard,
    fqn: str,
    structure: FullMatrix,
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
    units = structure.units(shard.param.shape)
    if shard.ranks is None or not units:
        return
    largest = max(units, key=lambda unit: unit.numel)
    copies = _copies(shard)
    unit = UnitSpec(fqn, 0, largest.numel, 0, (), shard.grid)
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
