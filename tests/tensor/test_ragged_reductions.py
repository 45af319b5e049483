"""Reductions of sharded tensors and their gradients are those of the full tensor, on every rank.

The oracle is torch on the full tensor. pytorch#131965, pytorch#144289: a penalty on sharded
parameters has gradients laid out as the parameters.
"""

import itertools
import random
from collections.abc import Callable, Iterator
from math import prod
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ranks import distributed_examples, run_ranks
from sharding.tensor.placement import RaggedShard
from sharding.tensor.ragged_tensor import RaggedDTensor, distribute_ragged

Dims = tuple[int, ...]
REDUCTIONS: dict[str, Callable[[Any, Dims, bool], Any]] = {
    "sum": lambda x, dims, keep: x.sum(dims, keepdim=keep),
    "mean": lambda x, dims, keep: x.mean(dims, keepdim=keep),
    "norm": lambda x, dims, keep: torch.linalg.vector_norm(x, 2, dims, keep),
    "norm 1": lambda x, dims, keep: torch.linalg.vector_norm(x, 1, dims, keep),
    "norm 3": lambda x, dims, keep: torch.linalg.vector_norm(x, 3, dims, keep),
    "logsumexp": lambda x, dims, keep: x.logsumexp(dims, keepdim=keep),
    "sum of squares": lambda x, dims, keep: x.square().sum(dims, keepdim=keep),
    "sum of magnitudes": lambda x, dims, keep: x.abs().sum(dims, keepdim=keep),
}
OF_SOME = REDUCTIONS | {
    "norm inf": lambda x, dims, keep: torch.linalg.vector_norm(x, float("inf"), dims, keep),
    "amax": lambda x, dims, keep: x.amax(dims, keepdim=keep),
    "amin": lambda x, dims, keep: x.amin(dims, keepdim=keep),
    "var": lambda x, dims, keep: x.var(dims, correction=0, keepdim=keep),
    "std": lambda x, dims, keep: x.std(dims, correction=0, keepdim=keep),
}
WITHOUT_GRADIENT: dict[str, Callable[[Any, Dims, bool], Any]] = {
    "norm 0": lambda x, dims, keep: torch.linalg.vector_norm(x, 0, dims, keep),
    "norm -1": lambda x, dims, keep: torch.linalg.vector_norm(x, -1, dims, keep),
    "norm -inf": lambda x, dims, keep: torch.linalg.vector_norm(x, -float("inf"), dims, keep),
    "any": lambda x, dims, keep: (x > 1).any(dims[0], keepdim=keep),
    "any of some": lambda x, dims, keep: torch.any(x > 1, dims, keepdim=keep),
    "all of bytes": lambda x, dims, keep: torch.all((x > 0).byte(), dims, keepdim=keep),
    "count_nonzero": lambda x, dims, keep: (x > 0).count_nonzero(dims),
    "sum of ints": lambda x, dims, keep: (x * 9).int().sum(dims, keepdim=keep),
    "sum of bfloat16": lambda x, dims, keep: x.bfloat16().sum(dims, keepdim=keep).float(),
    "amax of ints": lambda x, dims, keep: (x * 9).int().amax(dims, keepdim=keep),
    "amax beside NaN": lambda x, dims, keep: x.sqrt().amax(dims, keepdim=keep),
}


def draw(seed: int, shards: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], Dims]]:
    """Shapes, cuts of the flattened tensor with empty pieces among them, and dims to reduce."""
    generator = random.Random(seed)
    for _ in range(4):
        shape = tuple(generator.choice([0, 1, 2, 3, 5]) for _ in range(generator.randint(0, 3)))
        cuts = sorted(generator.randint(0, prod(shape)) for _ in range(shards - 1))
        units = tuple(b - a for a, b in itertools.pairwise([0, *cuts, prod(shape)]))
        dims = [dim for dim in range(len(shape)) if generator.random() < 0.5]
        yield shape, units, tuple(dims or range(len(shape))[:1])


