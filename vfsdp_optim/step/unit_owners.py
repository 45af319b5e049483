"""Which rank has the states of which unit, and the memory for them. Touches local tensors; making a
mesh of several axes into one of one may be a collective. See [Note: states of units]."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch.distributed as dist

from sharding.planning.structure import Unit
from vfsdp_optim.algorithm import Algorithm, MatrixAlgorithm
from vfsdp_optim.states.precision import is_8bit
from vfsdp_optim.states.scratch import Scratch
from vfsdp_optim.states.unit_states import standing_owner, unit_format, unit_views
from vfsdp_optim.step.member import Member
from vfsdp_optim.step.standing_state import States, standing
from vfsdp_optim.step.units import Job, jobs_by_ranks, plan_jobs

_ANY_UNIT = Unit(start=0, numel=1, batch=1, rows=1, cols=1)


def make_unit_states(
    members: Sequence[Member],
    groups: Sequence[dict[str, Any]],
    algorithms: Mapping[str, Algorithm],
    states: States,
    max_exchange_bytes: int,
    scratch: Scratch,
) -> None:
    """Give each unit that keeps something an owner, and its states memory there.

    Args:
        members: whose states that are cut as they are have been made.
        groups: of the optimizer.
        algorithms: by name.
        states: `Optimizer.state`: units whose states stand there keep their owners.
        max_exchange_bytes: memory for matrices that travel.
        scratch: working memory.
    """
    if not any(_keeps_states(algorithms[group["algorithm"]], group) for group in groups):
        return
    for jobs in jobs_by_ranks(members, groups, algorithms, scratch).values():
        pinned = [replace(job, owner=_standing_owner(job, states)) for job in jobs]
        owners = plan_jobs(pinned, max_exchange_bytes).owners
        chosen: dict[int, list[int]] = {}
        for job, owner in zip(jobs, owners, strict=True):
            if job.unit_states:
                _make(job, owner)
                chosen.setdefault(job.member.number, []).append(owner)
        for number, of_units in chosen.items():
            members[number].owners = tuple(of_units)


def _keeps_states(algorithm: Algorithm, group: dict[str, Any]) -> bool:
    # Keys are the same for all units of a group, so that any unit tells.
    return isinstance(algorithm, MatrixAlgorithm) and bool(algorithm.unit_states(group, _ANY_UNIT))


def _standing_owner(job: Job, states: States) -> int | None:
    ranks = job.member.shard.ranks
    old = standing(states, job.member.param, job.member.fqn)
    keys = (f"{key}.{job.number}" for key in job.unit_states)
    return next((o for o in (standing_owner(old, k, ranks) for k in keys) if o is not None), None)


def _make(job: Job, owner: int) -> None:
    """Allocate the states of a unit, zero, and add them to its member."""
    member, ranks = job.member, job.member.shard.ranks
    mine = ranks is None or ranks.ids[owner] == dist.get_rank()
    packed = is_8bit(job.group, tuple(member.param.shape), member.fqn)
    for key, spec in job.unit_states.items():
        name = f"{key}.{job.number}"
        state_format = unit_format(
            packed=packed and spec.compressible, nonnegative=spec.nonnegative
        )
        state = state_format.allocate(prod(spec.shape) if mine else 0, member.param.device)
        what = f"{member.fqn}.{name}"
        views = unit_views(state, state_format, spec.shape, ranks, owner, what)
        member.unit_states[name], member.unit_formats[name] = state, state_format
        member.views.update({name + suffix: view for suffix, view in views.items()})
        if spec.nonnegative:
            member.nonnegative |= {name}
