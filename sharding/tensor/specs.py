"""What RaggedDTensors that are cut alike share: torch's record of mesh, placements and shape.

Touches nothing; reads meshes. A model has thousands of equal parameters, each with gradient and
states: to make the record, and to check that it fits, costs several times the tensor around it.
"""

from __future__ import annotations

from math import prod
from weakref import ref

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from sharding.tensor.placement import RaggedShard
from sharding.transport.axes import placements_on, shard_rank, shard_size

_Key = tuple[int, RaggedShard, tuple[int, ...], torch.dtype]
# By id of the mesh, as of equal meshes one may have groups that were destroyed. An entry lives as
# long as a tensor has the spec, which holds the mesh: until then no other mesh has its id.
_known: dict[_Key, tuple[ref[DTensorSpec], int]] = {}


def shared_spec(
    mesh: DeviceMesh, placement: RaggedShard, shape: tuple[int, ...], dtype: torch.dtype
) -> tuple[DTensorSpec, int]:
    """Return the spec of a tensor, and the elements of this rank's piece.

    Tensors that are alive and laid out alike share it; it goes with the last of them.

    Args:
        mesh: 1-D, or 2-D (replicate, shard); its last dim has the placement's ranks.
        placement: How the flattened tensor is cut.
        shape: Of the full tensor.
        dtype: Of the pieces.

    Raises:
        ValueError: The placement does not fit shape or mesh.
    """
    key = id(mesh), placement, shape, dtype
    known = _known.get(key)
    spec = None if known is None else known[0]()
    if known is None or spec is None:
        spec, numel = _make(mesh, placement, shape, dtype)
        _known[key] = ref(spec, lambda _: _known.pop(key, None)), numel
        return spec, numel
    return spec, known[1]


def _make(
    mesh: DeviceMesh, placement: RaggedShard, shape: tuple[int, ...], dtype: torch.dtype
) -> tuple[DTensorSpec, int]:
    if mesh.ndim not in (1, 2) or shard_size(mesh) != placement.world_size:
        raise ValueError(
            f"expected a 1-D mesh of {placement.world_size} ranks, or a 2-D mesh with as many "
            f"in its last dim, for {placement!r}, got {mesh!r}"
        )
    placement.check_shape(shape)
    if not placement.is_row_major:
        raise ValueError(f"expected a tensor flattened in the order of its dims, got {placement!r}")
    start, stop = placement.bounds(shard_rank(mesh), prod(shape))
    strides = tuple(prod(shape[dim + 1 :]) for dim in range(len(shape)))
    meta = TensorMeta(torch.Size(shape), strides, dtype)
    return DTensorSpec(mesh, placements_on(mesh, placement), tensor_meta=meta), stop - start
