"""The reductions that RaggedDTensor allows, each with its own collective.

Touches local tensors and the process group of the mesh's shard axis: replicas hold the same and
need not be asked. Results are plain tensors, the same on all ranks. Which ops may be here says
[Note: allow-list] in local_ops.py.

[Note: partial reductions]
A rank's piece is a few boxes of the full tensor (see `boxes` in placement.py). It reduces each and
folds it into a result of the full size, where an element that no box of this rank contributes to
holds what the collective ignores: 0 for sums, -inf for the largest. Then one collective combines
the results of all ranks. A reduction over all dims takes the flat piece as the only box.

[Note: norms]
A rank takes the norm of its own piece with torch's kernel, accumulated in float32 (float64 for
float64). The p-th powers of these are added over ranks in float64, and the root is taken once;
orders inf and -inf take the largest and smallest instead. An empty piece contributes nothing. The
result is rounded to the dtype of the tensor once, at the end.

[Note: gradients of reductions]
The gradient of a sum or mean is a plain tensor of the full shape, the same on all ranks: autograd
makes it of the result's shape, which says nothing of the layout. A hook on the tensor that was
reduced takes this rank's range of it, so that the gradient of a parameter has the parameter's
layout. It is set when a reduction is first recorded, and does nothing to gradients of other ops.
Before, gradients of several uses are added up, plain ones beside sharded ones. As in `full_tensor`,
the gradient of a result is taken to be the same on all ranks.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._ops import OpOverload
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from sharding.tensor.local_ops import (
    Handler,
    bounds_of,
    foreach_in_place,
    overloads_of,
    own_range,
    refusal,
    unwrap,
    wrap,
)
from sharding.tensor.permuted import in_flat_order
from sharding.tensor.placement import boxes
from sharding.transport.axes import shard_group
from sharding.transport.waits import waiting_for

aten = torch.ops.aten

# (op, what to reduce, arguments by name) -> result, reduced dims kept with size 1
Combine = Callable[[OpOverload, "_Terms", dict[str, Any]], Tensor]


def _all_reduce(values: Tensor, op: dist.ReduceOp.RedOpType, mesh: DeviceMesh) -> Tensor:
    """Reduce over the pieces of one replica; leave `values` as they are."""
    # Values of a model that is offloaded to the CPU travel through the mesh's device.
    reduced = values.to(mesh.device_type, copy=True)
    group = shard_group(mesh)
    with waiting_for("a norm, sum or other reduction of sharded tensors", group):
        dist.all_reduce(reduced, op, group=group)
    return reduced.to(values.device)


def _extreme(values: Tensor, *, largest: bool, mesh: DeviceMesh) -> Tensor:
    """Return the largest or smallest over ranks of each of n float64 values; any NaN gives NaN.

    NaNs travel as flags: whether a backend's MAX keeps them depends on the order of the ranks.
    """
    sign = 1.0 if largest else -1.0
    nans = values.isnan()
    packed = torch.cat([(values * sign).masked_fill_(nans, -math.inf), nans.to(values.dtype)])
    best, flags = _all_reduce(packed, dist.ReduceOp.MAX, mesh).chunk(2)
    return (best * sign).masked_fill_(flags > 0, math.nan)


def _arguments(func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return all arguments by name, defaults filled in."""
    by_name = {arg.name: arg.default_value for arg in func._schema.arguments}
    by_name.update(zip(by_name, args, strict=False))
    by_name.update(kwargs)
    return by_name


def _dims(x: DTensor, dim: int | Iterable[int] | None) -> tuple[int, ...]:
    """Return the dims to reduce, as torch reads them: none given are all."""
    given = () if dim is None else (dim,) if isinstance(dim, int) else tuple(dim)
    ndim = max(x.dim(), 1)
    for d in given:
        if not -ndim <= d < ndim:
            raise IndexError(
                f"Dimension out of range (expected to be in range of [{-ndim}, {ndim - 1}], but "
                f"got {d})"
            )
    if len({d % ndim for d in given}) < len(given):
        raise RuntimeError(f"expected each dim once in the list of dims, got {given!r}")
    return tuple(sorted(d % ndim for d in given)) or tuple(range(ndim))


# (box, where in the result it goes) -> what the rank makes of it, reduced dims kept
Reduce = Callable[[Tensor, tuple[slice, ...]], Tensor]


