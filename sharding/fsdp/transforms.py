"""What a `fully_shard`ed module does inside of torch.func transforms and of forward-mode AD.

Touches the stack of transforms of this thread; knows no bucket.

[Note: transforms]
Inside of jvp, vmap, grad and their kin, every operation belongs to the transform and tensors are
wrapped. A gather is none of the function's operations: it runs with the transforms put aside, or
they refuse its writes into memory that they did not make. Weights are not inputs of the transform,
so they are plain tensors at every level, and the graph that trains them is that of the values
below the wrappers. What a transform computes besides the values (tangents, inner gradients) has
graphs that read weights and that no hook on inputs or outputs sees. Weights gathered inside of one
therefore stay until the end of the next backward, or until the next forward of the root.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.autograd import forward_ad

_P = ParamSpec("_P")
_R = TypeVar("_R")


def uncompiled(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Leave a function out of torch.compile; torch's own decorator hides its type from pyright."""
    return torch.compiler.disable(function)


def in_transform() -> bool:
    """Return whether a transform of torch.func or a dual level of forward-mode AD is open."""
    functorch = torch._C._functorch.peek_interpreter_stack()
    return functorch is not None or forward_ad._current_level >= 0


def outside_of_transforms(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Have a function run with all transforms put aside. See [Note: transforms]."""

    @wraps(function)
    def outside(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if torch._C._functorch.peek_interpreter_stack() is None:
            return function(*args, **kwargs)
        with temporarily_clear_interpreter_stack():
            return function(*args, **kwargs)

    return outside


def without_grad(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Have a function run without autograd, at no cost where it is off, as in backward."""

    @wraps(function)
    def unrecorded(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if not torch.is_grad_enabled():
            return function(*args, **kwargs)
        torch._C._set_grad_enabled(False)  # a quarter of what entering torch.no_grad() takes
        try:
            return function(*args, **kwargs)
        finally:
            torch._C._set_grad_enabled(True)

    return unrecorded


def value_below(x: Tensor) -> Tensor:
    """Return the plain tensor that transforms have wrapped; the tensor itself if none has."""
    while torch._C._functorch.is_functorch_wrapped_tensor(x):
        x = torch._C._functorch.get_unwrapped(x)
    return x
