"""What the tests of `verify` pass to --model and --optimizer."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Shard

from vfsdp_optim import AdamW


def make_model():
    """Two layers that are each cut between two ranks, and a loss."""
    model = nn.Sequential(nn.Linear(30, 200), nn.Linear(200, 9))
    x = torch.randn(8, 30, generator=torch.Generator().manual_seed(dist.get_rank()))
    return model, lambda model: model(x).square().mean()


def make_wrong(module: nn.Module) -> torch.optim.Optimizer:
    """AdamW of gradients that are divided by the norm of what this rank holds."""
    return Wrong(module.named_parameters(), lr=0.1)


class Wrong(AdamW):
    """See `make_wrong`."""

    def step(self, closure=None):
        """Take a step."""
        for group in self.param_groups:
            for p in group["params"]:
                piece = p.grad.to_local() if hasattr(p.grad, "to_local") else p.grad
                piece.div_(piece.norm().clamp(min=1e-3))
        return super().step(closure)


class WrongOnFsdp2(torch.optim.SGD):
    """SGD with twice the gradient on torch's shards."""

    def step(self, closure=None):
        """Take a step."""
        for p in self.param_groups[0]["params"]:
            if any(isinstance(place, Shard) for place in getattr(p, "placements", ())):
                p.grad.to_local().mul_(2)
        return super().step(closure)


def make_wrong_on_fsdp2(module: nn.Module) -> torch.optim.Optimizer:
    """See `WrongOnFsdp2`."""
    return WrongOnFsdp2(module.parameters(), lr=0.1)


class Scaled(nn.Linear):
    """A layer times a 0-D parameter."""

    def __init__(self):
        super().__init__(6, 5)
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, x):
        """(B, 6) -> (B, 5)."""
        return self.scale * super().forward(x)


def make_model_with_a_scalar():
    """A model that torch's fully_shard refuses, and a loss."""
    return Scaled(), lambda model: model(torch.ones(4, 6)).sum()


def make_no_loss():
    """A model alone."""
    return nn.Linear(6, 5)


def make_sgd(module: nn.Module) -> torch.optim.Optimizer:
    """SGD with momentum."""
    return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
