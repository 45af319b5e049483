"""Names of parameters: without what wrappers add to them, and matched between two sets of groups.

Pure; imports no torch.
"""

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


def match_by_name(
    saved: Sequence[Sequence[str]], own: Sequence[Sequence[str]]
) -> list[list[tuple[int, int]]]:
    """Return where the parameters of each of an optimizer's groups are in saved groups.

    Args:
        saved: By saved group, the names of its parameters.
        own: By group of the optimizer, the names of its parameters.

    Returns:
        By own group, for each parameter (saved group, position in it). All of one own group come
        from one saved group.

    Raises:
        ValueError: The names differ, or a group takes its parameters, and so its hyper-parameters,
            from several saved groups.

    Example:
        >>> match_by_name([["w", "b"], ["v"]], own=[["v"], ["b", "w"]])
        [[(1, 0)], [(0, 1), (0, 0)]]
    """
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
    matched = [[home[name] for name in names] for names in plain]
    for g, homes in enumerate(matched):
        if len(origins := {group for group, _ in homes}) > 1:
            raise ValueError(
                f"param group {g} has parameters of several saved groups, {sorted(origins)}: "
                "its hyper-parameters are ambiguous; group the parameters as they were saved"
            )
    return matched
