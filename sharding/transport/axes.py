"""The two axes that a device mesh may have: the last one shards, the one before it replicates.

Touches nothing; reads meshes. A 1-D mesh has no replicate axis. A 2-D mesh is that of HSDP, as
torch's `fully_shard` takes it: dim 0 replicates, dim 1 shards.
"""

from __future__ import annotations

import weakref

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.placement_types import Placement

from sharding.transport.waits import share_timeout


def shard_group(mesh: DeviceMesh) -> dist.ProcessGroup:
    """Return the ranks that hold one replica together, in the order of their pieces."""
    return mesh.get_group(mesh.ndim - 1)


def shard_rank(mesh: DeviceMesh) -> int:
    """Return the place of this rank in its `shard_group`: which piece of a tensor it holds."""
    return mesh.get_local_rank(mesh.ndim - 1)


def shard_size(mesh: DeviceMesh) -> int:
    """Return the number of pieces that a tensor is cut into."""
    return mesh.size(mesh.ndim - 1)


def joined_mesh(data: DeviceMesh, other: DeviceMesh, fqn: str) -> DeviceMesh:
    """Return the mesh of the dims of both, those of `data` first; communicates nothing.

    Raises:
        ValueError: They are no two parts of one mesh with named dims; names the parameter.
    """
    names = (data.mesh_dim_names or (), other.mesh_dim_names or ())
    root = data._get_root_mesh()
    apart = all(names) and not set(names[0]) & set(names[1])
    if not apart or other._get_root_mesh() != root:
        raise ValueError(
            f"{fqn} is a DTensor over {other!r}, and is to be sharded over {data!r}; pass dims of "
            f"one mesh to both: mesh = init_device_mesh(..., mesh_dim_names=('data', 'tensor')), "
            f"parallelize_module(..., mesh['tensor']), fully_shard(..., mesh=mesh['data'])"
        )
    return DeviceMesh._concatenate([data, other])


def part_of_shard_group(mesh: DeviceMesh, ranks: int) -> dist.ProcessGroup:
    """Return the group of `ranks` consecutive ranks of the shard axis that this one is in.

    Made once for each size, a collective of its ranks; of the same backends as the shard group.
    """
    whole = shard_group(mesh)
    parts = _parts.setdefault(whole, {})
    if ranks not in parts:
        first = shard_rank(mesh) // ranks * ranks
        members = dist.get_process_group_ranks(whole)[first : first + ranks]
        parts[ranks] = dist.new_group(
            members,
            backend=dist.distributed_c10d.get_backend_config(whole),
            use_local_synchronization=True,
        )
        share_timeout(parts[ranks], whole)
    return parts[ranks]


_parts: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[int, dist.ProcessGroup]] = (
    weakref.WeakKeyDictionary()
)


def replicate_group(mesh: DeviceMesh) -> dist.ProcessGroup | None:
    """Return the ranks that hold the same piece as this one; None on a 1-D mesh."""
    return None if mesh.ndim == 1 else mesh.get_group(0)


def replicate_rank(mesh: DeviceMesh) -> int:
    """Return the place of this rank in its `replicate_group`; 0 on a 1-D mesh."""
    return 0 if mesh.ndim == 1 else mesh.get_local_rank(0)


def groups_of(mesh: DeviceMesh) -> tuple[dist.ProcessGroup, ...]:
    """Return the group of each axis, the shard axis first: one after the other they reach all
    ranks."""
    replicas = replicate_group(mesh)
    return (shard_group(mesh),) if replicas is None else (shard_group(mesh), replicas)


def placements_on(mesh: DeviceMesh, placement: Placement) -> tuple[Placement, ...]:
    """Return one placement for each dim of the mesh: `placement` on the shard axis."""
    return (*(Replicate() for _ in range(mesh.ndim - 1)), placement)
