"""InputViews: views of what a module takes, whose nodes tell that backward has left the module.

May touch: the graph of autograd, by hooks on its nodes. Knows no bucket.

[Note: where backward leaves a module]
Each input that requires grad is handed on as a view of itself: the view's node is this call's own,
while the input may have other uses (a bias that every block adds). The engine runs the nodes of one
device in the reverse of the order in which they were made, so of the nodes of these views the one
made first runs last, and all that the module computed has run by then. A view that the module did
not use has no node in a backward, so every node asks whether one made before it is still to run.
Hooks hold those nodes only, never the later ones: nothing holds itself, and a graph that nobody
walks is freed at once.

A custom autograd function would count for us, but its outputs cannot be changed in place
(pytorch#124017), and it turns the gradient of an unused input from none into zeros, with which an
optimizer decays weights that it should skip.

A module that changes an input in place changes its caller's tensor, as it does without sharding.
Autograd then gives the view another node. The gradient of what the caller's tensor was before is
the next to come, so the node that made it tells instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor


class InputViews:
    """Views of the inputs of one call.

    Args:
        inputs: Tensors that require grad.
        device: Where the module computes; inputs of other devices are watched if it has none.
        left: Called once in each backward that reaches an input: all gradients of inputs are known.
    """

    __slots__ = ("_of", "_watched")

    def __init__(
        self, inputs: Sequence[Tensor], device: torch.device, left: Callable[[], None]
    ) -> None:
        self._of = {id(x): x.view_as(x) for x in inputs}
        views = list(self._of.values())
        # A node of another device may run at any time.
        views = [view for view in views if view.device.type == device.type] or views
        made: list[Any] = []
        for view in views:
            view.grad_fn.register_prehook(partial(_reached, left, tuple(made)))  # type: ignore[union-attr]
            made.append(view.grad_fn)
        self._watched = [(view, view._version, view._base.grad_fn) for view in views]  # type: ignore[union-attr]

    def of(self, x: Tensor) -> Tensor:
        """Return the view of an input; any other tensor itself."""
        return self._of.get(id(x), x)

    def end_forward(self, left: Callable[[], None]) -> None:
        """Look after inputs that the call changed in place.

        Args:
            left: Called when the gradient of one is known, maybe after the other `left` was.
        """
        for view, version, made_by in self._watched:
            if view._version != version and made_by is not None:
                made_by.register_prehook(partial(_reached, left, ()))


def _reached(left: Callable[[], None], earlier: tuple[Any, ...], grads: tuple[Any, ...]) -> None:
    if not any(map(torch._C._will_engine_execute_node, earlier)):
        left()
