"""Which parameters of a `fully_shard` call have a cut that was given, and which cut that is.

Touches nothing; reads parameters and meshes. Tensor parallelism gives one, as torch's `fully_shard`
would cut it further, and so does `shard_placement_fn`.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from sharding.fsdp.arguments import ArgumentRefused
from sharding.fsdp.forms import TorchForm
from sharding.transport.axes import joined_mesh, placements_on, shard_size

PlacementFn = Callable[[nn.Parameter], Any]


def local_of(parameter: Tensor) -> Tensor:
    """Return what this rank has of a parameter before it is cut: all but of tensor parallelism."""
    return parameter.to_local().detach() if isinstance(parameter, DTensor) else parameter.detach()


def given_cut(
    fqn: str, parameter: nn.Parameter, mesh: DeviceMesh, placement_fn: PlacementFn | None
) -> TorchForm | None:
    """Return the form of a parameter whose cut was given; None where it is to be planned.

    Raises:
        TypeError: The function returned what is no placement.
        AssertionError: As torch's: the parameter has no such dim.
        NotImplementedError: Chunks of another dim than 0 would differ, or the function returned
            more than a `Shard`.
        ValueError: The parameter is a DTensor with sums that are still partial, or of another mesh.
    """
    given = placement_fn(parameter) if placement_fn is not None else None
    if given is None:
        if not isinstance(parameter, DTensor):
            return None
        given = Shard(0)
    if type(given) is not Shard:
        raise NotImplementedError(
            f"{fqn}: shard_placement_fn returned {given!r}; expected a Shard, or None for the cut "
            f"that is planned"
        )
    local = local_of(parameter)
    dim = given.dim + local.ndim if given.dim < 0 else given.dim
    if not 0 <= dim < local.ndim:
        raise ArgumentRefused(
            f"{fqn}: Shard dim {given.dim} is invalid for {local.ndim}D tensor: "
            f"{tuple(local.shape)}; return None from shard_placement_fn for it"
        )
    if dim and local.shape[dim] % shard_size(mesh):
        raise NotImplementedError(
            f"{fqn}: FSDP does not support uneven sharding on dim {dim}: {tuple(local.shape)} "
            f"(world size: {shard_size(mesh)}); return Shard(0) or None from shard_placement_fn"
        )
    stored = (local.shape[dim], *local.shape[:dim], *local.shape[dim + 1 :])
    if not isinstance(parameter, DTensor):
        placements = placements_on(mesh, Shard(dim))
        return TorchForm(dim, stored, tuple(local.shape), mesh, placements, None)
    return _cut_further(fqn, parameter, mesh, dim, stored)


def _cut_further(
    fqn: str, parameter: DTensor, mesh: DeviceMesh, dim: int, stored: tuple[int, ...]
) -> TorchForm:
    """Return the form of a parameter of tensor parallelism."""
    parallel, placed = parameter.device_mesh, parameter.placements
    if any(isinstance(each, Partial) for each in placed):
        raise ValueError(
            f"{fqn} is placed as {placed!r}; a parameter is no sum to be completed: distribute it "
            f"with Shard or Replicate"
        )
    pieces = 1  # that tensor parallelism cut the same dim into
    for axis, each in enumerate(placed):
        if isinstance(each, (Shard, _StridedShard)) and each.dim == dim:
            pieces *= parallel.size(axis)
    cut: Placement = _StridedShard(dim, split_factor=pieces) if pieces > 1 else Shard(dim)
    return TorchForm(
        dim,
        stored,
        tuple(parameter.shape),
        joined_mesh(mesh, parallel, fqn),
        (*placements_on(mesh, cut), *placed),
        (parallel, placed),
    )


def chunk_of(form: TorchForm, ranks: int) -> int:
    """Return the elements that each of `ranks` holds, padding included: as torch.chunk cuts."""
    rows, *rest = form.stored
    return max(1, -(-rows // ranks) * prod(rest))
