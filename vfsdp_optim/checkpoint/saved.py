"""Matches a saved `state_dict()` to an optimizer's groups, and checks it, before anything is
written."""

import math
from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor

from sharding.checkpoint.matching import brought_names, match_parameters
from sharding.checkpoint.optimizer_checks import check_built, check_owned
from vfsdp_optim.algorithm import PRECISION_KEYS, Algorithm, check_schedule, plain_value
from vfsdp_optim.checkpoint.bitsandbytes_states import from_bitsandbytes, is_bitsandbytes
from vfsdp_optim.checkpoint.values import (
    CONVERT_CURE,
    LoadedState,
    check_not_left_out,
    check_numbers,
    check_state,
    read_state,
)
from vfsdp_optim.parameters.given import named
from vfsdp_optim.states.block_codec import CODES_FORMAT
from vfsdp_optim.step.working_set import WorkingSet

# How torch runs its own update, and what describes this optimizer's memory: of no meaning for the
# values that are loaded.
_EXECUTION_KEYS = frozenset(
    """params param_names foreach fused capturable differentiable keep_32bit unaligned
    states states_format""".split()
)


# What to do about codes that mean something else here.
_RESUME = (
    "resume with the version that wrote it, and where it says local blocks on the layout that "
    "wrote it"
)


def packed(groups: list[dict[str, Any]], states: Mapping[Any, Any]) -> dict[str, Any]:
    """Return groups and states as torch saves them: numbers for parameters, and text for dtypes.

    State of parameters that are in no group is left out.
    """
    numbers: dict[Tensor, int] = {}
    saved = []
    for group in groups:
        # See [Note: keys that checkpoints do not hold] in group.py; plain dicts give all keys.
        own = {key: group[key] for key in group if key != "params"}
        own.update({k: str(v) for k, v in own.items() if isinstance(v, torch.dtype)})
        params = [numbers.setdefault(param, len(numbers)) for param in group["params"]]
        saved.append({**own, "params": params})
    state = {
        numbers[key] if isinstance(key, Tensor) else key: value
        for key, value in states.items()
        if key in numbers or not isinstance(key, Tensor)
    }
    return {"state": state, "param_groups": saved}


class Checkpoint:
    """A saved state, matched to groups.

    Attributes:
        hyper_parameters: by group of the optimizer, what to write into it.
        states: by parameter, the state saved for it; parameters without state are absent.
        formats: by group of the optimizer, what the saved codes are; None where there are none.

    Raises:
        ValueError: it does not fit; see `StructuredOptimizer.load_state_dict`.
    """

    def __init__(
        self,
        state_dict: Mapping[str, Any],
        groups: list[dict[str, Any]],
        algorithms: Mapping[str, Algorithm],
        *,
        any_precision: bool = False,
    ) -> None:
        check_built(state_dict)
        if is_bitsandbytes(state_dict):
            state_dict = from_bitsandbytes(state_dict)
        saved = [_with_dtypes(group) for group in state_dict["param_groups"]]
        match = match_parameters(saved, groups)
        check_owned(state_dict)
        sources = [
            group if source is None else saved[source]
            for source, group in zip(match.sources, groups, strict=True)
        ]
        for g, (group, source) in enumerate(zip(groups, sources, strict=True)):
            keys = algorithms[group["algorithm"]].structural_keys
            _check_structural(f"param group {g}", group, source, ("algorithm", *keys))
            if not any_precision:
                _check_precision(g, group, source)
            elif group["params"]:
                _check_convertible(g, group, source)
        self.formats = [source.get("states_format") for source in sources]
        self.hyper_parameters = [
            _hyper_parameters(f"param group {g}", group, source, algorithms[group["algorithm"]])
            for g, (group, source) in enumerate(zip(groups, sources, strict=True))
        ]
        if brought := brought_names(saved, groups, match):
            for loaded, own in zip(self.hyper_parameters, brought, strict=True):
                loaded["param_names"] = own
        self.states: dict[Tensor, dict[str, Any]] = {}
        for places, group in zip(match.places, groups, strict=True):
            for (s, i), param in zip(places, group["params"], strict=True):
                if (saved_id := saved[s]["params"][i]) in state_dict["state"]:
                    self.states[param] = state_dict["state"][saved_id]

    def check_hyper_parameters(self, groups: list[dict[str, Any]]) -> None:
        """Check that every group finds its values.

        torch's state-dict functions give them to one group only where a saved group was split.

        Raises:
            ValueError: a group has parameters and no values in the checkpoint.
        """
        for g, (group, loaded) in enumerate(zip(groups, self.hyper_parameters, strict=True)):
            if group["params"] and not loaded:
                raise ValueError(
                    f"param group {g}: the checkpoint has no hyper-parameters for it, only its "
                    "parameters; group the parameters as they were saved"
                )

    def check_states(self, working: WorkingSet) -> None:
        """Check keys, types and shapes of all states; communicates nothing.

        Raises:
            RuntimeError, TypeError, ValueError: as `check_state`.
        """
        for member in working.members:
            if member.param in self.states:
                counts = working.counting[member.number]
                check_state(self.states[member.param], member, counts_steps=counts)

    def read_states(self, working: WorkingSet) -> list[LoadedState]:
        """Return the state of every member, its numbers checked.

        Raises:
            ValueError: a number cannot be one of a state.
            NotImplementedError: a DTensor on another mesh.
        """
        values = [
            read_state(self.states[m.param], m, counts_steps=working.counting[m.number])
            if m.param in self.states
            else LoadedState()
            for m in working.members
        ]
        check_not_left_out(working, self.states, values)
        check_numbers(list(zip(working.members, values, strict=True)))
        return values


