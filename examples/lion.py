"""Lion (Chen et al. 2023, arXiv:2302.06675) as an optimizer of one's own: exact on any shards."""

from typing import Any

from torch.optim.optimizer import ParamsT

from vfsdp_optim.algorithm import Algorithm
from vfsdp_optim.optimizer import StructuredOptimizer


class LionAlgorithm(Algorithm):
    """The sign of an interpolation between momentum and gradient, with decoupled weight decay."""

    name = "lion"

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"lr": 1e-4, "betas": (0.9, 0.99), "weight_decay": 0.0, **options})

    def state_keys(self, group: dict[str, Any]) -> tuple[str, ...]:
        """Return the momentum, which is kept as `states` says."""
        return ("exp_avg",)

    def update_run(self, group: dict[str, Any], run: Any, scratch: Any) -> None:
        """Update parameters and momentum in place, a few calls for many parameters."""
        lr, (beta1, beta2) = float(group["lr"]), group["betas"]
        for param, grad, states in run.chunks(scratch):
            momentum = states["exp_avg"]
            grad = grad.to(momentum.dtype)
            param.mul_(1 - lr * group["weight_decay"])
            param.add_(momentum.lerp(grad, 1 - beta1).sign_(), alpha=-lr)
            momentum.lerp_(grad, 1 - beta2)


class Lion(StructuredOptimizer):
    """Lion on plain and sharded parameters; takes `states="8bit"` as every optimizer here."""

    def __init__(self, params: ParamsT, **options: Any) -> None:
        super().__init__(params, LionAlgorithm(**options))
