"""Which tensors of one dtype share a buffer. Pure integers; imports no torch.

[Note: segments by granule]
In one buffer, S suits the blocks of all long tensors at once, so it is rounded up to their least
common multiple. Tensors of other blocks may instead have a buffer of their own, with an S of its
own: a *segment*. Every tensor stays contiguous in it, and the segments of a bucket are moved by one
coalesced call, so the price is a few more messages. We begin with one segment for each block and
merge, again and again, the two whose merger costs the fewest elements (it may save some: what one
leaves empty the other fills). Of the partitions met on the way into at most `most` segments, one is
taken when it saves more than the given gain.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import combinations

from sharding.planning.bounds import fullest_rank
from sharding.planning.planner import (
    ALIGN,
    SegmentPlan,
    TensorSpec,
    lower_bound,
    measured_cells,
    plan_segment,
)

MOST_SEGMENTS = 4
SEGMENT_GAIN = 0.01
_MOST_CLASSES = 8  # segments to begin with; their number of pairs bounds the number of plans

Members = tuple[int, ...]  # indices of the tensors of a segment, ascending


def plan_segments(
    tensors: tuple[TensorSpec, ...],
    world_size: int,
    *,
    most: int = MOST_SEGMENTS,
    gain: float = SEGMENT_GAIN,
    align: int = ALIGN,
    shard_align: int | None = None,
) -> tuple[tuple[Members, SegmentPlan], ...]:
    """Return the tensors of each segment and its layout. See [Note: segments by granule].

    Args:
        tensors: Of one dtype.
        world_size: Ranks.
        most: Segments, at most. With 1 the plan is `plan_segment`'s.
        gain: More segments are taken when they save more than this fraction of the tensors'
            elements, against the best plan with fewer segments that was taken.
        align: Elements; every tensor starts at a multiple of it.
        shard_align: Elements; S is a multiple of it (default: `align`).

    Raises:
        ValueError: An argument is out of range.

    Example:
        >>> from sharding.planning.granule import Granule
        >>> one = TensorSpec("w", 900 * 256, Granule(30 * 256))
        >>> two = TensorSpec("v", 700 * 256, Granule(70 * 256))
        >>> [plan.shard_numel // 256 for _, plan in plan_segments((one, two), 10, most=1)]
        [210]
        >>> [plan.shard_numel // 256 for _, plan in plan_segments((one, two), 10)]
        [90, 70]
    """
    if most < 1:
        raise ValueError(f"expected at least one segment, got most={most!r}.")
    if not gain >= 0:
        raise ValueError(f"segment_gain must be >= 0, got {gain!r}.")
    # Names are left out, so that equal layers are partitioned once.
    groups: dict[str, str] = {}
    unnamed = tuple(
        TensorSpec("", t.numel, t.granule, groups.setdefault(t.group_key, str(len(groups))))
        for t in tensors
    )
    return tuple(
        (
            members,
            plan_segment(
                tuple(tensors[i] for i in members), world_size, align=align, shard_align=shard_align
            ),
        )
        for members in _partition(unnamed, world_size, most, gain, align, shard_align)
    )


@lru_cache(maxsize=1024)
def _partition(
    tensors: tuple[TensorSpec, ...],
    world_size: int,
    most: int,
    gain: float,
    align: int,
    shard_align: int | None,
) -> tuple[Members, ...]:
    """Return the tensors of each segment."""
    everything = tuple(range(len(tensors)))
    single = plan_segment(tensors, world_size, align=align, shard_align=shard_align)
    best = {everything: single}
    worth = gain * single.numel  # padding, over all ranks
    if most > 1 and single.padding > worth:
        merging = _Merging(tensors, world_size, align, shard_align)
        if single.padding - merging.least_padding() > worth:
            for partition in sorted(merging.partitions(most), key=len):
                if _padding(best) - _padding(partition) > worth:
                    best = partition
    return tuple(sorted(best))


def least_total_shard(
    tensors: Sequence[TensorSpec], world_size: int, *, most: int = MOST_SEGMENTS, align: int = ALIGN
) -> int:
    """Return a number of elements that the S of all segments together are not below; cheap."""
    if most == 1:
        return lower_bound(tensors, world_size, align=align)
    cells = measured_cells(
        [(tensor.numel, tensor.granule) for tensor in tensors if tensor.numel], align
    )
    return align * fullest_rank(cells, world_size) if cells else 0


def _padding(partition: dict[Members, SegmentPlan]) -> int:
    return sum(plan.padding for plan in partition.values())


class _Merging:
    """Plans of sets of tensors, and the partitions that merging meets."""

    def __init__(
        self,
        tensors: tuple[TensorSpec, ...],
        world_size: int,
        align: int,
        shard_align: int | None,
    ) -> None:
        self.tensors, self.world_size = tensors, world_size
        self.align, self.shard_align = align, shard_align
        self.plans: dict[Members, SegmentPlan] = {}

    def least_padding(self) -> int:
        """Return padding that no number of segments avoids, or less."""
        numel = sum(tensor.numel for tensor in self.tensors)
        least = least_total_shard(self.tensors, self.world_size, align=self.align)
        return self.world_size * least - numel

    def plan(self, members: Members) -> SegmentPlan:
        if members not in self.plans:
            self.plans[members] = plan_segment(
                self.of(members), self.world_size, align=self.align, shard_align=self.shard_align
            )
        return self.plans[members]

    def of(self, members: Members) -> tuple[TensorSpec, ...]:
        return tuple(self.tensors[i] for i in members)

    def classes(self) -> list[Members]:
        """Return the tensors of each block, by first appearance; the smallest of too many share
        one."""
        numels = [(tensor.numel, tensor.granule) for tensor in self.tensors]
        by_block: dict[tuple[int, int], list[int]] = {}
        for i, cells in enumerate(measured_cells(numels, self.align)):
            by_block.setdefault((cells.block, cells.restart), []).append(i)
        by_numel = sorted(by_block.values(), key=lambda m: -sum(self.tensors[i].numel for i in m))
        kept = by_numel[: _MOST_CLASSES - 1]
        rest = sorted(i for members in by_numel[_MOST_CLASSES - 1 :] for i in members)
        return sorted(map(tuple, [*kept, *([rest] if rest else [])]))

    def partitions(self, most: int) -> list[dict[Members, SegmentPlan]]:
        """Those into 2 to `most` segments."""
        current = self.classes()
        met = []
        while len(current) > 1:
            if len(current) <= most:
                met.append({members: self.plan(members) for members in current})
            one, other = self.cheapest_merger(current)
            merged = tuple(sorted(one + other))
            current = [*(m for m in current if m not in (one, other)), merged]
        return met

    def cheapest_merger(self, current: list[Members]) -> tuple[Members, Members]:
        """Return the two segments whose merger costs least; plans only what may be the cheapest."""
        pairs: list[tuple[int, int, int, Members, Members]] = []
        for one, other in combinations(current, 2):
            apart = self.plan(one).shard_numel + self.plan(other).shard_numel
            tensors = self.of(tuple(sorted(one + other)))
            least = lower_bound(
                tensors, self.world_size, align=self.align, shard_align=self.shard_align
            )
            pairs.append((least - apart, len(pairs), apart, one, other))
        best, chosen = None, (current[0], current[1])
        for at_least, _, apart, one, other in sorted(pairs):
            if best is not None and at_least >= best:
                break
            cost = self.plan(tuple(sorted(one + other))).shard_numel - apart
            if best is None or cost < best:
                best, chosen = cost, (one, other)
        return chosen
