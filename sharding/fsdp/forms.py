"""How a parameter lies in a flat buffer, and the two tensors that users see of it.

May touch: nothing; makes views. Most parameters are cut where the plan says (`RaggedForm`). Those
of tensor parallelism, and those that `shard_placement_fn` has a placement for, are cut as torch's
`fully_shard` cuts them (`TorchForm`): they are torch's own DTensors, over pieces of the same kind
of buffer.

[Note: given cuts]
A parameter with a given cut has a segment of its own, of `chunk` elements on each rank: what a rank
holds is then one run of the buffer whatever the dim, because the cut dim is stored first. For
another dim than 0 the tensors that users see are strided views. The segments of a bucket are
gathered by one call, and reduced by one, so that none of this adds a collective.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from sharding.tensor.placement import RaggedShard
from sharding.tensor.ragged_tensor import RaggedDTensor


class Form(Protocol):
    """One parameter's layout."""

    def flat(self, whole: Tensor) -> Tensor:
        """Return (numel,), what a module computes with, in the order of the buffer."""

    def gathered(self, flat: Tensor) -> Tensor:
        """Return what a module computes with, over (numel,) gathered elements."""

    def local(self, piece: Tensor) -> Tensor:
        """Return a piece as the sharded tensor holds it; shares its memory."""

    def sharded(self, piece: Tensor) -> DTensor:
        """Return the tensor that users see, over this rank's piece."""

    def parameter(self, piece: Tensor, requires_grad: bool) -> DTensor:
        """Return the same as a parameter."""

    def gradient(self, parameter: DTensor, piece: Tensor) -> DTensor:
        """Return the gradient of the sharded parameter, over this rank's piece of it."""

    def piece(self, sharded: DTensor) -> Tensor:
        """Return (n,), this rank's elements of such a tensor, in the order of the buffer."""


@dataclass(frozen=True, slots=True)
class RaggedForm:
    """Cut where the buffer is cut."""

    mesh: DeviceMesh
    placement: RaggedShard
    shape: tuple[int, ...]

    def flat(self, whole: Tensor) -> Tensor:
        """Return (numel,), what a module computes with, in the order of the buffer."""
        return whole.reshape(-1)

    def gathered(self, flat: Tensor) -> Tensor:
        """Return what a module computes with, over (numel,) gathered elements."""
        return flat.view(self.shape)

    def local(self, piece: Tensor) -> Tensor:
        """Return a piece as the sharded tensor holds it; shares its memory."""
        return piece

    def sharded(self, piece: Tensor) -> RaggedDTensor:
        """Return the tensor that users see, over this rank's piece."""
        return RaggedDTensor.from_local(piece, self.mesh, self.placement, self.shape)

    def parameter(self, piece: Tensor, requires_grad: bool) -> RaggedDTensor:
        """Return the same as a parameter."""
        # As nn.Parameter marks those of other classes, on a detached one: this is new.
        parameter: Any = self.sharded(piece).requires_grad_(requires_grad)
        parameter._is_param = True
        return cast(RaggedDTensor, parameter)

    def gradient(self, parameter: DTensor, piece: Tensor) -> DTensor:
        """Return the gradient of the sharded parameter, over this rank's piece of it."""
        return cast(RaggedDTensor, parameter).over(piece)  # once a step: a third of `sharded`

    def piece(self, sharded: DTensor) -> Tensor:
        """Return (n,), this rank's elements of such a tensor, in the order of the buffer."""
        return sharded._local_tensor


@dataclass(frozen=True, slots=True)
class TorchForm:
    """Cut along a dim into equal chunks. See [Note: given cuts].

    Attributes:
        dim: That is cut over the shard axis.
        stored: The shape of what a module computes with (on this rank), the cut dim first.
        shape: Of the tensor that users see.
        mesh: Of the tensor that users see.
        placements: On that mesh.
        tensor_parallel: Mesh and placements of what a module computes with; None if it is plain.
    """

    dim: int
    stored: tuple[int, ...]
    shape: tuple[int, ...]
    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    tensor_parallel: tuple[DeviceMesh, tuple[Placement, ...]] | None

    def flat(self, whole: Tensor) -> Tensor:
        """Return (numel,), the elements of what a module computes with, in the order of the buffer.

        Gradients of tensor-parallel parameters are first placed as those; a collective then.
        """
        if isinstance(whole, DTensor):
            if self.tensor_parallel is not None and whole.placements != self.tensor_parallel[1]:
                whole = whole.redistribute(placements=self.tensor_parallel[1])
            whole = whole._local_tensor
        return whole.movedim(self.dim, 0).reshape(-1)

    def gathered(self, flat: Tensor) -> Tensor:
        """Return what a module computes with, over (numel,) gathered elements."""
        whole = flat.view(self.stored).movedim(0, self.dim)
        if self.tensor_parallel is None:
            return whole
        return _dtensor(whole, *self.tensor_parallel, self.shape)

    def local(self, piece: Tensor) -> Tensor:
        """Return a piece as the sharded tensor holds it; shares its memory."""
        rows = piece.numel() // max(1, prod(self.stored[1:]))
        return piece.view(rows, *self.stored[1:]).movedim(0, self.dim)

    def sharded(self, piece: Tensor) -> DTensor:
        """Return the tensor that users see, over this rank's piece."""
        return _dtensor(self.local(piece), self.mesh, self.placements, self.shape)

    def parameter(self, piece: Tensor, requires_grad: bool) -> DTensor:
        """Return the same as a parameter."""
        return cast(DTensor, nn.Parameter(self.sharded(piece), requires_grad=requires_grad))

    def gradient(self, parameter: DTensor, piece: Tensor) -> DTensor:
        """Return the gradient of the sharded parameter, over this rank's piece of it."""
        return self.sharded(piece)

    def piece(self, sharded: DTensor) -> Tensor:
        """Return (n,), this rank's elements of such a tensor, in the order of the buffer."""
        return sharded._local_tensor.movedim(self.dim, 0).reshape(-1)


@torch.no_grad()
def _dtensor(
    local: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: tuple[int, ...]
) -> DTensor:
    stride = tuple(prod(shape[dim + 1 :]) for dim in range(len(shape)))
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride
    )
