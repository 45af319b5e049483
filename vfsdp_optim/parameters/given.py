"""Parameters as users give them to an optimizer: names, repetitions, kinds. Touches no data."""

import warnings
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from sharding.fsdp.gathered import gathered_from
from sharding.fsdp.originals import sharded_as
from vfsdp_optim.parameters.param_shard import ParamShard


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


def check_kind(param: Tensor, fqn: str, *, whole_matrices: bool) -> None:
    """Refuse what cannot be updated.

    Args:
        param: of a group.
        fqn: its name.
        whole_matrices: whether the algorithm of its group needs them.

    Raises:
        NotImplementedError: a DTensor with partial sums, or of matrices whose pieces are no ranges
            of the flattened parameter.
        RuntimeError: the unsharded form of a sharded parameter, which is gone after backward.
        ValueError: a dtype that is not real and floating, of a parameter that is not frozen.
    """
    if gathered_from(param) is not None:
        raise RuntimeError(
            f"{fqn}: this is the unsharded form of {gathered_from(param)!r}, left by a forward "
            "without backward or by unshard(); call reshard() on the fully sharded modules before "
            "building the optimizer"
        )
    shard = ParamShard.of(param, fqn)
    if whole_matrices:
        shard.check_has_ranges(fqn)
    # What is frozen, such as a quantized base under adapters, is never updated.
    if not param.is_floating_point() and (param.requires_grad or param.is_complex()):
        raise ValueError(f"{fqn}: expected a real floating dtype, got {param.dtype}")


def check_current(groups: list[dict[str, Any]]) -> None:
    """Refuse originals of parameters that `fully_shard` has sharded since.

    Raises:
        RuntimeError: a group holds one; the module trains another parameter.
    """
    if not any(sharded_as(param) for group in groups for param in group["params"]):
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
