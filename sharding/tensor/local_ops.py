"""The aten ops that a RaggedDTensor runs on its local tensors, and the checks before they do.

Touches local tensors; communicates nothing (reductions.py does).

[Note: allow-list]
Dispatch looks the op overload up in the tables of this file, of random_ops.py and of
reductions.py; what is not there raises. An op may be in a table only if its result on the
pieces, put together, is its result on the full tensor:
- element-wise, in-place, foreach, fused-optimizer, like and copy ops, on tensors cut alike. Plain
  tensors may take part as scalars (of one element, or expanded from one), and in lists beside
  other plain ones. While a backward runs, any plain tensor that broadcasts to the shape may: the
  ops above let nothing plain into a graph but scalars and the results of reductions, so it is one
  of these or a gradient of one, see [Note: gradients of reductions] in reductions.py;
- views of the flattened tensor under another shape, slices along the first dim, `x[i]`, and views
  with the dims in another order (permuted.py);
- reductions, each with its own collective, whose results are plain tensors that are the same on
  all ranks. Ranks whose piece is empty join the collective and contribute nothing;
- random in-place ops, drawn for the full tensor: see [Note: random numbers] in random_ops.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from sharding.tensor.placement import RaggedShard, boxes
from sharding.transport.axes import placements_on, shard_rank

aten = torch.ops.aten

# (class of our tensors, op, args, kwargs) -> result. The class is passed in because it is defined
# in ragged_tensor.py, which imports this file.
Handler = Callable[[type[DTensor], OpOverload, Sequence[Any], dict[str, Any]], Any]

CURE = (
    "Use x.full_tensor() or x.redistribute(placements=[Replicate()]) for the whole tensor, "
    "x.redistribute(placements=[Shard(0)]) for a stock DTensor, or x.to_local() for this rank's "
    "flat piece. A module that computes outside of its root's forward needs root.unshard() first"
)


def wrap(cls: type[DTensor], local: Tensor, spec: DTensorSpec) -> DTensor:
    """Return a `cls` over `local`, laid out as `spec` says; takes the dtype of `local`."""
    meta = spec.tensor_meta
    if meta is None:
        raise RuntimeError(f"expected a spec with a shape, got {spec!r}")
    if meta.dtype != local.dtype:
        meta = TensorMeta(meta.shape, meta.stride, local.dtype)
        spec = DTensorSpec(spec.mesh, spec.placements, tensor_meta=meta)
    # DTensor.__init__ does nothing but costs as much as __new__.
    return cls.__new__(cls, local, spec, requires_grad=False)


def refusal(func: object, why: str) -> NotImplementedError:
    """Return the error for an op that has no right answer here; names the op and what to call."""
    return NotImplementedError(f"{func}: {why}. {CURE}")


def describe(x: DTensor) -> str:
    """Return a RaggedDTensor in the words of an error."""
    return f"a tensor of shape {tuple(x.shape)} placed as {x._spec.placements[-1]!r}"


# -- layout checks --------------------------------------------------------------------------------


def _check_alike(func: OpOverload, x: DTensor, y: DTensor) -> None:
    """Raise unless two tensors have the same mesh, placement and shape."""
    a, b = x._spec, y._spec
    if a is b:
        return
    if a.placements != b.placements or a.shape != b.shape or a.mesh != b.mesh:
        raise refusal(
            func,
            f"expected tensors cut alike over one mesh, got {describe(x)} on {a.mesh!r} and "
            f"{describe(y)} on {b.mesh!r}",
        )


def placement_of(spec: DTensorSpec) -> RaggedShard:
    """Return how the flattened tensor is cut."""
    return cast(RaggedShard, spec.placements[-1])


def check_row_major(func: object, x: DTensor) -> None:
    """Raise if `x` is a transposed view: what lies side by side in it, its pieces hold apart."""
    if not placement_of(x._spec).is_row_major:
        raise refusal(
            func, f"expected no transposed view, got {describe(x)}; turn it back, or turn the whole"
        )


def bounds_of(spec: DTensorSpec) -> tuple[int, int]:
    """Return this rank's range `(start, stop)` of the flattened tensor."""
    return placement_of(spec).bounds(shard_rank(spec.mesh), math.prod(spec.shape))


