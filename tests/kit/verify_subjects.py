"""What the tests of `verify` pass to --model and --optimizer."""

import torch
import torch.distributed as dist
from torch import nn

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
