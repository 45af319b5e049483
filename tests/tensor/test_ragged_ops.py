"""Every op on a RaggedDTensor is the op on the full tensor, or an error; never the local answer."""

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._ops import OpOverload
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from ranks import run_ranks
from sharding.tensor.local_ops import LOCAL_OPS
from sharding.tensor.placement import RaggedShard
from sharding.tensor.ragged_tensor import RaggedDTensor, distribute_ragged

aten = torch.ops.aten
WORLD_SIZES = [1, 2, 3, 5]

# Cuts inside rows, on rows, and ranks without elements in front, between and behind.
LAYOUTS = {
    1: [((4, 3), (12,)), ((5,), (5,)), ((), (1,)), ((0, 3), (0,))],
    2: [((4, 3), (5, 7)), ((4, 3), (0, 12)), ((5,), (3, 2)), ((), (0, 1)), ((2, 0), (0, 0))],
    3: [((4, 3), (4, 0, 8)), ((2, 2, 3), (1, 11, 0)), ((), (0, 1, 0))],
    5: [((4, 3), (0, 1, 0, 11, 0)), ((2, 3), (2, 1, 1, 1, 1)), ((3,), (1, 0, 1, 0, 1))],
}

# Results may differ in the last bit: vectorised kernels treat the tail of a piece differently.
CLOSE = {
    torch.float64: {"rtol": 1e-12, "atol": 1e-12},
    torch.float32: {"rtol": 1e-5, "atol": 1e-6},
    torch.bfloat16: {"rtol": 1e-2, "atol": 1e-2},
    torch.complex64: {"rtol": 1e-5, "atol": 1e-6},
}


def difference(actual: object, expected: object) -> str | None:
    """What is wrong with a result on pieces, given the result on full tensors."""
    if isinstance(expected, (list, tuple)):
        if not isinstance(actual, (list, tuple)) or len(actual) != len(expected):
            return f"got {actual!r}"
        return next(filter(None, map(difference, actual, expected)), None)
    if not isinstance(expected, Tensor):
        return None if actual == expected else f"expected {expected!r}, got {actual!r}"
    if type(actual) is DTensor:
        return "a stock DTensor over a piece"
    if not isinstance(actual, Tensor) or actual.shape != expected.shape:
        return f"expected shape {tuple(expected.shape)}, got {actual!r}"
    if actual.dtype != expected.dtype:
        return f"expected {expected.dtype}, got {actual.dtype}"
    if isinstance(actual, RaggedDTensor):
        expected = expected.reshape(-1)[slice(*actual.bounds)]
        actual = actual.to_local()
    close = CLOSE.get(expected.dtype, {"rtol": 0, "atol": 0})
    if actual.shape == expected.shape and torch.allclose(actual, expected, equal_nan=True, **close):
        return None
    return f"expected {expected.tolist()!r}, got {actual.tolist()!r}"