def own_range(spec: DTensorSpec, full: Tensor) -> Tensor:
    """Return this rank's elements of a plain tensor that broadcasts to the shape; (n_local,)."""
    start, stop = bounds_of(spec)
    if _repeats_one(full):
        return full[(0,) * full.dim()].expand(stop - start)
    whole = full.expand(spec.shape)
    if not placement_of(spec).is_row_major:
        whole = whole.permute(placement_of(spec).dims)
    if whole.is_contiguous():
        return whole.view(-1)[start:stop]
    parts = [
        whole[tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))]
        for box in boxes(start, stop, whole.shape)
    ]
    return torch.cat([part.reshape(-1) for part in parts]) if parts else full.new_empty(0)


def _repeats_one(x: Tensor) -> bool:
    """Return whether all elements of a tensor are one in memory: a scalar, whatever its shape."""
    return x.numel() > 0 and all(
        size == 1 or stride == 0 for size, stride in zip(x.shape, x.stride(), strict=True)
    )


def _broadcasts(other: Tensor, x: DTensor) -> bool:
    """Return whether a tensor beside `x` leaves the shape of `x` as it is."""
    sizes = zip(reversed(other.shape), reversed(x.shape), strict=False)
    return other.dim() <= x.dim() and all(n in (1, size) for n, size in sizes)


def _plain_operand(func: OpOverload, x: DTensor, other: Tensor) -> Tensor:
    """Return the local tensor to use for `other`, an argument beside the RaggedDTensor `x`."""
    if isinstance(other, DTensor):
        if not all(isinstance(placement, Replicate) for placement in other.placements):
            raise refusal(func, f"expected a replicated scalar, got {other.placements!r}")
        other = other.to_local()
    if other.dim() == 0:
        # The local tensor of a 0-dim tensor has a dim: with one too, a scalar takes the same part
        # in type promotion as it does for the full tensor.
        return other.view(1) if x.dim() == 0 else other
    in_backward = torch._C._current_graph_task_id() != -1
    if not (in_backward or _repeats_one(other)) or not _broadcasts(other, x):
        raise refusal(
            func,
            f"expected a 0-dim plain tensor beside {describe(x)}, "
            f"got {type(other).__name__} of shape {tuple(other.shape)}",
        )
    return own_range(x._spec, other)


def unwrap(
    cls: type[DTensor], func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[DTensor, list[Any], dict[str, Any]]:
    """Return the first RaggedDTensor, and the arguments with local tensors in place of all of
    them."""
    x = next(arg for arg in (*args, *kwargs.values()) if isinstance(arg, cls))

    def local(arg: object) -> object:
        if isinstance(arg, cls):
            _check_alike(func, x, arg)
            return arg._local_tensor
        return _plain_operand(func, x, arg) if isinstance(arg, Tensor) else arg

    return x, [local(arg) for arg in args], {key: local(arg) for key, arg in kwargs.items()}


# -- ops that run on the local tensors ------------------------------------------------------------


def _elementwise(
    cls: type[DTensor], func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]
) -> DTensor:
    x, local_args, local_kwargs = unwrap(cls, func, args, kwargs)
    return wrap(cls, func(*local_args, **local_kwargs), x._spec)


def _in_place(
    cls: type[DTensor], func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]
) -> DTensor:
    target = args[0]
    if not isinstance(target, cls):
        raise refusal(func, f"cannot write a piece into a plain {type(target).__name__}")
    _, local_args, local_kwargs = unwrap(cls, func, args, kwargs)
    func(*local_args, **local_kwargs)
    return target


def _out(
    cls: type[DTensor], func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]
) -> DTensor:
    """Element-wise ops that write into `out=`, which has to be cut like the inputs."""
    target = kwargs["out"]
    if not isinstance(target, cls):
        raise refusal(func, f"cannot write a piece into a plain {type(target).__name__}")
    _, local_args, local_kwargs = unwrap(cls, func, args, kwargs)
    func(*local_args, **local_kwargs)
    return target


