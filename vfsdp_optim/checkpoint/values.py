"""Saved values: whether they can be those of a parameter, and this rank's part of them.

Reads tensors; communicates where a saved tensor has another layout than its parameter, and to agree
on errors.
"""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sharding.transport.backends import is_fake
from sharding.transport.waits import waiting_for
from vfsdp_optim.parameters.param_shard import Ranks
from vfsdp_optim.states.formats import CODES
from vfsdp_optim.step.member import Member
from vfsdp_optim.step.standing_state import step_of
from vfsdp_optim.step.working_set import WorkingSet

# What to do about a checkpoint in another precision.
CONVERT_CURE = "call optimizer.load_state_dict(optimizer.convert_state_dict(state_dict))"
# In which moments of any parameter can be kept. Half underflows to 0 / 0 (eps too).
_DTYPES = (torch.float32, torch.bfloat16, torch.float64)


@dataclass(frozen=True, slots=True)
class LoadedState:
    """The state of one parameter: 1-D local pieces, none of them where nothing was saved."""

    states: dict[str, Tensor] = field(default_factory=dict)
    step: float = 0.0


def check_state(state: Mapping[str, Any], member: Member, *, counts_steps: bool) -> None:
    """Check keys, types and shapes of the saved state of a parameter; communicates nothing.

    Raises:
        ValueError: keys, shapes or dtypes differ from the member's, or `step` is no count.
        TypeError: a value is no dense tensor.
        RuntimeError: the parameter, or a saved tensor, is on the meta device.
    """
    if member.param.is_meta:
        raise RuntimeError(
            f"{member.fqn} is on the meta device; call module.to_empty(device=...) before its "
            "state is loaded"
        )
    expected = {*member.views, *(["step"] if counts_steps else [])}
    if set(state) != expected:
        raise ValueError(
            f"{member.fqn}: expected state {sorted(expected)}, got {sorted(state)}; "
            "the checkpoint was written by another algorithm, or in another precision: for "
            f"that {CONVERT_CURE}"
        )
    packed = member.packed_keys()
    for key, view in member.views.items():
        value, what = state[key], f"{member.fqn}.{key}"
        if not isinstance(value, Tensor) or value.layout is not torch.strided:
            layout = f"a tensor of layout {value.layout}" if isinstance(value, Tensor) else ""
            raise TypeError(f"{what}: expected a tensor, got {layout or repr(value)}")
        if value.shape != view.shape:
            raise ValueError(
                f"{what}: expected shape {tuple(view.shape)}, got {tuple(value.shape)}; it was "
                "made for another parameter"
            )
        if value.is_meta:
            raise RuntimeError(f"{what}: the saved tensor is on the meta device, without values")
        dtypes = (view.dtype,) if key in packed else (view.dtype, *_DTYPES)
        if value.dtype not in dtypes:
            wanted = " or ".join(dict.fromkeys(map(str, dtypes)))
            raise ValueError(f"{what}: expected {wanted}, got {value.dtype}")
    if counts_steps:
        step_of(state["step"], member.fqn)


def read_state(state: Mapping[str, Any], member: Member, *, counts_steps: bool) -> LoadedState:
    """Return this rank's part of a checked state; a collective where it is in another layout."""
    pieces = {key: member.values(state[key], key) for key in member.views}
    return LoadedState(pieces, step_of(state["step"], member.fqn) if counts_steps else 0.0)


