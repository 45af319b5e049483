"""Where a tensor may be cut, and so where it may start. Pure integers; imports no torch."""

from bisect import bisect_right
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from math import gcd, lcm

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Granule:
    """The legal cuts of a tensor, as element offsets from its start.

    Offset 0 is always legal. Another offset x is legal when `(x mod restart) mod numel == 0`
    (without `restart`: `x mod numel == 0`), or when it is listed in `cuts`. `numel=0` means that
    only the listed cuts are legal. The end of the tensor is not a cut, so the last run may be
    shorter than `numel`.

    Equal rules compare equal: a `restart` that changes nothing and a cut that the rule already
    allows are dropped, and `cuts` is sorted.

    Attributes:
        numel: Elements of a run that stays together.
        restart: The count of runs begins anew every `restart` elements (one expert of a stack).
        cuts: Further legal offsets, for runs of unequal length.

    Raises:
        ValueError: An attribute is negative, or `numel` is 0 without `cuts`.

    Example:
        >>> Granule(4).allows(8), Granule(4).allows(6)
        (True, False)
        >>> Granule(4, restart=10).allows(14), Granule(0, cuts=(3, 5)).allows(5)
        (True, True)
    """

    numel: int = 1
    restart: int | None = None
    cuts: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        """Check the attributes and bring them into the one form of this rule."""
        numel, restart, cuts = self.numel, self.restart, self.cuts
        if numel < 0 or (numel == 0 and (cuts is None or restart is not None)):
            raise ValueError(
                f"Granule expects numel >= 1, or numel=0 with cuts and no restart; got {self!r}."
            )
        if restart is not None:
            if restart < 1:
                raise ValueError(f"Granule expects restart >= 1 or None, got restart={restart!r}.")
            if numel >= restart:
                numel, restart = restart, None
            elif restart % numel == 0:
                restart = None
        if cuts is not None:
            if any(cut < 1 for cut in cuts):
                raise ValueError(f"Granule expects cuts >= 1 (0 is always legal), got {cuts!r}.")
            cuts = tuple(sorted(cut for cut in set(cuts) if not _follows(cut, numel, restart)))
            cuts = None if not cuts and numel else cuts
        object.__setattr__(self, "numel", numel)
        object.__setattr__(self, "restart", restart)
        object.__setattr__(self, "cuts", cuts)

    @property
    def is_plain(self) -> bool:
        """Whether the legal cuts are the multiples of `numel` and nothing else."""
        return self.restart is None and self.cuts is None

    def allows(self, cut: int) -> bool:
        """Return whether a rank boundary may lie `cut` elements after the start of the tensor."""
        if cut <= 0:
            return cut == 0
        if _follows(cut, self.numel, self.restart):
            return True
        return self.cuts is not None and cut in self.cuts

    def largest_cut(self, limit: int, align: int) -> int:
        """Return the largest legal cut c with 0 <= c <= limit and c a multiple of `align`.

        Example:
            >>> Granule(6).largest_cut(20, align=4)
            12
            >>> Granule(0, cuts=(3, 8)).largest_cut(20, align=4)
            8
        """
        largest = 0
        if self.restart is not None:
            largest = _largest_restarting_cut(self.numel, self.restart, limit, align)
        elif self.numel:
            step = lcm(self.numel, align)
            largest = limit // step * step
        cuts = self.cuts or ()
        for index in range(bisect_right(cuts, limit) - 1, -1, -1):
            if cuts[index] <= largest:
                break
            if cuts[index] % align == 0:
                return cuts[index]
        return largest

    def combine(self, other: "Granule") -> "Granule":
        """Return the granule whose cuts are legal in both.

        Exact for plain granules (least common multiple), equal restarts, a plain granule that
        divides or is divided by the other's restart, and listed cuts. Two rules whose common cuts
        have no such form keep the common multiples of their periods.

        Raises:
            ValueError: No cut but 0 is legal in both.

        Example:
            >>> Granule(4).combine(Granule(6))
            Granule(numel=12, restart=None, cuts=None)
            >>> Granule(4).combine(Granule(0, cuts=(6, 8)))
            Granule(numel=0, restart=None, cuts=(8,))
        """
        numel, restart = _common_rule((self.numel, self.restart), (other.numel, other.restart))
        listed = {*(self.cuts or ()), *(other.cuts or ())}
        cuts = tuple(cut for cut in listed if self.allows(cut) and other.allows(cut))
        if numel == 0 and not cuts:
            raise ValueError(f"no cut is legal in both {self!r} and {other!r}.")
        return Granule(numel, restart, cuts or None)


