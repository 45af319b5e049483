"""The part of a step that needs whole units: what is computed when, and the journey to owners.

Touches local tensors and, through `sharding.transport.exchange`, one process group. Executes the
owner plan that it is given.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sharding.planning.ownership import OwnerPlan
from sharding.transport.exchange import Exchange
from vfsdp_optim.algorithm import Algorithm
from vfsdp_optim.parameters.param_shard import Ranks
from vfsdp_optim.states.scratch import Scratch
from vfsdp_optim.step.member import Member
from vfsdp_optim.step.nonfinite import Skip
from vfsdp_optim.step.units import Job, jobs_by_ranks, plan_jobs


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
                inputs = job.room(wire, param.device)
                job.write_input(grad, inputs)
                job.apply(param, job.update(inputs, self._scratch, skip), skip)
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
                self._compute(unit, grads, skip)
            if wave > 0:
                self._apply(wave - 1, grads, skip)
            if wave + 1 < waves:
                self._send(wave + 1, grads)
            work.late_residents.step(grads, skip)
            if waves:
                self._exchange.wait_gather(wave)
            for unit in work.late_owned:
                self._compute(unit, grads, skip)
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

    def _compute(self, unit: int, grads: Sequence[Tensor | None], skip: Skip) -> None:
        job = self._jobs[unit]
        if grads[job.member.number] is None:  # on every rank
            return
        parts = self._exchange.parts(unit)
        like = parts[0][1]
        inputs = job.room(like.dtype, like.device)
        for part, piece in job.pieces_of(inputs, parts):
            part.copy_(piece)
        update = job.update(inputs, self._scratch, skip)
        for part, result in job.pieces_of(update, self._exchange.results(unit)):
            result.copy_(part)

    def _apply(self, wave: int, grads: Sequence[Tensor | None], skip: Skip) -> None:
        self._exchange.wait_return(wave)
        for unit in self._exchange.held_units(wave):
            job = self._jobs[unit]
            if grads[job.member.number] is not None:
                param = job.member.open()
                job.apply(param, self._exchange.update(unit), skip)
                job.member.close(param)


def make_parts(
    members: Iterable[Member],
    groups: Sequence[dict[str, Any]],
    algorithms: Mapping[str, Algorithm],
    max_exchange_bytes: int,
    scratch: Scratch,
) -> list[LocalMatrices | ShardedMatrices]:
    """Return what computes the units of all members; may make process groups, a collective."""
    parts: list[LocalMatrices | ShardedMatrices] = []
    for key, jobs in jobs_by_ranks(members, groups, algorithms, scratch).items():
        if key is None:
            parts.append(LocalMatrices(jobs, scratch))
        else:
            ranks, wire = key
            plan = plan_jobs(jobs, max_exchange_bytes)
            parts.append(ShardedMatrices(jobs, plan, ranks, wire, scratch))
    return parts


def absent_gradients(
    members: Sequence[Member],
    parts: Sequence[LocalMatrices | ShardedMatrices],
    grads: list[Tensor | None],
    steps: Tensor,
) -> AbsentGradients | None:
    """Put zeros for gradients that other ranks may have; None where this rank lacks none."""
    absent = [
        member
        for member, grad in zip(members, grads, strict=True)
        if grad is None
        and member.param.requires_grad
        and any(part.waits_for(member.number) for part in parts)
    ]
    return AbsentGradients(absent, grads, steps) if absent else None
