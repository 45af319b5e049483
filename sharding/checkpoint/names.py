"""Names of parameters, without what wrappers add to them. Pure; imports no torch."""

from __future__ import annotations

from collections.abc import Sequence

# Parts that wrappers put into names and that say nothing about the parameter.
_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})


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
