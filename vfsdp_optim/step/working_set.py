"""The parameters of an optimizer as a step finds them, with their state. Touches local tensors."""

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vfsdp_optim.algorithm import Algorithm
from vfsdp_optim.parameters.given import named
from vfsdp_optim.parameters.param_shard import ParamShard, Ranks
from vfsdp_optim.states.precision import check_blocks, note_format, state_formats, weight_rule
from vfsdp_optim.step.runs import Member, Span, find_spans
from vfsdp_optim.step.sharded_units import LocalMatrices, ShardedMatrices

States = defaultdict[Tensor, Any]  # what `Optimizer.state` is


@dataclass(slots=True)
class Layout:
    """The parameters as the last step found them, and their state.

    Attributes:
        members: every parameter that has state.
        spans: the same, by where they lie.
        steps: (number of members,) float32 on the CPU; `state[p]["step"]` are views of it.
        counting: whether each member's algorithm counts steps.
        peers: the ranks that hold members together, in the order of the groups.
        key: what the layout depends on besides memory addresses.
        matrices: the matrix part; None until the first step, because its slots take memory.
    """

    members: list[Member]
    spans: list[Span]
    steps: Tensor
    counting: list[bool]
    peers: list[Ranks]
    key: object = None
    matrices: list[LocalMatrices | ShardedMatrices] | None = None


@torch.no_grad()
def make_layout(
    groups: list[dict[str, Any]],
    algorithms: Mapping[str, Algorithm],
    replicas: Ranks | None,
    old_states: Mapping[Tensor, Any],
    has_state: Callable[[Tensor], bool],
) -> tuple[Layout, States]:
    """Find the spans, allocate their state and copy what state there was.

    Args:
        groups: of the optimizer.
        algorithms: by name.
        replicas: that hold a copy each of every plain parameter.
        old_states: by parameter.
        has_state: whether a parameter is to have state.
    """
    members: list[Member] = []
    for g, group in enumerate(groups):
        algorithm = algorithms[group["algorithm"]]
        note_format(group, f"group {g}")
        for param, fqn in named(group, f"group {g}"):
            if has_state(param):
                shard = ParamShard.of(param, fqn, replicas)
                check_blocks(group, shard, fqn)
                old = _carried_over(old_states, param)
                formats = state_formats(algorithm, group, param, fqn, old)
                rule = weight_rule(group, param)
                members.append(Member(shard, fqn, g, len(members), formats, rule))
    # A rank may hold nothing of a parameter; its state exists, and no step touches it.
    spans = [span for span in find_spans(members) if span.numel]
    of_members = [groups[member.group] for member in members]
    counting = [algorithms[group["algorithm"]].counts_steps(group) for group in of_members]
    steps = torch.zeros(len(members), dtype=torch.float32, device="cpu")
    states: States = defaultdict(dict)
    for member in members:
        old = _carried_over(old_states, member.param)
        state = states[member.param]
        if counting[member.number]:
            steps[member.number] = float(old.get("step", 0.0))
            state["step"] = steps[member.number]
        for key, part in member.parts().items():
            state[key] = member.views[key]
            if key in old:
                part.copy_(member.values(old[key], key))
    peers = list(dict.fromkeys(m.shard.ranks for m in members if m.shard.ranks is not None))
    return Layout(members, spans, steps, counting, peers), states


def _carried_over(states: Mapping[Tensor, Any], param: Tensor) -> dict[str, Any]:
    """Return the state to carry over; none that was seen before the parameter had memory."""
    state: dict[str, Any] = states.get(param, {})
    on_meta = any(isinstance(value, Tensor) and value.is_meta for value in state.values())
    return {} if on_meta else state