@dataclass(frozen=True, slots=True)
class _Terms:
    """A reduction of `x` over `dims`; see [Note: partial reductions].

    Attributes:
        shape: Of the result, reduced dims kept with size 1.
        boxes: What this rank holds, and where in the result it goes.
    """

    x: DTensor
    dims: tuple[int, ...]
    shape: tuple[int, ...]
    boxes: list[tuple[Tensor, tuple[slice, ...]]]

    @property
    def is_full(self) -> bool:
        """Whether all dims are reduced."""
        return len(self.dims) == len(self.shape)

    @property
    def reduced_numel(self) -> int:
        """How many elements one of the result is made of."""
        return self.x.numel() if self.is_full else prod(self.x.shape[dim] for dim in self.dims)

    def fold(
        self,
        nothing: float,
        reduce: Reduce,
        combine: Callable[[Tensor, Tensor], Tensor],
        dtype: torch.dtype,
    ) -> Tensor:
        """Return this rank's part of the result, `nothing` where it has none."""
        result = self.x._local_tensor.new_full(self.shape, nothing, dtype=dtype)
        for box, where in self.boxes:
            result[where] = combine(result[where], reduce(box, where).to(dtype))
        return result

    def total(self, reduce: Reduce, dtype: torch.dtype = torch.float64) -> Tensor:
        """Return the sum over ranks of what `reduce` makes of their boxes."""
        own = self.fold(0, reduce, torch.add, dtype)
        return _all_reduce(own, dist.ReduceOp.SUM, self.x.device_mesh)

    def extreme(self, reduce: Reduce, *, largest: bool) -> Tensor:
        """Return the largest or smallest over ranks, float64; any NaN gives NaN."""
        nothing, better = (-math.inf, torch.maximum) if largest else (math.inf, torch.minimum)
        own = self.fold(nothing, reduce, better, torch.float64)
        best = _extreme(own.view(-1), largest=largest, mesh=self.x.device_mesh)
        return best.view(self.shape)


def _terms(x: DTensor, dims: tuple[int, ...]) -> _Terms:
    local, ndim = x._local_tensor, max(x.dim(), 1)
    shape = tuple(1 if dim in dims else size for dim, size in enumerate(x.shape or (1,)))
    if len(dims) == ndim:
        whole = (slice(None),) * ndim
        held = [(local.view(*shape[1:], -1), whole)] if local.numel() else []
        return _Terms(x, dims, shape, held)
    held = []
    start, stop = bounds_of(x._spec)
    for box in boxes(start, stop, x.shape) if x.numel() else ():
        begin = box.flat_start - start
        where = tuple(
            slice(0, 1) if dim in dims else slice(offset, offset + size)
            for dim, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True))
        )
        held.append((local[begin : begin + box.numel].view(box.sizes), where))
    return _Terms(x, dims, shape, held)


