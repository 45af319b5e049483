"""The matrix part of a step: which matrices are computed where, and their journey there and back.

Touches local tensors and, through `sharding.exchange`, one process group. Plans come from shapes
and layouts alone, so every rank of a group makes the same ones.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sharding.exchange import Exchange
from sharding.ownership import OwnerPlan, UnitSpec, plan_owners
from sharding.structure import FullMatrix, Unit
from vfsdp_optim.algorithm import MatrixAlgorithm, Scratch
from vfsdp_optim.nonfinite import Skip
from vfsdp_optim.runs import Member
from vfsdp_optim.shards import Ranks


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
    """

    member: Member
    algorithm: MatrixAlgorithm
    group: dict[str, Any]
    structure: FullMatrix
    unit: Unit
    start: int
    numel: int

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
        here = slice(self.start, self.start + self.numel)
        states = {key: state[here] for key, state in self.member.states.items()}
        self.algorithm.write_input(self.group, grad[here], states, out)

    def update(self, inputs: Tensor) -> Tensor:
        """Return the update of the whole unit, 1-D as its input is, in the same dtype."""
        shape = self.member.param.shape
        matrices = self.structure.matrices(inputs, self.unit, shape)  # (batch, rows, cols)
        updates = [self.algorithm.matrix_update(self.group, matrix) for matrix in matrices]
        stacked = updates[0].unsqueeze(0) if len(updates) == 1 else torch.stack(updates)
        return self.structure.flatten(stacked, self.unit, shape).to(inputs.dtype)

    def apply(self, param: Tensor, update: Tensor, skip: Skip) -> None:
        """Add the update to the local elements; `param` is the local piece of the parameter,
        1-D. Nothing is added where `skip` is set."""
        factor = self.algorithm.factor(self.group, self.unit.rows, self.unit.cols)
        if param.dtype.itemsize < 4:
            # On the CPU, a + alpha * b in bfloat16 rounds in another way at the ends of a tensor
            # than inside; in float32, rounded once, it does not depend on where a shard is cut.
            update = update.float()
        piece = param[self.start : self.start + self.numel]
        if isinstance(skip, Tensor):
            updated = piece.add(update, alpha=factor)
            piece.copy_(torch.where(skip.to(piece.device), piece, updated))
        else:
            piece.add_(update, alpha=factor)


def make_jobs(
    member: Member, algorithm: MatrixAlgorithm, group: dict[str, Any], structure: FullMatrix
) -> list[Job]:
    """Return one job for each unit of a parameter, the units this rank holds nothing of too."""
    _, (first, last) = member.shard.check_has_ranges(member.fqn)
    jobs = []
    for unit in structure.units(member.param.shape):
        start = min(max(unit.start, first), last)
        stop = max(min(unit.start + unit.numel, last), start)
        jobs.append(Job(member, algorithm, group, structure, unit, start - first, stop - start))
    return jobs


def unit_spec(job: Job, index: int) -> UnitSpec:
    """Return a job as the owner plan sees it."""
    shard = job.member.shard
    all_bounds, _ = shard.check_has_ranges(job.member.fqn)
    start, stop = job.unit.start, job.unit.start + job.unit.numel
    held = [(i, min(stop, b) - max(start, a)) for i, (a, b) in enumerate(all_bounds)]
    holders = tuple((i, numel) for i, numel in held if numel > 0)
    return UnitSpec(job.member.fqn, index, job.unit.numel, job.cost, holders, shard.grid)


class LocalMatrices:
    """Jobs whose units lie whole on this rank; nothing moves."""

    def __init__(self, jobs: Iterable[Job], scratch: Scratch) -> None:
        self._by_member: dict[int, list[Job]] = {}
        for job in jobs:
            self._by_member.setdefault(job.member.number, []).append(job)
        self._scratch = scratch

    def step(self, grads: Sequence[Tensor | None], skip: Skip = False) -> None:
        """Compute and apply every update; `grads` by member number."""
        for number, jobs in self._by_member.items():
            grad = grads[number]
            if grad is None:
                continue
            member = jobs[0].member
            param = member.open()
            for job in jobs:
                wire = job.algorithm.wire_dtype(job.group, param.device)
                inputs = self._scratch.take(job.numel, wire, param.device)
                job.write_input(grad, inputs)
                job.apply(param, job.update(inputs), skip)
            member.close(param)


