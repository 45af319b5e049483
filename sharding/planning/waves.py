"""Decides which units travel together. Pure integers; imports no torch.

[Note: waves]
Units that move do so in waves: one packed exchange brings those of a wave to their owners, one
takes the updates back. Ranks meet in every exchange, so the matrix part of a step takes about the
sum over waves of the busiest rank's work. Owners are chosen over all units at once, because a layer
alone has fewer matrices than there are ranks; each rank's units are then dealt to the waves so that
in every wave all ranks have about the same to do. Units that stay where they lie are dealt as well:
they fill what the others leave open, and are computed while a wave arrives. Many waves overlap
better and need less memory, few are easier to balance: of 8, 4, 2 and 1, the largest number is
taken that costs no more than 1/64, what is due in single steps included: in each wave another rank
may have most of that.
"""

from collections.abc import Sequence
from math import lcm

from sharding.planning.holders import HeldUnit

# A plan with more waves may be slower than one with a single wave by this share (1/64).
_BALANCE_SLACK = 64
_MOST_WAVES = 8
_MOST_STEPS = 1000  # of a common period of all units that are looked at
# Elements that a rank sends and receives in a wave at least, if there is more than one: below, the
# latency of an exchange outweighs what can be overlapped.
_LEAST_WAVE_NUMEL = 1 << 19


class Packing:
    """Units dealt to waves, one after the other. See [Note: waves].

    Attributes:
        busiest: by wave, the work of the rank that has most.
        wave_of: by unit.
    """

    def __init__(self, units: int, waves: int, world_size: int, slot_numel: int) -> None:
        self.busiest = [0] * waves
        self.wave_of = [0] * units
        self._slot_numel = slot_numel
        self._work = [[0] * waves for _ in range(world_size)]  # rank, wave
        self._used = [[0] * waves for _ in range(world_size)]  # elements of the slot

    def add(self, i: int, cost: int, owner: int, use: Sequence[tuple[int, int]]) -> None:
        """Deal a unit to the wave in which it makes the busiest rank least busier."""
        work, used, limit = self._work[owner], self._used[owner], self._slot_numel
        needs = [(self._used[rank], numel) for rank, numel in use]
        chosen, least = -1, (0, 0, 0)
        for wave, busiest in enumerate(self.busiest):
            key = (max(0, work[wave] + cost - busiest), used[wave], busiest)
            if chosen >= 0 and key >= least:
                continue
            if all(row[wave] + numel <= limit for row, numel in needs):
                chosen, least = wave, key
        if chosen < 0:
            chosen = self._open()
        work[chosen] += cost
        self.busiest[chosen] = max(self.busiest[chosen], work[chosen])
        for row, numel in needs:
            row[chosen] += numel
        self.wave_of[i] = chosen

    def _open(self) -> int:
        for row in (self.busiest, *self._work, *self._used):
            row.append(0)
        return len(self.busiest) - 1

    def in_order(
        self, units: tuple[HeldUnit, ...], owners: tuple[int, ...]
    ) -> tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...], tuple[int, ...]]:
        """Return waves, resident units beside them, and the busiest rank's work beside them.

        Nothing overlaps with the arrival of the first wave and the return of the last, so those
        that move least come first and last.
        """
        moving: list[list[int]] = [[] for _ in self.busiest]
        resident: list[list[int]] = [[] for _ in self.busiest]
        moved = [0] * len(self.busiest)
        for i, (unit, owner, wave) in enumerate(zip(units, owners, self.wave_of, strict=True)):
            (resident if unit.stays(owner) else moving)[wave].append(i)
            if not unit.stays(owner):
                moved[wave] += unit.gathered(owner) + unit.returned(owner)
        order = sorted((w for w, wave in enumerate(moving) if wave), key=lambda w: (moved[w], w))
        order = order[:1] + order[2:] + order[1:2]
        # What is left beside no wave is computed beside the first.
        idle = [w for w in range(len(moving)) if not moving[w]]
        beside = [[w] for w in order] or [[]]
        beside[0] += idle
        return (
            tuple(tuple(moving[w]) for w in order),
            tuple(tuple(sorted(i for w in each for i in resident[w])) for each in beside),
            tuple(sum(self.busiest[w] for w in each) for each in beside),
        )

    def step_loads(self, units: tuple[HeldUnit, ...], owners: tuple[int, ...]) -> tuple[int, ...]:
        """Return the sum over waves of the busiest rank's work in each step of a common period."""
        return _step_loads(units, owners, self.wave_of, len(self.busiest), len(self._work))


def best_packing(
    units: tuple[HeldUnit, ...],
    owners: tuple[int, ...],
    loads: Sequence[int],
    slot_numel: int,
    two_ways: bool,
) -> Packing:
    """Return the packing with the most waves that costs at most 1/64, else the least work.

    Args:
        units: all of them.
        owners: of each.
        loads: by rank, work of a mean step.
        slot_numel: elements that a rank may send, receive and keep for one wave.
        two_ways: as of `HeldUnit.slot_use`.
    """
    world_size = len(loads)
    uses: list[list[tuple[int, int]]] = [
        [] if unit.stays(owner) else _summed(unit.slot_use(owner, two_ways=two_ways))
        for unit, owner in zip(units, owners, strict=True)
    ]
    order = sorted(range(len(units)), key=lambda i: (-units[i].cost, -units[i].numel, i))
    least = sum(_step_loads(units, owners, [0] * len(units), 1, world_size))
    together = _summed([each for use in uses for each in use])
    largest = max((numel for _, numel in together), default=0)
    best, fewest = None, 0
    waves = max(1, min(_MOST_WAVES, largest // _LEAST_WAVE_NUMEL))
    while waves:
        packing = Packing(len(units), waves, world_size, slot_numel)
        for i in order:
            packing.add(i, units[i].cost, owners[i], uses[i])
        work = sum(packing.step_loads(units, owners))
        if best is None or work < fewest:
            best, fewest = packing, work
        if fewest <= least + least // _BALANCE_SLACK:
            break
        waves //= 2
    assert best is not None  # one wave at least was tried
    return best


def _step_loads(
    units: tuple[HeldUnit, ...],
    owners: tuple[int, ...],
    wave_of: Sequence[int],
    waves: int,
    world_size: int,
) -> tuple[int, ...]:
    steps = min(lcm(*(unit.period for unit in units)), _MOST_STEPS)
    steady = [[0] * world_size for _ in range(waves)]
    due: list[list[dict[int, int]]] = [[{} for _ in range(steps)] for _ in range(waves)]
    for unit, owner, wave in zip(units, owners, wave_of, strict=True):
        steady[wave][owner] += unit.steady_cost
        for first, work in unit.due:
            for of_ranks in due[wave][first :: unit.period]:
                of_ranks[owner] = of_ranks.get(owner, 0) + work
    loads = [0] * steps
    for works, of_steps in zip(steady, due, strict=True):
        least = max(works)
        for step, of_ranks in enumerate(of_steps):
            loads[step] += max([least, *(works[rank] + more for rank, more in of_ranks.items())])
    return tuple(loads)


def _summed(use: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return one (rank, elements) for each rank."""
    sums: dict[int, int] = {}
    for rank, numel in use:
        sums[rank] = sums.get(rank, 0) + numel
    return list(sums.items())