def check_numbers(loaded: Sequence[tuple[Member, LoadedState]]) -> None:
    """Check that states are finite, and not negative where they cannot be; reads each once.

    Args:
        loaded: of each member, what `read_state` returned.

    Raises:
        ValueError: a number of a state cannot be one.
    """
    names, verdicts = [], []
    for member, value in loaded:
        packed = member.packed_keys()
        for key, piece in value.states.items():
            if piece.is_floating_point() and piece.numel():
                low, high = torch.aminmax(piece)
                above = (
                    key in member.nonnegative or key in packed
                )  # scales are the largest of their block
                finite = low.isfinite() & high.isfinite()  # a NaN is both
                verdicts.append(finite & (low >= 0) if above else finite)
                names.append((f"{member.fqn}.{key}", above))
    by_device: dict[torch.device, list[int]] = {}
    for i, verdict in enumerate(verdicts):
        by_device.setdefault(verdict.device, []).append(i)
    for places in by_device.values():  # one read of a device
        right = torch.stack([verdicts[i] for i in places]).tolist()
        for i, fine in zip(places, right, strict=True):
            if not fine:
                what, above = names[i]
                kind = "finite numbers >= 0" if above else "finite numbers"
                raise ValueError(f"{what}: expected {kind}, got others; the checkpoint is damaged")


def check_not_left_out(
    working: WorkingSet, states: Mapping[Tensor, Mapping[str, Any]], values: Sequence[LoadedState]
) -> None:
    """Refuse, beside what was loaded, zeros that this optimizer made and nobody wrote to since.

    torch.distributed.checkpoint loads into the tensors of a `state_dict()`, and leaves those alone
    that its files do not have (`allow_partial_load`).

    Raises:
        ValueError: a parameter has taken steps, and its moments were never written.
    """
    left_out: list[str] = []
    for number, versions in working.untouched.items():
        member, value = working.members[number], values[number]
        held = {key: part for key, part in member.parts().items() if part.numel()}
        keys = [
            key
            for key, part in held.items()
            if key in value.states
            and value.states[key].data_ptr() == part.data_ptr()
            and versions.get(key) == part._version
            and (key.endswith(CODES) or not bool(part.any()))
        ]
        of_units = {key for state in member.unit_states for key in held if key.startswith(state)}
        if not of_units <= set(keys):
            # First steps leave some of them zero, such as roots whose turn comes later.
            keys = [key for key in keys if key not in of_units]
        if keys and value.step > 0:
            raise ValueError(
                f"{member.fqn}: step is {value.step:g}, and {keys} are the zeros of a new "
                "optimizer: the checkpoint has none and was loaded in part (allow_partial_load). "
                "Load it with an optimizer of the precision that wrote it, and convert its state: "
                "optimizer.load_state_dict(optimizer.convert_state_dict(other.state_dict()))"
            )
        if keys and member.packed_keys():
            left_out.append(member.fqn)
    if left_out and len(left_out) < sum(1 for value in values if value.states):
        warnings.warn(
            f"the state of {left_out} is the zeros of a new optimizer: the checkpoint, loaded in "
            "part (allow_partial_load), has none of it, or has it in another precision",
            stacklevel=4,
        )


def recast(
    members: Sequence[Member], values: Sequence[LoadedState], states: Mapping[Any, Any]
) -> bool:
    """Put states whose dtype is another into `Optimizer.state`; return whether there are any."""
    found = [
        (member, key, tensor)
        for member, value in zip(members, values, strict=True)
        for key, tensor in value.states.items()
        if tensor.dtype != member.views[key].dtype and key not in member.unit_states
    ]
    for member, key, tensor in found:
        states[member.param][key] = member.shard.view(tensor)
    return bool(found)


@contextmanager
def agreed(peers: Sequence[Ranks]) -> Iterator[None]:
    """Raise on all ranks what was raised inside on some; a collective of each of `peers`.

    Raises:
        RuntimeError: only other ranks have raised.
    """
    mine: Exception | None = None
    try:
        yield
    except Exception as error:
        mine = error
    text = "" if mine is None else f"{type(mine).__name__}: {mine}"
    for ranks in peers:
        if is_fake(ranks.group()):
            continue
        texts: list[str] = [""] * ranks.size
        with waiting_for("the checks of the state to load", ranks.group()):
            dist.all_gather_object(texts, text, group=ranks.group())
        text = next(filter(None, (text, *texts)), "")
    if mine is not None:
        raise mine
    if text:
        raise RuntimeError(f"another rank refuses to load, so nothing was written: {text}")