@dataclass(frozen=True, slots=True)
class Cells:
    """A tensor measured in cells of `align` elements: where it may start in a buffer cut evenly.

    When starts and rank boundaries are multiples of `align`, so are the cuts, and a tensor takes
    up whole cells. A plain granule of g elements then is a block of lcm(g, align) / align cells.

    Attributes:
        size: Cells it takes up.
        block: Cells between its legal cuts (`size` when it has none). For an irregular granule: a
            number of cells that its start has no legal cut in.
        irregular: A granule that is not plain, reduced to its cuts in this tensor; else None.
        align: Elements of a cell.
    """

    size: int
    block: int
    irregular: Granule | None
    align: int

    @classmethod
    def measure(cls, numel: int, granule: Granule, align: int) -> "Cells":
        """Return the cells of a tensor of `numel` elements."""
        size = -(-numel // align)
        cuts = tuple(cut for cut in granule.cuts or () if cut < numel and cut % align == 0)
        restart = granule.restart if granule.restart and granule.restart < numel else None
        if cuts or restart:
            first = min(granule.numel or numel, numel, *cuts)
            return cls(size, -(-first // align), Granule(granule.numel, restart, cuts), align)
        block = lcm(granule.numel, align) // align if granule.numel else size
        return cls(size, max(1, min(size, block)), None, align)

    def earliest_start(self, shard: int, end: int) -> int:
        """Return the least legal start >= end, in cells, for shards of `shard` cells; -1: there is
        none.

        Only the distance to the next boundary matters: a start that is legal in one shard is legal
        in every later one, so at most one shard beyond the next boundary is looked at.
        """
        size, block = self.size, self.block
        room = shard - end % shard
        if size <= room:
            return end
        boundary = end + room
        if self.irregular is not None:
            head = _irregular_head(self, shard, room)
            return boundary - head if head > -shard else -1
        head = room // block * block  # cells before the boundary, at most
        if shard % block == 0:
            return boundary - head  # later boundaries are then cuts, too
        # Two boundaries in the tensor would be `shard` apart, no multiple of the block: one cut.
        if size - head <= shard:
            return boundary - head
        head = shard // block * block
        return boundary + shard - head if size - head <= shard else -1

    def run_end(self, shard: int, end: int, count: int, limit: int) -> int:
        """Return where `count` of these end that are placed one after the other, each as early as
        can be.

        Equal to `count` calls of `earliest_start`, in far fewer steps: whole tensors of one shard
        are taken at once, and so are all later ones as soon as starts repeat.

        Returns:
            The end in cells; -1 when one cannot be placed or ends after `limit`.
        """
        size, block = self.size, self.block
        crosses_freely = self.irregular is None and shard % block == 0
        phases: dict[int, tuple[int, int]] = {}  # end within its shard -> (how many left, end)
        while count:
            if crosses_freely and end % block == 0 and size % block == 0:
                end += count * size  # each starts where the one before ends
                break
            room = shard - end % shard
            if size <= room:
                fitting = min(count, room // size)
                end, count = end + fitting * size, count - fitting
                continue
            start = self.earliest_start(shard, end)
            if start < 0 or start + size > limit:
                return -1
            end, count = start + size, count - 1
            left, earlier = phases.setdefault(end % shard, (count, end))
            if left > count:
                repeats = count // (left - count)
                end, count = end + repeats * (end - earlier), count - repeats * (left - count)
                phases.clear()
        return end if end <= limit else -1

    def run_gapless(self, shard: int, end: int, count: int) -> int:
        """Return how many of `count` of these can follow each other from `end` on without a gap."""
        size, block = self.size, self.block
        if self.irregular is None and shard % block == end % block == size % block == 0:
            return count
        placed = 0
        while placed < count:
            room = shard - end % shard
            fitting = min(count - placed, room // size)
            if not fitting:
                if self.earliest_start(shard, end) != end:
                    break
                fitting = 1
            end, placed = end + fitting * size, placed + fitting
        return placed

    def uncut_runs(self) -> dict[int, int]:
        """Return lengths in cells of disjoint runs, none with a legal cut inside, with their
        counts.

        They make up the tensor. For an irregular granule whose rule does not fit the cells, all but
        the first are cells.
        """
        runs: Counter[int] = Counter()
        if self.irregular is None:
            runs.update({self.block: self.size // self.block})
            runs.update({self.size % self.block: 1})
        elif self.irregular.numel == 0:
            cuts = self.irregular.cuts or ()
            edges = [0, *(cut // self.align for cut in cuts), self.size]
            runs.update(stop - start for start, stop in pairwise(edges))
        elif self.restart:
            periods, rest = divmod(self.size, self.restart)
            blocks, last = divmod(self.restart, self.block)
            runs.update({self.block: periods * blocks + rest // self.block})
            runs.update({last: periods})
            runs.update({rest % self.block: 1})
        else:
            runs.update({self.block: 1})
            runs.update({1: self.size - self.block})
        return {length: count for length, count in runs.items() if length and count}

    @property
    def restart(self) -> int:
        """Cells after which the count of blocks begins anew; 0 where cells do not fit the rule."""
        rule = self.irregular
        if rule is None or rule.restart is None or rule.cuts:
            return 0
        if rule.numel % self.align or rule.restart % self.align:
            return 0
        return rule.restart // self.align

    @property
    def limit(self) -> tuple[int, int, int]:
        """(long, unit, free): shards of up to `long` cells must be multiples of `unit`, and longer
        ones have at least `free` cells.

        A tensor of more than 2 S cells has two boundaries inside, S apart and both multiples of its
        block, so the block divides S. One longer than S has a boundary inside; if the block does
        not divide S there is exactly one, at most block * floor(S / block) cells from its start and
        at most S from its end: S + block * floor(S / block) >= size. (If the block divides S, that
        holds for all S >= size / 2.)

        With restarts, from one boundary to the next either the count restarts or it does not. The
        block does not divide the period, so that of three boundaries in a row the first two steps
        are of one kind, unless the period divides S; then each step moves the boundary within its
        period by the same number of blocks: it has at most ceil(period / block) places to go to.
        """
        size, block = self.size, self.block
        if self.irregular is None:
            if not 1 < block < size:
                return 0, 1, 0
            head = (size + block) // (2 * block) * block
            return (size - 1) // 2, block, max(head, size - head)
        if not self.restart:
            return 0, 1, 0
        return (size - 1) // (-(-self.restart // block) + 1), self.restart, 0


@lru_cache(maxsize=1 << 16)
def _irregular_head(cells: Cells, shard: int, room: int) -> int:
    """Return cells of an irregular tensor before the next boundary, `room` cells away.

    Negative values are cells after that boundary; -shard when there is no legal start.
    """
    largest = _largest_restarting_head if cells.restart else _largest_listed_head
    for edge, most in ((0, room), (shard, shard - 1)):
        head = largest(cells, shard, most)
        if head >= 0:
            return head - edge
    return -shard


def _largest_listed_head(cells: Cells, shard: int, most: int) -> int:
    """Return the largest head <= `most` whose later boundaries are cuts, too; -1: there is none.

    Walks the legal first cuts downward.
    """
    granule, align, head = cells.irregular, cells.align, most + 1
    while head > 0 and granule is not None:
        head = granule.largest_cut((head - 1) * align, align) // align
        later = range(head + shard, cells.size, shard)
        if all(granule.allows(cut * align) for cut in later):
            return head
    return -1


def _largest_restarting_head(cells: Cells, shard: int, most: int) -> int:
    """Return the same for restarts, without a walk.

    From one boundary to the next the place in the period moves on by S mod period, and either
    passes the end of the period or does not; see `Cells.limit`. With `later` boundaries after the
    first, that leaves a range of places for the first one.
    """
    size, block, period = cells.size, cells.block, cells.restart
    moves = shard % period
    fewest = -(-(size - most) // shard) - 1
    for later in (fewest, fewest + 1):
        first, last = 0, period - 1
        if later and moves:
            if moves % block == 0:
                last -= later * moves
            elif (period - moves) % block == 0:
                first += later * (period - moves)
            else:
                continue
        # The largest head up to `high` at such a place, with so many boundaries after it.
        high = min(most, size - later * shard - 1)
        periods, place = divmod(high, period)
        place = min(place, last) // block * block
        if place < first:
            periods, place = periods - 1, last // block * block
        head = periods * period + place
        if place >= first and head >= max(0, size - (later + 1) * shard):
            return head
    return -1


def _follows(cut: int, numel: int, restart: int | None) -> bool:
    if numel == 0:
        return False
    return (cut % restart if restart else cut) % numel == 0


def _common_rule(a: tuple[int, int | None], b: tuple[int, int | None]) -> tuple[int, int | None]:
    """Return (numel, restart) whose multiples are legal in both rules; numel 0 when a rule has
    none."""
    (numel_a, restart_a), (numel_b, restart_b) = a, b
    if numel_a == 0 or numel_b == 0:
        return 0, None
    if restart_a == restart_b:
        return lcm(numel_a, numel_b), restart_a
    if restart_b is None:
        (numel_a, restart_a), (numel_b, restart_b) = b, a
    if restart_a is None and restart_b is not None:
        if restart_b % numel_a == 0:
            return lcm(numel_a, numel_b), restart_b
        # A multiple of both numel_a and restart_b starts a new count of b, so it is legal there.
        return lcm(numel_a, restart_b), None
    return lcm(restart_a or 1, restart_b or 1), None


def _largest_restarting_cut(numel: int, restart: int, limit: int, align: int) -> int:
    """Largest x = restart*j + numel*i <= limit, numel*i < restart, that is a multiple of align.

    For each period j, from the last one down, i solves numel*i = -restart*j (mod align).
    """
    common = gcd(numel, align)
    modulus = align // common
    inverse = pow(numel // common, -1, modulus)
    step = common // gcd(common, restart)  # the periods whose congruence has a solution
    for period in range(limit // restart // step * step, 0, -step):
        last = min(limit - restart * period, restart - 1) // numel
        first = -(restart * period // common) * inverse % modulus
        if first <= last:
            return restart * period + numel * (last - (last - first) % modulus)
    return min(limit, restart - 1) // numel // modulus * modulus * numel
