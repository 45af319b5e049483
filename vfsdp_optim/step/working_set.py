"""The parameters of an optimizer as a step finds them, with their state. Touches local tensors."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from sharding.fsdp.many_objects import collector_paused
from sharding.fsdp.proofs import UpdateLog, logs_of
from sharding.tensor.ragged_tensor import RaggedDTensor
from vfsdp_optim.algorithm import Algorithm
from vfsdp_optim.parameters.given import named
from vfsdp_optim.parameters.param_shard import Ranks
from vfsdp_optim.states.precision import note_format, state_formats, weight_rule
from vfsdp_optim.states.scratch import Scratch
from vfsdp_optim.states.weights import MASTER
from vfsdp_optim.step.admission import check_update
from vfsdp_optim.step.group_runs import GroupRuns, group_runs
from vfsdp_optim.step.member import Member, MemberList
from vfsdp_optim.step.nonfinite import Failure
from vfsdp_optim.step.runs import Span, find_spans
from vfsdp_optim.step.sharded_units import LocalMatrices, ShardedMatrices
from vfsdp_optim.step.standing_state import (
    Standing,
    States,
    check_standing,
    leave,
    standing,
    step_of,
)
from vfsdp_optim.step.unit_owners import make_unit_states


@dataclass(slots=True)
class WorkingSet:
    """The parameters as the last step found them, and their state.

    Attributes:
        members: every parameter that has state.
        looked_at: the same, together.
        spans: the same, by where they lie.
        runs: the spans, by group.
        steps: (number of members,) float32 on the CPU; `state[p]["step"]` are views of it.
        counting: whether each member's algorithm counts steps.
        failures: of units since the last step; None where no unit has states.
        sharded: the parameters that are sharded by fully_shard of this library.
        peers: the ranks that hold members together, in the order of the groups.
        standing: what it left in `Optimizer.state`; see [Note: state that users write].
        logs: where steps are noted; see [Note: proofs in reductions] in sharding/fsdp/proofs.py.
        key: what the working set depends on besides memory addresses.
        untouched: by number of a member whose zero state was made here, the version of each part
            then: torch counts what is written to it.
        matrices: the matrix part; None until the first step, because its slots take memory.
    """

    members: list[Member]
    looked_at: MemberList
    spans: list[Span]
    runs: list[GroupRuns]
    steps: Tensor
    counting: list[bool]
    failures: list[Failure] | None
    sharded: list[Tensor]
    peers: list[Ranks]
    standing: Standing
    logs: list[UpdateLog]
    key: object = None
    untouched: dict[int, dict[str, int]] = field(default_factory=dict)
    matrices: list[LocalMatrices | ShardedMatrices] | None = None
    _counted: tuple[list[bool], Tensor] | None = None

    def counts(self, grads: Sequence[Tensor | None]) -> Tensor:
        """Return how many steps each member takes with these gradients, (number of members,)."""
        advance = [c and grad is not None for c, grad in zip(self.counting, grads, strict=True)]
        if self._counted is None or self._counted[0] != advance:  # of long lists it takes a while
            self._counted = advance, torch.tensor(advance, dtype=torch.float32, device="cpu")
        return self._counted[1]


@torch.no_grad()
@collector_paused()
def make_working_set(
    groups: list[dict[str, Any]],
    algorithms: Mapping[str, Algorithm],
    replicas: Ranks | None,
    max_exchange_bytes: int,
    scratch: Scratch,
    states: States,
    has_state: Callable[[Tensor], bool],
) -> WorkingSet:
    """Find the spans, allocate their state and take over what stands in the optimizer's.

    Args:
        groups: of the optimizer.
        algorithms: by name.
        replicas: that hold a copy each of every plain parameter.
        max_exchange_bytes: memory for matrices that travel.
        scratch: working memory.
        states: `Optimizer.state`; written to after all of it was read.
        has_state: whether a parameter is to have state.

    Raises:
        RuntimeError, TypeError, ValueError: what stands there is no state of its parameter.
        ValueError, NotImplementedError: what was frozen when its group came cannot be updated.
    """
    members: list[Member] = []
    for g, group in enumerate(groups):
        algorithm = algorithms[group["algorithm"]]
        note_format(group, f"group {g}", has_state)
        alike: set[Hashable] = set()
        for param, fqn in named(group, f"group {g}"):
            if has_state(param):
                shard = check_update(
                    group, param, fqn, algorithm, replicas, max_exchange_bytes, alike
                )
                old = standing(states, param, fqn)
                formats = state_formats(algorithm, group, param, fqn, old)
                rule = weight_rule(group, param)
                members.append(Member(shard, fqn, g, len(members), formats, rule))
                members[-1].nonnegative = algorithm.nonnegative
    # A rank may hold nothing of a parameter; its state exists, and no step touches it.
    spans = [span for span in find_spans(members) if span.numel]
    make_unit_states(members, groups, algorithms, states, max_exchange_bytes, scratch)
    of_members = [groups[member.group] for member in members]
    counting = [algorithms[group["algorithm"]].counts_steps(group) for group in of_members]
    steps = torch.zeros(len(members), dtype=torch.float32, device="cpu")
    made: dict[Tensor, dict[str, Any]] = {}
    for member, step in zip(members, steps.unbind(), strict=True):
        counts = {"step": step} if counting[member.number] else {}
        member.count = counts.get("step")
        old = standing(states, member.param, member.fqn)
        if old:
            _take_over(member, old, *counts)
            steps[member.number] = step_of(old.get("step", 0.0), member.fqn)
        made[member.param] = {**counts, **member.views}
    untouched = {
        member.number: {
            key: part._version for key, part in member.parts().items() if not part.is_inference()
        }
        for member in members
        if not standing(states, member.param, member.fqn)
    }
    peers = list(dict.fromkeys(m.shard.ranks for m in members if m.shard.ranks is not None))
    sharded: list[Tensor] = [m.param for m in members if isinstance(m.param, RaggedDTensor)]
    left, logs = leave(states, made), logs_of(sharded)
    keepers = [member for member in members if member.unit_states]
    failures: list[Failure] = []
    for member in keepers:
        member.failures = failures
    return WorkingSet(
        members=members,
        looked_at=MemberList(members),
        spans=spans,
        runs=group_runs(spans),
        steps=steps,
        counting=counting,
        failures=failures if keepers else None,
        sharded=sharded,
        peers=peers,
        standing=left,
        logs=logs,
        untouched=untouched,
    )


def _take_over(member: Member, old: dict[str, Any], *others: str) -> None:
    """Copy what stands in the state of a member into its memory; `others` stand beside.

    A master copy may be missing: a step makes it of the parameter.
    """
    packed = member.packed_keys()
    keys = [key for key in member.views if key != MASTER or key in old]
    dtypes = {key: member.views[key].dtype if key in packed else None for key in keys}
    check_standing(old, {**dict.fromkeys(others), **dtypes}, member.fqn)
    parts = member.parts()
    for key in keys:
        parts[key].copy_(member.values(old[key], key))
