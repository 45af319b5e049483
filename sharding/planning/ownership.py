"""Decides which rank computes each unit. Pure integers; imports no torch.

Every rank calls `plan_owners` with the same arguments and gets the same plan, so nothing is sent to
agree on it.

See [Note: waves] in waves.py and [Note: turns] in turns.py.
"""

import heapq
from bisect import insort
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from sharding.planning.holders import HeldUnit
from sharding.planning.waves import best_packing

# A plan that moves fewer elements may be slower than the best balanced one by this share (1/64).
_BALANCE_SLACK = 64
# Work, in multiply-adds an element, from which a unit that lies whole on a rank is worth moving to
# one with less to do: 4 bytes at 40 GB/s take as long as 20,000 multiply-adds at 400 TFLOP/s.
_WORTH_MOVING = 1 << 14
_MOST_SWAPS = 128
# Ranks with equal work that are compared by what they have to do in single steps.
_MOST_TIED = 16


@dataclass(frozen=True, slots=True)
class OwnerPlan:
    """Who computes which unit, and when. See [Note: waves] in waves.py.

    Attributes:
        units: all units, resident ones too.
        world_size: number of ranks.
        owners: rank that computes each unit, once however many copies there are.
        waves: indices of the units that travel in one exchange.
        resident_waves: indices of the units that stay, by the wave beside which they are computed;
            one entry if nothing travels.
        loads: sum of cost on each rank.
        wave_loads: work of the busiest rank beside each wave.
        step_loads: the sum of that over all waves in each step of the period after which all units
            have the same to do again; one number where every step is alike.
    """

    units: tuple[HeldUnit, ...]
    world_size: int
    owners: tuple[int, ...]
    waves: tuple[tuple[int, ...], ...]
    resident_waves: tuple[tuple[int, ...], ...]
    loads: tuple[int, ...]
    wave_loads: tuple[int, ...]
    step_loads: tuple[int, ...]

    def is_resident(self, i: int) -> bool:
        """Return whether unit `i` lies whole on its owner, so that nothing moves for it."""
        return self.units[i].stays(self.owners[i])

    @property
    def gathered_numel(self) -> int:
        """Elements that travel to owners in one step, all ranks together."""
        return sum(u.gathered(owner) for u, owner in zip(self.units, self.owners, strict=True))

    @property
    def returned_numel(self) -> int:
        """Elements that travel back in one step, to the holders of every copy."""
        return sum(u.returned(owner) for u, owner in zip(self.units, self.owners, strict=True))

    @property
    def sent_numels(self) -> tuple[int, ...]:
        """Elements that leave each rank in one step, to owners and back."""
        sent = [0] * self.world_size
        for unit, owner in zip(self.units, self.owners, strict=True):
            sent[owner] += unit.returned(owner)
            for rank, start, stop in unit.way_pieces(owner, copies=False):
                sent[rank] += (stop - start) * (rank != owner)
        return tuple(sent)

    @property
    def skew(self) -> float:
        """Sum over waves of the busiest rank's work, over the work of a rank if all were equal."""
        total = sum(self.loads)
        return sum(self.wave_loads) * self.world_size / total if total else 1.0

    @property
    def spike(self) -> float:
        """Work of the longest step over that of a median one."""
        middle = median(self.step_loads)
        return max(self.step_loads) / middle if middle else 1.0

    @property
    def largest_share(self) -> float:
        """Cost of the largest unit, over the work of a rank if all were equal.

        No plan has a smaller `skew` than this: a unit is computed by one rank.
        """
        total = sum(self.loads)
        largest = max((unit.cost for unit in self.units), default=0)
        return largest * self.world_size / total if total else 0.0


def plan_owners(units: tuple[HeldUnit, ...], world_size: int, *, slot_numel: int) -> OwnerPlan:
    """Give every unit an owner so that ranks are equally loaded, then so that little moves.

    Units that lie whole on a rank are computed there and count as load from the start; where that
    alone would be more than a rank's share, those with the most work an element go to other ranks.
    The others are taken by descending cost (longest processing time first, Graham 1969,
    doi:10.1137/0117039). Of two assignments, one that takes the least loaded rank and one that
    takes the largest holder as long as no rank is loaded above the average, the second is chosen
    where it is at most 1/64 slower. A unit whose states are on a rank stays there; ranks with equal
    work are equally filled with states, and have little due in the same steps.

    Args:
        units: what to assign.
        world_size: number of ranks.
        slot_numel: elements that a rank may send, receive and keep for one wave.

    Raises:
        ValueError: a unit is not held completely, or larger than `slot_numel`; or `slot_numel` or
            `world_size` is not positive.
    """
    if world_size < 1 or slot_numel < 1:
        raise ValueError(
            f"world_size and slot_numel must be positive, got world_size={world_size!r}, "
            f"slot_numel={slot_numel!r}"
        )
    two_ways = any(unit.replicas > 1 for unit in units)
    for unit in units:
        _check_unit(unit, world_size, slot_numel, two_ways)
    balanced = _assign(units, world_size, prefer_holders=False)
    local = _assign(units, world_size, prefer_holders=True)
    slowest = max(_loads(units, balanced, world_size), default=0)
    owners = balanced
    if max(_loads(units, local, world_size), default=0) <= slowest + slowest // _BALANCE_SLACK:
        owners = min(local, balanced, key=lambda choice: _moved_numel(units, choice))
    loads = _loads(units, owners, world_size)
    packing = best_packing(units, owners, loads, slot_numel, two_ways)
    waves, resident_waves, wave_loads = packing.in_order(units, owners)
    steps = packing.step_loads(units, owners)
    return OwnerPlan(units, world_size, owners, waves, resident_waves, loads, wave_loads, steps)


