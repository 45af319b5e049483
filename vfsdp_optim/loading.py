"""Matches a saved `state_dict()` to an optimizer's groups, and checks it, before anything is
written."""

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from vfsdp_optim.algorithm import Algorithm
from vfsdp_optim.runs import Member
from vfsdp_optim.states import saved_values

# Prefixes that wrappers put into names and that say nothing about the parameter.
_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
# How torch runs its own update; of no meaning for state.
_EXECUTION_KEYS = frozenset(
    {"params", "param_names", "foreach", "fused", "capturable", "differentiable"}
)


@dataclass(frozen=True, slots=True)
class LoadedState:
    """The state of one parameter: 1-D local pieces, none of them where nothing was saved."""

    states: dict[str, Tensor] = field(default_factory=dict)
    step: float = 0.0


class Checkpoint:
    """A saved state, matched to groups.

    Attributes:
        hyper_parameters: by group of the optimizer, what to write into it.
        states: by parameter, the state saved for it; parameters without state are absent.

    Raises:
        ValueError: it does not fit; see `StructuredOptimizer.load_state_dict`.
    """

    def __init__(
        self,
        state_dict: Mapping[str, Any],
        groups: list[dict[str, Any]],
        algorithms: Mapping[str, Algorithm],
    ) -> None:
        saved = [dict(group) for group in state_dict["param_groups"]]
        if all("param_names" in group for group in (*saved, *groups)):
            sources, ids = _match_by_name(saved, groups)
        else:
            sources, ids = _match_by_position(saved, groups)
        for g, (group, source) in enumerate(zip(groups, sources, strict=True)):
            _check_structural(f"param group {g}", group, source, algorithms[group["algorithm"]])
        self.hyper_parameters = [
            {key: deepcopy(value) for key, value in source.items() if key not in _EXECUTION_KEYS}
            for source in sources
        ]
        self.states: dict[Tensor, dict[str, Any]] = {}
        for param, saved_id in ids.items():
            state = state_dict["state"].get(saved_id)
            if state:
                self.states[param] = state

    def values(self, member: Member, counts_steps: bool) -> LoadedState:
        """Return the state of a member.

        Raises:
            ValueError: keys or shapes differ from the member's.
        """
        state = self.states.get(member.param)
        if state is None:
            return LoadedState()
        expected = {*member.state_dtypes, *(["step"] if counts_steps else [])}
        if set(state) != expected:
            raise ValueError(
                f"{member.fqn}: expected state {sorted(expected)}, got {sorted(state)}; "
                "the checkpoint was written by another algorithm"
            )
        return LoadedState(
            {
                key: saved_values(state[key], member.param, f"{member.fqn}.{key}")
                for key in member.state_dtypes
            },
            float(state["step"]) if counts_steps else 0.0,
        )


def plain_names(names: list[str]) -> list[str]:
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
    return plain if len(set(plain)) == len(names) else names


def _match_by_position(
    saved: list[dict[str, Any]], groups: list[dict[str, Any]]
) -> tuple[list[dict[str, Any]], dict[Tensor, Any]]:
    if len(saved) != len(groups):
        raise ValueError(
            f"loaded state dict has {len(saved)} parameter groups, the optimizer has {len(groups)}"
        )
    ids: dict[Tensor, Any] = {}
    for g, (source, group) in enumerate(zip(saved, groups, strict=True)):
        if len(source["params"]) != len(group["params"]):
            raise ValueError(
                f"param group {g}: loaded state dict has {len(source['params'])} parameters, the "
                f"optimizer has {len(group['params'])}"
            )
        ids.update(zip(group["params"], source["params"], strict=True))
    return saved, ids


def _match_by_name(
    saved: list[dict[str, Any]], groups: list[dict[str, Any]]
) -> tuple[list[dict[str, Any]], dict[Tensor, Any]]:
    homes = [(s, saved_id) for s, source in enumerate(saved) for saved_id in source["params"]]
    home = dict(zip(_all_names(saved), homes, strict=True))  # name -> (saved group, saved id)
    own_names = iter(_all_names(groups))
    names = [[next(own_names) for _ in group["params"]] for group in groups]
    wanted = {name for own in names for name in own}
    missing, unexpected = sorted(wanted - set(home)), sorted(set(home) - wanted)
    if missing or unexpected:
        raise ValueError(
            f"loaded state dict does not have the parameters of the optimizer: missing {missing}, "
            f"unexpected {unexpected}; to match by position, remove param_names from its groups"
        )
    sources: list[dict[str, Any]] = []
    ids: dict[Tensor, Any] = {}
    for g, (group, own) in enumerate(zip(groups, names, strict=True)):
        origins = {home[name][0] for name in own}
        if len(origins) > 1:
            raise ValueError(
                f"param group {g} has parameters of several saved groups, {sorted(origins)}: "
                "its hyper-parameters are ambiguous; group the parameters as they were saved"
            )
        # A group without parameters keeps its values.
        sources.append(saved[origins.pop()] if origins else group)
        ids.update((param, home[name][1]) for name, param in zip(own, group["params"], strict=True))
    return sources, ids


def _all_names(groups: list[dict[str, Any]]) -> list[str]:
    return plain_names([name for group in groups for name in group["param_names"]])


def _check_structural(
    where: str, group: dict[str, Any], source: dict[str, Any], algorithm: Algorithm
) -> None:
    for key in ("algorithm", *algorithm.structural_keys):
        # A checkpoint of torch's own optimizers has no key that torch does not know.
        if key in source and _comparable(source[key]) != _comparable(group[key]):
            raise ValueError(
                f"{where}: the checkpoint has {key}={source[key]!r}, the optimizer {group[key]!r}; "
                "build the optimizer with the saved value"
            )


def _comparable(value: Any) -> Any:
    """Return tuples for lists, which some formats make of them."""
    return tuple(_comparable(v) for v in value) if isinstance(value, list | tuple) else value