def _reduction(combine: Combine) -> Handler:
    """Return a handler that reduces over the dims that the op is given."""

    def handler(
        cls: type[DTensor], func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Tensor:
        arguments = _arguments(func, args, kwargs)
        x, dims = arguments["self"], _dims(arguments["self"], arguments.get("dim"))
        flat, places = in_flat_order(x)
        if flat is not x:
            held = tuple(sorted(places[dim] for dim in dims))
            arguments.update(self=flat, **({"dim": held} if "dim" in arguments else {}))
            result = combine(func, _terms(flat, held), arguments).permute(places)
        else:
            result = combine(func, _terms(x, dims), arguments)
        _keep_gradient_sharded(x)
        if arguments.get("keepdim"):
            return result.view(result.shape if x.dim() else ())
        return result.view([size for d, size in enumerate(result.shape) if d not in dims])

    return handler


class _OwnRange(torch.autograd.Function):
    """This rank's range of a plain gradient of the full shape."""

    @staticmethod
    def forward(ctx: Any, full: Tensor, cls: type[DTensor], spec: DTensorSpec) -> DTensor:
        return wrap(cls, own_range(spec, full).clone(memory_format=torch.contiguous_format), spec)

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> tuple[Tensor, None, None]:
        return grad.full_tensor(), None, None


class _KeepSharded:
    """The hook of [Note: gradients of reductions]."""

    __torch_unserializable__ = True  # a copy of the tensor gets its own: pickling need not warn

    def __init__(self, x: DTensor) -> None:
        self._cls = type(x)
        self._spec = x._spec
        # A parameter may have been laid out anew before its gradient comes.
        self._leaf = weakref.ref(x) if x.is_leaf else lambda: None

    def __call__(self, grad: Tensor) -> Tensor:
        if isinstance(grad, self._cls):
            return grad
        leaf = self._leaf()
        return _OwnRange.apply(grad, self._cls, self._spec if leaf is None else leaf._spec)


def _keep_gradient_sharded(x: DTensor) -> None:
    """See [Note: gradients of reductions]."""
    if torch.is_grad_enabled() and x.requires_grad:
        hooks = (x._backward_hooks or {}).values()
        if not any(isinstance(hook, _KeepSharded) for hook in hooks):
            Tensor.register_hook(x, _KeepSharded(x))  # of a parameter, too; see gradient_hooks.py


def _accumulator(dtype: torch.dtype) -> torch.dtype:
    """Return what a rank accumulates its own piece in; ranks are combined in float64 or int64."""
    if dtype.is_floating_point:
        return torch.float64 if dtype == torch.float64 else torch.float32
    return torch.int64


def _sum_boxes(terms: _Terms, dtype: torch.dtype) -> Tensor:
    """Sum over all ranks, float64 or int64."""
    accumulator = _accumulator(dtype)
    return terms.total(
        lambda box, where: box.sum(terms.dims, keepdim=True, dtype=accumulator),
        torch.float64 if dtype.is_floating_point else torch.int64,
    )


def _sum(func: OpOverload, terms: _Terms, arguments: dict[str, Any]) -> Tensor:
    given = terms.x.dtype
    dtype = arguments["dtype"] or (given if given.is_floating_point else torch.int64)
    if given.is_complex or dtype.is_floating_point != given.is_floating_point:
        raise refusal(func, f"cannot sum {given} as {dtype}")
    return _sum_boxes(terms, dtype).to(dtype)


def _mean(func: OpOverload, terms: _Terms, arguments: dict[str, Any]) -> Tensor:
    dtype = arguments["dtype"] or terms.x.dtype
    if not (dtype.is_floating_point and terms.x.dtype.is_floating_point):
        raise refusal(func, f"cannot average {terms.x.dtype} as {dtype}")
    return (_sum_boxes(terms, dtype) / terms.reduced_numel).to(dtype)


def _count_nonzero(func: OpOverload, terms: _Terms, arguments: dict[str, Any]) -> Tensor:
    return terms.total(lambda box, where: (box != 0).sum(terms.dims, keepdim=True), torch.int64)


def _variance(*, root: bool) -> Combine:
    """Reduce as `var` and `std` do: the mean first, then the rest, so nothing cancels."""

    def combine(func: OpOverload, terms: _Terms, arguments: dict[str, Any]) -> Tensor:
        dtype = terms.x.dtype
        if not dtype.is_floating_point:
            raise refusal(func, f"the variance of {dtype} is not supported")
        accumulator, numel = _accumulator(dtype), terms.reduced_numel
        mean = (_sum_boxes(terms, dtype) / numel).to(accumulator)
        squares = terms.total(
            lambda box, where: (box - mean[where]).square().sum(terms.dims, keepdim=True)
        )
        correction = 1 if arguments["correction"] is None else arguments["correction"]
        variance = squares / max(numel - correction, 0)
        return (variance.sqrt() if root else variance).to(dtype)

    return combine


def _logsumexp(func: OpOverload, terms: _Terms, arguments: dict[str, Any]) -> Tensor:
    dtype = terms.x.dtype
    if not dtype.is_floating_point:
        raise refusal(func, f"the logsumexp of {dtype} is not supported")
    largest = terms.extreme(lambda box, where: box.amax(terms.dims, keepdim=True), largest=True)
    largest = largest.masked_fill(largest.isinf(), 0)  # an infinity comes out of the sum
    shift = largest.to(_accumulator(dtype))
    total = terms.total(lambda box, where: (box - shift[where]).exp().sum(terms.dims, keepdim=True))
    return (total.log() + largest).to(dtype)


def _largest_or_smallest(*, largest: bool) -> Combine:
    reduce = torch.amax if largest else torch.amin

    def combine(func: OpOverload, terms: _Terms, arguments: dict[str, Any]) -> Tensor:
        x = terms.x
        if x.dtype.is_complex or (not x.dtype.is_floating_point and x.dtype.itemsize > 4):
            raise refusal(func, f"{x.dtype} does not fit the float64 that ranks are compared in")
        if x.numel() == 0:
            return _of_nothing(func, terms, arguments)
        best = terms.extreme(
            lambda box, where: reduce(box, terms.dims, keepdim=True), largest=largest
        )
        return best.to(x.dtype)

    return combine


def _of_nothing(func: OpOverload, terms: _Terms, arguments: dict[str, Any]) -> Tensor:
    """Return what torch makes of an empty tensor: nothing, or an error that all ranks raise."""
    others = {name: value for name, value in arguments.items() if name != "self"}
    empty = terms.x._local_tensor.new_empty(terms.x.shape)
    return cast(Tensor, func(empty, **others)).view(terms.shape)


def _any_or_all(*, any_of: bool) -> Combine:
    op = dist.ReduceOp.MAX if any_of else dist.ReduceOp.MIN
    reduce, combined = (torch.any, torch.maximum) if any_of else (torch.all, torch.minimum)

    def combine(func: OpOverload, terms: _Terms, arguments: dict[str, Any]) -> Tensor:
        own = terms.fold(
            0 if any_of else 1,
            lambda box, where: reduce(box, terms.dims, keepdim=True),
            combined,
            torch.int32,
        )
        dtype = torch.uint8 if terms.x.dtype == torch.uint8 else torch.bool
        return _all_reduce(own, op, terms.x.device_mesh).to(dtype)

    return combine


def _equal(
    cls: type[DTensor], func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]
) -> bool:
    """Compare as `equal` and `allclose` do: true when it is on every rank."""
    if not all(isinstance(arg, cls) for arg in args[:2]):
        raise refusal(func, f"expected two tensors cut alike, got {list(map(type, args[:2]))}")
    x, local_args, local_kwargs = unwrap(cls, func, args, kwargs)
    verdict = torch.tensor(func(*local_args, **local_kwargs), dtype=torch.int32, device="cpu")
    return bool(_all_reduce(verdict, dist.ReduceOp.MIN, x.device_mesh))


