"""Slots: the entries of modules' `_parameters` that hold a bucket's parameters; what is in them.

May touch: modules' parameter slots; watches assignments to them. What it asks of every slot in a
step runs in C, over lists that are made once.

[Note: foreign tensors]
A tensor in a slot that is no form of the slot's own parameter came in one of two ways:
- Assigned (`module.weight = parameter`, `load_state_dict(assign=True)`): torch tells of every such
  registration. The next gather takes its values over (`Bucket.adopt`).
- Written into the slot for a while, past torch's registration: `torch.func.functional_call`, and
  whatever swaps weights as it does. Modules compute with it and it gets its gradient, on this rank
  alone; a sharded one is gathered first, and another dtype than that of compute is cast.
Who writes for a while puts back what was found, also where the bucket has been resharded since:
gathered memory that was found is kept until then.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import cache
from operator import is_
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_parameter_registration_hook

from sharding.fsdp.parameter import BucketParameter, put


class Slots:
    """What the modules of one bucket hold. See [Note: foreign tensors].

    Args:
        parameters: Those of the bucket; a later tie moves entries of their `sites`.
        name: Of the bucket, for errors.
    """

    def __init__(self, parameters: Sequence[BucketParameter], name: str) -> None:
        self._parameters = parameters
        self.name = name
        self.assigned: set[int] = set()  # slots that were given another parameter
        self.borrowed: list[int] = []  # slots that hold a foreign tensor, as of the last `show`
        self.lends_memory = False  # whether somebody will put gathered forms back
        self._staged: dict[int, Tensor] = {}  # what was borrowed, while modules compute
        entries = [(module, name, p) for p in parameters for module, name in p.sites]
        self._modules = [module for module, _, _ in entries]
        self._names = [name for _, name, _ in entries]
        self._owners = [owner for _, _, owner in entries]
        self._dicts = [module._parameters for module in self._modules]
        self._shows_gathered = False
        self.refresh()
        for k, (module, slot, _) in enumerate(entries):
            _slot_of.setdefault(module, {})[slot] = (weakref.ref(self), k)
        _live.add(self)
        _watch_assignments()

    def refresh(self) -> None:
        """Look again at which forms the parameters have; all modules hold one of them."""
        self._sharded: list[Tensor] = [owner.sharded for owner in self._owners]
        self._gathered: list[Tensor] = [owner.unsharded for owner in self._owners]
        # As left by `show`, or found there by who borrowed since:
        self._left = self._gathered if self._shows_gathered else self._sharded
        plain: dict[nn.Module, list[int]] = {}
        self._special: list[int] = []
        for k, module in enumerate(self._modules):
            if type(module).__setattr__ is nn.Module.__setattr__:
                plain.setdefault(module, []).append(k)
            else:
                self._special.append(k)
        self._plain = [cast("dict[str, Any]", module._parameters) for module in plain]
        self._updates = [
            [{self._names[k]: forms[k] for k in slots} for slots in plain.values()]
            for forms in (self._sharded, self._gathered)
        ]

    # -- own forms ------------------------------------------------------------------------------

    def hold(self, gathered: bool) -> bool:
        """Return whether every slot holds this form."""
        forms = self._gathered if gathered else self._sharded
        return all(map(is_, map(dict.get, self._dicts, self._names), forms))

    def fill(self) -> None:
        """Give all modules their sharded parameters, whatever they hold."""
        for module, name, form in zip(self._modules, self._names, self._sharded, strict=True):
            put(module, name, form)

    def show(self, gathered: bool) -> None:
        """Have all modules hold this form; what is foreign stays, and is in `borrowed` then."""
        forms = self._gathered if gathered else self._sharded
        self._shows_gathered = gathered
        if all(map(is_, map(dict.get, self._dicts, self._names), self._left)):
            for slots, update in zip(self._plain, self._updates[gathered], strict=True):
                slots.update(update)
            for k in self._special:
                put(self._modules[k], self._names[k], forms[k])
            self._left, self.borrowed, self.lends_memory = forms, [], False
            return
        self._show_beside_foreign(gathered)

    def _show_beside_foreign(self, gathered: bool) -> None:
        self.borrowed, self._left = [], list(self._left)
        for k in range(len(self._owners)):
            held, sharded = self._held(k), self._sharded[k]
            swapped = held is sharded and self._left[k] is self._gathered[k]
            if swapped or (held is not sharded and held is not self._gathered[k]):
                self.borrowed.append(k)
                continue
            self._left[k] = self._gathered[k] if gathered else sharded
            put(self._modules[k], self._names[k], self._left[k])
        self.lends_memory = any(
            self._left[k] is self._gathered[k] for k in self.borrowed if k not in self.assigned
        )

    def _held(self, k: int) -> Tensor | None:
        return self._dicts[k].get(self._names[k])

    # -- foreign tensors ------------------------------------------------------------------------

    def check_present(self) -> None:
        """Raise for a parameter that was taken out of its module."""
        for k, owner in enumerate(self._owners):
            if self._held(k) is None:
                raise RuntimeError(
                    f"{owner.fqn} was deleted from its fully sharded module; a parametrization, "
                    f"weight_norm or pruning does that: apply it before fully_shard"
                )

    def stage(self, compute_dtype: Callable[[BucketParameter], torch.dtype | None]) -> None:
        """Have modules compute with what was borrowed, until `unstage`. A collective for shards.

        Raises:
            NotImplementedError: A sharded tensor is to get a gradient.
        """
        for k in self.borrowed:
            held, owner = self._held(k), self._owners[k]
            if held is None or k in self._staged:
                continue
            ready = owner.unsharded if held is owner.sharded else held
            if ready is held and isinstance(held, DTensor):
                if torch.is_grad_enabled() and held.requires_grad:
                    raise NotImplementedError(
                        f"{owner.fqn} of {self.name!r} was replaced, as functional_call does, by a "
                        f"sharded tensor that requires grad, whose gradient no reduction averages; "
                        f"pass its full_tensor(), which gets this rank's gradient, or detach() it"
                    )
                ready = held.full_tensor()
            dtype = compute_dtype(owner)
            if dtype is not None and ready.is_floating_point():
                ready = ready.to(dtype)
            if ready is not held:
                self._staged[k] = held
                self._dicts[k][self._names[k]] = cast(nn.Parameter, ready)

    def unstage(self) -> None:
        """Put back what `stage` found."""
        for k, held in self._staged.items():
            self._dicts[k][self._names[k]] = cast(nn.Parameter, held)
        self._staged.clear()

    def check_step(self, updated: set[int]) -> None:
        """Raise where a step would train a parameter that its module has no more.

        Args:
            updated: The ids of the parameters of an optimizer.
        """
        if self.hold(False) or self.hold(True):
            return
        for k, owner in enumerate(self._owners):
            held = self._held(k)
            if held is owner.sharded or held is owner.unsharded or k in self.assigned:
                continue
            if id(owner.sharded) in updated:
                raise RuntimeError(
                    f"{owner.fqn} of {self.name!r} is not what its module holds: a "
                    f"{type(held).__name__} was written into module._parameters, and the step "
                    f"would train nothing that forward uses; assign it, module.name = parameter, "
                    f"or put back what was found there before the step"
                )

    # -- assignments ----------------------------------------------------------------------------

    def take_assigned(self, *, keeps_ties: bool) -> None:
        """Copy what modules were assigned into the sharded parameters, and put those back.

        Args:
            keeps_ties: Whether one of several modules that share a parameter may have been
                assigned the new values of all, as loading a checkpoint does.
        """
        for k in sorted(self.assigned):
            owner, held = self._owners[k], self._held(k)
            if held is None or held is owner.sharded:
                continue
            shared = [j for j, other in enumerate(self._owners) if other is owner]
            if not keeps_ties and not self.assigned.issuperset(shared):
                names = [f"{type(self._modules[j]).__name__}.{self._names[j]}" for j in shared]
                raise ValueError(
                    f"{owner.fqn} of {self.name!r} is shared by {names}, and "
                    f"{type(self._modules[k]).__name__}.{self._names[k]} was assigned a parameter "
                    f"of its own; untie before fully_shard, or write values with p.copy_(values)"
                )
            owner.take_back(held)
            put(self._modules[k], self._names[k], owner.sharded)
        self.assigned.clear()
        self._left = self._sharded if self.hold(False) else self._left

    def note_assignment(self, k: int, given: nn.Parameter) -> nn.Parameter | None:
        """Remember an assignment that is about to be made.

        Returns:
            What the module is to get in its place; None for `given` itself.

        Raises:
            RuntimeError: It would tie what lies in two buckets.
        """
        owner = self._owners[k]
        if given is owner.sharded or given is owner.unsharded:
            self.assigned.discard(k)
            self._left = [*self._left[:k], cast(Tensor, given), *self._left[k + 1 :]]
            return None
        for slots in _live:
            for other in slots._parameters:
                if given is other.sharded or given is other.unsharded:
                    return self._tie(k, other, slots)
        self.assigned.add(k)
        return None

    def _tie(self, k: int, other: BucketParameter, slots: Slots) -> nn.Parameter:
        """Have slot `k` hold the parameter of another slot, as assigning it does in torch."""
        owner, site = self._owners[k], (self._modules[k], self._names[k])
        if slots is not self or other.sharded.shape != owner.sharded.shape:
            raise RuntimeError(
                f"{owner.fqn} of {self.name!r} was tied to {other.fqn} of {slots.name!r} after "
                f"fully_shard, which cut them apart; tie before fully_shard (tie_weights()), and "
                f"put both into one call, fully_shard([a, b]), or leave both to the call on the "
                f"model that holds them"
            )
        owner.sites.remove(site)
        other.sites.append(site)
        self._owners[k] = other
        self.assigned.discard(k)
        self.refresh()
        return cast(nn.Parameter, self._left[k])


_live: weakref.WeakSet[Slots] = weakref.WeakSet()
_slot_of: weakref.WeakKeyDictionary[nn.Module, dict[str, tuple[weakref.ref[Slots], int]]] = (
    weakref.WeakKeyDictionary()
)


def _note(module: nn.Module, name: str, given: nn.Parameter) -> nn.Parameter | None:
    found = _slot_of.get(module, {}).get(name)
    slots = None if found is None else found[0]()
    return None if slots is None or found is None else slots.note_assignment(found[1], given)


@cache
def _watch_assignments() -> None:
    """Have torch tell of every parameter that a module of the process is assigned."""
    register_module_parameter_registration_hook(cast("Callable[..., None]", _note))


def check_step(optimizer: torch.optim.Optimizer) -> None:
    """Raise before a step that would train what forward does not use."""
    broken = [slots for slots in _live if not (slots.hold(False) or slots.hold(True))]
    if broken:
        updated = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for slots in broken:
            slots.check_step(updated)
