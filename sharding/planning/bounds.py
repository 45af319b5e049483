"""Shards that no layout can have: lower bounds on S, and which S pass them. Pure integers.

Everything is counted in cells, see [Note: the placement problem] in planner.py.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from math import lcm

from sharding.planning.granule import Cells


class Admissible:
    """The values of S that sizes and blocks alone do not rule out.

    Args:
        cells: Of the tensors; repeated ones cost nothing.
        step: S is a multiple of it.
    """

    def __init__(self, cells: Iterable[Cells], step: int = 1) -> None:
        self.step = step
        limits = {tensor.limit for tensor in set(cells)}
        self._limits = sorted(limit for limit in limits if limit[0])

    def at_least(self, shard: int) -> int:
        """Return the least admissible S >= `shard`, which is at least the mean load and the longest
        run.

        See `Cells.limit`. Jumps by the least common multiple of all units that hold.
        """
        while True:
            free = max((free for long, _, free in self._limits if shard > long), default=0)
            if free > shard:
                shard = free
                continue
            holding = [limit for limit in self._limits if shard <= limit[0]]
            unit = lcm(self.step, *(unit for _, unit, _ in holding))
            multiple = -(-shard // unit) * unit
            if multiple == shard:
                return shard
            # Below `multiple` some limit would have to stop holding.
            shard = min([multiple, *(max(free, long + 1) for long, _, free in holding)])


def least_shard(cells: Sequence[Cells], world_size: int, step: int = 1) -> int:
    """Return cells that no legal shard is smaller than, a multiple of `step`: `fullest_rank`, then
    admissible."""
    return Admissible(cells, step).at_least(fullest_rank(cells, world_size))


def fullest_rank(cells: Sequence[Cells], world_size: int) -> int:
    """Return cells that some rank must hold, in however many segments the tensors are laid out.

    Runs that cannot be cut are dealt to the ranks. Of the k*m + 1 longest, some of the m ranks
    holds k + 1, together at least as long as the k + 1 shortest of them. (k = 0 is the longest run.
    Every cell is such a run or part of one, so the mean load is included.)
    """
    runs: Counter[int] = Counter()
    for tensor, count in Counter(cells).items():
        for length, times in tensor.uncut_runs().items():
            runs[length] += count * times
    mean = -(-sum(tensor.size for tensor in cells) // world_size)
    return max(mean, _pigeonhole(runs, world_size), 1)


def _pigeonhole(runs: Counter[int], world_size: int) -> int:
    """Return the largest k of `fullest_rank` for each length that occurs."""
    lengths = sorted(runs, reverse=True)
    most = max(lengths, default=0)
    longest = 0  # runs of this length or longer
    for last, length in enumerate(lengths):
        longest += runs[length]
        layers = (longest - 1) // world_size  # k
        beyond = longest - (layers * world_size + 1)  # of these, not among the k*m + 1 longest
        left, held = layers + 1, 0
        for shorter in reversed(lengths[: last + 1]):
            skipped = min(beyond, runs[shorter])
            taken = min(left, runs[shorter] - skipped)
            beyond -= skipped
            left -= taken
            held += taken * shorter
            if not left:
                break
        most = max(most, held)
    return most