def _norms(func: OpOverload, tensors: Sequence[DTensor], order: float) -> Tensor:
    """Return norms of n tensors on one mesh and device, the same on all ranks, by one collective.

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


def _vector_norm(func: OpOverload, terms: _Terms, arguments: dict[str, Any]) -> Tensor:
    x, order = terms.x, float(arguments["ord"])
    dtype = arguments["dtype"] or x.dtype
    if terms.is_full:
        return _norms(func, [x], order).view(terms.shape).to(dtype)
    if not x.dtype.is_floating_point:
        raise refusal(func, f"the norm of {x.dtype} is not supported")
    if x.numel() == 0 and not 0 <= order < math.inf:
        return _of_nothing(func, terms, arguments)

    def norms(box: Tensor, where: tuple[slice, ...]) -> Tensor:
        return torch.linalg.vector_norm(
            box, order, terms.dims, keepdim=True, dtype=_accumulator(x.dtype)
        ).double()

    if math.isinf(order):
        return terms.extreme(norms, largest=order > 0).to(dtype)
    if order == 0:  # numbers of nonzeros
        return terms.total(norms).to(dtype)
    powers = terms.total(lambda box, where: norms(box, where).pow(order))
    return powers.pow(1 / order).to(dtype)


def _foreach_norm(
    cls: type[DTensor], func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]
) -> list[Tensor]:
    """Run one packed collective per mesh for the whole list; other tensors are left to torch."""
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


_COMBINE: dict[str, Combine] = {
    "all": _any_or_all(any_of=False),
    "amax": _largest_or_smallest(largest=True),
    "amin": _largest_or_smallest(largest=False),
    "any": _any_or_all(any_of=True),
    "count_nonzero": _count_nonzero,
    "linalg_vector_norm": _vector_norm,
    "logsumexp": _logsumexp,
    "max": _largest_or_smallest(largest=True),  # without a dim: with one it has positions, too
    "mean": _mean,
    "min": _largest_or_smallest(largest=False),
    "std": _variance(root=True),
    "sum": _sum,
    "var": _variance(root=False),
}
_OVERLOADS = {"max": "default", "min": "default", "std": "correction", "var": "correction"}

REDUCTIONS: dict[OpOverload, Handler] = {
    aten._amp_foreach_non_finite_check_and_unscale_.default: _unscale,
    aten._foreach_norm.Scalar: _foreach_norm,
    aten.allclose.default: _equal,
    aten.equal.default: _equal,
    **{
        overload: _reduction(combine)
        for name, combine in _COMBINE.items()
        for overload in overloads_of([name], _OVERLOADS.get(name, "default dim dims dim_IntList"))
    },
}
