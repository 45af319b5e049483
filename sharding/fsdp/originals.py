"""Who holds a parameter that training does not use: originals of sharded ones, and gathered forms.

May touch: marks on parameters; watches the steps of every optimizer of the process.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from functools import cache
from itertools import repeat
from operator import attrgetter, contains
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from sharding.fsdp.gathered import gathered_from
from sharding.fsdp.proofs import logs_of, record_update
from sharding.fsdp.slots import check_step

# Set on the original of a sharded parameter: whoever meets it later holds what no module has.
_TAKEN = "_fully_sharded_as"
_MARKS = attrgetter("__dict__")


def sharded_as(parameter: Tensor) -> str | None:
    """Return the fqn under which `fully_shard` took an original parameter; None if it did not."""
    return parameter.__dict__.get(_TAKEN)


def any_sharded(parameters: Iterable[Tensor]) -> bool:
    """Return whether `sharded_as` knows one of these: in C, because it is asked in every step, and
    of all parameters in every call of `fully_shard`."""
    return any(map(contains, map(_MARKS, parameters), repeat(_TAKEN)))


def mark_sharded(parameter: Tensor, fqn: str) -> None:
    """Have `sharded_as` return `fqn` for an original parameter from here on."""
    setattr(parameter, _TAKEN, fqn)


def check_hooks(originals: Iterable[weakref.ref[Tensor]]) -> None:
    """Raise for hooks that were put on the original of a sharded parameter."""
    for reference in originals:
        original = reference()
        if original is None:
            continue
        if original._backward_hooks or original._post_accumulate_grad_hooks:
            raise RuntimeError(
                f"{sharded_as(original)}: hooks on its gradient were put on the original, which "
                f"fully_shard has replaced, and would never run; put them on the sharded "
                f"parameter, with register_post_accumulate_grad_hook"
            )


def _before_step(
    optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Raise before the step of an optimizer that was built before its model was sharded.

    Its parameters get no gradients any more, so that the step would train nothing, in silence. Of
    others it notes what they are told; see [Note: proofs in reductions] in proofs.py.
    """
    check_step(optimizer)
    if hasattr(optimizer, "rebind"):  # ours look by themselves, whenever their state is used
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if (fqn := gathered_from(parameter)) is not None:
                raise RuntimeError(
                    f"{type(optimizer).__name__} holds {fqn} in its gathered form, which is freed "
                    f"after forward: a step would train nothing; build the optimizer from "
                    f"model.parameters() of the module that fully_shard was given"
                )
            if (fqn := sharded_as(parameter)) is not None:
                raise RuntimeError(
                    f"{type(optimizer).__name__} holds the original of {fqn}, which fully_shard "
                    f"has replaced since: a step would train nothing; build the optimizer after "
                    f"fully_shard, pass a vfsdp_optim optimizer to it as optimizer=, or put the "
                    f"sharded parameters into optimizer.param_groups"
                )
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    record_update(type(optimizer).__name__, optimizer.param_groups, logs_of(parameters))


@cache
def watch_optimizers() -> None:
    """Have every optimizer of the process checked before its steps."""
    register_optimizer_step_pre_hook(_before_step)
