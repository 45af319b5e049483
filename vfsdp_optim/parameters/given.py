"""Parameters as users give them to an optimizer: names, repetitions, kinds. Touches no data."""

import warnings
from collections.abc import Iterator, Sequence
from operator import eq
from typing import Any

from torch import Tensor

from sharding.fsdp.gathered import gathered_from
from sharding.fsdp.originals import any_sharded, sharded_as


def named(group: dict[str, Any], where: str) -> Iterator[tuple[Tensor, str]]:
    """Yield each parameter of a group with its name, or its place where it has none."""
    names = group.get("param_names")
    if names and len(names) != len(group["params"]):
        names = None  # parameters came or went since they were named
    for i, param in enumerate(group["params"]):
        yield param, names[i] if names else f"{where}, parameter {i} of shape {tuple(param.shape)}"


def distinct(params: list[Any], where: str) -> list[Any]:
    """Return parameters, or (name, parameter) pairs, without those that came before."""
    first: dict[int, int] = {}
    for i, item in enumerate(params):
        origin = first.setdefault(id(item[1] if isinstance(item, tuple) else item), i)
        if origin != i:
            names = [repr(params[j][0]) if isinstance(item, tuple) else str(j) for j in (origin, i)]
            warnings.warn(
                f"{where}: {' and '.join(names)} are the same parameter; it is updated once. "
                "torch will make this an error: pytorch#40967",
                stacklevel=4,
            )
    return [params[i] for i in first.values()]


def check_not_gathered(param: Tensor, fqn: str) -> None:
    """Refuse the unsharded form of a sharded parameter, frozen or not.

    Raises:
        RuntimeError: it is one, which is gone after backward.
    """
    if gathered_from(param) is not None:
        raise RuntimeError(
            f"{fqn}: this is the unsharded form of {gathered_from(param)!r}, left by a forward "
            "without backward or by unshard(); call reshard() on the fully sharded modules before "
            "building the optimizer"
        )


def check_current(groups: list[dict[str, Any]]) -> None:
    """Refuse originals of parameters that `fully_shard` has sharded since.

    Raises:
        RuntimeError: a group holds one; the module trains another parameter.
    """
    if not any(any_sharded(group["params"]) for group in groups):
        return
    for g, group in enumerate(groups):
        for param, fqn in named(group, f"group {g}"):
            if sharded_as(param):
                raise RuntimeError(
                    f"{fqn} was sharded as {sharded_as(param)!r} after the optimizer got it; its "
                    "module has another parameter, and a step would train nothing. Build the "
                    "optimizer after fully_shard, pass optimizer= to every fully_shard call, or "
                    "put the sharded parameters into optimizer.param_groups"
                )


class GroupPlaces:
    """Where the parameters of groups are; finds one in constant time while nobody edits groups."""

    def __init__(self) -> None:
        self._of: dict[int, tuple[int, int]] = {}  # id of a parameter -> group, index
        self._ids: list[list[int]] = []  # by group, when they were looked at

    def find(self, groups: Sequence[dict[str, Any]], param: Tensor) -> tuple[int, int] | None:
        """Return the group and the index in it of this very parameter; None if none has it."""
        place = self._of.get(id(param))
        if place is None and self._is_current(groups):
            return None
        if place is None or not _is_at(groups, param, *place):
            self._ids = [list(map(id, group["params"])) for group in groups]
            self._of = {p: (g, i) for g, ids in enumerate(self._ids) for i, p in enumerate(ids)}
            place = self._of.get(id(param))
        return place

    def _is_current(self, groups: Sequence[dict[str, Any]]) -> bool:
        """Return whether nobody has edited groups; in C, as what is in no group asks each time."""
        counts = [len(group["params"]) for group in groups]
        return counts == list(map(len, self._ids)) and all(
            all(map(eq, map(id, group["params"]), ids))
            for group, ids in zip(groups, self._ids, strict=True)
        )

    def note(self, param: Tensor, place: tuple[int, int]) -> None:
        """Remember a parameter that was put into a place."""
        group, index = place
        self._of[id(param)] = place
        self._ids[group][index] = id(param)


def _is_at(groups: Sequence[dict[str, Any]], param: Tensor, group: int, index: int) -> bool:
    members = groups[group]["params"] if group < len(groups) else []
    return index < len(members) and members[index] is param
