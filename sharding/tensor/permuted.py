"""Views of a RaggedDTensor with its dims in another order: `t()`, `T`, `transpose`, `permute`.

Touches nothing but local tensors; communicates nothing. A rank keeps the very elements that it has;
the placement's `dims` say in which order the dims are flattened and cut. What asks for elements
next to each other in the order of the dims (`view`, rows, DCP) is refused of such a view;
element-wise ops, reductions, `copy_` and `full_tensor()` are right.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from sharding.tensor.local_ops import Handler, placement_of, wrap
from sharding.transport.axes import placements_on

aten = torch.ops.aten


def permuted(x: DTensor, order: Sequence[int]) -> DTensor:
    """Return `x.permute(order)` over the same local piece, the very object."""
    shape, strides = [x.shape[dim] for dim in order], tuple(x.stride()[dim] for dim in order)
    meta = TensorMeta(torch.Size(shape), strides, x.dtype)
    layout = placements_on(x._spec.mesh, placement_of(x._spec).permuted(order))
    return wrap(type(x), x._local_tensor, DTensorSpec(x._spec.mesh, layout, tensor_meta=meta))


def in_flat_order(x: DTensor) -> tuple[DTensor, tuple[int, ...]]:
    """Return `x` with its dims in the order in which they are cut, and for each of its dims the
    place that it has there."""
    placement = placement_of(x._spec)
    if placement.is_row_major:
        return x, tuple(range(x.dim()))
    return permuted(x, placement.dims), tuple(placement.dims.index(d) for d in range(x.dim()))


def _permute(
    cls: type[DTensor], func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]
) -> DTensor:
    x = args[0]
    # The order of the dims, and for dims that do not fit the error, are those of torch.
    numbers = torch.empty(tuple(range(2, 2 + x.dim())), device="meta")
    order = [size - 2 for size in func(numbers, *args[1:], **kwargs).shape]
    return (
        permuted(x, order) if order != list(range(x.dim())) else wrap(cls, x._local_tensor, x._spec)
    )


PERMUTATIONS: dict[OpOverload, Handler] = {
    aten.t.default: _permute,
    aten.transpose.int: _permute,
    aten.permute.default: _permute,
}


def unpermuted(flat: Tensor, x: DTensor) -> Tensor:
    """Return the full tensor `x` of its elements in the order in which they are cut, a view."""
    placement = placement_of(x._spec)
    if placement.is_row_major:
        return flat.view(x.shape)
    _, places = in_flat_order(x)
    return flat.view([x.shape[dim] for dim in placement.dims]).permute(places)
