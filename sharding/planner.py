"""Where each tensor lies in a bucket's flat buffer. Pure integers; imports no torch.

[Note: the placement problem]
A segment is one buffer of `world_size * S` elements; rank r holds [r*S, (r+1)*S). Tensors lie in it
whole and apart, each starts at a multiple of `align`, S is a positive multiple of `align`, and a
rank boundary inside a tensor must be one of its granule's cuts. We want the least S.

Boundaries and starts are multiples of `align`, so cuts are too, and a tensor takes up whole *cells*
of `align` elements (S * world_size is a multiple of `align`, so even the last tensor's cell fits).
The problem is thus the unaligned one, counted in cells, where a plain granule of g elements becomes
a *block* of lcm(g, align) / align cells.

For a given order and S, putting each tensor at the earliest legal start is optimal: the legal
starts of the next tensor only shrink as the end before it grows. What remains is to choose S and
the order. Whether S is feasible is not monotone in S (divisibility), so bisection alone can miss
the least one: candidates for S are derived from blocks and sizes and tried upward from a proven
lower bound, each with a few orders. The effort is counted in steps, not seconds, so that every
machine finds the same plan.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations, pairwise
from math import lcm

from sharding.granule import Cells, Granule

ALIGN = 256
"""Elements: a multiple of every 8-bit quantization block, and 512 bytes of bf16."""

_STEPS = 400_000  # placements of one tensor that one search may spend; a fraction of a second
_MOST_KINDS = 64  # of tensors, for the one order that looks at all kinds again for each tensor
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
    """

    tensors: tuple[TensorSpec, ...]
    world_size: int
    shard_numel: int
    order: tuple[int, ...]
    offsets: tuple[int, ...]
    lower_bound: int

    @property
    def optimal(self) -> bool:
        """Whether no smaller S is possible, as far as the lower bound can tell."""
        return self.shard_numel == self.lower_bound

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

    def ranges(
        self, i: int, start: int = 0, stop: int | None = None
    ) -> tuple[tuple[int, int, int], ...]:
        """Who holds the elements [start, stop) of tensor i (default: all of them).

        Returns:
            (rank, start, stop) by rank, counted from the start of the tensor; no empty ranges.

        Example:
            >>> plan_segment((TensorSpec("a", 900), TensorSpec("b", 300)), 2).ranges(0)
            ((0, 0, 768), (1, 768, 900))
        """
        offset, shard = self.offsets[i], self.shard_numel
        stop = self.tensors[i].numel if stop is None else stop
        if start >= stop:
            return ()
        ranks = range((offset + start) // shard, (offset + stop - 1) // shard + 1)
        return tuple(
            (r, max(start, r * shard - offset), min(stop, (r + 1) * shard - offset)) for r in ranks
        )


def place(
    tensors_in_order: Sequence[TensorSpec],
    shard_numel: int,
    world_size: int,
    *,
    align: int = ALIGN,
) -> tuple[int, ...] | None:
    """The earliest legal offsets of tensors in this order, or None when they do not fit.

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
    cells = [Cells.measure(tensor.numel, tensor.granule, align) for tensor in tensors_in_order]
    starts = _place(cells, range(len(cells)), shard_numel // align, world_size)
    return tuple(start * align for start in starts) if len(starts) == len(cells) else None


def lower_bound(tensors: Sequence[TensorSpec], world_size: int, *, align: int = ALIGN) -> int:
    """A number of elements that no legal shard is smaller than; the proof is at `_bound`.

    Far cheaper than a plan: it tells early that a granularity is too coarse for `world_size`.

    Raises:
        ValueError: An argument is out of range.

    Example:
        >>> lower_bound([TensorSpec(str(i), 512, Granule(512)) for i in range(5)], 4)
        1024
    """
    _check(tensors, world_size, align)
    cells = [Cells.measure(tensor.numel, tensor.granule, align) for tensor in tensors]
    return align * _bound(cells, world_size)


def plan_segment(
    tensors: tuple[TensorSpec, ...], world_size: int, *, align: int = ALIGN
) -> SegmentPlan:
    """The layout of least S that the search finds; never fails on legal arguments.

    Depends on the arguments alone (not on names, hash seeds, or the speed of the host), and is
    computed once per signature: sizes, granules, pattern of group keys, world size, align.

    Raises:
        ValueError: An argument is out of range.

    Example:
        >>> plan = plan_segment((TensorSpec("w", 1000), TensorSpec("b", 10)), 4)
        >>> plan.shard_numel, plan.offsets, plan.optimal
        (512, (0, 1024), True)
    """
    _check(tensors, world_size, align)
    group_ids: dict[str, int] = {}
    signature = tuple(
        (tensor.numel, tensor.granule, group_ids.setdefault(tensor.group_key, len(group_ids)))
        for tensor in tensors
    )
    shard, order, offsets, bound = _solve(signature, world_size, align)
    return SegmentPlan(tensors, world_size, shard, order, offsets, bound)


def _check(tensors: Sequence[TensorSpec], world_size: int, align: int) -> None:
    if world_size < 1:
        raise ValueError(f"world_size must be >= 1, got {world_size!r}.")
    if align < 1:
        raise ValueError(f"align must be >= 1, got {align!r}.")
    for tensor in tensors:
        if tensor.numel < 0:
            raise ValueError(f"{tensor.fqn}: numel must be >= 0, got {tensor.numel!r}.")


def _place(cells: Sequence[Cells], order: Sequence[int], shard: int, world_size: int) -> list[int]:
    """The earliest starts of `cells` in `order`; fewer than `order` when they do not fit."""
    starts: list[int] = []
    end = 0
    slack = world_size * shard - sum(cells[i].size for i in order)  # cells that may stay empty
    for i in order:
        start = cells[i].earliest_start(shard, end)
        slack -= start - end
        if start < 0 or slack < 0:
            break
        starts.append(start)
        end = start + cells[i].size
    return starts


def _bound(cells: Sequence[Cells], world_size: int) -> int:
    """Cells that no legal shard is smaller than.

    1. Runs that cannot be cut are dealt to the ranks. Of the k*m + 1 longest, some of the m ranks
       holds k + 1, together at least as long as the k + 1 shortest of them. (k = 0 is the longest
       run. Every cell is such a run or part of one, so the mean load is included.)
    2. A tensor longer than 2*S has two boundaries inside, S apart and both multiples of its block,
       so the block divides S. One longer than S has a boundary inside; if the block does not
       divide S there is exactly one, at most block * floor(S / block) cells from its start and at
       most S from its end. See `_admissible_from`.
    """
    runs: Counter[int] = Counter()
    for tensor in cells:
        runs.update(tensor.uncut_runs())
    mean = -(-sum(tensor.size for tensor in cells) // world_size)
    return _admissible_from(max(mean, _pigeonhole(runs, world_size), 1), cells)


def _pigeonhole(runs: Counter[int], world_size: int) -> int:
    """Point 1 of `_bound`, with the largest k for each length that occurs."""
    lengths = sorted(runs, reverse=True)
    bound = max(lengths, default=0)
    longest = 0  # runs of this length or longer
    for last, length in enumerate(lengths):
        longest += runs[length]
        layers = (longest - 1) // world_size  # k
        beyond = longest - (layers * world_size + 1)  # of these, not among the k*m + 1 longest
        left, load = layers + 1, 0
        for shorter in reversed(lengths[: last + 1]):
            skipped = min(beyond, runs[shorter])
            taken = min(left, runs[shorter] - skipped)
            beyond -= skipped
            left -= taken
            load += taken * shorter
            if not left:
                break
        bound = max(bound, load)
    return bound


def _admissible_from(shard: int, cells: Sequence[Cells]) -> int:
    """The least S >= shard that passes point 2 of `_bound`, given that it passes point 1.

    A tensor of n cells in blocks of g allows S with 2*S < n and g | S, and S >= `free`, the least S
    with S + g * floor(S / g) >= n. (If g | S, that holds for all S >= n / 2.)
    """
    limits = []
    for size, block in {(t.size, t.block) for t in cells if t.irregular is None}:
        if 1 < block < size:
            # The least multiple of the block with 2 * head + block > size.
            head = (size + block) // (2 * block) * block
            limits.append((size, block, max(head, size - head)))
    while True:
        free = max((free for size, _, free in limits if 2 * shard >= size), default=0)
        if free > shard:
            shard = free
            continue
        long = [limit for limit in limits if 2 * shard < limit[0]]
        step = lcm(*(block for _, block, _ in long))
        multiple = -(-shard // step) * step
        if multiple == shard:
            return shard
        # Below `multiple` some long tensor would have to stop being long, below `free` none can.
        shard = min(multiple, *(free for _, _, free in long))


@lru_cache(maxsize=1024)
def _solve(
    signature: tuple[tuple[int, Granule, int], ...], world_size: int, align: int
) -> tuple[int, tuple[int, ...], tuple[int, ...], int]:
    """(S, order, offsets, lower bound) in elements."""
    empty = [i for i, (numel, _, _) in enumerate(signature) if numel == 0]
    kept = [i for i, (numel, _, _) in enumerate(signature) if numel]
    cells = [Cells.measure(signature[i][0], signature[i][1], align) for i in kept]
    search = _Search(cells, [signature[i][2] for i in kept], world_size)
    shard = search.least_shard()
    order, starts = search.best_order(shard)
    offsets = [0] * len(signature)
    for i, start in zip(order, starts, strict=True):
        offsets[kept[i]] = start * align
    by_offset = (*empty, *(kept[i] for i in order))
    return shard * align, by_offset, tuple(offsets), search.bound * align


class _Search:
    """Tries values of S with a few orders each, within a budget of steps. All in cells."""

    def __init__(self, cells: list[Cells], groups: list[int], world_size: int) -> None:
        self.cells, self.groups, self.world_size = cells, groups, world_size
        self.bound = _bound(cells, world_size)
        self.steps_left = _STEPS
        natural = list(range(len(cells)))
        self.kinds: dict[Cells, list[int]] = {}  # equal tensors, the last one first
        for i in reversed(natural):
            self.kinds.setdefault(cells[i], []).append(i)
        self.fixed_orders = [
            natural,
            sorted(natural, key=lambda i: (-cells[i].block, -cells[i].size)),
            sorted(natural, key=lambda i: (cells[i].block, -cells[i].size)),
            sorted(natural, key=lambda i: -cells[i].size),
        ]

    def least_shard(self) -> int:
        """The least candidate that some order fits; the last candidate always fits."""
        if self.fits(self.bound):
            return self.bound
        candidates = self.candidates()
        refused = {self.bound}
        # A first good value by bisection, then everything below it, upward.
        low, high = 0, len(candidates) - 1
        while low < high:
            middle = (low + high) // 2
            if candidates[middle] not in refused and self.fits(candidates[middle]):
                high = middle
            else:
                refused.add(candidates[middle])
                low = middle + 1
        for shard in candidates[:high]:
            if self.steps_left <= 0:
                break
            if shard not in refused and self.fits(shard):
                return shard
        return candidates[high]

    def candidates(self) -> list[int]:
        """Admissible values of S, ascending, the last of which every order fits.

        With the mean load plus the largest tensor, each rank takes whole tensors until it holds
        the mean; the greedy placement of that order is not worse.
        """
        cells, bound = self.cells, self.bound
        total = sum(tensor.size for tensor in cells)
        always = -(-total // self.world_size) + max(tensor.size for tensor in cells)
        values = {bound + (j << k) // 4 for k in range(bound.bit_length()) for j in (4, 5, 6, 7)}
        weight: Counter[int] = Counter()
        for tensor in cells:
            if 1 < tensor.block < tensor.size:
                weight[tensor.block] += tensor.size
        blocks = [block for block, _ in weight.most_common(7)]
        for count in range(1, len(blocks) + 1):
            for chosen in combinations(blocks, count):
                values.update(_multiples(lcm(*chosen), bound, 8))
        for size in {tensor.size for tensor in cells}:
            values.update(_multiples(size, bound, 4))
            values.add(-(-size // 2))
        admissible = {_admissible_from(v, cells) for v in values if bound <= v < always}
        return [*sorted(value for value in admissible if value < always), always]

    def fits(self, shard: int) -> bool:
        """Whether one of the orders fits."""
        return any(self.starts(order, shard) is not None for order in self.orders(shard))

    def best_order(self, shard: int) -> tuple[list[int], list[int]]:
        """Of the orders that fit, one with the fewest runs of a group key; and its starts."""
        best: tuple[list[int], list[int]] | None = None
        fewest = len(self.cells) + 1
        for order in self.orders(shard):
            keys = [self.groups[i] for i in order]
            runs = sum(a != b for a, b in pairwise(keys))
            if runs < fewest and (starts := self.starts(order, shard)) is not None:
                best, fewest = (order, starts), runs
        if best is None:
            raise AssertionError(f"no order fits shards of {shard} cells any more")
        return best

    def starts(self, order: list[int], shard: int) -> list[int] | None:
        starts = _place(self.cells, order, shard, self.world_size)
        self.steps_left -= len(starts) + 1
        return starts if len(starts) == len(order) else None

    def orders(self, shard: int) -> Iterator[list[int]]:
        """The orders to try, each also with the tensors of a group key kept together."""
        several = len(set(self.groups)) > 1
        for order in self.plain_orders(shard):
            yield order
            if several:
                yield sorted(order, key=self.groups.__getitem__)

    def plain_orders(self, shard: int) -> Iterator[list[int]]:
        yield from self.fixed_orders
        # Blocks that divide S may be cut at any boundary: keep them at one end, fillers last.
        keys = [(tensor.block == 1, shard % tensor.block != 0, tensor) for tensor in self.cells]
        for divisors_last in (False, True):
            for sign in (-1, 1):
                self.steps_left -= len(keys)
                yield sorted(
                    range(len(keys)),
                    key=lambda i: (
                        keys[i][0],
                        keys[i][1] != divisors_last,
                        sign * keys[i][2].block,
                        sign * keys[i][2].size,
                    ),
                )
        if len(self.kinds) <= _MOST_KINDS:
            yield self.filling_order(shard)

    def filling_order(self, shard: int) -> list[int]:
        """Next is always a tensor that leaves the least gap, of these the one of largest block."""
        left = {tensor: indices.copy() for tensor, indices in self.kinds.items()}
        coarse_first = sorted(left, key=lambda t: (-t.block, -t.size, left[t][-1]))
        order: list[int] = []
        end = 0
        while coarse_first:
            best, best_start = coarse_first[0], -1
            for tensor in coarse_first:
                self.steps_left -= 1
                start = tensor.earliest_start(shard, end)
                if start >= 0 and (best_start < 0 or start < best_start):
                    best, best_start = tensor, start
                if start == end:
                    break
            order.append(left[best].pop())
            end = max(best_start, end) + best.size
            if not left[best]:
                coarse_first.remove(best)
        return order


def _multiples(step: int, least: int, count: int) -> range:
    """The first `count` multiples of `step` that are not below `least`."""
    first = -(-least // step) * step
    return range(first, first + count * step, step)
