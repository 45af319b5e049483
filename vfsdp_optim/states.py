"""Where optimizer state lives: flat tensors, the views of them that users see, and copies into
them."""

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from sharding.ragged_tensor import RaggedDTensor


class StateFormat(ABC):
    """How one state of a run of parameters is kept in memory."""

    name: ClassVar[str]

    @abstractmethod
    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return the zero state of `numel` elements: 1-D, to be cut into views of any range."""


class PlainFormat(StateFormat):
    """One number an element, in the dtype asked for: what torch's optimizers keep."""

    name = "32bit"

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return `numel` zeros."""
        return torch.zeros(numel, dtype=dtype, device=device)


def is_sharded(param: Tensor) -> bool:
    """Return whether this rank holds a piece of `param` instead of all of it."""
    return isinstance(param, RaggedDTensor)


def local_data(tensor: Tensor) -> Tensor:
    """Return the elements on this rank, detached: 1-D if sharded, else in the shape."""
    if isinstance(tensor, RaggedDTensor):
        return tensor._local_tensor.detach()
    return tensor.detach()


def local_pointer(tensor: Tensor) -> int:
    """Return the address of the elements on this rank."""
    return (tensor._local_tensor if isinstance(tensor, RaggedDTensor) else tensor).data_ptr()


def local_bounds(param: Tensor) -> tuple[int, int]:
    """Return the range of the flattened parameter that this rank holds."""
    if isinstance(param, RaggedDTensor):
        return param.bounds
    return 0, param.numel()


def user_view(state: Tensor, param: Tensor) -> Tensor:
    """Return a view of the 1-D `state` as users see it: sharded, or in the shape."""
    if isinstance(param, RaggedDTensor):
        return RaggedDTensor.from_local(state, param.device_mesh, param.placement, param.shape)
    return state.view(param.shape)


def saved_values(value: Any, param: Tensor, what: str) -> Tensor:
    """Return the elements of a loaded state that belong to this rank, 1-D.

    Args:
        value: a full tensor of the parameter's shape, or (for a sharded parameter) a
            `RaggedDTensor` in any layout. Another layout than the parameter's makes this a
            collective.
        param: the parameter whose state it is.
        what: names the state in errors.

    Raises:
        TypeError: it is no tensor.
        ValueError: it has another shape than the parameter.
        NotImplementedError: it is a DTensor of another kind.
    """
    if not isinstance(value, Tensor):
        raise TypeError(f"{what}: expected a tensor, got {value!r}")
    if value.shape != param.shape:
        raise ValueError(
            f"{what}: expected shape {tuple(param.shape)}, got {tuple(value.shape)}; "
            "the checkpoint was written for another parameter"
        )
    value = value.detach()
    if isinstance(value, RaggedDTensor) and isinstance(param, RaggedDTensor):
        if value.placements != param.placements:
            value = value.redistribute(placements=param.placements)
        return local_data(value)
    if isinstance(value, DTensor):
        raise NotImplementedError(
            f"{what}: got a {type(value).__name__} with placements {value.placements} for a "
            f"{type(param).__name__}; load it through torch.distributed.checkpoint, or pass "
            "value.full_tensor()"
        )
    start, stop = local_bounds(param)
    return value.reshape(-1)[start:stop]
