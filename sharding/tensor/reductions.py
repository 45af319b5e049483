"""The full reductions that RaggedDTensor allows, each with its own collective.

Touches local tensors and the process group of the mesh's shard axis: replicas hold the same and
need not be asked. Results are plain tensors, the same on all ranks. Which ops may be here says
[Note: allow-list] in ragged_ops.py.

[Note: norms]
A rank takes the norm of its own piece with torch's kernel, accumulated in float32 (float64 for
float64). The p-th powers of these are added over ranks in float64, and the root is taken once;
orders inf and -inf take the largest and smallest instead. An empty piece contributes nothing. The
result is rounded to the dtype of the tensor once, at the end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._ops import OpOverload
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from sharding.tensor.local_ops import Handler, describe, foreach_in_place, refusal, unwrap
from sharding.transport.axes import shard_group

aten = torch.ops.aten

# (op, tensor, arguments by name) -> 0-dim result
Combine = Callable[[OpOverload, DTensor, dict[str, Any]], Tensor]


def _all_reduce(values: Tensor, op: dist.ReduceOp.RedOpType, mesh: DeviceMesh) -> Tensor:
    """Reduces over the pieces of one replica; leaves `values` as they are."""
    # Values of a model that is offloaded to the CPU travel through the mesh's device.
    reduced = values.to(mesh.device_type, copy=True)
    dist.all_reduce(reduced, op, group=shard_group(mesh))
    return reduced.to(values.device)


def _extreme(values: Tensor, *, largest: bool, mesh: DeviceMesh) -> Tensor:
    """The largest or smallest over ranks of each of n float64 values; any NaN gives NaN.

    NaNs travel as flags: whether a backend's MAX keeps them depends on the order of the ranks.
    """
    sign = 1.0 if largest else -1.0
    nans = values.isnan()
    packed = torch.cat([(values * sign).masked_fill_(nans, -math.inf), nans.to(values.dtype)])
    best, flags = _all_reduce(packed, dist.ReduceOp.MAX, mesh).chunk(2)
    return (best * sign).masked_fill_(flags > 0, math.nan)


def _arguments(func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """All arguments by name, defaults filled in."""
    by_name = {arg.name: arg.default_value for arg in func._schema.arguments}
    by_name.update(zip(by_name, args, strict=False))
    by_name.update(kwargs)
    return by_name


def _covers_all(x: DTensor, dim: int | Iterable[int] | None) -> bool:
    dims = [] if dim is None else [dim] if isinstance(dim, int) else list(dim)
    return not dims or sorted(d % max(x.dim(), 1) for d in dims) == list(range(x.dim()))


def _full(combine: Combine) -> Handler:
    """A handler that reduces over all dims, or raises."""

    def handler(
        cls: type[DTensor], func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Tensor:
        arguments = _arguments(func, args, kwargs)
        x = arguments["self"]
        if not _covers_all(x, arguments.get("dim")):
            raise refusal(func, f"expected all dims of {describe(x)}, got {arguments['dim']!r}")
        result = combine(func, x, arguments)
        return result.view((1,) * x.dim()) if arguments.get("keepdim") else result

    return handler


def _accumulator(dtype: torch.dtype) -> torch.dtype:
    """What a rank accumulates its own piece in; ranks are combined in float64 or int64."""
    if dtype.is_floating_point:
        return torch.float64 if dtype == torch.float64 else torch.float32
    return torch.int64


def _sum(func: OpOverload, x: DTensor, arguments: dict[str, Any]) -> Tensor:
    dtype = arguments["dtype"] or (x.dtype if x.dtype.is_floating_point else torch.int64)
    if x.dtype.is_complex or dtype.is_floating_point != x.dtype.is_floating_point:
        raise refusal(func, f"cannot sum {x.dtype} as {dtype}")
    total = x._local_tensor.sum(dtype=_accumulator(dtype))
    total = total.double() if dtype.is_floating_point else total
    return _all_reduce(total, dist.ReduceOp.SUM, x.device_mesh).to(dtype)


def _mean(func: OpOverload, x: DTensor, arguments: dict[str, Any]) -> Tensor:
    dtype = arguments["dtype"] or x.dtype
    if not (dtype.is_floating_point and x.dtype.is_floating_point):
        raise refusal(func, f"cannot average {x.dtype} as {dtype}")
    total = x._local_tensor.sum(dtype=_accumulator(dtype)).double()
    return (_all_reduce(total, dist.ReduceOp.SUM, x.device_mesh) / x.numel()).to(dtype)


def _largest_or_smallest(*, largest: bool) -> Combine:
    def combine(func: OpOverload, x: DTensor, arguments: dict[str, Any]) -> Tensor:
        if x.dtype.is_complex or (not x.dtype.is_floating_point and x.dtype.itemsize > 4):
            raise refusal(func, f"{x.dtype} does not fit the float64 that ranks are compared in")
        local = x._local_tensor
        if x.numel() == 0:
            return func(local)  # raises the error of the full tensor, on every rank
        if local.numel():
            best = (local.amax() if largest else local.amin()).double()
        else:
            best = local.new_full((), -math.inf if largest else math.inf, dtype=torch.float64)
        best = _extreme(best.view(1), largest=largest, mesh=x.device_mesh)
        return best.view(()).to(x.dtype)

    return combine


def _any_or_all(*, any_of: bool) -> Combine:
    op = dist.ReduceOp.MAX if any_of else dist.ReduceOp.MIN

    def combine(func: OpOverload, x: DTensor, arguments: dict[str, Any]) -> Tensor:
        local = x._local_tensor
        verdict = local.any() if any_of else local.all()  # bool, or uint8 for uint8
        return _all_reduce(verdict.to(torch.int32), op, x.device_mesh).to(verdict.dtype)

    return combine


def _equal(
    cls: type[DTensor], func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]
) -> bool:
    """`equal` and `allclose`: true when it is on every rank."""
    if not all(isinstance(arg, cls) for arg in args[:2]):
        raise refusal(func, f"expected two tensors cut alike, got {list(map(type, args[:2]))}")
    x, local_args, local_kwargs = unwrap(cls, func, args, kwargs)
    verdict = torch.tensor(func(*local_args, **local_kwargs), dtype=torch.int32, device="cpu")
    return bool(_all_reduce(verdict, dist.ReduceOp.MIN, x.device_mesh))


def _norms(func: OpOverload, tensors: Sequence[DTensor], order: float) -> Tensor:
    """Norms of n tensors on one mesh and device, the same on all ranks, by one collective.

    Returns:
        (n,) float64. See [Note: norms].
    """
    pieces = [x._local_tensor for x in tensors]
    for x, piece in zip(tensors, pieces, strict=True):
        if not x.dtype.is_floating_point:
            raise refusal(func, f"the norm of {x.dtype} is not supported")
        if x.numel() == 0 and not 0 <= order < math.inf:
            torch.linalg.vector_norm(piece, order)  # raises the error of the full tensor
    # The norm of an empty piece: what the powers, or the comparison, of the others ignore.
    nothing = {math.inf: -math.inf, -math.inf: math.inf}.get(order, 0.0 if order >= 0 else math.inf)
    own = [pieces[0].new_full((), nothing, dtype=torch.float64)] * len(pieces)
    held: dict[torch.dtype, list[int]] = {}
    for i, piece in enumerate(pieces):
        if piece.numel():
            held.setdefault(_accumulator(piece.dtype), []).append(i)
    for dtype, members in held.items():
        norms = torch._foreach_norm([pieces[i] for i in members], order, dtype=dtype)
        for i, norm in zip(members, norms, strict=True):
            own[i] = norm
    values = torch.stack(own).double()  # (n,)
    if math.isinf(order):
        return _extreme(values, largest=order > 0, mesh=tensors[0].device_mesh)
    if order == 0:  # numbers of nonzeros
        return _all_reduce(values, dist.ReduceOp.SUM, tensors[0].device_mesh)
    powers = _all_reduce(values.pow(order), dist.ReduceOp.SUM, tensors[0].device_mesh)
    return powers.pow(1 / order)


def _vector_norm(func: OpOverload, x: DTensor, arguments: dict[str, Any]) -> Tensor:
    norms = _norms(func, [x], float(arguments["ord"]))
    return norms.view(()).to(arguments["dtype"] or x.dtype)


def _foreach_norm(
    cls: type[DTensor], func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]
) -> list[Tensor]:
    """One packed collective per mesh for the whole list; other tensors are left to torch."""
    arguments = _arguments(func, args, kwargs)
    tensors: Sequence[Tensor] = arguments["self"]
    order, dtype = float(arguments["ord"]), arguments["dtype"]
    groups: dict[object, list[int]] = {}
    for i, x in enumerate(tensors):
        key = (x.device_mesh, x.device) if isinstance(x, cls) else type(x)
        groups.setdefault(key, []).append(i)
    results: dict[int, Tensor] = {}
    for members in groups.values():
        group = [tensors[i] for i in members]
        if isinstance(group[0], cls):
            ragged = cast("list[DTensor]", group)
            norms = _norms(func, ragged, order)
            by_dtype = {out: norms.to(out) for out in {dtype or x.dtype for x in group}}
            rounded: Sequence[Tensor] = [by_dtype[dtype or x.dtype][j] for j, x in enumerate(group)]
        else:
            rounded = torch._foreach_norm(group, order, dtype=dtype)
        results.update(zip(members, rounded, strict=True))
    return [results[i] for i in range(len(tensors))]


def _unscale(
    cls: type[DTensor], func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]
) -> None:
    """GradScaler's check: an inf in one rank's piece makes every rank skip the step."""
    grads, found_inf, _ = args
    foreach_in_place(cls, func, args, kwargs)
    for mesh in dict.fromkeys(grad.device_mesh for grad in grads if isinstance(grad, cls)):
        found_inf.copy_(_all_reduce(found_inf, dist.ReduceOp.MAX, mesh))


REDUCTIONS: dict[OpOverload, Handler] = {
    aten._amp_foreach_non_finite_check_and_unscale_.default: _unscale,
    aten._foreach_norm.Scalar: _foreach_norm,
    aten.allclose.default: _equal,
    aten.all.default: _full(_any_or_all(any_of=False)),
    aten.amax.default: _full(_largest_or_smallest(largest=True)),
    aten.amin.default: _full(_largest_or_smallest(largest=False)),
    aten.any.default: _full(_any_or_all(any_of=True)),
    aten.equal.default: _equal,
    aten.linalg_vector_norm.default: _full(_vector_norm),
    aten.max.default: _full(_largest_or_smallest(largest=True)),
    aten.mean.default: _full(_mean),
    aten.mean.dim: _full(_mean),
    aten.min.default: _full(_largest_or_smallest(largest=False)),
    aten.sum.default: _full(_sum),
    aten.sum.dim_IntList: _full(_sum),
}
