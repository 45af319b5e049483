"""KeptTensors: the tensors inside of a unit, beside its outputs, that somebody else may use.

May touch: forward hooks of modules. Decides nothing: `module_state.py` watches what is found.

[Note: entrances of backward]
Backward enters a unit through its outputs, and through every tensor of its forward that a loss got
hold of in another way: an attribute (`self.aux_loss`, also in a list or dict), or a forward hook on
a module inside (features of an encoder). All are announced, so that weights are there before the
nodes behind them run. What leaves otherwise is found when gradients of weights or inputs arrive
while the weights are not gathered, and raises.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from sharding.fsdp.containers import leaves
from sharding.fsdp.transforms import in_transform

# What every module has, before the attributes that its class adds.
_COMMON = frozenset(vars(nn.Module()))


class KeptTensors:
    """What is kept of the forwards of one `fully_shard` call.

    Args:
        modules: Those of the call, whose outputs are watched anyway.
        below: The modules inside of them that belong to no other call.
        found: Called with every tensor that a forward hook of a module inside may have kept.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        below: Sequence[nn.Module],
        found: Callable[[Tensor], None],
    ) -> None:
        self._below = list(below)
        self._found = found
        self._attributes = [(vars(m), _first_own(m), _settled(m)) for m in (*modules, *below)]
        self._watched: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    def watch_hooked(self) -> None:
        """Have the outputs of modules found that have forward hooks, from the next forward on."""
        for module in self._below:
            if module._forward_hooks and module not in self._watched:
                self._watched.add(module)
                # Before the others: one of them may keep the output and return another.
                module.register_forward_hook(self._after_module, prepend=True)

    @torch._dynamo.disable
    def _after_module(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if torch.is_grad_enabled() and not in_transform():  # then the weights stay gathered
            for tensor in leaves(output):
                if isinstance(tensor, Tensor) and tensor.grad_fn is not None:
                    self._found(tensor)

    def in_attributes(self) -> Iterator[Tensor]:
        """Return the tensors with a graph that modules hold as attributes, also in a list or a
        dict."""
        for attributes, first, settled in self._attributes:
            if len(attributes) == settled:
                continue
            for value in islice(attributes.values(), first, None):
                if isinstance(value, Tensor):
                    if value.grad_fn is not None:
                        yield value
                elif isinstance(value, (list, tuple, dict)) and value:
                    yield from _in_container(value)


def _first_own(module: nn.Module) -> int:
    """Return where the attributes begin that not every module has."""
    names = list(vars(module))
    return next((i for i, name in enumerate(names) if name not in _COMMON), len(names))


def _settled(module: nn.Module) -> int:
    """Return how many attributes a layer of torch has as long as it keeps nothing; -1 of other
    classes.

    Those assign no attribute in forward: it takes a new one, from outside, to keep a tensor.
    """
    values = islice(vars(module).values(), _first_own(module), None)
    is_of_torch = type(module).__module__.startswith("torch.nn.modules.")
    keeps_nothing = is_of_torch and not any(isinstance(v, (Tensor, list, dict)) for v in values)
    return len(vars(module)) if keeps_nothing else -1


def _in_container(container: Any) -> Iterator[Tensor]:
    """Return the tensors of a container that ends with one; no other, which may be long, is
    read."""
    values: Iterable[Any] = container.values() if isinstance(container, dict) else container
    last = next(reversed(values))  # type: ignore[call-overload]
    if isinstance(last, Tensor):
        for value in values:
            if isinstance(value, Tensor) and value.grad_fn is not None:
                yield value