def mesh_of(shards: int, replicas: int) -> DeviceMesh:
    sizes = (replicas, shards) if replicas > 1 else (shards,)
    return init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard")[-len(sizes) :])


def outcome(op: Callable[..., Any], *args: Any) -> Any:
    try:
        return op(*args)
    except (IndexError, RuntimeError) as error:
        return type(error)


def compare(got: Any, expected: Any, *, rtol: float = 1e-4) -> str:
    if not isinstance(expected, Tensor):
        return "" if got == expected else f"expected {expected}, got {got}"
    if not isinstance(got, Tensor) or got.shape != expected.shape or got.dtype != expected.dtype:
        return f"expected {expected}, got {got}"
    close = torch.allclose(got, expected, rtol=rtol, atol=1e-5, equal_nan=True)
    return "" if close else f"expected {expected}, got {got}"


def own_part(full: Tensor, param: RaggedDTensor) -> Tensor:
    return full.reshape(-1)[slice(*param.bounds)]


def check_results(shards: int, replicas: int, seed: int) -> list[str]:
    mesh, wrong = mesh_of(shards, replicas), []
    for shape, units, dims in draw(seed, shards):
        full = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 2
        x = distribute_ragged(full, mesh, RaggedShard(range(len(shape)), units))
        for (name, op), keep in itertools.product((OF_SOME | WITHOUT_GRADIENT).items(), (0, 1)):
            if not dims and name == "any":
                continue
            got, expected = (outcome(op, tensor, dims, bool(keep)) for tensor in (x, full))
            if found := compare(got, expected, rtol=2e-2 if "bfloat16" in name else 1e-4):
                wrong.append(f"{name} over {dims} of {shape} cut {units}: {found}")
    return wrong


def check_gradients(shards: int, replicas: int, seed: int) -> list[str]:
    """Of a reduction times other scalars, beside a second and a third use of the parameter."""
    mesh, wrong = mesh_of(shards, replicas), []
    for (shape, units, dims), second in itertools.product(draw(seed, shards), (False, True)):
        if not prod(shape):
            continue
        for name, op in OF_SOME.items():
            full = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).double()
            placement = RaggedShard(range(len(shape)), units)
            x = nn.Parameter(distribute_ragged(full, mesh, placement))
            y = full.requires_grad_()
            for tensor in (x, y):
                result = op(tensor, dims, second)
                loss = (result * torch.arange(1.0, result.numel() + 1).view(result.shape)).sum()
                if second:
                    loss = loss * tensor.mean() + tensor.flatten().sum() + 0.1 * tensor.norm()
                    loss = loss + (tensor - tensor.detach() / 2).square().sum()
                loss.backward()
            where = f"{name} over {dims} of {shape} cut {units}, {second=}"
            if type(x.grad) is not RaggedDTensor or x.grad.placements != x.placements:
                wrong.append(f"{where}: got {x.grad!r}")
            elif found := compare(x.grad.to_local(), own_part(y.grad, x)):
                wrong.append(f"{where}: {found}")
    return wrong


@distributed_examples
@given(layout=st.sampled_from([(1, 1), (2, 1), (3, 1), (4, 1), (2, 2)]), seed=st.integers(0, 999))
def test_reduction_over_some_dims_is_that_of_the_full_tensor(layout, seed):
    """Over no, some and all dims, of pieces cut inside rows, and of ranks that hold nothing."""
    assert run_ranks(check_results, prod(layout), *layout, seed) == [[]] * prod(layout)


@distributed_examples
@given(layout=st.sampled_from([(1, 1), (2, 1), (3, 1), (4, 1), (2, 2)]), seed=st.integers(0, 999))
def test_gradient_of_a_reduction_has_the_layout_of_the_tensor(layout, seed):
    """pytorch#131965: sums and means had plain gradients of the full shape, products failed."""
    assert run_ranks(check_gradients, prod(layout), *layout, seed) == [[]] * prod(layout)