def inputs(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Three full tensors: of positive, negative and zero floats, or of positive integers."""
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(shape, generator=generator) for _ in range(3)]
    for tensor in tensors:
        tensor.view(-1)[3:4] = 0
    return [
        t.to(dtype) if dtype.is_floating_point else (t.abs() * 4 + 1).to(dtype) for t in tensors
    ]


def cut(tensors: list[Tensor], units: tuple[int, ...]) -> list[RaggedDTensor]:
    mesh = init_device_mesh("cpu", (len(units),))
    return [distribute_ragged(t, mesh, RaggedShard(tuple(range(t.dim())), units)) for t in tensors]


def _transposed(x: Any, y: Any) -> list[Any]:
    """What scripts do with transposed parameters: read, reduce, write, and turn back."""
    order = list(range(x.dim()))[1:] + [0] * (x.dim() > 0)
    turned, other = x.permute(order), y.permute(order)
    full = torch.arange(float(x.numel())).view(x.shape).permute(order)
    results = [turned, turned * other + 1, turned.mT if x.dim() > 1 else turned]
    if x.numel() and x.dim():
        results += [turned.sum(0), turned.norm(dim=-1), turned.mean(-1, keepdim=True), turned.max()]
        results += [turned.amax(0), turned.var(0), turned.logsumexp(-1), turned.clone()]
    turned.mul_(2)  # a view: what is written is written into x
    results.append(x.clone())
    return [*results, turned.copy_(full).transpose(0, -1) if x.dim() else turned, x]


RIGHT: dict[str, Callable[[Any, Any, Any], Any]] = {
    # element-wise, scalars of every kind, operators
    "add": lambda x, y, z: x + y,
    "add with alpha": lambda x, y, z: torch.add(x, y, alpha=3),
    "python scalar on the left": lambda x, y, z: 1 - x * 2,
    "0-dim tensor": lambda x, y, z: torch.tensor(3.0) * x,
    "0-dim tensor of a wider dtype": lambda x, y, z: x + torch.tensor(2.0, dtype=torch.float64),
    "rounding division": lambda x, y, z: torch.div(x, y.abs() + 1, rounding_mode="floor"),
    "integer power": lambda x, y, z: x**2,
    "where": lambda x, y, z: torch.where(x > 0, y, z),
    "where with scalar": lambda x, y, z: torch.where(x > 0, y, 2.0),
    "masked_fill": lambda x, y, z: x.masked_fill(y > 0, 7.0),
    "clamp by tensor": lambda x, y, z: torch.clamp(x, min=y.minimum(z), max=y.maximum(z)),
    "logic": lambda x, y, z: (x > 0) & (y <= z) | ~(z != 0),
    "isfinite": lambda x, y, z: (x / y).isfinite(),
    "isclose": lambda x, y, z: torch.isclose(x, x + 1e-9 * y),
    "gelu": lambda x, y, z: F.gelu(x, approximate="tanh"),
    "softplus": lambda x, y, z: F.softplus(x),
    "in a chain of dtypes": lambda x, y, z: (x.double() * y).to(torch.bfloat16).float(),
    # in place
    "augmented": lambda x, y, z: x.__iadd__(y).mul_(2).addcdiv_(y, z.abs() + 1, value=0.5),
    "lerp_": lambda x, y, z: x.lerp_(y, 0.3).clamp_(min=-1),
    "copy_": lambda x, y, z: x.copy_(y.double()),
    "copy_ of a full tensor": lambda x, y, z: x.copy_(torch.ones(x.shape).cumsum(0)),
    "copy_ of a scalar": lambda x, y, z: x.copy_(torch.tensor(3.0)),
    "zero_": lambda x, y, z: x.zero_(),
    "out=": lambda x, y, z: torch.maximum(x, y, out=z),
    # layout
    "same view": lambda x, y, z: x.view(x.shape).view_as(x).reshape(x.shape),
    "view with -1": lambda x, y, z: x.view(-1, *x.shape[1:]) if x.dim() and x.numel() else x,
    "flat view": lambda x, y, z: x.view(-1).add_(y.reshape(-1)),
    "view of another shape": lambda x, y, z: x.view(1, *reversed(x.shape), 1),
    "flatten": lambda x, y, z: x.flatten().max() if x.numel() else x,
    "unsqueeze and squeeze": lambda x, y, z: [x[None], x.unsqueeze(-1), x[None].squeeze()],
    "transposed": lambda x, y, z: [
        v.full_tensor() if isinstance(v, DTensor) else v for v in _transposed(x, y)
    ],
    "same expand": lambda x, y, z: x.expand(x.shape).expand_as(y),
    "rows": lambda x, y, z: [x[0], x[-1]] if x.dim() and len(x) else x,
    "row in place": lambda x, y, z: (x[1].fill_(7) if x.dim() > 1 and len(x) else x, x),
    "runs of rows": lambda x, y, z: [x[1:], x[:-1], x[1:2], x[9:], x[:]] if x.dim() else x,
    "narrow": lambda x, y, z: x.narrow(0, len(x) // 2, len(x) - len(x) // 2) if x.dim() else x,
    "rows in place": lambda x, y, z: (x.__setitem__(slice(1, 3), 7), x) if x.dim() else x,
    "one element": lambda x, y, z: x * torch.full((1,) * x.dim(), 2.0),
    "one expanded": lambda x, y, z: torch.tensor(2.0).expand(x.shape) * x if x.numel() else x,
    "contiguous": lambda x, y, z: x.contiguous(),
    "detach": lambda x, y, z: x.detach(),
    "data": lambda x, y, z: x.data.mul_(2),
    "clone": lambda x, y, z: x.clone(memory_format=torch.contiguous_format),
    "zeros_like": lambda x, y, z: torch.zeros_like(x, memory_format=torch.preserve_format),
    "full_like": lambda x, y, z: torch.full_like(x, 3, dtype=torch.int64),
    "new_zeros": lambda x, y, z: x.new_zeros(x.shape, dtype=torch.float64),
    "new_full": lambda x, y, z: x.new_full(x.shape, 2.5),
    "new_empty_strided": lambda x, y, z: x.new_empty_strided(x.shape, x.stride()).fill_(1),
    "is_same_size": lambda x, y, z: x.is_same_size(y),
    "is_pinned": lambda x, y, z: x.is_pinned(),
    # foreach
    "foreach add": lambda x, y, z: torch._foreach_add([x, y], [z, x], alpha=2),
    "foreach scalars": lambda x, y, z: torch._foreach_mul([x, y], [2.0, 3.0]),
    "foreach 0-dim tensor": lambda x, y, z: torch._foreach_mul([x, y], torch.tensor(3.0)),
    "foreach 0-dim tensors": lambda x, y, z: torch._foreach_div([x, y], [torch.tensor(3.0)] * 2),
    "foreach beside plain": lambda x, y, z: torch._foreach_add([x, torch.ones(2)], 1.0),
    "foreach in place": lambda x, y, z: torch._foreach_addcmul_([x], [y], [z], 0.5) or x,
    # full reductions
    "sum": lambda x, y, z: x.sum(),
    "sum over all dims": lambda x, y, z: x.sum(tuple(range(x.dim())), keepdim=True),
    "sum of bools": lambda x, y, z: (x > 0).sum(),
    "mean": lambda x, y, z: x.mean(),
    "mean of bfloat16": lambda x, y, z: x.bfloat16().mean(),
    "norm": lambda x, y, z: x.norm(),
    "norm over all dims": lambda x, y, z: torch.linalg.vector_norm(
        x, 1, dim=tuple(range(x.dim())), keepdim=True
    ),
    "norm of bfloat16 as float32": lambda x, y, z: torch.linalg.vector_norm(
        x.bfloat16(), dtype=torch.float32
    ),
    "foreach norm": lambda x, y, z: torch._foreach_norm([x, torch.ones(3), y.double()], 1),
    "any": lambda x, y, z: (x > 1).any(),
    "all": lambda x, y, z: (x > -1).all(),
    "count_nonzero": lambda x, y, z: x.count_nonzero(),
    "logsumexp": lambda x, y, z: x.logsumexp(tuple(range(x.dim()))),
    "equal": lambda x, y, z: (torch.equal(x, x.clone()), torch.equal(x, x.mul(y))),
    "allclose": lambda x, y, z: (torch.allclose(x, x + 1e-9), torch.allclose(x, y)),
}
# What these do with empty tensors is an error of torch's own.
NOT_EMPTY: dict[str, Callable[[Any, Any, Any], Any]] = {
    "max": lambda x, y, z: x.max(),
    "min": lambda x, y, z: x.min(),
    "amax": lambda x, y, z: x.amax(),
    "amin over all dims": lambda x, y, z: x.amin(tuple(range(x.dim()))),
    "max beside a NaN": lambda x, y, z: (x / x).max(),
    "max of ints": lambda x, y, z: (x * 9).int().max(),
    "item": lambda x, y, z: x.max().item(),
}


def check_right(shape: tuple[int, ...], units: tuple[int, ...]) -> list[str]:
    ops = RIGHT | (NOT_EMPTY if math.prod(shape) else {})
    wrong = []
    for name, op in ops.items():
        expected = op(*inputs(shape))
        wrong_here = difference(op(*cut(inputs(shape), units)), expected)
        wrong += [f"{name}: {wrong_here}"] if wrong_here else []
    return wrong


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_allowed_op_equals_the_op_on_the_full_tensor(world_size: int) -> None:
    for shape, units in LAYOUTS[world_size]:
        assert run_ranks(check_right, world_size, shape, units) == [[]] * world_size


# Tested by name above or in test_ragged_tensor.py, or without defined values.
NOT_SYNTHESISED = re.compile(
    r"aten\.(_amp|_fused|_pin_memory|_to_copy|_unsafe_view|copy_|empty|expand|new_|record_stream"
    r"|select|slice|squeeze|unsqueeze|view)|\.out$"
)


FOREACH = "aten::_foreach"


def synthesise(func: OpOverload, tensors: list[Tensor]) -> tuple[list[Any], dict[str, Any]]:
    """Arguments for an op from its schema: tensors in turn, and plain numbers."""
    tensors = list(tensors)
    numbers = {"number": 2, "float": 0.5, "int": 2, "List[number]": [2, 3], "bool": True}
    args, kwargs = [], {}
    for argument in func._schema.arguments:
        kind = str(argument.type)
        if kind == "Tensor" and argument.name == "scalars":
            value = torch.tensor([2, 3])
        elif kind == "Tensor" and (argument.name == "value" or func.name().startswith(FOREACH)):
            value = torch.tensor(2)
        elif kind == "Tensor":
            value = tensors.pop(0)
        elif kind == "List[Tensor]":
            value = [tensors.pop(0), tensors.pop(0)]
        elif kind == "Optional[str]" and argument.default_value is None:
            value = "floor"
        elif kind.startswith("Optional[number") and argument.name in ("min", "max"):
            value = 0.5
        elif kind == "Optional[Tensor]" and argument.name == "min":
            value = tensors.pop(0)
        elif argument.has_default_value():
            continue
        else:
            value = numbers[kind]
        if argument.kwarg_only:
            kwargs[argument.name] = value
        else:
            args.append(value)
    return args, kwargs


def check_synthesised(shape: tuple[int, ...], units: tuple[int, ...]) -> tuple[list[str], int]:
    """What is wrong with the ops of the table, and how many were run."""
    wrong, count = [], 0
    for func in sorted(LOCAL_OPS, key=str):
        if NOT_SYNTHESISED.search(str(func)):
            continue
        for dtype in (torch.float32, torch.int32, torch.bool):
            full = [t for _ in range(3) for t in inputs(shape, dtype)]
            pieces = cut(full, units)
            args, kwargs = synthesise(func, full)
            try:
                expected = func(*args, **kwargs)
            except RuntimeError:  # not for this dtype
                continue
            args, kwargs = synthesise(func, pieces)
            # In-place ops are seen in their arguments too.
            found = difference([func(*args, **kwargs), *pieces], [expected, *full])
            wrong += [f"{func} {dtype}: {found}"] if found else []
            count += 1
            break
        else:
            wrong.append(f"{func}: no arguments found")
    return wrong, count


@pytest.mark.parametrize("world_size", [1, 3])
def test_every_op_of_the_table_equals_the_op_on_the_full_tensor(world_size: int) -> None:
    shape, units = LAYOUTS[world_size][0]
    results = run_ranks(check_synthesised, world_size, shape, units)
    assert [wrong for wrong, _ in results] == [[]] * world_size
    assert min(count for _, count in results) > 300


OTHER = (7, 5)  # another layout of the same tensor on two ranks

RAISES: dict[str, Callable[[Any, Any], Any]] = {
    # shapes and positions
    "view of a permuted view": lambda x, p: x.permute(1, 0).view(3, 2, 2),
    "rows of a transpose": lambda x, p: x.T[0],
    "run of rows of a transpose": lambda x, p: x.T[1:],
    "unsqueeze of a transpose": lambda x, p: x.t().unsqueeze(0),
    "contiguous transpose": lambda x, p: x.t().contiguous(),
    "random numbers into a transpose": lambda x, p: x.t().normal_(),
    "transpose beside its source": lambda x, p: (
        x.view(2, 6).view(4, 3).view(6, 2).t() * x.view(2, 6)
    ),
    "view of a transpose": lambda x, p: x.transpose(0, 1).reshape(-1),
    "view as another dtype": lambda x, p: x.view(torch.int32),
    "expand": lambda x, p: x.expand(2, 4, 3),
    "repeat": lambda x, p: x.repeat(2, 1),
    "as_strided": lambda x, p: x.as_strided((2,), (1,)),
    "select along another dim": lambda x, p: x[:, 1],
    "slice along another dim": lambda x, p: x[:, 1:],
    "slice with steps": lambda x, p: x[::2],
    "index": lambda x, p: x[torch.tensor([0])],
    "boolean index": lambda x, p: x[x > 0],
    "index_put": lambda x, p: x.__setitem__(torch.tensor([0]), 1.0),
    "gather": lambda x, p: x.gather(0, torch.zeros(1, 3, dtype=torch.int64)),
    "scatter": lambda x, p: x.scatter(0, torch.zeros(1, 3, dtype=torch.int64), 1.0),
    "index_select": lambda x, p: x.index_select(0, torch.tensor([1])),
    "take": lambda x, p: x.take(torch.tensor([0])),
    "masked_select": lambda x, p: x.masked_select(x > 0),
    "unbind": lambda x, p: list(x),
    "split": lambda x, p: x.split(1),
    "chunk": lambda x, p: x.chunk(2),
    "cat": lambda x, p: torch.cat([x, x]),
    "stack": lambda x, p: torch.stack([x, x]),
    "roll": lambda x, p: x.roll(1),
    "flip": lambda x, p: x.flip(0),
    "tril": lambda x, p: x.tril(),
    "diagonal": lambda x, p: x.diagonal(),
    "pad": lambda x, p: F.pad(x, (1, 1)),
    "new of another shape": lambda x, p: x.new_zeros(5),
    "resize_": lambda x, p: x.resize_(3, 3),
    "nonzero": lambda x, p: x.nonzero(),
    # order, scans and partial reductions
    "sort": lambda x, p: x.sort(),
    "topk": lambda x, p: x.topk(1),
    "argmax": lambda x, p: x.argmax(),
    "median": lambda x, p: x.median(),
    "kthvalue": lambda x, p: x.kthvalue(1),
    "unique": lambda x, p: x.unique(),
    "cumsum": lambda x, p: x.cumsum(0),
    "cumprod": lambda x, p: x.cumprod(1),
    "logcumsumexp": lambda x, p: x.logcumsumexp(0),
    "max over a dim": lambda x, p: x.max(0),
    "prod": lambda x, p: x.prod(),
    "softmax": lambda x, p: x.softmax(0),
    "histc": lambda x, p: x.histc(3),
    "sum as another kind": lambda x, p: x.sum(dtype=torch.int64),
    "max of int64": lambda x, p: x.long().max(),
    "norm of complex": lambda x, p: x.to(torch.complex64).norm(),
    # linear algebra and layers
    "matmul": lambda x, p: x @ p.T,
    "matmul from the right": lambda x, p: p.T @ x,
    "mv": lambda x, p: x @ p[0],
    "einsum": lambda x, p: torch.einsum("ij,ij->i", x, x),
    "kron": lambda x, p: torch.kron(x, x),
    "qr": lambda x, p: torch.linalg.qr(x),
    "svd": lambda x, p: torch.linalg.svd(x),
    "matrix norm": lambda x, p: torch.linalg.matrix_norm(x, 2),
    "linear": lambda x, p: F.linear(p, x),
    "embedding": lambda x, p: F.embedding(torch.tensor([0]), x),
    "layer_norm": lambda x, p: F.layer_norm(x, (3,)),
    "fft": lambda x, p: torch.fft.fft(x),
    # random numbers
    "rand_like": lambda x, p: torch.rand_like(x),
    "randn_like": lambda x, p: torch.randn_like(x),
    "bernoulli_ of another tensor": lambda x, p: x.clone().bernoulli_(x.sigmoid()),
    "bernoulli": lambda x, p: x.sigmoid().bernoulli(),
    "orthogonal_": lambda x, p: torch.nn.init.orthogonal_(x),
    "eye_": lambda x, p: torch.nn.init.eye_(x),
    # other tensors among the arguments
    "plain operand": lambda x, p: x + p,
    "plain row": lambda x, p: x * p[0],
    "plain in place": lambda x, p: x.add_(p),
    "into plain": lambda x, p: p.add_(x),
    "copy into plain": lambda x, p: p.copy_(x),
    "scalar into plain": lambda x, p: torch.tensor(1.0).add_(x.sum() * 0 + x),
    "out= plain": lambda x, p: torch.add(x, x, out=p),
    "out= another op": lambda x, p: torch.cumsum(x, 0, out=x),
    "copy_ of a row": lambda x, p: x.copy_(p[0]),
    "foreach with plain": lambda x, p: torch._foreach_add_([x], [p]),
    "foreach into plain": lambda x, p: torch._foreach_add_([p], [x]),
    "equal to plain": lambda x, p: torch.equal(x, p),
}
UNLIKE: dict[str, Callable[[Any, Any], Any]] = {
    "operand": lambda x, y: x + y,
    "in place": lambda x, y: x.mul_(y),
    "out=": lambda x, y: torch.mul(x, x, out=y),
    "copy_": lambda x, y: x.copy_(y),
    "equal": lambda x, y: torch.equal(x, y),
    "foreach": lambda x, y: torch._foreach_lerp_([x, x], [x, y], 0.5),
    "fused": lambda x, y: torch._fused_sgd_(
        [x], [y], [], weight_decay=0, momentum=0, lr=1, dampening=0, nesterov=False,
        maximize=False, is_first_step=True,
    ),
}  # fmt: skip


def raised_by(op: Callable[..., Any], *args: object) -> str:
    """The error of an op, which has to be the one that names the op and the cure."""
    try:
        result = op(*args)
    except NotImplementedError as error:
        text = str(error)
        names_op = re.search(r"aten\.\w+", text) is not None
        return "" if names_op and ".full_tensor()" in text else f"says {text}"
    except Exception as error:
        return f"raised {error!r}"
    return f"returned {result!r}"


def check_raises(units: tuple[int, ...]) -> dict[str, str]:
    full, other, _ = inputs((4, 3))
    wrong = {}
    for name, op in RAISES.items():
        (x,) = cut([full], units)
        if complaint := raised_by(op, x, other.clone()):
            wrong[name] = complaint
        elif not torch.equal(x.full_tensor(), full):
            wrong[name] = "wrote before it raised"
    for name, op in UNLIKE.items():
        (x,), (y,) = cut([full], units), cut([other], OTHER)
        if complaint := raised_by(op, x, y):
            wrong[name] = complaint
    return wrong


@pytest.mark.parametrize("units", [(6, 6), (0, 12)])
def test_other_op_raises_on_every_rank_also_where_the_piece_is_empty(units):
    assert len(RAISES) + len(UNLIKE) > 80
    assert run_ranks(check_raises, 2, units) == [{}, {}]


def test_op_that_raises_is_one_that_torch_has() -> None:
    # Else the errors above could be about wrong arguments.
    for name, op in RAISES.items():
        full, other, _ = inputs((4, 3))
        try:
            op(full, other)
        except NotImplementedError as error:
            raise AssertionError(f"{name} is not implemented by torch either") from error
        except RuntimeError:
            assert name in ("scalar into plain", "resize_"), name
