"""Which parameters a step can update, under the options of their group. Reads layouts and shapes;
communicates nothing.

A frozen parameter has no state and is never updated: whatever the base under adapters is kept in,
no rule is asked about it before it trains.
"""

from collections.abc import Callable, Hashable
from functools import lru_cache
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from sharding.planning.structure import Blocks, Demand, Elementwise, Structure
from vfsdp_optim.algorithm import Algorithm, MatrixAlgorithm
from vfsdp_optim.parameters.given import check_not_gathered, named
from vfsdp_optim.parameters.param_shard import ParamShard, Ranks
from vfsdp_optim.states.precision import check_kept, note_format
from vfsdp_optim.step.units import check_exchange, usable_structure


def admit(
    group: dict[str, Any],
    where: str,
    algorithm: Algorithm,
    replicas: Ranks | None,
    max_exchange_bytes: int,
    has_state: Callable[[Tensor], bool],
) -> None:
    """Check the parameters of a group that came, and note what its codes are.

    Args:
        group: complete.
        where: names the group in errors.
        algorithm: of the group.
        replicas: that hold a copy each of every plain parameter.
        max_exchange_bytes: memory for matrices that travel.
        has_state: whether a parameter is to have state.

    Raises:
        RuntimeError: a parameter is the unsharded form of a sharded one.
        ValueError: see `check_update`.
        NotImplementedError: see `check_update`.
    """
    alike: set[Hashable] = set()
    for param, fqn in named(group, where):
        check_not_gathered(param, fqn)
        if has_state(param):
            check_update(group, param, fqn, algorithm, replicas, max_exchange_bytes, alike)
    note_format(group, where, has_state)


def check_update(
    group: dict[str, Any],
    param: Tensor,
    fqn: str,
    algorithm: Algorithm,
    replicas: Ranks | None,
    max_exchange_bytes: int,
    alike: set[Hashable],
) -> ParamShard:
    """Return how a parameter that has state lies on this rank, if a step can update it.

    Args:
        group: complete.
        param: one of it.
        fqn: names it in errors.
        algorithm: of the group.
        replicas: that hold a copy each of every plain parameter.
        max_exchange_bytes: memory for matrices that travel.
        alike: what the group's parameters before were like: the rules are asked about the first
            of those that are alike; written.

    Raises:
        TypeError: the algorithm declares units that nothing would update.
        ValueError: a dtype, a shape or a matrix that cannot be treated.
        NotImplementedError: a DTensor with partial sums, pieces that are no ranges of the
            parameter where elements need an index, or unknown ones where units are put together.
    """
    shard = ParamShard.of(param, fqn, replicas)
    spec = id(param._spec) if isinstance(param, DTensor) else None  # which equal parameters share
    like = (spec, param.shape, param.dtype, param.device, fqn in group["keep_32bit"])
    if like in alike:
        return shard
    alike.add(like)
    check_kept(group, shard, fqn)
    if not param.is_floating_point():
        raise ValueError(f"{fqn}: expected a real floating dtype, got {param.dtype}")
    if isinstance(algorithm, MatrixAlgorithm):
        shard.check_has_units(fqn)
    algorithm.check_param(group, param.shape, fqn)
    structure = usable_structure(algorithm, group, param, fqn)
    if isinstance(algorithm, MatrixAlgorithm):
        wire = algorithm.wire_dtype(group, param.device)
        check_exchange(shard, fqn, structure, wire, max_exchange_bytes)
    return shard


@lru_cache(maxsize=1024)
def demands_of(structure: Structure, by: str, *, trains: bool) -> tuple[Demand, ...]:
    """Return what state and step need of a parameter; equal parameters share it.

    Args:
        structure: that its algorithm declares.
        by: names the optimizer.
        trains: whether it has state.
    """
    blocks = Demand(Blocks(256), "stored", by)
    if structure == Elementwise() or not trains:
        return (blocks,)
    # Blocks hold at rest: the element-wise part of a step works on what a rank holds.
    return blocks, Demand(structure, "step" if structure.has_units else "stored", by)
