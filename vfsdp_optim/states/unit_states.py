"""States that a unit has on its owner: one copy, whole, on one rank. Touches local tensors.

[Note: states of units]
An algorithm may keep something of a whole matrix or panel, such as a factor. It lies on the rank
that computes the unit and is there from the first look on; on other ranks it has no elements. Users
and checkpoints see it beside the states that are cut as the parameter is, under its key and the
number of the unit in the parameter ("left.3"), as a tensor whose elements are all on one rank: so
it is saved once, and loads on any number of ranks. Owners stay while their states stand in
`Optimizer.state`; where one is loaded that lies elsewhere, its values come to the owner.
"""

from collections.abc import Mapping
from math import prod

import torch
from torch import Tensor

from sharding.tensor.placement import placement_from_runs
from sharding.tensor.ragged_tensor import RaggedDTensor
from vfsdp_optim.parameters.param_shard import ParamShard, Ranks
from vfsdp_optim.states.formats import CODES, BlockFormat, PlainFormat, State, StateFormat


def unit_format(*, packed: bool, nonnegative: bool) -> StateFormat:
    """Return how a state of a unit is kept: as 8-bit codes, or in fp32."""
    return BlockFormat(not nonnegative) if packed else PlainFormat(torch.float32)


def unit_views(
    state: State,
    state_format: StateFormat,
    shape: tuple[int, ...],
    ranks: Ranks | None,
    owner: int,
    what: str,
) -> dict[str, Tensor]:
    """Return the parts of a state as users see them, by what is added to its key.

    Args:
        state: of all elements on the owner, and of none elsewhere.
        state_format: of that state.
        shape: of the whole.
        ranks: among which the owner is; None where this process is alone.
        owner: number of a rank among them.
        what: names it in errors.
    """
    local = next(iter(state.parts().values()))
    whole: Tensor
    if ranks is None:
        whole = local.view(shape)
    else:
        runs = ((0, owner), (prod(shape), 1), (0, ranks.size - owner - 1))
        placement = placement_from_runs(tuple(range(len(shape))), runs, 1)
        whole = RaggedDTensor.from_local(local, ranks.mesh(), placement, torch.Size(shape))
    return state_format.views(state, ParamShard.of(whole, what), what)


def standing_owner(state: Mapping[str, object], key: str, ranks: Ranks | None) -> int | None:
    """Return the rank that has the state `key` of a unit, as it stands in `Optimizer.state`; None
    where it does not lie whole on one of `ranks`."""
    for value in (state.get(key), state.get(key + CODES)):
        if ranks is None or not isinstance(value, RaggedDTensor):
            continue
        holders = [
            rank
            for rank, (start, stop) in enumerate(value.placement.ranges(value.numel()))
            if stop > start
        ]
        mesh = value.device_mesh
        if mesh.ndim == 1 and mesh.size() == ranks.size and len(holders) == 1:
            return holders[0]
    return None
