"""What a model's state dict stands for, and whether saved tensors fit it. Writes nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sharding.checkpoint.load_checks import EXTRA_STATE
from sharding.checkpoint.names import plain_names


@dataclass(frozen=True, slots=True)
class TensorOutline:
    """Stands for a full tensor of one or more dims."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Target:
    """What a key of the model's state dict stands for."""

    key: str  # with what wrappers put into it
    value: Any  # a parameter, a buffer or extra state


def targets_of(model: nn.Module) -> dict[str, Target]:
    """Return the live tensors of a model by plain name; its buckets are sharded afterwards."""
    held = model.state_dict(keep_vars=True)
    return {
        name: Target(key, value)
        for name, (key, value) in zip(plain_names(list(held)), held.items(), strict=True)
    }


def is_extra_state(key: object) -> bool:
    """Return whether a key is that of a module's extra state, which may be anything."""
    return isinstance(key, str) and key.rpartition(".")[2] == EXTRA_STATE


def check_model(
    outline: Mapping[str, Any], targets: Mapping[str, Target], where: str = "state"
) -> None:
    """Raise where a saved model is not that which is to be loaded.

    Args:
        outline: By plain name, what stands for a tensor, or a tensor; extra state may be anything.
        targets: Of the model.
        where: Begins the errors.

    Raises:
        ValueError: Keys, shapes or dtypes differ.
        RuntimeError: The model is on the meta device.
    """
    given = {id(target.value) for name, target in targets.items() if name in outline}
    missing = [name for name, target in targets.items() if id(target.value) not in given]
    unexpected = [name for name in outline if name not in targets]
    if missing or unexpected:
        cure = "; without an optimizer, state is the model's alone" if "model" in unexpected else ""
        fit = f"missing {missing}, unexpected {unexpected}"
        raise ValueError(f"{where}: the model's keys do not fit: {fit}{cure}")
    on_meta = [n for n, t in targets.items() if isinstance(t.value, Tensor) and t.value.is_meta]
    if on_meta:
        raise RuntimeError(
            f"{on_meta} are on the meta device; call module.to_empty(device=...) before loading"
        )
    wrong = []
    for name, value in outline.items():
        target = targets[name].value
        if is_extra_state(name):
            continue  # of any type
        if not isinstance(value, (TensorOutline, Tensor)):
            wrong.append(f"{name}: expected a tensor, got {type(value).__name__}")
        elif tuple(value.shape) != tuple(target.shape):
            wrong.append(f"{name}: expected shape {tuple(target.shape)}, got {tuple(value.shape)}")
        elif not _castable(value.dtype, target.dtype):
            wrong.append(f"{name}: expected {target.dtype}, got {value.dtype}")
    if wrong:
        raise ValueError(f"{where} does not fit the model: " + "; ".join(wrong))


def _castable(source: torch.dtype, target: torch.dtype) -> bool:
    return source == target or (source.is_floating_point and target.is_floating_point)


def state_for(targets: Mapping[str, Target], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state dict that the model takes, of values by plain name that `check_model` took.

    A tied tensor may be there under one of its names.
    """
    shared = {id(targets[name].value): value for name, value in values.items()}
    return {
        target.key: values[name] if name in values else shared[id(target.value)]
        for name, target in targets.items()
    }


@torch.no_grad()
def memory_like(target: Any, outline: TensorOutline) -> Tensor:
    """Return memory on the host for a saved tensor, laid out as `target` where the shapes agree."""
    if isinstance(target, Tensor) and tuple(target.shape) == outline.shape:
        return torch.empty_like(target, dtype=outline.dtype, device="cpu", requires_grad=False)
    return torch.empty(outline.shape, dtype=outline.dtype, device="cpu")
