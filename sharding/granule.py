"""Where a tensor may be cut, and so where it may start. Pure integers; imports no torch."""

from bisect import bisect_right
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from math import gcd, lcm


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
        """Checks the attributes and brings them into the one form of this rule."""
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
        """Whether a rank boundary may lie `cut` elements after the start of the tensor."""
        if cut <= 0:
            return cut == 0
        if _follows(cut, self.numel, self.restart):
            return True
        return self.cuts is not None and cut in self.cuts

    def largest_cut(self, limit: int, align: int) -> int:
        """The largest legal cut c with 0 <= c <= limit and c a multiple of `align`.

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
        """The granule whose cuts are legal in both.

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
        """The cells of a tensor of `numel` elements."""
        size = -(-numel // align)
        cuts = tuple(cut for cut in granule.cuts or () if cut < numel and cut % align == 0)
        restart = granule.restart if granule.restart and granule.restart < numel else None
        if cuts or restart:
            first = min(granule.numel or numel, numel, *cuts)
            return cls(size, -(-first // align), Granule(granule.numel, restart, cuts), align)
        block = lcm(granule.numel, align) // align if granule.numel else size
        return cls(size, max(1, min(size, block)), None, align)

    def earliest_start(self, shard: int, end: int) -> int:
        """The least legal start >= end, in cells, for shards of `shard` cells; -1: there is none.

        Only the distance to the next boundary matters: a start that is legal in one shard is legal
        in every later one, so at most one shard beyond the next boundary is looked at.
        """
        size, block = self.size, self.block
        room = shard - end % shard
        if size <= room:
            return end
        boundary = end + room
        if self.irregular is not None:
            return self._earliest_irregular(self.irregular, shard, boundary, room)
        head = room // block * block  # cells before the boundary, at most
        if shard % block == 0:
            return boundary - head  # later boundaries are then cuts, too
        # Two boundaries in the tensor would be `shard` apart, no multiple of the block: one cut.
        if size - head <= shard:
            return boundary - head
        head = shard // block * block
        return boundary + shard - head if size - head <= shard else -1

    def _earliest_irregular(self, granule: Granule, shard: int, boundary: int, room: int) -> int:
        """Walks the legal first cuts downward until all later boundaries are cuts, too."""
        for edge, head in ((boundary, room + 1), (boundary + shard, shard)):
            while head > 0:
                head = granule.largest_cut((head - 1) * self.align, self.align) // self.align
                later = range(head + shard, self.size, shard)
                if all(granule.allows(cut * self.align) for cut in later):
                    return edge - head
        return -1

    def uncut_runs(self) -> dict[int, int]:
        """Lengths in cells of disjoint runs, none with a legal cut inside, with their counts.

        They make up the tensor. For an irregular granule with a rule all but the first are cells.
        """
        runs: Counter[int] = Counter()
        if self.irregular is None:
            runs.update({self.block: self.size // self.block})
            runs.update({self.size % self.block: 1})
        elif self.irregular.numel == 0:
            cuts = self.irregular.cuts or ()
            edges = [0, *(cut // self.align for cut in cuts), self.size]
            runs.update(stop - start for start, stop in pairwise(edges))
        else:
            runs.update({self.block: 1})
            runs.update({1: self.size - self.block})
        return {length: count for length, count in runs.items() if length and count}


def _follows(cut: int, numel: int, restart: int | None) -> bool:
    if numel == 0:
        return False
    return (cut % restart if restart else cut) % numel == 0


def _common_rule(a: tuple[int, int | None], b: tuple[int, int | None]) -> tuple[int, int | None]:
    """(numel, restart) whose multiples are legal in both rules; numel 0 when a rule has none."""
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
