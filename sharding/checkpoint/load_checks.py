"""Checks that come before `load_state_dict` writes into sharded modules; torch's come after.

May touch: the state dict that is loaded (DTensors in other layouts are brought into that of their
parameter, a collective). Writes no parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from sharding.tensor.ragged_tensor import RaggedDTensor, distribute_ragged

EXTRA_STATE = "_extra_state"


def check_keys(module: nn.Module, state_dict: Mapping[str, Any]) -> None:
    """Raise what a strict `load_state_dict` would raise, before it writes.

    Raises:
        RuntimeError: Keys are missing or unexpected. As torch's, with all of them.
    """
    expected: set[str] = set()
    own_ways = []
    for prefix, part in _modules(module, ""):
        if _loads_its_own_way(part):
            own_ways.append(prefix)
            continue
        held = (
            *part._parameters.items(),
            *(b for b in part._buffers.items() if b[0] not in part._non_persistent_buffers_set),
        )
        expected.update(prefix + name for name, value in held if value is not None)
        if type(part).get_extra_state is not nn.Module.get_extra_state:
            expected.add(prefix + EXTRA_STATE)
    free = tuple(own_ways)
    missing = [k for k in expected if k not in state_dict and not k.startswith(free)]
    unexpected = [k for k in state_dict if k not in expected and not k.startswith(free)]
    errors = [
        f"{kind} key(s) in state_dict: {', '.join(map(repr, sorted(keys)))}."
        for kind, keys in (("Unexpected", unexpected), ("Missing", missing))
        if keys
    ]
    if errors:
        _raise(module, errors)


class LoadCheck:
    """A pre-hook of `load_state_dict`: checks all tensors below a module before one is written.

    Args:
        reshard: Has all modules below hold sharded parameters.
    """

    def __init__(self, reshard: Callable[[], None]) -> None:
        self._reshard = reshard

    def __call__(
        self,
        module: nn.Module,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: Mapping[str, Any],
        *_: object,
    ) -> None:
        """Bring DTensors in `state_dict` into the layouts of their parameters; torch calls it.

        Raises:
            RuntimeError: A shape differs, or a value is no tensor or would go to the meta device.
                As torch's, with all of them.
            NotImplementedError: A DTensor on another mesh.
        """
        self._reshard()
        assign = bool(local_metadata.get("assign_to_params_buffers", False))
        held = [
            (name, target, state_dict[name])
            for name, target in _tensors(module, prefix)
            if name in state_dict
        ]
        errors = [_complaint(name, target, value, assign) for name, target, value in held]
        if any(errors):
            _raise(module, [error for error in errors if error])
        for name, target, value in held:
            if isinstance(target, RaggedDTensor) and isinstance(value, DTensor):
                state_dict[name] = _moved(name, value, target)
            elif isinstance(target, DTensor) and not target.is_meta:
                state_dict[name] = laid_out(target, value.detach())


def laid_out(sharded: DTensor, held: Tensor) -> Tensor:
    """Return `held` as what may be copied into a sharded parameter; a collective for some."""
    if isinstance(sharded, RaggedDTensor) or not held.dim():
        return held
    if not isinstance(held, DTensor):
        return distribute_tensor(held, sharded.device_mesh, sharded.placements, src_data_rank=None)
    if held.device_mesh != sharded.device_mesh or held.placements != sharded.placements:
        return held.redistribute(sharded.device_mesh, sharded.placements)
    return held


def _complaint(name: str, target: Tensor, value: Any, assign: bool) -> str:
    """Return what is wrong with loading `value` into a parameter or buffer."""
    if not torch.overrides.is_tensor_like(value):
        return f"{name}: expected a tensor, got {type(value).__name__}."
    # Files of torch 0.3 hold scalars with one dim; torch takes them.
    if value.shape != target.shape and (target.dim() or tuple(value.shape) != (1,)):
        return (
            f"size mismatch for {name}: copying a param with shape {tuple(value.shape)} from "
            f"checkpoint, the shape in current model is {tuple(target.shape)}."
        )
    if target.is_meta and isinstance(target, RaggedDTensor) and not (value.is_meta or assign):
        return (
            f"{name} is on the meta device; call module.to_empty(device=...) first, or pass "
            "assign=True."
        )
    return ""


def _moved(name: str, value: DTensor, target: RaggedDTensor) -> Tensor:
    """Return `value` in the layout of `target`."""
    if value.requires_grad:
        value = cast(DTensor, value.detach())
    if not isinstance(value, RaggedDTensor):
        return distribute_ragged(value.full_tensor(), target.device_mesh, target.placement)
    if value.device_mesh != target.device_mesh:
        raise NotImplementedError(
            f"{name}: expected a tensor sharded over {target.device_mesh!r}, got one over "
            f"{value.device_mesh!r}; save through torch.distributed.checkpoint to load on another "
            "number of ranks"
        )
    return value.redistribute(placements=target.placements)


def _tensors(module: nn.Module, prefix: str) -> Iterator[tuple[str, Tensor]]:
    """Return parameters and persistent buffers of all modules below that load as torch does."""
    for path, part in _modules(module, prefix):
        if not _loads_its_own_way(part):
            for name, value in (*part._parameters.items(), *part._buffers.items()):
                if value is not None and name not in part._non_persistent_buffers_set:
                    yield path + name, value


def _modules(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    """Return every module with its prefix, as `load_state_dict` walks; none below one of its own
    way."""
    yield prefix, module
    if not _loads_its_own_way(module):
        for name, child in module._modules.items():
            if child is not None:
                yield from _modules(child, f"{prefix}{name}.")


def _loads_its_own_way(module: nn.Module) -> bool:
    """Return whether keys and shapes are for the module's own code to judge."""
    method = type(module)._load_from_state_dict
    hooks = module._load_state_dict_pre_hooks.values()
    return not method.__module__.startswith("torch.nn.modules.") or any(
        not isinstance(getattr(hook, "hook", hook), LoadCheck) for hook in hooks
    )


def _raise(module: nn.Module, errors: list[str]) -> None:
    raise RuntimeError(
        f"Error(s) in loading state_dict for {type(module).__name__}, nothing was written:\n\t"
        + "\n\t".join(errors)
    )
