"""Which saved parameter is which parameter of an optimizer. Pure; imports no torch.

[Note: names and positions]
A saved state has parameters by number, as `state_dict()` of an optimizer does, or by text, as
torch's state-dict functions do. Text is the name in the model: it finds a parameter that is known
to have this name there, whatever group and place it has. Where the model is not at hand, names that
the optimizer was given do if they are the model's, which one in common shows; users may give names
of their own. Numbers say nothing themselves: groups match by `param_names` where both sides have
them. All else is matched by position, as torch does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sharding.checkpoint.names import plain_names

SavedPlace = tuple[int, int]  # saved group, position in it
Groups = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Match:
    """Where the groups of an optimizer are in a saved state.

    Attributes:
        places: By group, of each parameter.
        sources: By group, the saved group whose values it takes; None where it keeps its own, as a
            group without parameters does among names.
    """

    places: tuple[tuple[SavedPlace, ...], ...]
    sources: tuple[int | None, ...]


def match_parameters(
    saved: Groups,
    own: Groups,
    names_in_model: Sequence[Sequence[Sequence[str]]] | None = None,
    where: str = "",
) -> Match:
    """Find each parameter of an optimizer in a saved state. See [Note: names and positions].

    Args:
        saved: The saved groups, which `check_built` accepted.
        own: The groups of the optimizer.
        names_in_model: By group of the optimizer, of each parameter, the names it has in the model:
            several where it is tied, none where it is not the model's. None without a model.
        where: Begins the errors; names the part of a larger state.

    Raises:
        ValueError: The names differ, or a group takes its parameters, and so its hyper-parameters,
            from several saved groups; or without names, numbers of groups or parameters differ.

    Example:
        >>> own = [{"params": [0], "param_names": ["v"]}, {"params": [1], "param_names": ["b"]}]
        >>> match_parameters([{"params": ["b"]}, {"params": ["v"]}], own)
        Match(places=(((1, 0),), ((0, 0),)), sources=(1, 0))
    """
    names = _saved_names(saved)
    if names is not None and _are_ids(saved):
        text = set(plain_names([name for group in names for name in group]))
        if names_in_model is not None:
            return _by_name(names, _names_among(text, own, names_in_model))
        given = _param_names(own)
        if given is not None and text & set(plain_names([n for group in given for n in group])):
            return _by_name(names, given)
    elif names is not None and (given := _param_names(own)) is not None:
        return _by_name(names, given)
    return _by_position(saved, own, where)


def brought_names(saved: Groups, own: Groups, match: Match) -> list[list[str]] | None:
    """Return the names that saved groups give to those of an optimizer without any, as torch takes
    them over, by group and parameter; None where the one lack them or the other have them."""
    if any("param_names" in group for group in own):
        return None  # they are the parameters', in the order of the parameters
    if not all("param_names" in group for group in saved):
        return None
    names = _saved_names(saved) or []
    return [[names[group][i] for group, i in places] for places in match.places]


def _saved_names(saved: Groups) -> list[list[str]] | None:
    """Return the names of the saved parameters, by group; None where they have none.

    torch's state-dict functions, whose ids are names, order `params` as the optimizer does and
    leave `param_names` as they were saved: the ids count.
    """
    return [list(group["params"]) for group in saved] if _are_ids(saved) else _param_names(saved)


def _are_ids(saved: Groups) -> bool:
    """Return whether the ids of saved parameters are their names."""
    ids = [saved_id for group in saved for saved_id in group["params"]]
    return bool(ids) and all(isinstance(saved_id, str) for saved_id in ids)


def _param_names(groups: Groups) -> list[list[str]] | None:
    if not all("param_names" in group for group in groups):
        return None
    return [list(group["param_names"]) for group in groups]


def _names_among(
    text: set[str], own: Groups, names_in_model: Sequence[Sequence[Sequence[str]]]
) -> list[list[str]]:
    """Return a name of each parameter in the model: of a tied one, that which was saved."""
    found: list[list[str]] = []
    for g, names_of_group in enumerate(names_in_model):
        found.append([])
        for i, names in enumerate(names_of_group):
            if not names:
                shape = tuple(own[g]["params"][i].shape)
                raise ValueError(
                    f"param group {g}, parameter {i} of shape {shape} is not one of the model's; "
                    "its state cannot be found by name"
                )
            found[-1].append(next((name for name in names if name in text), names[0]))
    return found


def _by_name(saved: Sequence[Sequence[str]], own: Sequence[Sequence[str]]) -> Match:
    places = [(g, i) for g, names in enumerate(saved) for i in range(len(names))]
    home = dict(zip(plain_names([n for names in saved for n in names]), places, strict=True))
    flat = iter(plain_names([n for names in own for n in names]))
    plain = [[next(flat) for _ in names] for names in own]
    wanted = {name for names in plain for name in names}
    missing, unexpected = sorted(wanted - set(home)), sorted(set(home) - wanted)
    if missing or unexpected:
        raise ValueError(
            f"loaded state dict does not have the parameters of the optimizer: missing {missing}, "
            f"unexpected {unexpected}; to match by position, remove param_names from its groups"
        )
    matched = tuple(tuple(home[name] for name in names) for names in plain)
    for g, homes in enumerate(matched):
        if len(origins := {group for group, _ in homes}) > 1:
            raise ValueError(
                f"param group {g} has parameters of several saved groups, {sorted(origins)}: "
                "its hyper-parameters are ambiguous; group the parameters as they were saved"
            )
    return Match(matched, tuple(homes[0][0] if homes else None for homes in matched))


def _by_position(saved: Groups, own: Groups, where: str) -> Match:
    if len(saved) != len(own):
        raise ValueError(
            f"{where}loaded state dict has {len(saved)} parameter groups, the optimizer has "
            f"{len(own)}"
        )
    for g, (source, group) in enumerate(zip(saved, own, strict=True)):
        if len(source["params"]) != len(group["params"]):
            raise ValueError(
                f"{where}param group {g}: loaded state dict has {len(source['params'])} "
                f"parameters, the optimizer has {len(group['params'])}"
            )
    places = tuple(tuple((g, i) for i in range(len(s["params"]))) for g, s in enumerate(saved))
    return Match(places, tuple(range(len(saved))))
