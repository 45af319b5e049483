"""Where each tensor lies in a bucket's flat buffer. Pure integers; imports no torch.

[Note: the placement problem]
A segment is one buffer of `world_size * S` elements; rank r holds [r*S, (r+1)*S). Tensors lie in it
whole and apart, each starts at a multiple of `align`, S is a positive multiple of `align` (or of
`shard_align`, a multiple of it), and a rank boundary inside a tensor must be one of its granule's
cuts. We want the least S.

Boundaries and starts are multiples of `align`, so cuts are too, and a tensor takes up whole *cells*
of `align` elements (S * world_size is a multiple of `align`, so even the last tensor's cell fits).
The problem is thus the unaligned one, counted in cells, where a plain granule of g elements becomes
a *block* of lcm(g, align) / align cells.

For a given order and S, putting each tensor at the earliest legal start is optimal: the legal
starts of the next tensor only shrink as the end before it grows. What remains is to choose S and
the order: see bounds.py for what S cannot be, and search.py for how both are found.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from sharding.planning.bounds import least_shard
from sharding.planning.cuts import held_parts
from sharding.planning.granule import Cells, Granule
from sharding.planning.orders import starts_of
from sharding.planning.search import solve

ALIGN = 256
"""Elements: a multiple of every 8-bit quantization block, and 512 bytes of bf16."""

_PLAIN = Granule()


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """What the planner knows of a tensor.

    Attributes:
        fqn: Its name; never influences the plan.
        numel: Its elements, 0 allowed.
        granule: Where it may be cut.
        group_key: Tensors of one key are laid side by side where that costs nothing.
    """

    fqn: str
    numel: int
    granule: Granule = _PLAIN
    group_key: str = ""


@dataclass(frozen=True, slots=True)
class SegmentPlan:
    """The layout of one segment: `world_size` equal shards of `shard_numel` elements.

    Attributes:
        tensors: In the order given by the caller.
        world_size: Ranks.
        shard_numel: S, the elements of every rank's shard.
        order: Indices into `tensors`, by position in the buffer (tensors without elements first).
        offsets: `offsets[i]` is where `tensors[i]` starts in the buffer of `world_size * S`.
        lower_bound: No legal S is smaller.
        proof: How it is known that no S is smaller than `shard_numel`: "bound" when it equals the
            lower bound, "search" when all smaller ones were tried exactly, "" when it is not known.
    """

    tensors: tuple[TensorSpec, ...]
    world_size: int
    shard_numel: int
    order: tuple[int, ...]
    offsets: tuple[int, ...]
    lower_bound: int
    proof: str = ""

    @property
    def optimal(self) -> bool:
        """Whether it is proven that no smaller S is possible."""
        return self.proof != ""

    @property
    def numel(self) -> int:
        """Elements of all tensors."""
        return sum(tensor.numel for tensor in self.tensors)

    @property
    def padding(self) -> int:
        """Elements of the buffer, over all ranks, that belong to no tensor."""
        return self.world_size * self.shard_numel - self.numel

    @property
    def padding_ratio(self) -> float:
        """`padding` as a fraction of the tensors' elements (0 when there are none)."""
        return self.padding / self.numel if self.numel else 0.0

    def is_whole(self, i: int) -> bool:
        """Return whether one rank holds all of tensor i."""
        offset, last = self.offsets[i], self.offsets[i] + max(0, self.tensors[i].numel - 1)
        return offset // self.shard_numel == last // self.shard_numel

    def ranges(
        self, i: int, start: int = 0, stop: int | None = None
    ) -> tuple[tuple[int, int, int], ...]:
        """Return who holds the elements [start, stop) of tensor i (default: all of them).

        Returns:
            (rank, start, stop) by rank, counted from the start of the tensor; no empty ranges.

        Example:
            >>> plan_segment((TensorSpec("a", 900), TensorSpec("b", 300)), 2).ranges(0)
            ((0, 0, 768), (1, 768, 900))
        """
        offset = self.offsets[i]
        stop = self.tensors[i].numel if stop is None else stop
        runs = ((self.shard_numel, self.world_size),)
        parts = held_parts(runs, offset + start, offset + stop)
        return tuple((rank, first - offset, last - offset) for rank, first, last in parts)


