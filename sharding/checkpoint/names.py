"""Names of parameters, without what wrappers add to them. Pure; imports no torch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from difflib import get_close_matches

# Parts that wrappers put into names and that say nothing about the parameter.
_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")  # a whole part of a name


def plain_names(names: Sequence[str]) -> list[str]:
    """Return names without what torch.compile, DDP and activation checkpointing put into them.

    The names are returned as they are where the shorter ones would not be distinct.

    Example:
        >>> plain_names(["module._orig_mod.layers.0._checkpoint_wrapped_module.weight"])
        ['layers.0.weight']
    """
    plain = []
    for name in names:
        parts = [part for part in name.split(".") if part not in _WRAPPERS]
        # DDP wraps the root only; elsewhere `module` may be the user's own name.
        plain.append(".".join(parts[1:] if len(parts) > 1 and parts[0] == "module" else parts))
    return plain if len(set(plain)) == len(names) else list(names)


def closest_names(wanted: str, names: Sequence[str]) -> str:
    """Return how many names there are, and the three closest to a name or glob, for errors.

    Names that differ in the numbers of their modules count as one.

    Example:
        >>> closest_names("*.nrom.weight", ["0.norm.weight", "1.norm.weight", "head.weight"])
        "3 parameters, such as '*.norm.weight' (2), 'head.weight'"
    """
    alike: dict[str, list[str]] = {}
    for name in names:
        alike.setdefault(_NUMBER.sub("*", name), []).append(name)
    shown = [
        repr(same[0]) if len(same := alike[form]) == 1 else f"{form!r} ({len(same)})"
        for form in get_close_matches(_NUMBER.sub("*", wanted), alike, n=3, cutoff=0.0)
    ]
    return f"{len(names)} parameters, such as {', '.join(shown)}"
