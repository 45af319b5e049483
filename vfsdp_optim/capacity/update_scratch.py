"""Working memory that an optimizer's updates keep from step to step, on each rank.

Lets the updates of every length and shape that a rank has run once on the meta device, where
tensors take no memory, and reads off what they took of the scratch they were handed. The optimizer
keeps one tensor for each purpose and dtype, as large as the largest use of it.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import TypeVar

import torch

from sharding.planning.negotiation import BucketPlan
from vfsdp_optim.algorithm import Algorithm
from vfsdp_optim.capacity.optimizers import BlockOptimizer
from vfsdp_optim.states.scratch import Scratch
from vfsdp_optim.step.member import Member
from vfsdp_optim.step.runs import Run, piece_numel
from vfsdp_optim.step.units import Job

Need = tuple[str, torch.dtype]
"""A purpose, and the dtype of its memory."""

Needs = dict[Need, list[int]]
"""Elements by rank."""

_META = torch.device("meta")
_THREADS = 1  # of a CPU; each more works on a piece of its own
Key = TypeVar("Key")


def update_scratch(plan: BucketPlan, block: BlockOptimizer) -> Needs:
    """Return what the updates of one bucket need on each rank of its mesh, matrices apart.

    Args:
        plan: Of the bucket.
        block: The optimizer of its parameters, in the order of the plan.
    """
    needs: Needs = {}
    ranks = plan.segments[0].world_size if plan.segments else 1
    seen: dict[object, Mapping[Need, int]] = {}
    for member, rank, numel in _runs(plan, block):
        key = member.group, *member.formats.items(), numel
        if key not in seen:
            seen[key] = run_scratch(block, member, numel)
        most(needs, seen[key], rank, ranks)
    for i, jobs in block.jobs.items():
        which, index = plan.location[i]
        for job in jobs:
            unit, member = job.unit, job.member
            aligned = max((f.unit for f in member.formats.values()), default=1)
            for rank, start, stop in plan.segments[which].ranges(
                index, unit.start, unit.start + unit.numel
            ):
                key = member.group, *member.formats.items(), start % aligned, stop - start
                if key not in seen:
                    seen[key] = piece_scratch(block, job, start, stop)
                most(needs, seen[key], rank, ranks)
    return needs


def most(needs: Needs, own: Mapping[Need, int], rank: int, ranks: int) -> None:
    """Raise what a rank needs to `own`."""
    for need, numel in own.items():
        by_rank = needs.setdefault(need, [0] * ranks)
        by_rank[rank] = max(by_rank[rank], numel)


def run_scratch(block: BlockOptimizer, member: Member, numel: int) -> Mapping[Need, int]:
    """Return what the element-wise update of a run of `numel` elements takes, a run of such
    members."""

    def run_of(length: int) -> Run:
        param, grad = (
            torch.empty(length, dtype=member.param.dtype, device=_META) for _ in range(2)
        )
        states = {key: f.allocate(length, _META) for key, f in member.formats.items()}
        return Run(member.group, [member], param, grad, states, (), step=1.0)

    algorithm, group = block.algorithm(member), block.group(member)
    run = run_of(numel)
    longest = piece_numel(numel, block.device.type, _THREADS, copied=run.copied)
    if longest < numel:
        run = run_of(longest)
    return _followed(algorithm, lambda scratch: algorithm.update_run(group, run, scratch))


def piece_scratch(block: BlockOptimizer, job: Job, start: int, stop: int) -> Mapping[Need, int]:
    """Return what a rank that holds elements start:stop of a parameter takes to send them as input
    of a
    unit, and to apply the update."""
    param = job.member.param
    # What is decoded is so in pieces, of which none is longer than the first.
    numel = piece_numel(stop - start, block.device.type, _THREADS, copied=True)
    flat = torch.empty(param.numel(), dtype=param.dtype, device=_META)
    wire = torch.empty(numel, dtype=block.wire(job), device=_META)

    def follow(scratch: Scratch) -> None:
        own = replace(job, start=start, numel=numel, scratch=scratch)
        own.write_input(flat, wire)
        own.apply(flat, wire, skip=False)

    return _followed(job.algorithm, follow)


def unit_scratch(block: BlockOptimizer, job: Job) -> Mapping[Need, int]:
    """Return what the rank that computes a unit takes, in the first step or a later one."""

    def follow(scratch: Scratch) -> None:
        own = replace(job, scratch=scratch)
        for step in (1, 2):
            if job.member.count is not None:
                job.member.count.fill_(step)
            own.update(own.room(block.wire(job), _META), scratch, skip=False)
        job.member.failures.clear()

    return _followed(job.algorithm, follow)


def _followed(algorithm: Algorithm, follow: Callable[[Scratch], None]) -> Mapping[Need, int]:
    scratch = Scratch()
    try:
        with torch.no_grad():
            follow(scratch)
    except (RuntimeError, NotImplementedError) as error:
        raise ValueError(
            f"algorithm {algorithm.name!r}: a plan follows its update on tensors of the meta "
            f"device, which have shapes and no numbers, and there it failed: {error}; leave out "
            "what reads numbers on the host, such as item()"
        ) from error
    return scratch.sizes


def _runs(plan: BucketPlan, block: BlockOptimizer) -> Iterator[tuple[Member, int, int]]:
    """Return (one of its members, rank, elements) of what is updated at once.

    Neighbours of one group and format on one rank; see [Note: spans and runs] in runs.py.
    """
    members = {place: block.members.get(i) for i, place in enumerate(plan.location)}
    for which, segment in enumerate(plan.segments):
        chains: list[tuple[Member, int, int]] = []
        for index in segment.order:
            member, start = members[which, index], segment.offsets[index]
            if member is None or not member.numel:
                continue
            stop = start + member.numel
            if chains and _alike(chains[-1][0], member):
                chains[-1] = chains[-1][0], chains[-1][1], stop
            else:
                chains.append((member, start, stop))
        size = segment.shard_numel
        for member, start, stop in chains:
            for rank in range(start // size, (stop - 1) // size + 1):
                yield member, rank, min(stop, (rank + 1) * size) - max(start, rank * size)


def _alike(a: Member, b: Member) -> bool:
    return a.group == b.group and a.formats == b.formats
