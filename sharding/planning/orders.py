"""Orders of the tensors of a segment that fit a given S. Pure integers, counted in cells.

Equal tensors form a *kind*, and an order is a list of runs `(kind, count)`: hundreds of equal
experts cost as much as one. Placing an order is exact, see [Note: the placement problem] in
planner.py; [Note: the search] in search.py tells which of these orders are tried when.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby, pairwise
from math import prod
from typing import NamedTuple, cast

from sharding.planning.granule import Cells

KindRuns = list[tuple[int, int]]  # (kind, count), in the order of the buffer

_STEPS = 120_000  # one search may take, and `_STEPS_A_TENSOR` more for each tensor
_STEPS_A_TENSOR = 300
_MOST_STATES = 20_000  # of an exact search
_MOST_DEPTH = 250  # tensors of an exact search, which recurses
_BEAM_WIDTH = 8


class OutOfSteps(Exception):
    """An exact search was cut short."""


class Orders:
    """The tensors of a segment, orders of them, and the steps that are left to look for more.

    A step is about one placement of a tensor.
    """

    def __init__(self, cells: Sequence[Cells], world_size: int) -> None:
        kinds: dict[Cells, int] = {}
        self.kind_of = [kinds.setdefault(tensor, len(kinds)) for tensor in cells]
        self.kinds = list(kinds)
        self.counts = [0] * len(self.kinds)
        for kind in self.kind_of:
            self.counts[kind] += 1
        self.world_size = world_size
        self.natural: KindRuns = [(kind, len(list(run))) for kind, run in groupby(self.kind_of)]
        self.total = sum(tensor.size for tensor in cells)
        self.steps_left = _STEPS + _STEPS_A_TENSOR * len(cells)
        self.infeasible: set[int] = set()  # values of S that no order fits, proven

    @property
    def has_few_states(self) -> bool:
        """Whether `complete` can be expected to end."""
        few = prod(count + 1 for count in self.counts) <= _MOST_STATES
        return few and len(self.kind_of) <= _MOST_DEPTH

    def fits(self, runs: KindRuns, shard: int) -> bool:
        """Return whether the tensors fit in this order."""
        end, limit = 0, self.world_size * shard - self.total
        if limit < 0:
            return False
        for kind, count in runs:
            tensor = self.kinds[kind]
            limit += count * tensor.size
            before, end = end, tensor.run_end(shard, end, count, limit)
            self.steps_left -= 1 + min(count, max(0, end - before) // shard)
            if end < 0:
                return False
        return True

    def sorted_runs(self, key: Callable[[Cells], tuple[int, ...]]) -> KindRuns:
        """Return all tensors of a kind together, the kinds sorted."""
        order = sorted(range(len(self.kinds)), key=lambda kind: key(self.kinds[kind]))
        return [(kind, self.counts[kind]) for kind in order]

    def simple(self, shard: int) -> Iterator[KindRuns]:
        """Return orders by block and size, and the natural one last, whose runs can be many."""
        yield self.sorted_runs(lambda kind: (-kind.block, -kind.size))
        yield self.sorted_runs(lambda kind: (kind.block, -kind.size))
        yield self.sorted_runs(lambda kind: (-kind.size, -kind.block))
        # Blocks that divide S may be cut at any boundary: keep them at one end, fillers last.
        for last in (False, True):
            for sign in (-1, 1):
                yield self.sorted_runs(
                    lambda kind, last=last, sign=sign: (  # type: ignore[misc]
                        kind.block == 1,
                        (shard % kind.block != 0) != last,
                        sign * kind.block,
                        sign * kind.size,
                    )
                )
        yield self.natural

    def made(self, shard: int) -> Iterator[KindRuns]:
        """Return orders made for this S, one run at a time, that do not leave more gaps than they
        may."""
        for even in (False, True):
            for pace in (0, 1):
                runs = self.filling(shard, pace, even)
                if runs is not None:
                    yield runs

    def filling(self, shard: int, pace: int, even: bool) -> KindRuns | None:
        """Next comes the first kind without a gap, else the one with the least gap.

        Args:
            shard: S.
            pace: With 1, also the first whose gap keeps the waste in proportion to what is placed:
                small blocks are kept for boundaries that coarse ones cannot cross.
            even: First is the kind of which most is left, as a fraction; else the coarsest one.
        """
        slack = self.world_size * shard - self.total
        left = self.counts.copy()
        active = self.coarse_first()
        runs: KindRuns = []
        end = placed = 0
        while active and slack >= end - placed:
            if even:
                active.sort(key=lambda kind: -(left[kind] << 20) // self.counts[kind])
            allowed = pace * slack * placed // self.total - (end - placed)
            best, best_start = self.next_kind(active, shard, end, allowed)
            if best < 0:
                return None
            tensor = self.kinds[best]
            # After one of them a kind that comes before it may fit, but for the coarsest.
            one = even or best != active[0]
            count = 1 if one else tensor.run_gapless(shard, best_start, left[best])
            runs.append((best, count))
            end = best_start + count * tensor.size
            placed += count * tensor.size
            left[best] -= count
            if not left[best]:
                active.remove(best)
        return None if active else runs

    def next_kind(self, active: list[int], shard: int, end: int, allowed: int) -> tuple[int, int]:
        """Return the first kind whose gap is 0 or allowed, else the one of least gap; and its
        start."""
        best, best_start = -1, -1
        for kind in active:
            self.steps_left -= 1
            start = self.kinds[kind].earliest_start(shard, end)
            if start == end or 0 <= start - end <= allowed:
                return kind, start
            if start >= 0 and (best < 0 or start < best_start):
                best, best_start = kind, start
        return best, best_start

    def coarse_first(self) -> list[int]:
        """Return all kinds, those of the largest blocks first."""
        return [kind for kind, _ in self.sorted_runs(lambda kind: (-kind.block, -kind.size))]

    def complete(self, shard: int) -> Iterator[KindRuns]:
        """Return an order that fits, if there is one: exact, unless the steps run out."""
        try:
            runs = _Exact(self, shard).runs()
        except OutOfSteps:
            return
        if runs is None:
            self.infeasible.add(shard)
        else:
            yield runs

    def beams(self, shard: int) -> Iterator[KindRuns]:
        """Return orders that a beam search finds."""
        runs = _beam(self, shard)
        if runs is not None:
            yield runs


class _Exact:
    """Depth first over how many of each kind are placed; the least end that failed is kept.

    The value of a state is its end: when it failed from an end it fails from every later one.
    """

    def __init__(self, orders: Orders, shard: int) -> None:
        self.orders, self.shard = orders, shard
        self.slack = orders.world_size * shard - orders.total
        self.coarse_first = orders.coarse_first()
        self.left = orders.counts.copy()
        self.weights = [
            prod(count + 1 for count in orders.counts[:k]) for k in range(len(self.left))
        ]
        self.failed: dict[int, int] = {}
        self.path: list[int] = []

    def runs(self) -> KindRuns | None:
        """Return an order that fits, or None when there is none.

        Raises:
            OutOfSteps: The search used up its steps.
        """
        if self.slack < 0 or not self.place(0, 0, 0):
            return None
        return [(kind, len(list(run))) for kind, run in groupby(self.path)]

    def place(self, end: int, placed: int, code: int) -> bool:
        orders = self.orders
        if placed == orders.total:
            return True
        failed = self.failed.get(code)
        if failed is not None and failed <= end:
            return False
        if orders.steps_left <= 0:
            raise OutOfSteps
        moves = []
        for rank, kind in enumerate(self.coarse_first):
            if self.left[kind]:
                orders.steps_left -= 1
                start = orders.kinds[kind].earliest_start(self.shard, end)
                if 0 <= start <= placed + self.slack:
                    moves.append((start, rank, kind))
        for start, _, kind in sorted(moves):
            self.left[kind] -= 1
            self.path.append(kind)
            size = orders.kinds[kind].size
            if self.place(start + size, placed + size, code + self.weights[kind]):
                return True
            self.path.pop()
            self.left[kind] += 1
        self.failed[code] = end
        return False


class _Partial(NamedTuple):
    """A partial order of the beam: cells to its end, cells placed, what is left, how it came."""

    end: int
    placed: int
    left: tuple[int, ...]
    runs: tuple[object, int, int] | None  # (earlier runs, kind, count)


def _beam(orders: Orders, shard: int) -> KindRuns | None:
    """Return a few partial orders at a time, each continued by one run; the most promising are
    kept.

    The waste that is left to spend is meant for what is hard to place: tensors whose block does not
    divide S, the more the larger the block. A partial order is promising when it wasted less than
    the share of what it placed; so fillers, which waste nothing, are no merit.
    """
    slack = orders.world_size * shard - orders.total
    hardness = [
        tensor.size * (tensor.block if shard % tensor.block else 1) for tensor in orders.kinds
    ]
    whole = sum(hard * count for hard, count in zip(hardness, orders.counts, strict=True))
    coarse_first = orders.coarse_first()

    def merit(partial: _Partial) -> tuple[int, int]:
        left = sum(hard * count for hard, count in zip(hardness, partial.left, strict=True))
        return whole * (partial.end - partial.placed) - slack * (whole - left), partial.end

    beam = [_Partial(0, 0, tuple(orders.counts), None)]
    while beam and orders.steps_left > 0:
        children: dict[tuple[int, ...], _Partial] = {}
        for partial in beam:
            for kind in coarse_first:
                for child in _continued(orders, shard, partial, kind, slack):
                    if child.placed == orders.total:
                        return _unlinked(child.runs)
                    known = children.get(child.left)
                    if known is None or child.end < known.end:
                        children[child.left] = child
        beam = sorted(children.values(), key=merit)[:_BEAM_WIDTH]
    return None


def _continued(
    orders: Orders, shard: int, partial: _Partial, kind: int, slack: int
) -> Iterator[_Partial]:
    """Return the partial order with one more tensor of a kind, and with as many as leave no gap."""
    end, placed, left, runs = partial
    if not left[kind]:
        return
    orders.steps_left -= 1
    tensor = orders.kinds[kind]
    start = tensor.earliest_start(shard, end)
    if start < 0 or start - placed > slack:
        return
    orders.steps_left -= 4  # about as long as so many placements
    for count in {1, tensor.run_gapless(shard, start, left[kind])}:
        size = count * tensor.size
        remaining = (*left[:kind], left[kind] - count, *left[kind + 1 :])
        yield _Partial(start + size, placed + size, remaining, (runs, kind, count))


def _unlinked(link: tuple[object, int, int] | None) -> KindRuns:
    runs: KindRuns = []
    while link is not None:
        earlier, kind, count = link
        runs.append((kind, count))
        link = cast("tuple[object, int, int] | None", earlier)
    return runs[::-1]


def fewest_group_runs(
    orders: Orders, shard: int, found: KindRuns, groups: Sequence[int]
) -> tuple[list[int], list[int]]:
    """Return, of some orders that fit, one with the fewest runs of a group; and its starts.

    Each is also tried with the tensors of a group kept together, and so are the members of a kind.
    """
    by_group = sorted(range(len(groups)), key=groups.__getitem__)
    members: list[list[int]] = [[] for _ in orders.kinds]
    for i in reversed(by_group):
        members[orders.kind_of[i]].append(i)
    natural = list(range(len(groups)))
    best: tuple[list[int], list[int]] | None = None
    fewest = len(groups) + 1
    for runs in (None, *orders.simple(shard), found):
        order = natural if runs is None else _members_in_order(runs, members)
        for variant in (order, sorted(order, key=groups.__getitem__)):
            changes = sum(groups[a] != groups[b] for a, b in pairwise(variant))
            if changes < fewest:
                starts = _starts(orders, shard, variant)
                if starts is not None:
                    best, fewest = (variant, starts), changes
    if best is None:
        raise AssertionError(f"no order fits shards of {shard} cells any more")
    return best


def _members_in_order(runs: KindRuns, members: list[list[int]]) -> list[int]:
    left = [list(indices) for indices in members]
    return [left[kind].pop() for kind, count in runs for _ in range(count)]


def _starts(orders: Orders, shard: int, order: list[int]) -> list[int] | None:
    cells = [orders.kinds[orders.kind_of[i]] for i in order]
    starts = starts_of(cells, shard, orders.world_size)
    return starts if len(starts) == len(order) else None


def starts_of(cells: Sequence[Cells], shard: int, world_size: int) -> list[int]:
    """Return the earliest starts of `cells` in this order; fewer than `cells` when they do not
    fit."""
    starts: list[int] = []
    end = 0
    slack = world_size * shard - sum(tensor.size for tensor in cells)  # cells that may stay empty
    for tensor in cells:
        start = tensor.earliest_start(shard, end)
        slack -= start - end
        if start < 0 or slack < 0:
            break
        starts.append(start)
        end = start + tensor.size
    return starts