def _like(
    cls: type[DTensor], func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]
) -> DTensor:
    """Clone, casts and `*_like`: the layout is kept, and the memory format has to be row-major."""
    memory_format = kwargs.get("memory_format")
    if memory_format not in (None, torch.preserve_format, torch.contiguous_format):
        raise refusal(func, f"expected a contiguous memory format, got {memory_format!r}")
    if memory_format == torch.contiguous_format:
        check_row_major(func, args[0])
    kept = {key: value for key, value in kwargs.items() if key != "memory_format"}
    return _elementwise(cls, func, args, kept)


def _expand(
    cls: type[DTensor], func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]
) -> DTensor:
    x, shape = args[0], list(args[1])
    if len(shape) != x.dim() or any(n not in (-1, m) for n, m in zip(shape, x.shape, strict=True)):
        raise refusal(func, f"expected the shape {tuple(x.shape)} of the tensor, got {args[1]!r}")
    return wrap(cls, x._local_tensor, x._spec)


def _alias(
    cls: type[DTensor], func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]
) -> DTensor:
    """Return the same piece, the very object: it counts the in-place changes that all aliases
    make."""
    return wrap(cls, args[0]._local_tensor, args[0]._spec)


def _view(
    cls: type[DTensor], func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]
) -> DTensor:
    """Return views that keep the order of the elements: the cuts of the flattened tensor stay."""
    x = args[0]
    # The shape, and for one that does not fit the error, are those of torch.
    shape = func(torch.empty(x.shape, device="meta"), *args[1:], **kwargs).shape
    local = x._local_tensor.detach()
    if shape == x.shape:
        return wrap(cls, local, x._spec)
    check_row_major(func, x)
    mesh = x._spec.mesh
    placement = placement_of(x._spec).flattening(len(shape))
    strides = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
    meta = TensorMeta(shape, strides, local.dtype)
    return wrap(cls, local, DTensorSpec(mesh, placements_on(mesh, placement), tensor_meta=meta))


def _rows(x: DTensor, first: int, rows: int, shape: Sequence[int]) -> tuple[Tensor, DTensorSpec]:
    """Return `rows` slices along the first dim from the `first` on, as a tensor of `shape`;
    views."""
    mesh, placement = x._spec.mesh, placement_of(x._spec)
    numel = math.prod(x.shape[1:])
    first, stop_at = first * numel, (first + rows) * numel
    kept = [
        (max(start, first) - start, max(min(stop, stop_at) - max(start, first), 0))
        for start, stop in placement.all_bounds(x.numel())
    ]  # of every rank's piece: where the run starts, and how many of its elements are there
    begin, size = kept[shard_rank(mesh)]
    part = RaggedShard(range(len(shape)), [size for _, size in kept])
    local = x._local_tensor.narrow(0, begin if size else 0, size)
    strides = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
    meta = TensorMeta(torch.Size(shape), strides, local.dtype)
    return local, DTensorSpec(mesh, placements_on(mesh, part), tensor_meta=meta)


def _select(
    cls: type[DTensor], func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]
) -> DTensor:
    """Return `x[i]`: a slice along the first dim is a run of the flattened tensor; a view of the
    piece."""
    x, dim, index = args
    if x.dim() == 0 or dim not in (0, -x.dim()):
        raise refusal(func, f"expected an index of the first dim of {describe(x)}, got dim {dim}")
    rows, *shape = x.shape
    check_row_major(func, x)
    if not -rows <= index < rows:
        raise IndexError(f"index {index} is out of range for {describe(x)}")
    return wrap(cls, *_rows(x, index % rows, 1, shape))


def _slice(
    cls: type[DTensor], func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]
) -> DTensor:
    """Return `x[a:b]` along the first dim, as `x[i]`."""
    given: list[Any] = list(args)
    x, dim, start, stop, step = given + [0, None, None, 1][len(given) - 1 :]
    if x.dim() == 0 or dim not in (0, -x.dim()) or step != 1:
        raise refusal(
            func, f"expected a run of the first dim of {describe(x)}, got {dim=} and {step=}"
        )
    check_row_major(func, x)
    first, end, _ = slice(start, stop).indices(x.shape[0])
    rows = max(end - first, 0)
    return wrap(cls, *_rows(x, first, rows, (rows, *x.shape[1:])))


