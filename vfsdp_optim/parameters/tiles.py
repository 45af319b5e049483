"""What placements of a DTensor leave on each rank: ranges of the flattened tensor, or boxes.

Pure: reads placements, shapes and sizes of meshes; touches no tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

import torch
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from sharding.planning.boxes import Boxes, Range, boxes_of, chunk_ranges
from sharding.planning.cuts import PieceRuns, piece_runs
from sharding.planning.holders import Grid
from sharding.tensor.placement import RaggedShard


@dataclass(frozen=True, slots=True, eq=False)
class Tiles:
    """The fields of a `ParamShard` that its placements decide, and the elements on this rank."""

    grid: Grid
    all_bounds: Sequence[Range] | None
    runs: PieceRuns
    boxes: Boxes | None
    shard: int
    numel: int


@lru_cache(maxsize=1 << 14)
def tiles_of(
    placements: tuple[Placement, ...],
    sizes: tuple[int, ...],
    coordinate: tuple[int, ...],
    shape: torch.Size,
) -> Tiles | None:
    """Return how a parameter is cut; None where that is unknown. Parameters that are cut alike
    share it.

    Args:
        placements: of a parameter, by axis of its mesh.
        sizes: of those axes.
        coordinate: of this rank in the mesh.
        shape: of the parameter.
    """
    cut = [
        axis
        for axis, placement in enumerate(placements)
        if not placement.is_replicate() and sizes[axis] > 1
    ]
    long = [axis for axis, size in enumerate(sizes) if size > 1]
    if cut and cut != long[long.index(cut[0]) : long.index(cut[-1]) + 1]:
        return None  # copies between shards: no `Grid` numbers them
    cuts = [(placements[axis], sizes[axis]) for axis in cut]
    shards = prod(sizes[axis] for axis in cut)
    inner = sizes[cut[-1] + 1 :] if cut else ()
    grid = Grid(shards, prod(sizes) // shards, prod(inner))
    shard = 0
    for axis in cut:
        shard = shard * sizes[axis] + coordinate[axis]
    tiling = _tiling(shape, cuts)
    if tiling is not None:
        all_bounds, runs = tiling
        start, stop = all_bounds[shard]
        return Tiles(grid, all_bounds, runs, None, shard, stop - start)
    boxes = _boxes(shape, cuts)
    if boxes is None:
        return None
    numel = prod(stop - start for start, stop in boxes.box(shard))
    return Tiles(grid, None, (), boxes, shard, numel)


def _boxes(shape: torch.Size, cuts: Sequence[tuple[Placement, int]]) -> Boxes | None:
    """Return the boxes of all shards; None where a placement is none of torch's."""
    known = []
    for placement, size in cuts:
        if isinstance(placement, _StridedShard):
            known.append((placement.dim % len(shape), size, placement.split_factor))
        elif type(placement) is Shard:
            known.append((placement.dim % len(shape), size, 1))
        else:
            return None
    return boxes_of(tuple(shape), tuple(known))


def _tiling(
    shape: torch.Size, cuts: Sequence[tuple[Placement, int]]
) -> tuple[Sequence[Range], PieceRuns] | None:
    """Return every shard's range of the flattened parameter and the runs of their sizes; None
    where shards are no ranges.

    Args:
        shape: of the parameter.
        cuts: (placement, size) of the axes of its mesh that cut it, in the order of the mesh.
    """
    if not cuts:
        return [(0, prod(shape))], ((prod(shape), 1),)
    first = cuts[0][0]
    if isinstance(first, RaggedShard) and len(cuts) == 1:
        return first.ranges(prod(shape)), first.piece_runs
    if not isinstance(first, Shard) or any(placement != first for placement, _ in cuts):
        return None
    dim = first.dim % len(shape)
    if type(first) is not Shard or prod(shape[:dim]) != 1:
        return None
    row_numel = prod(shape[dim + 1 :])
    return _row_ranges(shape[dim], row_numel, tuple(size for _, size in cuts))


@lru_cache(maxsize=1024)
def _row_ranges(
    rows: int, row_numel: int, sizes: tuple[int, ...]
) -> tuple[Sequence[Range], PieceRuns]:
    """Return the same of rows cut by one mesh axis after another; equal parameters share them."""
    pieces = [(0, rows)]
    for size in sizes:
        pieces = [piece for start, stop in pieces for piece in chunk_ranges(start, stop, size)]
    ranges = tuple((start * row_numel, stop * row_numel) for start, stop in pieces)
    return ranges, piece_runs(stop - start for start, stop in ranges)
