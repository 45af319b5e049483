"""Finds a small S and an order for the tensors of one segment. Pure integers, counted in cells.

[Note: the search]
The problem is stated in planner.py, orders are made in orders.py. The stages, each of which only
looks below the best S so far:

1. The lower bound. If some order fits it, that is the proof and the end.
2. The published heuristic: three fixed orders, S a multiple of the least common multiple of the
   blocks of the largest tensors, by bisection. So no plan is ever worse than that one.
3. Candidates for S (multiples of common multiples of blocks, sizes and their fractions, a geometric
   grid) with orders sorted by block and size, then with orders made for S one tensor at a time.
4. Few states: an exact dynamic programme over how many of each kind are placed, at the candidates,
   and then at all S from the bound upward. When that ends, it is the proof. Many states: a beam.

Whether S is feasible is not monotone in S, so bisection alone can miss the least one. Effort is
counted in steps (placements looked at), not seconds: every machine finds the same plan.

References: arXiv:2602.22437 (veScale-FSDP: the heuristic of stage 2)
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import lcm

from sharding.planning.bounds import Admissible, fullest_rank
from sharding.planning.granule import Cells
from sharding.planning.orders import KindRuns, Orders, fewest_group_runs


@dataclass(frozen=True, slots=True)
class Solution:
    """What a search found.

    Attributes:
        shard: S in cells.
        order: Indices of the tensors, by position.
        starts: In that order, in cells.
        bound: No S is smaller.
        proof: Why no S is smaller than `shard`: "bound", "search", or "" when that is not known.
    """

    shard: int
    order: list[int]
    starts: list[int]
    bound: int
    proof: str


def solve(
    cells: Sequence[Cells], groups: Sequence[int], world_size: int, step: int = 1
) -> Solution:
    """Return the layout of least S that can be found. See [Note: the search].

    Args:
        cells: Of the tensors, none of them empty.
        groups: Of the tensors; those of one group lie side by side where that costs nothing.
        world_size: Ranks.
        step: In cells; S is a multiple of it.
    """
    found = _Search(cells, world_size, step)
    found.run()
    order, starts = fewest_group_runs(found.orders, found.shard, found.runs, groups)
    return Solution(found.shard, order, starts, found.bound, found.proof)


class _Search:
    """The best shard so far, the runs that fit it, and the steps that are left."""

    def __init__(self, cells: Sequence[Cells], world_size: int, step: int) -> None:
        self.orders = Orders(cells, world_size)
        self.admissible = Admissible(cells, step)
        self.bound = self.admissible.at_least(fullest_rank(cells, world_size))
        # With the mean load plus the largest tensor, each rank takes whole tensors until it holds
        # the mean; the greedy placement of any order is not worse.
        self.mean = -(-self.orders.total // world_size)
        largest = max((kind.size for kind in self.orders.kinds), default=0)
        self.always = max(self.bound, -(-(self.mean + largest) // step) * step)
        self.shard, self.runs, self.proof = self.always, self.orders.natural, ""

    def run(self) -> None:
        """Lower `shard`, stage by stage."""
        if self.improve(self.bound, self.orders.simple) or self.improve(
            self.bound, self.orders.made
        ):
            return
        self.bisect_multiples()
        candidates = self.candidates()
        self.bisect(candidates, self.orders.simple)
        self.ascend(candidates, self.orders.simple, self.orders.steps_left // 4)
        self.bisect(candidates, self.orders.made)
        self.ascend(candidates, self.orders.made, self.orders.steps_left // 4)
        if self.orders.has_few_states:
            self.ascend(candidates, self.orders.complete, self.orders.steps_left // 2)
            self.prove()
        else:
            self.ascend(self.candidates(32), self.orders.made, self.orders.steps_left // 2)
            self.bisect([self.bound, *self.candidates(32)], self.orders.beams)

    # -- values of S ------------------------------------------------------------------------------

    def improve(self, shard: int, orders: Callable[[int], Iterator[KindRuns]]) -> bool:
        """Take over `shard` if one of the orders fits it."""
        for runs in orders(shard):
            if self.orders.fits(runs, shard):
                self.shard, self.runs = shard, runs
                self.proof = "bound" if shard == self.bound else ""
                return True
        return False

    def ascend(
        self, candidates: list[int], orders: Callable[[int], Iterator[KindRuns]], steps: int
    ) -> None:
        """Take over the first candidate below the best that some order fits."""
        stop = self.orders.steps_left - steps
        for shard in candidates:
            if shard >= self.shard or self.orders.steps_left <= stop:
                return
            if shard not in self.orders.infeasible and self.improve(shard, orders):
                return

    def bisect(self, candidates: list[int], orders: Callable[[int], Iterator[KindRuns]]) -> None:
        """Return a good value early on: what is below it is looked at later."""
        low, high = 0, sum(shard < self.shard for shard in candidates)
        while low < high and self.orders.steps_left > 0:
            middle = (low + high) // 2
            if self.improve(candidates[middle], orders):
                high = middle
            else:
                low = middle + 1

    def bisect_multiples(self) -> None:
        """Return the published heuristic, stage 2 of [Note: the search]."""
        orders = self.orders
        by_size = orders.sorted_runs(lambda kind: (-kind.size, -kind.block))
        by_block = orders.sorted_runs(lambda kind: (-kind.block, -kind.size))
        least = max(self.mean, *(kind.block for kind in orders.kinds))
        unit = self.admissible.step
        units = [unit]
        for kind, _ in by_size:
            unit = lcm(unit, orders.kinds[kind].block)
            if unit > self.always:
                break
            units.append(unit)
        for unit in dict.fromkeys(units):
            for runs in (orders.natural, by_block, by_size):
                low, high = -(-least // unit), -(-self.always // unit)
                while low < high:
                    middle = (low + high) // 2
                    if orders.fits(runs, middle * unit):
                        high = middle
                    else:
                        low = middle + 1
                if high * unit < self.shard:
                    self.shard, self.runs = high * unit, runs

    def candidates(self, multiples: int = 8) -> list[int]:
        """Admissible values of S below the best, ascending."""
        bound = self.bound
        values = {bound + (j << k) // 4 for k in range(bound.bit_length()) for j in (4, 5, 6, 7)}
        weight: Counter[int] = Counter()
        for kind, count in zip(self.orders.kinds, self.orders.counts, strict=True):
            for unit in {kind.block, kind.restart}:
                if 1 < unit < kind.size:
                    weight[unit] += count * kind.size
        units = [unit for unit, _ in weight.most_common(7)]
        for chosen in range(1, len(units) + 1):
            for subset in combinations(units, chosen):
                values.update(_multiples(lcm(*subset), bound, multiples))
        for kind in self.orders.kinds:
            values.update(_multiples(kind.size, bound, 4))
            values.update(-(-kind.size // parts) for parts in (2, 3, 4))
            # One cut that leaves as much before it as after it, or nearly so.
            head = kind.size // 2 // kind.block * kind.block
            values.update((kind.size - head, kind.size - head - kind.block))
        width = self.shard - bound
        values.update(bound + width * part // multiples for part in range(multiples))
        admissible = {self.admissible.at_least(v) for v in values if bound <= v < self.shard}
        return sorted(value for value in admissible if bound < value < self.shard)

    def prove(self) -> None:
        """Try every admissible S below the best exactly, upward; the first that fits is least."""
        shard = self.bound
        while shard < self.shard:
            if shard not in self.orders.infeasible and self.improve(shard, self.orders.complete):
                break
            if self.orders.steps_left <= 0:
                return
            shard = self.admissible.at_least(shard + 1)
        self.proof = self.proof or "search"


def _multiples(step: int, least: int, count: int) -> range:
    """Return the first `count` multiples of `step` that are not below `least`."""
    first = -(-least // step) * step
    return range(first, first + count * step, step)
