"""What the states and weights of each parameter are kept in, from its group, its name and its
global shape. Reads metadata only; communicates nothing.

The choice never depends on a local size, a mesh or a device, so it is the same at every world size.
"""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from sharding.checkpoint.names import closest_names
from sharding.tensor.ragged_tensor import RaggedDTensor
from vfsdp_optim.algorithm import PRECISION, Algorithm, NamesToKeep
from vfsdp_optim.parameters.given import named
from vfsdp_optim.parameters.param_shard import ParamShard
from vfsdp_optim.states.block_codec import BLOCK, CODES_FORMAT
from vfsdp_optim.states.formats import CODES, BlockFormat, PlainFormat, StateFormat, block_runs
from vfsdp_optim.states.weights import MASTER, InPlace, MasterCopy, RandomRounding, WeightRule

# Smaller parameters, and vectors (norms, biases), cost little and are sensitive: the limit of
# bitsandbytes, there of the local size.
SMALLEST_8BIT = 4096

STATES = ("32bit", "8bit")
_CHOICES = {"states": STATES, "unaligned": ("raise", "local_blocks")}
_IN_PLACE, _MASTER_COPY, _RANDOM_ROUNDING = InPlace(), MasterCopy(), RandomRounding()


def check_precision(group: dict[str, Any], where: str) -> None:
    """Check the keys of a complete group that are in `PRECISION`; read `keep_32bit` once.

    Raises:
        TypeError: `keep_32bit` is text, or no collection.
        ValueError: an unknown choice, or choices that contradict each other.
    """
    chosen = group["keep_32bit"]
    if isinstance(chosen, str) or not isinstance(chosen, Iterable):
        raise TypeError(f"{where}: keep_32bit: expected names like ['head.weight'], got {chosen!r}")
    if not isinstance(chosen, NamesToKeep):
        group["keep_32bit"] = tuple(chosen)
    for key, choices in _CHOICES.items():
        if group[key] not in choices:
            raise ValueError(f"{where}: {key}: expected one of {choices}, got {group[key]!r}")
    for key in ("master_weights", "stochastic_rounding"):
        if not isinstance(group[key], bool):
            raise ValueError(f"{where}: {key}: expected True or False, got {group[key]!r}")
    if group["master_weights"] and group["stochastic_rounding"]:
        raise ValueError(
            f"{where}: expected master_weights or stochastic_rounding, got both; a master copy "
            "keeps what rounding by chance keeps in the mean"
        )


def check_params(group: dict[str, Any], own_keys: Iterable[str], where: str) -> None:
    """Check the parameters of a group against its precision; leave in `keep_32bit` the names that
    are the group's.

    Args:
        group: complete, after torch has taken its parameters and names apart.
        own_keys: what the group itself says; the rest may be meant for other groups.
        where: names the group in errors.

    Raises:
        ValueError: a name is not a parameter's, or the parameters have nothing to round.
    """
    check_used({key: group[key] for key in own_keys if key in PRECISION}, [group], where)
    wanted = set(group["keep_32bit"])
    group["keep_32bit"] = tuple(n for n in group.get("param_names", ()) if n in wanted)


def check_used(options: dict[str, Any], groups: Sequence[dict[str, Any]], where: str) -> None:
    """Check that options have something to act on in the groups that they are meant for.

    Args:
        options: some of `PRECISION`.
        groups: complete.
        where: names in errors who said it.

    Raises:
        ValueError: a name in `keep_32bit` is not a parameter's, or no parameter has 16 bits.
    """
    chosen = options.get("keep_32bit", ())
    known = [name for group in groups for name in group.get("param_names", ())]
    unknown = sorted(set(chosen).difference(known))
    if unknown and not known:
        raise ValueError(
            f"{where}: keep_32bit={unknown!r} needs names: pass model.named_parameters() instead "
            "of model.parameters(), or param_groups(model)"
        )
    if unknown and not isinstance(chosen, NamesToKeep):
        raise ValueError(
            f"{where}: keep_32bit names {unknown!r}, expected some of "
            f"{closest_names(unknown[0], known)}"
        )
    params = [item for group in groups for item in named(group, where)]
    for key in ("master_weights", "stochastic_rounding"):
        if options.get(key) and params and all(p.dtype.itemsize >= 4 for p, _ in params):
            param, fqn = params[0]
            raise ValueError(
                f"{fqn}: {key}=True is for parameters of 16 bits, and {where} has none: got "
                f"{param.dtype}; leave it out"
            )


