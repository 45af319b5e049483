"""State dicts of bitsandbytes in our keys. Touches the tensors of a state dict; writes none."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from vfsdp_optim.states.block_codec import BLOCK, CODES_FORMAT, block_count, dynamic_map
from vfsdp_optim.states.formats import ABSMAX, CODES
from vfsdp_optim.step.standing_state import step_of

# https://github.com/bitsandbytes-foundation/bitsandbytes/blob/0.50.2/bitsandbytes/optim/optimizer.py
_QUANTIZED = "__bnb_optimizer_quant_state__"
_KEYS = {"state1": ("exp_avg", "1", True), "state2": ("exp_avg_sq", "2", False)}


def is_bitsandbytes(state_dict: Mapping[str, Any]) -> bool:
    """Return whether a state dict is of an optimizer of bitsandbytes."""
    states = state_dict["state"].values()
    return any(isinstance(s, Mapping) and (_QUANTIZED in s or "state1" in s) for s in states)


def from_bitsandbytes(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state dict of a bitsandbytes AdamW in our keys; codes stay as they are.

    Raises:
        ValueError: a state is not Adam's, has other maps, or blocks of another size than 256.
    """
    state = {i: _state(f"state[{i!r}]", dict(s)) for i, s in state_dict["state"].items()}
    packed = {i for i, of_param in state.items() if any(CODES in key for key in of_param)}
    groups = []
    for group in state_dict["param_groups"]:
        known = {k: group[k] for k in ("lr", "betas", "eps", "weight_decay") if k in group}
        names = {"param_names": group["param_names"]} if "param_names" in group else {}
        precision = {}
        if packed & set(group["params"]):
            precision = {"states": "8bit", "states_format": CODES_FORMAT}
        groups.append({**known, **names, **precision, "params": group["params"]})
    return {"state": state, "param_groups": groups}


def _state(where: str, saved: dict[str, Any]) -> dict[str, Any]:
    quantized = saved.pop(_QUANTIZED, {})
    saved = {**saved, **(quantized if isinstance(quantized, Mapping) else {})}
    if not {"state1", "state2", "step"} <= set(saved):
        raise ValueError(
            f"{where}: expected the state1, state2 and step of a bitsandbytes Adam, got "
            f"{sorted(saved)}; other optimizers of bitsandbytes cannot be loaded"
        )
    step = step_of(saved["step"], where)
    result: dict[str, Any] = {"step": torch.tensor(step, dtype=torch.float32, device="cpu")}
    for key, (name, number, signed) in _KEYS.items():
        value = _tensor(saved, key, where)
        if value.dtype != torch.uint8:
            result[name] = value
            continue
        absmax = _tensor(saved, f"absmax{number}", where)
        values = _tensor(saved, f"qmap{number}", where)
        known = dynamic_map(signed, torch.device("cpu"))
        if not torch.equal(values.cpu(), known.values):
            raise ValueError(f"{where}: expected the dynamic map of bitsandbytes in qmap{number}")
        if absmax.numel() != block_count(value.numel()):
            raise ValueError(
                f"{where}: expected {block_count(value.numel())} scales for the blocks of {BLOCK} "
                f"of {value.numel()} codes, got {absmax.numel()}; versions before 0.44 had blocks "
                "of 2048: load the state with such a version and convert it there"
            )
        result[name + CODES], result[name + ABSMAX] = value, absmax
    return result


def _tensor(saved: Mapping[str, Any], key: str, where: str) -> Tensor:
    value = saved.get(key)
    if not isinstance(value, Tensor) or value.is_meta:
        raise TypeError(f"{where}: {key}: expected a tensor, got {value!r:.80}")
    return value
