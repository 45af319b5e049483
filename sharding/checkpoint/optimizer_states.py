"""Saved states of an optimizer under the numbers of its parameters, for `load_state_dict`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sharding.checkpoint.matching import brought_names, match_parameters
from sharding.checkpoint.names import plain_names
from sharding.checkpoint.optimizer_checks import check_built, check_owned

# From a saved value, the parameter, the optimizer's own value, and the path (id, key) in "state".
Receive = Callable[[Any, Tensor, Any, tuple[Any, str]], Any]


def renumbered(
    saved: Mapping[str, Any],
    optimizer: torch.optim.Optimizer,
    names: Sequence[Sequence[Sequence[str]]] | None,
    receive: Receive,
    where: str,
) -> dict[str, Any]:
    """Return a state dict that `optimizer` takes, matched by name; see [Note: names and positions].

    Args:
        saved: As `state_dict()` is built, or with names for numbers.
        optimizer: Reads its groups and its states.
        names: By group of the optimizer, of each parameter, the names it has in the model.
        receive: Makes of what is saved what the optimizer gets.
        where: Begins the errors.

    Raises:
        TypeError, ValueError: As `check_built`, `match_parameters` and `check_owned`.
    """
    check_built(saved, where)
    own_groups = optimizer.param_groups
    match = match_parameters(saved["param_groups"], own_groups, names, where)
    check_owned(saved, where)
    brought = brought_names(saved["param_groups"], own_groups, match)
    groups, states = [], {}
    number = 0
    matched = zip(match.places, match.sources, own_groups, strict=True)
    for g, (places, source, group) in enumerate(matched):
        values = group if source is None else saved["param_groups"][source]
        numbers = []
        for (s, i), param in zip(places, group["params"], strict=True):
            saved_id = saved["param_groups"][s]["params"][i]
            state = saved["state"].get(saved_id)
            if state is not None:
                own = optimizer.state.get(param, {})
                states[number] = {
                    key: receive(value, param, own.get(key), (saved_id, key))
                    for key, value in state.items()
                }
            numbers.append(number)
            number += 1
        kept = {k: v for k, v in values.items() if k not in ("params", "param_names")}
        named = {} if brought is None else {"param_names": brought[g]}
        groups.append({**kept, **named, "params": numbers})
    return {"state": states, "param_groups": groups}


def names_of_parameters(models: Mapping[tuple[Any, ...], nn.Module]) -> dict[int, list[str]]:
    """Return the names of every parameter by id; of several models, with the model's name."""
    names: dict[int, list[str]] = {}
    for (_, *prefix), model in models.items():
        for name, parameter in named_parameters(model):
            names.setdefault(id(parameter), []).append(".".join([*map(str, prefix), name]))
    return names


def named_parameters(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Return the parameters with plain names, tied ones under each of theirs."""
    named = list(model.named_parameters(remove_duplicate=False))
    return list(zip(plain_names([n for n, _ in named]), [p for _, p in named], strict=True))


def names_in_groups(
    optimizer: torch.optim.Optimizer, names: Mapping[int, Sequence[str]]
) -> list[list[str]]:
    """Return a name for every parameter of an optimizer, by group.

    The name in the model, else that which the optimizer was given, else its number.

    Raises:
        ValueError: Some parameters have a name in a model and others have none.
    """
    groups = optimizer.param_groups
    found = [[next(iter(names.get(id(p), ())), "") for p in group["params"]] for group in groups]
    missing = [(g, i) for g, each in enumerate(found) for i, name in enumerate(each) if not name]
    if not missing:
        return found
    if sum(map(len, found)) > len(missing):
        g, i = missing[0]
        shape = tuple(groups[g]["params"][i].shape)
        raise ValueError(
            f"optimizer: param group {g}, parameter {i} of shape {shape} is of none of the models; "
            "pass all models whose parameters it has"
        )
    if all("param_names" in group for group in groups):
        return [list(group["param_names"]) for group in groups]
    numbers = iter(range(len(missing)))
    return [[str(next(numbers)) for _ in group["params"]] for group in groups]


def known_names(
    optimizer: torch.optim.Optimizer, names: Mapping[int, Sequence[str]]
) -> list[list[Sequence[str]]] | None:
    """Return the names of each parameter by group; None where none has any."""
    found = [[names.get(id(p), ()) for p in group["params"]] for group in optimizer.param_groups]
    return found if any(each for group in found for each in group) else None