def place(
    tensors_in_order: Sequence[TensorSpec],
    shard_numel: int,
    world_size: int,
    *,
    align: int = ALIGN,
) -> tuple[int, ...] | None:
    """Return the earliest legal offsets of tensors in this order, or None when they do not fit.

    Exact: when this returns None, no offsets in this order are legal for this `shard_numel`.

    Raises:
        ValueError: An argument is out of range, or `shard_numel` is no multiple of `align`.

    Example:
        >>> place((TensorSpec("a", 3, Granule(3)), TensorSpec("b", 4, Granule(2))), 4, 2, align=1)
        (0, 4)
        >>> place((TensorSpec("b", 4, Granule(2)), TensorSpec("a", 3, Granule(3))), 4, 2, align=1)
        (0, 4)
    """
    _check(tensors_in_order, world_size, align)
    if shard_numel < 1 or shard_numel % align:
        raise ValueError(
            f"shard_numel must be a positive multiple of align={align}, got {shard_numel!r}."
        )
    cells = measured_cells([(tensor.numel, tensor.granule) for tensor in tensors_in_order], align)
    starts = starts_of(cells, shard_numel // align, world_size)
    return tuple(start * align for start in starts) if len(starts) == len(cells) else None


def lower_bound(
    tensors: Sequence[TensorSpec],
    world_size: int,
    *,
    align: int = ALIGN,
    shard_align: int | None = None,
) -> int:
    """Return a number of elements that no legal shard is smaller than; the proofs are in bounds.py.

    Far cheaper than a plan: it tells early that a granularity is too coarse for `world_size`.

    Raises:
        ValueError: An argument is out of range.

    Example:
        >>> lower_bound([TensorSpec(str(i), 512, Granule(512)) for i in range(5)], 4)
        1024
    """
    step = _check(tensors, world_size, align, shard_align)
    cells = measured_cells(
        [(tensor.numel, tensor.granule) for tensor in tensors if tensor.numel], align
    )
    return align * least_shard(cells, world_size, step)


def plan_segment(
    tensors: tuple[TensorSpec, ...],
    world_size: int,
    *,
    align: int = ALIGN,
    shard_align: int | None = None,
) -> SegmentPlan:
    """Return the layout of least S that the search finds; never fails on legal arguments.

    Depends on the arguments alone (not on names, hash seeds, or the speed of the host), and is
    computed once per signature: sizes, granules, pattern of group keys, world size, alignments.

    Args:
        tensors: Of the segment.
        world_size: Ranks.
        align: Elements; every tensor starts at a multiple of it.
        shard_align: Elements; S is a multiple of it. A multiple of `align`, which is the default.

    Raises:
        ValueError: An argument is out of range.

    Example:
        >>> plan = plan_segment((TensorSpec("w", 1000), TensorSpec("b", 10)), 4)
        >>> plan.shard_numel, plan.offsets, plan.optimal
        (512, (0, 1024), True)
    """
    step = _check(tensors, world_size, align, shard_align)
    group_ids: dict[str, int] = {}
    signature = tuple(
        (tensor.numel, tensor.granule, group_ids.setdefault(tensor.group_key, len(group_ids)))
        for tensor in tensors
    )
    return SegmentPlan(tensors, world_size, *_solve(signature, world_size, align, step))


def _check(
    tensors: Sequence[TensorSpec], world_size: int, align: int, shard_align: int | None = None
) -> int:
    """Return how many `align` there are in a `shard_align`."""
    if world_size < 1:
        raise ValueError(f"world_size must be >= 1, got {world_size!r}.")
    if align < 1:
        raise ValueError(f"align must be >= 1, got {align!r}.")
    for tensor in tensors:
        if tensor.numel < 0:
            raise ValueError(f"{tensor.fqn}: numel must be >= 0, got {tensor.numel!r}.")
    if shard_align is None:
        return 1
    if shard_align < 1 or shard_align % align:
        raise ValueError(
            f"shard_align must be a positive multiple of align={align}, got {shard_align!r}."
        )
    return shard_align // align


@lru_cache(maxsize=1024)
def _solve(
    signature: tuple[tuple[int, Granule, int], ...], world_size: int, align: int, step: int
) -> tuple[int, tuple[int, ...], tuple[int, ...], int, str]:
    """Return (S, order, offsets, lower bound, proof) in elements."""
    empty = [i for i, (numel, _, _) in enumerate(signature) if numel == 0]
    kept = [i for i, (numel, _, _) in enumerate(signature) if numel]
    cells = measured_cells([signature[i][:2] for i in kept], align)
    groups = [signature[i][2] for i in kept]
    found = solve(cells, groups, world_size, step)
    offsets = [0] * len(signature)
    for i, start in zip(found.order, found.starts, strict=True):
        offsets[kept[i]] = start * align
    order = (*empty, *(kept[i] for i in found.order))
    return found.shard * align, order, tuple(offsets), found.bound * align, found.proof


def measured_cells(tensors: Iterable[tuple[int, Granule]], align: int) -> list[Cells]:
    """Return the cells of tensors; equal tensors share one object."""
    known: dict[tuple[int, Granule], Cells] = {}
    cells = []
    for tensor in tensors:
        if tensor not in known:
            known[tensor] = Cells.measure(*tensor, align)
        cells.append(known[tensor])
    return cells