def _check_unit(unit: HeldUnit, world_size: int, slot_numel: int, two_ways: bool) -> None:
    shards = world_size
    if unit.grid is not None:
        shards = unit.grid.shards
        if unit.grid.size != world_size:
            raise ValueError(
                f"unit {unit.index} of {unit.fqn!r}: expected a grid of {world_size} ranks, got "
                f"{unit.grid!r}"
            )
    ranks = [rank for rank, _ in unit.holders]
    complete = sum(held for _, held in unit.holders) == unit.numel
    ordered = all(a < b for a, b in pairwise(ranks))
    if not (complete and ordered and all(0 <= r < shards for r in ranks)):
        raise ValueError(
            f"unit {unit.index} of {unit.fqn!r}: expected holders with ascending ranks below "
            f"{shards} that hold {unit.numel} elements together, got {unit.holders!r}"
        )
    needed = unit.least_slot(two_ways=two_ways)
    if needed > slot_numel:
        raise ValueError(
            f"unit {unit.index} of {unit.fqn!r} takes up {needed} elements, more than slot_numel="
            f"{slot_numel!r}; a unit travels whole"
        )


class _Filling:
    """What each rank has been given.

    Attributes:
        loads: work.
        kept: elements of states.
    """

    def __init__(self, world_size: int) -> None:
        self.loads = [0] * world_size
        self.kept = [0] * world_size
        # By rank: (period, step of it) -> work that is due then.
        self._due: list[dict[tuple[int, int], int]] = [{} for _ in range(world_size)]
        self._by_load = [(0, 0, rank) for rank in range(world_size)]

    def give(self, unit: HeldUnit, rank: int) -> None:
        """Count a unit."""
        self.loads[rank] += unit.cost
        self.kept[rank] += unit.state_numel
        due = self._due[rank]
        for step, work in unit.due:
            due[unit.period, step] = due.get((unit.period, step), 0) + work
        heapq.heappush(self._by_load, (self.loads[rank], self.kept[rank], rank))

    def lightest(self, most: int) -> list[int]:
        """Return ranks with the least work, `most` of them, those with the least states first."""
        found: list[tuple[int, int, int]] = []
        heap = self._by_load
        while heap and len(found) < most and (not found or heap[0][0] == found[0][0]):
            entry = heapq.heappop(heap)
            rank = entry[2]
            # Else left over from before that rank was given work.
            if entry[:2] == (self.loads[rank], self.kept[rank]):
                found.append(entry)
        for entry in found:
            heapq.heappush(heap, entry)
        return [rank for _, _, rank in found]

    def clash(self, unit: HeldUnit, rank: int) -> int:
        """Return how much a rank has to do in the steps in which the unit has most."""
        due, period = self._due[rank], unit.period
        return sum(work * due.get((period, step), 0) for step, work in unit.due)


