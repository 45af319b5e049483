"""Tensors inside of what modules take and return: tuples, dicts, dataclasses, whatever nests them.

May touch: nothing; a container is copied where a tensor in it changes, and else is the same object.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from operator import is_
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

# What can hold no tensor; everything else that is not a known container might.
PLAIN = (type(None), bool, int, float, str, bytes, torch.dtype, torch.device)
_LEAF = (Tensor, *PLAIN)

_Rebuild = Callable[[list[Any]], Any]


def leaves(tree: Any) -> list[Any]:
    """Return the tensors in `tree` and all else that is no container, in an order that is always
    the same.

    Args:
        tree: What a module took or returned.
    """
    found: list[Any] = []
    _collect(tree, (), found)
    return found


def _collect(tree: Any, around: tuple[int, ...], found: list[Any]) -> None:
    """Add the leaves of `tree`; `around` are the ids of the containers around it, for those that
    hold themselves."""
    opened = None if isinstance(tree, _LEAF) or id(tree) in around else _open(tree)
    if opened is None:
        found.append(tree)
        return
    around = (*around, id(tree))
    for value in opened[0]:
        _collect(value, around, found)


def map_tensors(fn: Callable[[Tensor], Tensor], tree: Any, around: tuple[int, ...] = ()) -> Any:
    """Return `tree` with `fn` of each tensor in its place, called in the order of `leaves`;
    `around` is as in `_collect`."""
    if isinstance(tree, Tensor):
        return fn(tree)
    if not tree and type(tree) in (dict, tuple):  # as the keywords of most calls
        return tree
    opened = None if isinstance(tree, PLAIN) or id(tree) in around else _open(tree)
    if opened is None:
        return tree
    values, rebuild = opened
    around = (*around, id(tree))
    mapped = [map_tensors(fn, value, around) for value in values]
    if all(map(is_, mapped, values)):
        return tree
    return rebuild(mapped)


def _open(tree: Any) -> tuple[list[Any], _Rebuild] | None:
    """Return what a container holds, and how to make one that holds something else; None for a
    leaf."""
    kind = type(tree)
    if kind is tuple or kind is list:
        return list(tree), kind
    if kind is dict:
        return list(tree.values()), lambda values: dict(zip(tree, values, strict=True))
    values, spec = tree_flatten(tree, is_leaf=lambda part: part is not tree)
    if len(values) != 1 or values[0] is not tree:  # a kind that torch or its owner registered
        return values, lambda values: tree_unflatten(values, spec)
    if is_dataclass(tree) and not isinstance(tree, type):
        return _open_dataclass(tree)
    if isinstance(tree, dict):
        return list(tree.values()), lambda values: _copy_of_dict(tree, values)
    if isinstance(tree, tuple) and hasattr(tree, "_make"):  # a class derived from a named tuple
        return list(tree), kind._make
    return None


def _open_dataclass(tree: Any) -> tuple[list[Any], _Rebuild]:
    names = [field.name for field in fields(tree) if hasattr(tree, field.name)]

    def rebuild(values: list[Any]) -> Any:
        made = copy.copy(tree)
        for name, value in zip(names, values, strict=True):
            object.__setattr__(made, name, value)  # frozen or not; runs no __post_init__
            if isinstance(made, dict) and name in made:  # as Hugging Face's ModelOutput is one
                dict.__setitem__(made, name, value)
        return made

    return [getattr(tree, name) for name in names], rebuild


def _copy_of_dict(tree: dict[Any, Any], values: list[Any]) -> Any:
    made = copy.copy(tree)
    for key, value in zip(list(tree), values, strict=True):
        dict.__setitem__(made, key, value)
    return made
