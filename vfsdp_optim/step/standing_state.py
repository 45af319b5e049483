"""What stands in `Optimizer.state`, where users write as in torch. Touches local tensors.

[Note: state that users write]
`Optimizer.state` is the truth between steps. A working set is its copy in flat memory, and holds as
long as the tensors that it left there stand there; their identities, compared in C, tell. Else the
next step, or the next state dict, takes over what stands there, and leaves its own views instead:
the same objects, pointed to the flat memory, so that whoever keeps one sees the live state, as in
torch. In between nothing is judged, because an edit may be half done. State of parameters that are
in no group stays, in memory of its own, for the case that they return.
"""

from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass
from itertools import chain, islice
from operator import eq, ge, is_
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from vfsdp_optim.parameters.param_shard import local_tensor
from vfsdp_optim.states.formats import CODES

States = MutableMapping[Any, Any]  # what `Optimizer.state` is


@dataclass(frozen=True, slots=True)
class Standing:
    """What a working set left in the state, to find out whether it is still there.

    Attributes:
        keys: all keys of the state.
        entries: their values.
        held: those of the working set's parameters, which begin with its own keys.
        counts: how many keys of each of them are its own.
        names: these keys, of all.
        values: their values.
    """

    keys: list[Any]
    entries: list[Any]
    held: list[dict[str, Any]]
    counts: list[int]
    names: list[str]
    values: list[Any]

    def holds(self, states: States) -> bool:
        """Return whether nobody has put others into the state, or taken some out."""
        # In C throughout: this runs in every step, and hashing a tensor is Python.
        return (
            len(states) == len(self.keys)
            and all(map(is_, states, self.keys))
            and all(map(is_, states.values(), self.entries))
            and all(map(ge, map(len, self.held), self.counts))
            and all(map(is_, _heads(map(dict.values, self.held), self.counts), self.values))
            and all(map(eq, _heads(iter(self.held), self.counts), self.names))
        )


def _heads(rows: Iterator[Any], counts: list[int]) -> Iterator[Any]:
    """Yield the first items of each row."""
    return chain.from_iterable(map(islice, rows, counts))


def standing(states: States, param: Tensor, fqn: str) -> dict[str, Any]:
    """Return the state to take over for a parameter; none that was made before it had memory.

    Raises:
        TypeError: somebody put something else than a dict there.
    """
    state = states.get(param)
    if state is None:
        return {}
    if not isinstance(state, dict):
        raise TypeError(
            f"{fqn}: expected its optimizer.state to be a dict of tensors, got a "
            f"{type(state).__name__}; del optimizer.state[param] starts it anew"
        )
    return {} if any(isinstance(v, Tensor) and v.is_meta for v in state.values()) else state


def check_standing(
    state: dict[str, Any], expected: dict[str, torch.dtype | None], fqn: str
) -> None:
    """Check the keys and types of a state to take over; shapes are checked where it is read.

    Args:
        state: of one parameter, not empty.
        expected: key -> dtype of its tensor; None for any floating dtype.
        fqn: names the parameter in errors.

    Raises:
        RuntimeError: keys are missing.
        TypeError: a value is no dense tensor of such a dtype.
    """
    if missing := [key for key in expected if key not in state]:
        raise RuntimeError(
            f"{fqn}: expected {list(expected)} in its optimizer.state, got {list(state)}; assign "
            f"{missing} too, or del optimizer.state[param] to start anew"
        )
    for key, dtype in expected.items():
        value = state[key]
        if key == "step":  # a number too
            continue
        dense = isinstance(value, Tensor) and value.layout is torch.strided
        if not dense or (value.dtype != dtype if dtype else not value.is_floating_point()):
            got = f"{value.dtype}, {value.layout}" if isinstance(value, Tensor) else repr(value)
            raise TypeError(
                f"{fqn}.{key} in optimizer.state: expected a dense tensor of "
                f"{dtype or 'a floating dtype'}, got {got}"
            )


def step_of(value: Any, fqn: str) -> float:
    """Return the step count of a parameter, from its state.

    Raises:
        ValueError: it is no count.
    """
    try:
        step = float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        step = float("nan")
    if not 0.0 <= step < float("inf"):
        raise ValueError(f"{fqn}.step: expected a finite number >= 0, got {value!r}")
    return step


def leave(states: States, made: dict[Tensor, dict[str, Any]]) -> Standing:
    """Write the states of a working set into `Optimizer.state`, after all others were read.

    Dicts and tensors that stand there and fit stay the same objects; what users keep beside stays.

    Args:
        states: to write into.
        made: by parameter, its views.
    """
    held, taken = [], set()
    others = {}
    for key, entry in states.items():
        if key not in made and not _is_nothing(key, entry):
            others[key] = entry
            _stand_alone(entry)
    entries = {param: states.get(param) for param in made}
    states.clear()
    for param, views in made.items():
        entry = entries[param]
        if not isinstance(entry, dict):
            entry = {}
        old = dict(entry)
        entry.clear()
        for key, view in views.items():
            entry[key] = view
            mine = old.pop(key, None)
            if id(mine) not in taken and _pointed(mine, view):
                taken.add(id(mine))
                entry[key] = mine
        entry.update(old)
        states[param] = entry
        held.append(entry)
    states.update(others)
    counts = [len(views) for views in made.values()]
    return Standing(
        keys=list(states),
        entries=list(states.values()),
        held=held,
        counts=counts,
        names=list(_heads(iter(held), counts)),
        values=list(_heads(map(dict.values, held), counts)),
    )


def _pointed(tensor: Any, view: Tensor) -> bool:
    """Point a tensor to the memory of another if it is one of the same kind."""
    if type(tensor) is not type(view) or tensor.is_inference() or view.is_inference():
        return False
    kinds = [(x.shape, x.dtype, x.device, x.layout, x.requires_grad) for x in (tensor, view)]
    if kinds[0] != kinds[1]:
        return False
    if isinstance(tensor, DTensor) and isinstance(view, DTensor):
        if tensor._spec != view._spec:
            return False
        tensor._local_tensor = view._local_tensor
    else:
        tensor.data = view
    return True


def _is_nothing(param: Any, entry: Any) -> bool:
    """Return whether an entry is the zero state of a plain parameter that was replaced.

    Of sharded ones ranks might judge differently.
    """
    if not isinstance(param, Tensor) or isinstance(param, DTensor) or not isinstance(entry, dict):
        return False
    values = [value for key, value in entry.items() if not key.endswith(CODES)]
    return bool(values) and all(
        isinstance(value, Tensor) and (value.is_meta or not bool(value.any())) for value in values
    )


def _stand_alone(entry: Any) -> None:
    """Move state out of flat memory that is to be freed."""
    for value in entry.values() if isinstance(entry, dict) else ():
        if isinstance(value, Tensor) and value.layout is torch.strided and not value.is_meta:
            local = local_tensor(value)
            if local.untyped_storage().nbytes() > local.nbytes:
                if isinstance(value, DTensor):
                    value._local_tensor = local.clone()
                elif not value.is_inference():
                    value.data = local.clone()
