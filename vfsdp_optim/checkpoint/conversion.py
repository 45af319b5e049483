"""Saved states in another precision: 32 bits to 8-bit codes and back, with and without a master
copy.

Touches the tensors of a state dict and local parameters; gathers what is cut in another layout.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from vfsdp_optim.algorithm import PRECISION_KEYS, Algorithm
from vfsdp_optim.checkpoint.saved import Checkpoint
from vfsdp_optim.parameters.param_shard import ParamShard
from vfsdp_optim.states.block_codec import CODES_FORMAT, block_count
from vfsdp_optim.states.formats import (
    ABSMAX,
    CODES,
    BlockFormat,
    PlainFormat,
    StateFormat,
)
from vfsdp_optim.states.scratch import Scratch
from vfsdp_optim.states.weights import MASTER
from vfsdp_optim.step.member import Member


def converted(
    state_dict: Mapping[str, Any],
    groups: list[dict[str, Any]],
    algorithms: Mapping[str, Algorithm],
    members: Sequence[Member],
) -> dict[str, Any]:
    """Return a state dict in the precision of an optimizer; see
    `StructuredOptimizer.convert_state_dict`."""
    checkpoint = Checkpoint(state_dict, groups, algorithms, any_precision=True)
    numbers: dict[Tensor, int] = {}
    saved_groups = []
    for group, loaded in zip(groups, checkpoint.hyper_parameters, strict=True):
        first = len(numbers)
        numbers.update((param, first + i) for i, param in enumerate(group["params"]))
        precision = {key: group[key] for key in ("algorithm", *PRECISION_KEYS)}
        names = {key: group[key] for key in ("param_names",) if key in group}
        params = [numbers[param] for param in group["params"]]
        saved_groups.append({**loaded, **precision, **names, "params": params})
    state = {}
    for member in members:
        saved = checkpoint.states.get(member.param)
        if saved is not None:
            algorithm = algorithms[groups[member.group]["algorithm"]]
            saved_format = checkpoint.formats[member.group]
            state[numbers[member.param]] = _state(saved, member, saved_format)
            if algorithm.counts_steps(groups[member.group]):
                never = torch.tensor(0.0, dtype=torch.float32, device="cpu")
                state[numbers[member.param]]["step"] = saved.get("step", never)
    return {"state": state, "param_groups": saved_groups}


def _state(saved: Mapping[str, Any], member: Member, saved_format: str | None) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, state_format in member.all_formats.items():
        packed, plain = key + CODES in saved, key in saved
        if key == MASTER and not plain:
            result[key] = member.shard.view(member.shard.tensor.reshape(-1).float())
        elif not packed and not plain:
            raise ValueError(
                f"{member.fqn}: expected a state {key!r} in some precision, got {sorted(saved)}; "
                "the checkpoint was written by another algorithm"
            )
        elif packed and isinstance(state_format, PlainFormat):
            if saved_format not in (None, CODES_FORMAT):
                raise ValueError(
                    f"{member.fqn}: {key} is saved in local blocks, which cannot be converted; "
                    "keep it in 8 bits on the same layout"
                )
            values = _decoded(saved, key, member).to(state_format.dtype)
            shard = _shard_of(key, member)
            result[key] = shard.view(shard.values(values, f"{member.fqn}.{key}").clone())
        elif plain and isinstance(state_format, BlockFormat):
            local = _shard_of(key, member).values(saved[key], f"{member.fqn}.{key}")
            result.update(_encoded(local, key, member, state_format))
        else:
            names = (key + CODES, key + ABSMAX) if packed else (key,)
            result.update((name, saved[name]) for name in names if name in saved)
    return result


def _shard_of(key: str, member: Member) -> ParamShard:
    """Return how a state lies, be it cut as its parameter or whole on the owner of a unit."""
    view = member.views[key if key in member.views else key + CODES]
    return ParamShard.of(view, f"{member.fqn}.{key}")


def _decoded(saved: Mapping[str, Any], key: str, member: Member) -> Tensor:
    """Return the numbers of a whole state, in its shape, of codes in any layout."""
    whole = _shard_of(key, member).param
    shapes = {CODES: tuple(whole.shape), ABSMAX: (block_count(whole.numel()),)}
    parts: dict[str, Tensor] = {}
    for suffix, shape in shapes.items():
        part = saved.get(key + suffix)
        if not isinstance(part, Tensor) or tuple(part.shape) != shape:
            found = tuple(part.shape) if isinstance(part, Tensor) else part
            raise ValueError(f"{member.fqn}.{key}{suffix}: expected shape {shape}, got {found!r}")
        parts[suffix] = part.full_tensor() if isinstance(part, DTensor) else part
    signed = key not in member.nonnegative
    state = BlockFormat(signed).allocate(whole.numel(), parts[CODES].device)
    for suffix, target in state.parts().items():
        target.copy_(parts[suffix].reshape(-1))
    return state.open(Scratch(), "numbers").view(whole.shape)


def _encoded(
    local: Tensor, key: str, member: Member, state_format: StateFormat
) -> dict[str, Tensor]:
    """Return the codes and scales of this rank's elements, as users see them."""
    state = state_format.allocate(local.numel(), local.device)
    if local.numel():
        scratch = Scratch()
        numbers = state.open(scratch, "numbers").copy_(local)
        state.close(numbers, (), scratch)
    views = state_format.views(state, _shard_of(key, member), member.fqn)
    return {key + suffix: view for suffix, view in views.items()}
