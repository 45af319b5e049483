"""Penalties on parameters, outside of the model's forward, train as in one process.

pytorch#131965, pytorch#144289: sums of sharded parameters had gradients of another layout, or none.
"""

import copy
import io
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ranks import run_ranks
from sharding import RaggedDTensor
from small_models import VOCAB, build, shard

PENALTIES: dict[str, Callable[[list[nn.Parameter]], Tensor]] = {
    "sum": lambda ps: sum(p.sum() for p in ps),
    "mean": lambda ps: sum(p.mean() for p in ps),
    "squares": lambda ps: sum((p * p).mean() + p.square().sum() for p in ps),
    "magnitudes": lambda ps: sum(p.abs().sum() for p in ps),
    "products": lambda ps: ps[0].sum() * ps[1].norm() + ps[-1].logsumexp((0, 1)) * ps[-1].mean(),
    "norms of rows": lambda ps: sum((p.norm(dim=-1) - 1).square().sum() for p in ps),
    "columns": lambda ps: sum(p.mean(0).square().sum() + p.flatten().std() for p in ps),
    "of a copy": lambda ps: sum((p - p.detach().clone() / 2).square().sum() for p in ps),
}


def train(penalty: str, before: bool, mesh: DeviceMesh | None) -> dict[str, Tensor]:
    """Two steps on one batch that all ranks share; the parameters are held while sharded."""
    model = build()
    names = [name for name, _ in model.named_parameters()]
    if mesh is not None:
        shard(model, mesh=mesh)
    params = list(model.parameters())
    optimizer = torch.optim.SGD(params, lr=0.05)
    tokens = torch.randint(VOCAB, (2, 6), generator=torch.Generator().manual_seed(1))
    for _ in range(2):
        first = 0.01 * PENALTIES[penalty](params) if before else 0
        loss = first + model(tokens).square().mean()
        loss = loss if before else loss + 0.01 * PENALTIES[penalty](params)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return {
        name: (p if mesh is None else p.full_tensor()).detach()
        for name, p in zip(names, params, strict=True)
    }


def train_with_all(mesh_sizes: tuple[int, ...]) -> dict[str, dict[str, Tensor]]:
    mesh = None
    if mesh_sizes:
        names = ("replicate", "shard")[-len(mesh_sizes) :]
        mesh = init_device_mesh("cpu", mesh_sizes, mesh_dim_names=names)
    return {
        f"{penalty}, {before=}": train(penalty, before, mesh)
        for penalty in PENALTIES
        for before in ((False, True) if len(mesh_sizes) < 2 else (False,))
    }


@pytest.mark.parametrize("mesh_sizes", [(3,), (2, 2)])
def test_penalties_on_parameters_train_as_in_one_process(mesh_sizes: tuple[int, ...]) -> None:
    expected = train_with_all(())
    for results in run_ranks(train_with_all, torch.Size(mesh_sizes).numel(), mesh_sizes):
        same = {name: expected[name] for name in results}
        torch.testing.assert_close(results, same, rtol=1e-5, atol=1e-6)


def copies_and_second_derivatives() -> list[Any]:
    model = shard(build())
    param = model.head.weight
    (first,) = torch.autograd.grad(param.square().sum() * param.mean(), param, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), param)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.save(param, io.BytesIO())
        twin = copy.deepcopy(param)
    twin.sum().backward()
    assert all(type(grad) is RaggedDTensor for grad in (first, second, twin.grad))
    return [first.full_tensor().detach(), second.full_tensor(), twin.grad.full_tensor()]


def test_penalty_has_second_derivatives_and_leaves_parameters_that_can_be_copied() -> None:
    param = build().head.weight
    (first,) = torch.autograd.grad(param.square().sum() * param.mean(), param, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), param)
    for results in run_ranks(copies_and_second_derivatives, 2):
        torch.testing.assert_close(results, [first.detach(), second, torch.ones_like(param)])
