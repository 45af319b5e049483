"""Hyper-parameters of single parameters, by globs over their names.

Reads names; touches no data.
"""

from collections.abc import Collection, Mapping, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor

from sharding.checkpoint.names import closest_names
from vfsdp_optim.algorithm import Precision

# Group keys that arguments of their own decide.
_ELSEWHERE = {
    "params": "the model decides it",
    "param_names": "the model decides it",
    "algorithm": "pass matrices={{{glob!r}: None}} for AdamW",
    "matrices": "pass matrices={{{glob!r}: ...}} to param_groups itself",
    "keep_32bit": "pass keep_32bit=[...] to param_groups itself, which adds embeddings and heads",
}


def overridden(
    algorithms: Mapping[str, str],
    overrides: Mapping[str, Mapping[str, Any]],
    keys: Mapping[str, Collection[str]],
) -> dict[str, dict[str, Any]]:
    """Return by name what overrides say of a parameter, the last glob before the others.

    Args:
        algorithms: by name of a parameter, its algorithm, or "frozen".
        overrides: by glob.
        keys: by algorithm, the group keys that it has. One that is not there may have any.

    Raises:
        TypeError: what a glob maps to is no mapping with text as keys.
        ValueError: a glob that matches nothing, or a key that no match has a use for.
    """
    found: dict[str, dict[str, Any]] = {}
    for glob, options in overrides.items():
        matched = [name for name in algorithms if fnmatchcase(name, glob)]
        if not matched:
            raise unmatched("overrides", glob, list(algorithms))
        if not isinstance(options, Mapping) or not all(isinstance(key, str) for key in options):
            raise TypeError(
                f"overrides: {glob!r}: expected a mapping such as {{'lr': 3e-4}}, got {options!r}"
            )
        kinds = {algorithms[name] for name in matched} - {"frozen"} or set(keys)
        for key in (*options, *(["keep_32bit"] if kept_by(options) else [])):
            _check_key(key, glob, {kind: keys[kind] for kind in kinds if kind in keys}, kinds)
        for name in matched:
            allowed = keys.get(algorithms[name], options)
            own = {key: value for key, value in options.items() if key in allowed}
            found.setdefault(name, {}).update(own)
    return found


def unmatched(argument: str, glob: str, names: Sequence[str]) -> ValueError:
    """Return the error for a glob that matches none of the parameters of a model."""
    return ValueError(
        f"{argument}: {glob!r} matches none of {closest_names(glob, names)}; correct the glob, or "
        "leave it out"
    )


def kept_by(options: Mapping[str, Any]) -> Any:
    """Return the names that options of a group would keep in 32 bits, also within a `Precision`."""
    states = options.get("states")
    inside = states.keep_32bit if isinstance(states, Precision) else ()
    return options.get("keep_32bit", inside)


def token_of(options: Mapping[str, Any]) -> tuple[tuple[str, object], ...]:
    """Return what equal options have in common: equal values, and of tensors the very same."""
    items = sorted(options.items())
    return tuple((k, id(v) if isinstance(v, Tensor) else repr(v)) for k, v in items)


def _check_key(
    key: str, glob: str, known: Mapping[str, Collection[str]], kinds: Collection[str]
) -> None:
    if key in _ELSEWHERE:
        cure = _ELSEWHERE[key].format(glob=glob)
        raise ValueError(f"overrides: {glob!r}: {key} cannot be given here; {cure}")
    if len(known) < len(kinds) or any(key in keys for keys in known.values()):
        return
    union = sorted({other for keys in known.values() for other in keys} - _ELSEWHERE.keys())
    close = get_close_matches(key, union, n=3) or union
    raise ValueError(
        f"overrides: {glob!r}: {' and '.join(sorted(kinds))} have no {key!r}, expected one of "
        f"{close} or others of {len(union)}; labels can be written into the returned groups"
    )
