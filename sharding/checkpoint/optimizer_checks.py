"""Whether what is loaded into an optimizer is built as a `state_dict()`. Pure; imports no torch."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

_SHOWN = 4  # ids in an error


def check_built(state_dict: Any, where: str = "") -> None:
    """Raise where a saved state of an optimizer is none, before a key of it is used.

    Args:
        state_dict: What is to be loaded.
        where: Begins the errors; names the part of a larger state.

    Raises:
        TypeError: A part is no dict or list.
        ValueError: Keys are missing, or ids are there twice.
    """
    _check_type(state_dict, Mapping, where.rstrip(": ") or "state_dict")
    missing = [key for key in ("state", "param_groups") if key not in state_dict]
    if missing:
        raise ValueError(
            f"{where}expected an optimizer's state_dict with 'state' and 'param_groups', got the "
            f"keys {sorted(map(str, state_dict))!r}; pass what optimizer.state_dict() returned"
        )
    _check_type(state_dict["state"], Mapping, f"{where}state")
    _check_type(state_dict["param_groups"], Sequence, f"{where}param_groups")
    ids: list[Any] = []
    for g, group in enumerate(state_dict["param_groups"]):
        _check_group(group, f"{where}param group {g}")
        ids.extend(group["params"])
    seen = set(ids)
    if len(seen) < len(ids):
        twice = next(each for each in seen if ids.count(each) > 1)
        raise ValueError(f"{where}param_groups: the id {twice!r} is there twice in 'params'")
    for key, state in state_dict["state"].items():
        if isinstance(state, Mapping) and key in seen:
            _check_keys(state, f"{where}state[{key!r}]")
        elif key in seen:
            _check_type(state, Mapping, f"{where}state[{key!r}]")


def check_owned(state_dict: Mapping[str, Any], where: str = "") -> None:
    """Raise where states are of no parameter; torch would restore nothing, and not say so.

    Args:
        state_dict: What `check_built` accepted.
        where: As there.

    Raises:
        ValueError: States are there for ids that no group has.

    Example:
        >>> check_owned({"state": {7: {}}, "param_groups": [{"params": [0]}]})
        Traceback (most recent call last):
        ...
        ValueError: state: entries [7] are of no parameter of the saved groups, whose ids are [0]; \
pass states and groups of one optimizer
    """
    ids = [each for group in state_dict["param_groups"] for each in group["params"]]
    known = set(ids)
    if strangers := [key for key in state_dict["state"] if key not in known]:
        cure = "pass states and groups of one optimizer"
        if all(isinstance(key, str) and key.isdecimal() for key in strangers):
            cure = (
                "JSON and others make text of numbers: load {int(key): value for key, value in "
                "state.items()}"
            )
        more = " and others" if len(ids) > _SHOWN else ""
        raise ValueError(
            f"{where}state: entries {strangers[:_SHOWN]!r} are of no parameter of the saved "
            f"groups, whose ids are {ids[:_SHOWN]!r}{more}; {cure}"
        )


def _check_group(group: Any, where: str) -> None:
    _check_type(group, Mapping, where)
    _check_keys(group, where)
    if "params" not in group:
        raise ValueError(f"{where}: has no 'params', only {sorted(group)}")
    _check_type(group["params"], Sequence, f"{where}: params")
    for each in group["params"]:
        if not isinstance(each, Hashable) or each != each:
            raise TypeError(f"{where}: params: expected numbers or names, got {each!r}")
    if "param_names" in group:
        names, params = group["param_names"], group["params"]
        _check_type(names, Sequence, f"{where}: param_names")
        # torch's state-dict functions, whose ids are names, leave those of groups as they were.
        fits = len(names) == len(params) or all(isinstance(each, str) for each in params)
        if not fits or not all(isinstance(name, str) for name in names):
            raise ValueError(
                f"{where}: param_names: expected the names of its {len(params)} "
                f"parameters, got {list(names)!r}"
            )


def _check_keys(mapping: Mapping[Any, Any], where: str) -> None:
    for key in mapping:
        if not isinstance(key, str):
            raise TypeError(f"{where}: expected keys that are text, got {key!r}")


def _check_type(value: Any, kind: type, where: str) -> None:
    if not isinstance(value, kind) or isinstance(value, str):
        wanted = "dict" if kind is Mapping else "list"
        raise TypeError(f"{where}: expected a {wanted}, got {value!r:.80}")
