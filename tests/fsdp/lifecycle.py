"""A model, the way it is sharded and the way it is called, and a loop that trains it."""

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from sharding import fully_shard
from sharding.fsdp.bucket import ShardedState
from sharding.fsdp.module_state import state_of
from small_models import full
from training import mesh_of

WIDTH = 10
STEPS = 4


class Layer(nn.Module):
    """A residual layer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, 23), nn.Linear(23, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.outer(F.gelu(self.inner(x)))


class Case:
    """A lifecycle; by default of three sharded layers in a row.

    Attributes:
        parameters: those of the model before its first forward, set by `train`.
        options: of `fully_shard`, set by `train`: on 4 ranks, a mesh of two replicas.
        ends_in_backward: whether a step does, which leaves nothing gathered.
    """

    parameters: list[nn.Parameter]
    options: Mapping[str, Any] = MappingProxyType({})
    ends_in_backward = True

    def build(self) -> nn.Module:
        return nn.Sequential(Layer(), Layer(), Layer())

    def shard(self, model: nn.Module) -> None:
        for part in model.children():
            fully_shard(part, **self.options)
        fully_shard(model, **self.options)

    def step(self, model: nn.Module, x: Tensor, step: int) -> Tensor:
        """Forward and backward; returns the loss."""
        loss = model(x).square().mean()
        loss.backward()
        return loss


def on_ranks() -> bool:
    return dist.is_initialized()


def batches(world_size: int, rank: int) -> Iterator[Tensor]:
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        yield torch.randn(60, WIDTH, generator=generator).tensor_split(world_size)[rank]


def train(case: Case) -> tuple[list[float], dict[str, Tensor]]:
    """Trains in one process or on the default group's ranks; losses and full weights."""
    world_size, rank = (dist.get_world_size(), dist.get_rank()) if on_ranks() else (1, 0)
    torch.manual_seed(0)
    case.options = {"mesh": mesh_of((2, 2))} if world_size == 4 else {}
    model = case.build()
    if on_ranks():
        case.shard(model)
    named = dict(model.named_parameters())
    case.parameters = list(named.values())
    optimizer = torch.optim.SGD(
        [p for p in case.parameters if p.is_floating_point()], lr=0.02, momentum=0.9
    )
    losses = []
    for step, x in enumerate(batches(world_size, rank)):
        loss = case.step(model, x, step).detach()
        if on_ranks():
            dist.all_reduce(loss, op=dist.ReduceOp.AVG)
            states = [state_of(module) for module in model.modules() if case.ends_in_backward]
            found = {s.bucket.state for s in states if s is not None and s.bucket is not None}
            assert found <= {ShardedState.SHARDED}, "gathered weights stay"
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, {key.replace("_orig_mod.", ""): full(p) for key, p in named.items()}