class ShardedMatrices:
    """Jobs of the parameters that the same ranks hold, with one dtype on the wire.

    Args:
        jobs: of all those parameters, in the same order on every rank.
        ranks: those ranks. Making their process group may be a collective.
        wave_numel: elements that a rank may receive at a time.
        wire: dtype on the wire.
        scratch: working memory.
    """

    def __init__(
        self,
        jobs: list[Job],
        ranks: Ranks,
        *,
        wave_numel: int,
        wire: torch.dtype,
        scratch: Scratch,
    ) -> None:
        self._jobs = jobs
        self._scratch = scratch
        self.plan = plan_jobs(jobs, wave_numel=wave_numel)
        self.group = ranks.group()
        rank = dist.get_rank(self.group)
        device = jobs[0].member.param.device
        self._exchange = Exchange(self.plan, rank, self.group, dtype=wire, device=device)
        resident = [
            job
            for i, job in enumerate(jobs)
            if self.plan.is_resident(i) and self.plan.owners[i] == rank
        ]
        self._resident = LocalMatrices(resident, scratch)

    def step(self, grads: Sequence[Tensor | None], skip: Skip = False) -> None:
        """Compute and apply every update; `grads` by member number.

        While a wave is computed the next one arrives and the one before returns; resident units are
        computed while the first arrives. The waves are the same in every step, whatever gradients
        there are, so that ranks cannot wait for each other in vain.
        """
        waves = len(self.plan.waves)
        if waves:
            self._send(0, grads)
        self._resident.step(grads, skip)
        for wave in range(waves):
            if wave + 1 < waves:
                self._send(wave + 1, grads)
            self._exchange.wait_gather(wave)
            for unit in self._exchange.owned_units(wave):
                self._compute(unit, grads)
            self._exchange.start_return(wave)
            if wave > 0:
                self._apply(wave - 1, grads, skip)
        if waves:
            self._apply(waves - 1, grads, skip)

    def _send(self, wave: int, grads: Sequence[Tensor | None]) -> None:
        for unit in self._exchange.sent_units(wave):
            job = self._jobs[unit]
            grad = grads[job.member.number]
            if grad is not None:
                job.write_input(grad, self._exchange.piece(unit))
        self._exchange.start_gather(wave)

    def _compute(self, unit: int, grads: Sequence[Tensor | None]) -> None:
        job = self._jobs[unit]
        if grads[job.member.number] is None:
            return
        parts = self._exchange.parts(unit)
        like = parts[0][1]
        inputs = self._scratch.take(job.unit.numel, like.dtype, like.device)
        for start, part in parts:
            inputs[start : start + part.numel()].copy_(part)
        update = job.update(inputs)
        for start, result in self._exchange.results(unit):
            result.copy_(update[start : start + result.numel()])

    def _apply(self, wave: int, grads: Sequence[Tensor | None], skip: Skip) -> None:
        self._exchange.wait_return(wave)
        for unit in self._exchange.held_units(wave):
            job = self._jobs[unit]
            if grads[job.member.number] is not None:
                job.apply(job.member.open(), self._exchange.update(unit), skip)


def plan_jobs(jobs: Sequence[Job], *, wave_numel: int) -> OwnerPlan:
    """Return the owner plan of jobs of the same ranks, in which unit i is jobs[i]."""
    units: list[UnitSpec] = []
    previous, index = None, 0
    for job in jobs:
        index = index + 1 if job.member is previous else 0
        previous = job.member
        units.append(unit_spec(job, index))
    ranks = jobs[0].member.shard.ranks if jobs else None
    return plan_owners(tuple(units), ranks.size if ranks else 1, wave_numel=wave_numel)