def is_8bit(group: dict[str, Any], shape: tuple[int, ...], fqn: str) -> bool:
    """Return whether states of a parameter of this global shape are kept as 8-bit codes."""
    return (
        group["states"] == "8bit"
        and len(shape) >= 2
        and prod(shape) >= SMALLEST_8BIT
        and fqn not in group["keep_32bit"]
    )


def weight_rule(group: dict[str, Any], param: Tensor) -> WeightRule:
    """Return how updates reach a parameter."""
    if param.dtype.itemsize < 4 and group["master_weights"]:
        return _MASTER_COPY
    if param.dtype.itemsize < 4 and group["stochastic_rounding"]:
        return _RANDOM_ROUNDING
    return _IN_PLACE


def state_formats(
    algorithm: Algorithm, group: dict[str, Any], param: Tensor, fqn: str, old: dict[str, Any]
) -> dict[str, StateFormat]:
    """Return how each state of a parameter is kept.

    The dtype of a plain state is that of the existing one, else what the group says, else the
    parameter's; float32 where the group asks for better than that.

    Raises:
        RuntimeError: the state exists in another format; the group was changed since.
    """
    packed = is_8bit(group, tuple(param.shape), fqn)
    better = group["states"] == "8bit" or weight_rule(group, param) is not _IN_PLACE
    default = torch.promote_types(param.dtype, torch.float32) if better else param.dtype
    chosen = group.get("state_dtype") or default
    formats: dict[str, StateFormat] = {}
    for key in algorithm.state_keys(group):
        if (key + CODES in old) != packed and (key in old or key + CODES in old):
            raise RuntimeError(
                f"{fqn}: {key} is kept {'in 32 bits' if packed else 'as 8-bit codes'}, and its "
                "group was changed since; build another optimizer, and load "
                "new.convert_state_dict(old.state_dict()) into it"
            )
        if packed:
            formats[key] = BlockFormat(key not in algorithm.nonnegative)
        else:
            dtype = getattr(old.get(key), "dtype", chosen)
            formats[key] = PlainFormat(dtype if dtype.is_floating_point else chosen)
    if weight_rule(group, param) is _MASTER_COPY:
        formats[MASTER] = PlainFormat(torch.float32)
    return formats


def check_kept(group: dict[str, Any], shard: ParamShard, fqn: str) -> None:
    """Check that a parameter and its states can be kept as its group says: shards hold whole blocks
    where states are kept in blocks, elements have an index where they are rounded by chance.

    Raises:
        ValueError: a shard starts inside a block, and the group does not accept that; or the dtype
            is not one to round to by chance.
        NotImplementedError: shards are no ranges of the parameter.
    """
    if weight_rule(group, shard.param).draws:
        shard.check_has_ranges(fqn)
        if shard.param.dtype != torch.bfloat16:
            raise ValueError(
                f"{fqn}: stochastic_rounding=True rounds to bfloat16, got {shard.param.dtype}; use "
                "master_weights=True"
            )
    if not is_8bit(group, tuple(shard.param.shape), fqn):
        return
    block_runs(shard, fqn)
    cut = _cut_block(shard)
    if cut is not None and group["unaligned"] == "raise":
        number, start, stop = cut
        raise ValueError(
            f"{fqn}: 8-bit states are blocks of {BLOCK} elements, and shard {number} holds "
            f"elements {start} to {stop}, from the middle of a block on; shard with "
            'vfsdp_optim.fully_shard, or pass unaligned="local_blocks" (each rank counts blocks '
            "from its own first element: not bitwise equal to the unsharded run, and saved states "
            "load on the same layout only)"
        )


def note_format(group: dict[str, Any], where: str, has_state: Callable[[Tensor], bool]) -> None:
    """Write what the codes of a group are into it, for checkpoints; None where it has none."""
    group["states_format"] = None
    if group["states"] == "8bit":
        group["states_format"] = CODES_FORMAT
        shards = [
            (fqn, ParamShard.of(param, fqn))
            for param, fqn in named(group, where)
            if has_state(param) and is_8bit(group, tuple(param.shape), fqn)
        ]
        if any(_cut_block(shard) is not None for _, shard in shards):
            text = repr([(fqn, list(shard.all_bounds or ())) for fqn, shard in shards])
            digest = hashlib.sha256(text.encode()).hexdigest()[:16]
            group["states_format"] += f", local blocks of layout {digest}"


def _cut_block(shard: ParamShard) -> tuple[int, int, int] | None:
    """Return (number, start, stop) of the first shard that starts inside a block."""
    param = shard.param
    if isinstance(param, RaggedDTensor):
        if param.placement.runs_of_blocks(param.numel(), BLOCK) is not None:
            return None
    for number, (start, stop) in enumerate(shard.all_bounds or ()):
        if start % BLOCK and stop > start:
            return number, start, stop
    return None
