"""Draws the buffers of all ranks: a row per rank, a block per tensor, padding hatched.

A tensor is one block with at most eight corners, however many ranks hold a piece of it, so that a
picture of 1,024 ranks has no more shapes than one of 8.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from sharding.planning.planner import SegmentPlan
from vfsdp_optim.capacity.prediction import Capacity, PlannedBucket

_COLORS = {
    "embedding": "#4e79a7",
    "head": "#a0cbe8",
    "matrix": "#59a14f",
    "mlp": "#f28e2b",
    "expert": "#f2b56b",
    "vector": "#b07aa1",
}
_LABELS = {
    "embedding": "embedding",
    "head": "output head",
    "matrix": "attention, router and other matrices",
    "mlp": "MLP",
    "expert": "experts",
    "vector": "norms and biases",
}
_PADDING = "#ececec"
_MOST_OUTLINED = 150  # blocks of a bucket; the outlines of more would hide the blocks
_MOST_RULED = 16  # ranks, above which lines between them would hide the blocks
_LEAST_LABELLED = 0.03  # of a panel's area


def draw(capacities: Sequence[Capacity], path: Path, title: str) -> None:
    """Write a picture with a column per number of ranks and a row per kind of bucket.

    Args:
        capacities: Of one model.
        path: Ends in ".png" or ".svg".
        title: Above all of it.

    Raises:
        ValueError: Another suffix, a folder that does not exist, or no matplotlib.
    """
    if path.suffix not in (".png", ".svg"):
        raise ValueError(f"plot: expected a file name ending in .png or .svg, got {str(path)!r}")
    if not path.absolute().parent.is_dir():
        raise ValueError(f"plot: there is no folder {str(path.parent)!r}")
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError as error:
        raise ValueError(f"plot: {error}; install vfsdp-optim[plot]") from None
    rows = max(len(capacity.buckets) for capacity in capacities)
    width, height = 1.6 + 3.6 * len(capacities), 1.3 + 3.4 * rows
    figure = Figure(figsize=(max(width, 7.0), height), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(rows, len(capacities), squeeze=False)
    for column, capacity in enumerate(capacities):
        for row in range(rows):
            axes = panels[row][column]
            if row < len(capacity.buckets):
                _draw_bucket(axes, capacity.buckets[row])
            else:
                axes.set_axis_off()
    kinds = {
        tensor.kind
        for capacity in capacities
        for bucket in capacity.buckets
        for tensor in bucket.divided.shapes.tensors
    }
    legend = [
        Patch(facecolor=_COLORS[kind], label=_LABELS[kind]) for kind in _LABELS if kind in kinds
    ]
    legend.append(Patch(facecolor=_PADDING, edgecolor="#808080", hatch="////", label="padding"))
    figure.suptitle(title, fontsize=11)
    figure.legend(handles=legend, loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    figure.savefig(path, dpi=130)


def _draw_bucket(axes: Any, bucket: PlannedBucket) -> None:
    """Return one panel: ranks downwards, the elements of a shard to the right, segments side by
    side."""
    ranks, total = bucket.divided.world_size, bucket.shard_numel
    axes.set_facecolor(_PADDING)
    axes.set_xlim(0, total)
    axes.set_ylim(ranks, 0)
    tensors = bucket.divided.shapes.tensors
    members = {place: i for i, place in enumerate(bucket.plan.location)}
    line = 0.5 if len(tensors) <= _MOST_OUTLINED else 0.0
    left = 0
    for which, segment in enumerate(bucket.plan.segments):
        for start, stop in _gaps(segment):
            for outline in _outlines(start, stop, segment.shard_numel, left):
                _fill(axes, outline, _PADDING, edge="#9a9a9a", hatch="////")
        for index in range(len(segment.tensors)):
            tensor, start = tensors[members[which, index]], segment.offsets[index]
            stop = start + tensor.numel
            for outline in _outlines(start, stop, segment.shard_numel, left):
                _fill(axes, outline, _COLORS[tensor.kind], edge="white", line=line)
            if tensor.numel > _LEAST_LABELLED * ranks * total:
                _label(axes, tensor.name, start, stop, segment, left)
        left += segment.shard_numel
        if left < total:
            axes.axvline(left, color="black", linewidth=1.2)
    if ranks <= _MOST_RULED:
        axes.hlines(range(1, ranks), 0, total, color="black", linewidth=0.4, alpha=0.4)
    padding = sum(s.padding for s in bucket.plan.segments) / max(1, bucket.divided.shapes.numel)
    times = f" x {bucket.count}" if bucket.count > 1 else ""
    axes.set_title(f"{bucket.name}{times}, {ranks:,} ranks\npadding {padding:.2%}", fontsize=8)
    axes.tick_params(labelsize=7)
    axes.set_ylabel("rank", fontsize=7)
    axes.set_xlabel("elements of the shard", fontsize=7)
    axes.xaxis.get_offset_text().set_fontsize(7)
    axes.locator_params(axis="x", nbins=4)


Outline = list[tuple[float, float]]


def _outlines(start: int, stop: int, shard: int, left: int) -> list[Outline]:
    """Return the corners of what a run of a segment's buffer covers in the panel.

    Example:
        >>> _outlines(6, 20, 8, 0)  # the end of a row, a row, the start of one
        [[(6, 0), (8, 0), (8, 2), (4, 2), (4, 3), (0, 3), (0, 1), (6, 1)]]
    """
    if stop <= start:
        return []
    top, first = divmod(start, shard)
    bottom, last = divmod(stop - 1, shard)
    a, b, right = left + first, left + last + 1, left + shard
    if top == bottom:
        return [[(a, top), (b, top), (b, top + 1), (a, top + 1)]]
    if bottom == top + 1 and b <= a:  # two parts that do not touch
        return [
            [(a, top), (right, top), (right, top + 1), (a, top + 1)],
            [(left, bottom), (b, bottom), (b, bottom + 1), (left, bottom + 1)],
        ]
    return [
        [
            (a, top),
            (right, top),
            (right, bottom),
            (b, bottom),
            (b, bottom + 1),
            (left, bottom + 1),
            (left, top + 1),
            (a, top + 1),
        ]
    ]


def _gaps(segment: SegmentPlan) -> Iterator[tuple[int, int]]:
    """Return the runs of the buffer that belong to no tensor."""
    end = 0
    for index in segment.order:
        if segment.tensors[index].numel:
            if segment.offsets[index] > end:
                yield end, segment.offsets[index]
            end = segment.offsets[index] + segment.tensors[index].numel
    if end < segment.world_size * segment.shard_numel:
        yield end, segment.world_size * segment.shard_numel


def _fill(
    axes: Any, outline: Outline, color: str, *, edge: str, line: float = 0.0, hatch: str = ""
) -> None:
    from matplotlib.patches import Polygon

    style = {"facecolor": color, "edgecolor": edge, "linewidth": line, "hatch": hatch}
    axes.add_patch(Polygon(outline, closed=True, **style))


def _label(axes: Any, name: str, start: int, stop: int, segment: SegmentPlan, left: int) -> None:
    """Write a name into the middle of the largest part of a run."""
    shard = segment.shard_numel
    x: float
    y: float
    top, bottom = -(-start // shard), stop // shard
    if top >= bottom:  # no whole row: the middle of the run
        row, column = divmod((start + stop) // 2, shard)
        x, y, turned = column, row + 0.5, False
    else:
        x, y = shard / 2, (top + bottom) / 2
        turned = (bottom - top) / segment.world_size > shard / axes.get_xlim()[1]
    axes.text(
        left + x,
        y,
        name,
        fontsize=6,
        ha="center",
        va="center",
        rotation=90 if turned else 0,
        clip_on=True,
    )
