"""A model, the way it is sharded and the way it is called, and a loop that trains it."""

from collections.abc import Iterator

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from sharding import fully_shard

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
    """

    parameters: list[nn.Parameter]

    def build(self) -> nn.Module:
        return nn.Sequential(Layer(), Layer(), Layer())

    def shard(self, model: nn.Module) -> None:
        for part in model.children():
            fully_shard(part)
        fully_shard(model)

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
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    weights = {
        key.replace("_orig_mod.", ""): (p.full_tensor() if isinstance(p, DTensor) else p).detach()
        for key, p in named.items()
    }
    return losses, weights