def _new(
    cls: type[DTensor], func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]
) -> DTensor:
    """Run `new_zeros` and its kin, for the tensor's own shape only."""
    x, shape, *rest = args
    if tuple(shape) != tuple(x.shape):
        raise refusal(func, f"expected the shape {tuple(x.shape)} of the tensor, got {shape!r}")
    if func is aten.new_empty_strided.default:
        if tuple(rest[0]) != x.stride():
            raise refusal(func, f"expected the strides {x.stride()} of the tensor, got {rest[0]}")
        rest = [(1,)]
    local = x._local_tensor
    return wrap(cls, func(local, local.shape, *rest, **kwargs), x._spec)


def _copy(
    cls: type[DTensor], func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]
) -> DTensor:
    """Run `copy_`, also from a plain tensor of the full shape: a rank copies its own range of
    it."""
    target, source, *rest = args
    if not isinstance(target, cls) or isinstance(source, cls) or source.dim() == 0:
        return _in_place(cls, func, args, kwargs)
    if isinstance(source, DTensor) or source.shape != target.shape:
        raise refusal(
            func,
            f"expected a source cut alike or a plain tensor of the full shape for "
            f"{describe(target)}, got {type(source).__name__} of shape {tuple(source.shape)}",
        )
    func(target._local_tensor, own_range(target._spec, source), *rest, **kwargs)
    return target


def _on_first(
    cls: type[DTensor], func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]
) -> object:
    """Answer queries and keep books of one tensor's memory, such as `is_pinned`."""
    return func(args[0]._local_tensor, *args[1:], **kwargs)


def _is_same_size(
    cls: type[DTensor], func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]
) -> bool:
    return args[0].shape == args[1].shape


# -- foreach and fused ops ------------------------------------------------------------------------


def _is_tensor_list(arg: object) -> bool:
    return isinstance(arg, (list, tuple)) and bool(arg) and isinstance(arg[0], Tensor)


def _local_lists(
    cls: type[DTensor], func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]
) -> list[Any]:
    """Return the arguments with local tensors in place of RaggedDTensors, checked position by
    position."""
    first = next(arg for arg in args if _is_tensor_list(arg))

    def local(i: int, x: Tensor, y: Tensor) -> Tensor:
        if isinstance(y, cls):
            if not isinstance(x, cls):
                raise refusal(func, f"position {i} pairs a {type(x).__name__} with {describe(y)}")
            _check_alike(func, x, y)
            return y._local_tensor
        if isinstance(x, cls):
            return _plain_operand(func, x, y)
        if isinstance(y, DTensor):
            raise refusal(func, f"position {i} holds a {type(y).__name__}; pass it in its own call")
        return y

    for arg in (*args, *kwargs.values()):
        if isinstance(arg, cls):
            raise refusal(func, f"expected lists of tensors, got {describe(arg)} beside them")
    return [
        [local(i, x, y) for i, (x, y) in enumerate(zip(first, arg, strict=True))]
        if _is_tensor_list(arg)
        else arg
        for arg in args
    ]


def _foreach(
    cls: type[DTensor], func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]
) -> list[Tensor]:
    first = next(arg for arg in args if _is_tensor_list(arg))
    for scalar in (arg for arg in args if isinstance(arg, Tensor) and arg.dim() == 0):
        for x in first:
            # Their local tensors have a dim, so that torch would not promote as it should.
            if x.dim() == 0 and torch.promote_types(x.dtype, scalar.dtype) != x.dtype:
                raise refusal(func, f"expected a scalar of {x.dtype}, got {scalar.dtype}")
    results = func(*_local_lists(cls, func, args, kwargs), **kwargs)
    return [
        wrap(cls, out, x._spec) if isinstance(x, cls) else out
        for x, out in zip(first, results, strict=True)
    ]


def foreach_in_place(
    cls: type[DTensor], func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]
) -> None:
    """Foreach and fused ops that write into their lists."""
    func(*_local_lists(cls, func, args, kwargs), **kwargs)