def _assign(
    units: tuple[HeldUnit, ...], world_size: int, *, prefer_holders: bool
) -> tuple[int, ...]:
    average = -(-sum(unit.cost for unit in units) // world_size)
    owners = _residents(units, world_size, average + average // _BALANCE_SLACK)
    filling = _Filling(world_size)
    for unit, owner in zip(units, owners, strict=True):
        if owner >= 0:
            filling.give(unit, owner)
    loads, kept = filling.loads, filling.kept
    for i in sorted(
        (i for i, owner in enumerate(owners) if owner < 0),
        key=lambda i: (-units[i].cost, -units[i].numel, i),
    ):
        unit = units[i]
        choices = filling.lightest(_MOST_TIED if unit.due else 1)
        least = loads[choices[0]]
        holders = [rank for rank, _, _ in unit.all_pieces()]
        if prefer_holders:
            limit = max(average, least + unit.cost)
            choices += [r for r in holders if loads[r] + unit.cost <= limit]
        else:
            choices += [r for r in holders if loads[r] == least]
        owners[i] = min(
            choices,
            key=lambda r, u=unit: (-u.held_by(r), loads[r], filling.clash(u, r), kept[r], r),  # type: ignore[misc]
        )
        filling.give(unit, owners[i])
    _even_out(units, owners, loads, average + average // _BALANCE_SLACK)
    return tuple(owners)


def _even_out(units: tuple[HeldUnit, ...], owners: list[int], loads: list[int], limit: int) -> None:
    """Move work from the busiest rank to the least busy one until none is above `limit`.

    A unit moves, or is swapped for a shorter one. Longest first leaves gaps where the short units
    lie whole on a rank and were not free to fill them.
    """
    held: list[list[int]] = []  # by rank, the units of it that may move, ascending
    kinds: dict[int, dict[int, int]] = {}  # rank -> cost -> one of these
    for _ in range(min(2 * len(loads), _MOST_SWAPS)):
        busiest = max(range(len(loads)), key=lambda r: (loads[r], r))
        idlest = min(range(len(loads)), key=lambda r: (loads[r], r))
        gap = loads[busiest] - loads[idlest]
        if loads[busiest] <= limit:
            return
        held = held or _movable(units, owners, len(loads))
        for rank in {busiest, idlest} - kinds.keys():
            kinds[rank] = _one_of_each_cost(units, held[rank])
        swaps = [
            (abs(2 * (long - short) - gap), long, short)
            for long in kinds[busiest]
            for short in (0, *kinds[idlest])
            if 0 < long - short < gap
        ]
        if not swaps:
            return
        _, long, short = min(swaps)
        moves = [(kinds[busiest][long], busiest, idlest)]
        if short:
            moves.append((kinds[idlest][short], idlest, busiest))
        for unit, origin, target in moves:
            owners[unit] = target
            held[origin].remove(unit)
            insort(held[target], unit)
        del kinds[busiest], kinds[idlest]
        loads[busiest] -= long - short
        loads[idlest] += long - short


def _movable(units: tuple[HeldUnit, ...], owners: list[int], ranks: int) -> list[list[int]]:
    """Return, by rank, the units that it owns and another might."""
    movable: list[list[int]] = [[] for _ in range(ranks)]
    for i, unit in enumerate(units):
        if unit.owner is None and unit.cost > 0 and (not unit.is_resident or _worth_moving(unit)):
            movable[owners[i]].append(i)
    return movable


def _one_of_each_cost(units: tuple[HeldUnit, ...], held: list[int]) -> dict[int, int]:
    """Return a unit of each cost, rather one that moves."""
    found: dict[int, int] = {}
    for i in held:
        known = found.get(units[i].cost)
        if known is None or units[known].is_resident > units[i].is_resident:
            found[units[i].cost] = i
    return found


def _worth_moving(unit: HeldUnit) -> bool:
    return unit.cost >= _WORTH_MOVING * unit.numel


def _residents(units: tuple[HeldUnit, ...], world_size: int, limit: int) -> list[int]:
    """Return the owners of the units that stay where their states are, or where they lie whole, and
    -1 for the others.

    The same matrix of every layer may lie whole on the same rank, which then has several times the
    work of others (DeepSeek-V3 on 64 ranks: 2.5). Above `limit`, what is worth moving is let go.
    """
    owners = [-1] * len(units)
    lying: list[list[int]] = [[] for _ in range(world_size)]
    loads = [0] * world_size
    for i, unit in enumerate(units):
        if unit.owner is not None:
            owners[i] = unit.owner
            loads[unit.owner] += unit.cost
        elif unit.is_resident:
            owners[i] = unit.holders[0][0]
            lying[owners[i]].append(i)
            loads[owners[i]] += unit.cost
    for rank, load in enumerate(loads):
        if load <= limit:
            continue
        worth = [i for i in lying[rank] if _worth_moving(units[i])]
        for i in sorted(worth, key=lambda i: (-units[i].cost / units[i].numel, i)):
            # One unit alone is as slow elsewhere.
            if load > limit and units[i].cost < load:
                owners[i] = -1
                load -= units[i].cost
    return owners


def _loads(
    units: tuple[HeldUnit, ...], owners: tuple[int, ...], world_size: int
) -> tuple[int, ...]:
    loads = [0] * world_size
    for unit, owner in zip(units, owners, strict=True):
        loads[owner] += unit.cost
    return tuple(loads)


def _moved_numel(units: tuple[HeldUnit, ...], owners: tuple[int, ...]) -> int:
    return sum(
        unit.gathered(owner) + unit.returned(owner)
        for unit, owner in zip(units, owners, strict=True)
        if not unit.stays(owner)
    )