def _hyper_parameters(
    where: str, group: dict[str, Any], source: dict[str, Any], algorithm: Algorithm
) -> dict[str, Any]:
    """Return what to write into a group, which then is one that the constructor takes."""
    fixed = {*_EXECUTION_KEYS, *PRECISION_KEYS, *algorithm.structural_keys, "algorithm"}
    loaded = {k: plain_value(deepcopy(v)) for k, v in source.items() if k not in fixed}
    for key, value in loaded.items():
        if key in group and not _differs(value, group[key]):
            continue
        for number in value if isinstance(value, list | tuple) else [value]:
            if isinstance(number, Tensor) and (number.numel() != 1 or number.is_meta):
                raise ValueError(
                    f"{where}: {key}: expected a tensor of 1 element with a value, got "
                    f"{tuple(number.shape)} on {number.device}"
                )
            if isinstance(number, int | float | Tensor) and not _is_finite(number):
                raise ValueError(f"{where}: {key}: expected finite numbers, got {value!r}")
    algorithm.check_group({**group, **loaded}, where)
    check_schedule(loaded, where)
    return loaded


def _is_finite(number: float | Tensor) -> bool:
    try:
        return math.isfinite(number)
    except OverflowError:  # of an integer beyond all floats
        return False


def _with_dtypes(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a saved group, with dtypes for the text that `state_dict` makes of them."""
    return {key: _dtype(value) if isinstance(value, str) else value for key, value in group.items()}


def _dtype(text: str) -> Any:
    named = getattr(torch, text.removeprefix("torch."), None)
    return named if text.startswith("torch.") and isinstance(named, torch.dtype) else text


def _check_structural(
    where: str, group: dict[str, Any], source: dict[str, Any], keys: tuple[str, ...]
) -> None:
    for key in keys:
        # A checkpoint of torch's own optimizers has no key that torch does not know.
        if key in source and _differs(source[key], group[key]):
            raise ValueError(
                f"{where}: the checkpoint has {key}={source[key]!r}, the optimizer {group[key]!r}; "
                "build the optimizer with the saved value"
            )


def _check_precision(g: int, group: dict[str, Any], source: dict[str, Any]) -> None:
    for key in PRECISION_KEYS:
        if key in source and _differs(source[key], group[key]):
            _, fqn = next(named(group, f"param group {g}"), (None, f"param group {g}"))
            cure = CONVERT_CURE
            if key == "states_format" and isinstance(source[key], str) and group[key]:
                cure = _RESUME
            raise ValueError(
                f"{fqn}: the checkpoint has {key}={source[key]!r}, the optimizer {group[key]!r}; "
                f"{cure}"
            )


def _check_convertible(g: int, group: dict[str, Any], source: dict[str, Any]) -> None:
    saved = source.get("states_format")
    if all(_differs(saved, known) for known in (None, CODES_FORMAT, group["states_format"])):
        _, fqn = next(named(group, f"param group {g}"))
        raise ValueError(
            f"{fqn}: the checkpoint has states_format={saved!r}, the optimizer "
            f"{group['states_format']!r}; only {CODES_FORMAT!r} can be converted: {_RESUME}"
        )


def _differs(saved: Any, own: Any) -> bool:
    """Return whether two values of an option differ; some formats make lists of tuples."""
    if isinstance(saved, list | tuple) and isinstance(own, list | tuple):
        pairs = zip(saved, own, strict=False)
        return len(saved) != len(own) or any(_differs(a, b) for a, b in pairs)
    kinds = (bool, int, float, str, torch.dtype, type(None))
    return not isinstance(saved, kinds) or not isinstance(own, kinds) or saved != own
