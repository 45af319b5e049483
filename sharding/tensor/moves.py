"""What a tensor in flat pieces sends when its layout changes; one collective each.

Touches the process group of the mesh's shard axis: replicas hold the same. Knows no placement, only
which range of the flattened tensor each rank has.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from sharding.transport.axes import shard_group, shard_rank
from sharding.transport.waits import waiting_for

Tiling = Sequence[tuple[int, int]]  # flat (start, stop) of every rank, in rank order, a tiling


def chunks(rows: int, world_size: int) -> Tiling:
    """Return the rows of every rank under `Shard(0)`, which cuts as `torch.chunk` does."""
    chunk = -(-rows // world_size)
    cuts = [min(rank * chunk, rows) for rank in range(world_size + 1)]
    return list(itertools.pairwise(cuts))


# Elements travel as bytes: a backend need not know the dtype (gloo rejects some), nor round.


def gather(local: Tensor, bounds: Tiling, mesh: DeviceMesh) -> Tensor:
    """Return all elements on every rank, from pieces at `bounds`; (numel,)."""
    group, world_size = shard_group(mesh), len(bounds)
    sizes = [stop - start for start, stop in bounds]
    full = local.new_empty(sum(sizes))
    with waiting_for(f"full_tensor() of {full.numel()} elements", group):
        if world_size * max(sizes) > 2 * full.numel():
            # Padding every piece to the largest would multiply the memory by the world size.
            _broadcast_pieces(local, full, bounds, group)
        elif full.numel():
            _gather_padded(local, full, sizes, group)
    return full


def _broadcast_pieces(
    local: Tensor, full: Tensor, bounds: Tiling, group: dist.ProcessGroup
) -> None:
    own_rank = dist.get_rank(group)
    works = [
        dist.broadcast(
            (local if rank == own_rank else full[start:stop]).view(torch.uint8),
            group=group,
            group_src=rank,
            async_op=True,
        )
        for rank, (start, stop) in enumerate(bounds)
        if start < stop
    ]
    for work in works:
        work.wait()
    start, stop = bounds[own_rank]
    full[start:stop] = local


def _gather_padded(
    local: Tensor, full: Tensor, sizes: Sequence[int], group: dist.ProcessGroup
) -> None:
    padded = local.new_zeros(max(sizes))
    padded[: local.numel()] = local
    slots = local.new_empty(len(sizes), max(sizes))
    dist.all_gather(
        [slot.view(torch.uint8) for slot in slots], padded.view(torch.uint8), group=group
    )
    torch.cat([slot[:size] for slot, size in zip(slots, sizes, strict=True)], out=full)


def exchange(local: Tensor, source: Tiling, target: Tiling, mesh: DeviceMesh) -> Tensor:
    """Return this rank's elements at `target`, from pieces at `source`; by one uneven
    all-to-all."""

    def overlaps(own: tuple[int, int], others: Tiling) -> list[int]:
        return [max(0, min(own[1], stop) - max(own[0], start)) for start, stop in others]

    rank, width = shard_rank(mesh), local.element_size()
    sent = overlaps(source[rank], target)
    received = overlaps(target[rank], source)
    moved = local.new_empty(sum(received))
    group = shard_group(mesh)
    with waiting_for(f"redistribute() of {source[-1][1]} elements", group):
        dist.all_to_all_single(
            moved.view(torch.uint8),
            local.view(torch.uint8),
            [numel * width for numel in received],
            [numel * width for numel in sent],
            group=group,
        )
    return moved