# -- the table ------------------------------------------------------------------------------------

_UNARY = """abs acos acosh asin asinh atan atanh bitwise_not ceil cos cosh deg2rad digamma erf erfc
erfinv exp exp2 expm1 floor frac i0 lgamma log log10 log1p log2 logical_not logit nan_to_num neg
positive rad2deg reciprocal relu round rsqrt sgn sigmoid sign signbit silu sin sinc sinh sqrt square
tan tanh trunc isnan isinf isposinf isneginf gelu elu hardtanh leaky_relu mish softplus"""
_BINARY = """add atan2 bitwise_and bitwise_left_shift bitwise_or bitwise_right_shift bitwise_xor
copysign div eq floor_divide fmax fmin fmod ge gt heaviside hypot le logical_and logical_or
logical_xor lt maximum minimum mul ne nextafter pow remainder rsub sub xlogy"""
_TERNARY = "addcdiv addcmul clamp clamp_max clamp_min lerp masked_fill"
_OPERANDS = """default Tensor Scalar Tensor_mode Scalar_mode Tensor_Tensor Tensor_Scalar
Scalar_Tensor Scalar_Self Scalar_Other"""
_IN_PLACE_ONLY = "fill_ zero_"
_LIKE = "clone _to_copy empty_like full_like ones_like zeros_like"
_FOREACH = """abs acos add addcdiv addcmul asin atan ceil clamp_max clamp_min clone copy cos cosh
div erf erfc exp expm1 floor frac lerp lgamma log log10 log1p log2 maximum minimum mul neg pow
reciprocal round rsqrt sigmoid sign sin sinh sqrt sub tan tanh trunc zero"""
_FOREACH_OVERLOADS = "default List Scalar ScalarList Tensor ScalarAndTensor"
_FUSED = "_fused_adagrad_ _fused_adam_ _fused_adamw_ _fused_sgd_"
_FUSED_OVERLOADS = "default tensor_lr"


def overloads_of(names: Iterable[str], overloads: str) -> list[OpOverload]:
    """Return the listed overloads that this torch has."""
    return [
        getattr(getattr(aten, name), overload)
        for name in names
        if hasattr(aten, name)
        for overload in overloads.split()
        if overload in getattr(aten, name).overloads()
    ]


def _table() -> dict[OpOverload, Handler]:
    table: dict[OpOverload, Handler] = {}

    def allow(names: Iterable[str], overloads: str, handler: Handler) -> None:
        table.update(dict.fromkeys(overloads_of(names, overloads), handler))

    unary, others = _UNARY.split(), (_BINARY + " " + _TERNARY).split()
    allow(unary, "default decimals", _elementwise)
    allow([f"{name}_" for name in unary], "default decimals", _in_place)
    allow(others, _OPERANDS, _elementwise)
    allow([f"{name}_" for name in others], _OPERANDS, _in_place)
    allow(unary + others, "out", _out)
    allow(["where"], "self", _elementwise)
    allow(_IN_PLACE_ONLY.split(), "default Scalar Tensor", _in_place)
    allow(["detach", "alias"], "default", _alias)
    allow(["_pin_memory"], "default", _elementwise)
    allow(_LIKE.split(), "default", _like)
    allow(["expand"], "default", _expand)
    allow(["view", "_unsafe_view", "unsqueeze", "squeeze"], "default dim dims", _view)
    allow(["new_empty", "new_empty_strided", "new_full", "new_ones", "new_zeros"], "default", _new)
    allow(["select"], "int", _select)
    allow(["slice"], "Tensor", _slice)
    allow(["copy_"], "default", _copy)
    allow(["is_pinned", "record_stream"], "default", _on_first)
    allow(["is_same_size"], "default", _is_same_size)

    foreach = [f"_foreach_{name}" for name in _FOREACH.split()]
    allow(foreach, _FOREACH_OVERLOADS, _foreach)
    allow([f"{name}_" for name in foreach], _FOREACH_OVERLOADS, foreach_in_place)
    allow(_FUSED.split(), _FUSED_OVERLOADS, foreach_in_place)
    return table


LOCAL_OPS = _table()
