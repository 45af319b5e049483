"""Hooks on the gradient of a sharded parameter: those that would never run are refused.

May touch: nothing.

Forward computes with gathered parameters, so autograd never reaches the sharded ones: their
averaged gradients are set, and then the hooks of `register_post_accumulate_grad_hook` are called.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from torch import Tensor, nn
from torch.distributed.tensor import DTensor


class GradientHooks(DTensor):
    """A DTensor that, as a parameter, takes no hooks which autograd would have to call."""

    def register_hook(self, hook: Callable[[Tensor], Tensor | None]) -> Any:
        """Do as torch's, for what is computed from parameters.

        Raises:
            NotImplementedError: This is a parameter.
        """
        if isinstance(self, nn.Parameter):
            self._refuse("register_hook")
        return super().register_hook(hook)

    def view_as(self, other: Tensor) -> Tensor:
        """Do as torch's.

        Raises:
            NotImplementedError: Both are one parameter, which is how hooks of its node are placed.
        """
        if other is self and isinstance(self, nn.Parameter):
            self._refuse("a hook on the AccumulateGrad node (p.view_as(p).grad_fn)")
        return super().view_as(other)

    def expand_as(self, other: Tensor) -> Tensor:
        """Do as torch's.

        Raises:
            NotImplementedError: Both are one parameter, which is how hooks of its node are placed.
        """
        if other is self and isinstance(self, nn.Parameter):
            self._refuse("a hook on the AccumulateGrad node (p.expand_as(p).grad_fn)")
        return super().expand_as(other)

    def _refuse(self, what: str) -> NoReturn:
        raise NotImplementedError(
            f"{what} of a sharded parameter of shape {tuple(self.shape)} would never run: its "
            f"gradient is averaged outside of autograd; use p.register_post_accumulate_grad_hook("
            f"hook), where p.grad is the average and may be changed in place, or a hook on the "
            f"module"
        )
