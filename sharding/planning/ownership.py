"""Decides which rank computes each unit, and which units travel together. Pure integers; imports no
torch.

Every rank calls `plan_owners` with the same arguments and gets the same plan, so nothing is sent to
agree on it.

[Note: waves]
Units that move do so in waves: one packed exchange brings those of a wave to their owners, one
takes the updates back. Ranks meet in every exchange, so the matrix part of a step takes about the
sum over waves of the busiest rank's work. Owners are chosen over all units at once, because a layer
alone has fewer matrices than there are ranks; each rank's units are then dealt to the waves so that
in every wave all ranks have about the same to do. Units that stay where they lie are dealt as well:
they fill what the others leave open, and are computed while a wave arrives. Many waves overlap
better and need less memory, few are easier to balance: of 8, 4, 2 and 1, the largest number is
taken that costs no more than 1/64.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from sharding.planning.holders import HeldUnit

# A plan that moves fewer elements, or has more waves, may be slower than the best balanced one by
# this share (1/64).
_BALANCE_SLACK = 64
# Work, in multiply-adds an element, from which a unit that lies whole on a rank is worth moving to
# one with less to do: 4 bytes at 40 GB/s take as long as 20,000 multiply-adds at 400 TFLOP/s.
_WORTH_MOVING = 1 << 14
_MOST_WAVES = 8
_MOST_SWAPS = 128
# Elements that a rank sends and receives in a wave at least, if there is more than one: below, the
# latency of an exchange outweighs what can be overlapped.
_LEAST_WAVE_NUMEL = 1 << 19


@dataclass(frozen=True, slots=True)
class OwnerPlan:
    """Who computes which unit, and when. See [Note: waves].

    Attributes:
        units: all units, resident ones too.
        world_size: number of ranks.
        owners: rank that computes each unit, once however many copies there are.
        waves: indices of the units that travel in one exchange.
        resident_waves: indices of the units that stay, by the wave beside which they are computed;
            one entry if nothing travels.
        loads: sum of cost on each rank.
        wave_loads: work of the busiest rank beside each wave.
    """

    units: tuple[HeldUnit, ...]
    world_size: int
    owners: tuple[int, ...]
    waves: tuple[tuple[int, ...], ...]
    resident_waves: tuple[tuple[int, ...], ...]
    loads: tuple[int, ...]
    wave_loads: tuple[int, ...]

    def is_resident(self, i: int) -> bool:
        """Return whether unit `i` lies whole on its owner, so that nothing moves for it."""
        return _stays(self.units[i], self.owners[i])

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
    work are equally filled with states.

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
    packing = _best_packing(units, owners, loads, slot_numel, two_ways)
    waves, resident_waves, wave_loads = packing.in_order(units, owners)
    return OwnerPlan(units, world_size, owners, waves, resident_waves, loads, wave_loads)


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


def _stays(unit: HeldUnit, owner: int) -> bool:
    """Return whether nothing of the unit travels to this owner, nor back."""
    return not unit.holders or (unit.is_resident and unit.holders[0][0] == owner)


def _assign(
    units: tuple[HeldUnit, ...], world_size: int, *, prefer_holders: bool
) -> tuple[int, ...]:
    average = -(-sum(unit.cost for unit in units) // world_size)
    owners = _residents(units, world_size, average + average // _BALANCE_SLACK)
    loads = [0] * world_size
    for unit, owner in zip(units, owners, strict=True):
        if owner >= 0:
            loads[owner] += unit.cost
    kept = [0] * world_size  # elements of states
    for unit, owner in zip(units, owners, strict=True):
        if owner >= 0:
            kept[owner] += unit.state_numel
    by_load = [(load, kept[rank], rank) for rank, load in enumerate(loads)]
    heapq.heapify(by_load)
    for i in sorted(
        (i for i, owner in enumerate(owners) if owner < 0),
        key=lambda i: (-units[i].cost, -units[i].numel, i),
    ):
        unit = units[i]
        while by_load[0][:2] != (
            loads[by_load[0][2]],
            kept[by_load[0][2]],
        ):  # left over from before that rank was given work
            heapq.heappop(by_load)
        lightest = by_load[0][2]
        limit = max(average, loads[lightest] + unit.cost) if prefer_holders else -1
        holders = [rank for rank, _, _ in unit.all_pieces()]
        choices = [r for r in holders if loads[r] + unit.cost <= limit] + [lightest]
        if not prefer_holders:
            choices += [r for r in holders if loads[r] == loads[lightest]]
        owner = min(choices, key=lambda r, u=unit: (-u.held_by(r), loads[r], kept[r], r))  # type: ignore[misc]
        owners[i] = owner
        loads[owner] += unit.cost
        kept[owner] += unit.state_numel
        heapq.heappush(by_load, (loads[owner], kept[owner], owner))
    _even_out(units, owners, loads, average + average // _BALANCE_SLACK)
    return tuple(owners)


def _even_out(units: tuple[HeldUnit, ...], owners: list[int], loads: list[int], limit: int) -> None:
    """Move work from the busiest rank to the least busy one until none is above `limit`.

    A unit moves, or is swapped for a shorter one. Longest first leaves gaps where the short units
    lie whole on a rank and were not free to fill them.
    """
    kinds: dict[int, dict[int, int]] = {}  # rank -> cost -> a unit of it that may move
    for _ in range(min(2 * len(loads), _MOST_SWAPS)):
        busiest = max(range(len(loads)), key=lambda r: (loads[r], r))
        idlest = min(range(len(loads)), key=lambda r: (loads[r], r))
        gap = loads[busiest] - loads[idlest]
        if loads[busiest] <= limit:
            return
        for rank in {busiest, idlest} - kinds.keys():
            kinds[rank] = _movable(units, owners, rank)
        swaps = [
            (abs(2 * (long - short) - gap), long, short)
            for long in kinds[busiest]
            for short in (0, *kinds[idlest])
            if 0 < long - short < gap
        ]
        if not swaps:
            return
        _, long, short = min(swaps)
        owners[kinds.pop(busiest)[long]] = idlest
        back = kinds.pop(idlest).get(short)
        if back is not None:
            owners[back] = busiest
        loads[busiest] -= long - short
        loads[idlest] += long - short


def _movable(units: tuple[HeldUnit, ...], owners: list[int], rank: int) -> dict[int, int]:
    """Return a unit of each cost that `rank` owns and another might, rather one that moves."""
    movable: dict[int, int] = {}
    for i, (unit, owner) in enumerate(zip(units, owners, strict=True)):
        free = unit.owner is None and (not unit.is_resident or _worth_moving(unit))
        if owner == rank and unit.cost > 0 and free:
            known = movable.get(unit.cost)
            if known is None or units[known].is_resident > unit.is_resident:
                movable[unit.cost] = i
    return movable


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


class _Packing:
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
            (resident if _stays(unit, owner) else moving)[wave].append(i)
            if not _stays(unit, owner):
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


def _best_packing(
    units: tuple[HeldUnit, ...],
    owners: tuple[int, ...],
    loads: Sequence[int],
    slot_numel: int,
    two_ways: bool,
) -> _Packing:
    """Return the packing with the most waves that costs at most 1/64, else the least work."""
    world_size = len(loads)
    uses: list[list[tuple[int, int]]] = [
        [] if _stays(unit, owner) else _summed(unit.slot_use(owner, two_ways=two_ways))
        for unit, owner in zip(units, owners, strict=True)
    ]
    order = sorted(range(len(units)), key=lambda i: (-units[i].cost, -units[i].numel, i))
    tolerated = max(loads) + max(loads) // _BALANCE_SLACK
    together = _summed([each for use in uses for each in use])
    largest = max((numel for _, numel in together), default=0)
    best: _Packing | None = None
    waves = max(1, min(_MOST_WAVES, largest // _LEAST_WAVE_NUMEL))
    while waves:
        packing = _Packing(len(units), waves, world_size, slot_numel)
        for i in order:
            packing.add(i, units[i].cost, owners[i], uses[i])
        if best is None or sum(packing.busiest) < sum(best.busiest):
            best = packing
        if sum(best.busiest) <= tolerated:
            break
        waves //= 2
    assert best is not None  # one wave at least was tried
    return best


def _summed(use: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return one (rank, elements) for each rank."""
    sums: dict[int, int] = {}
    for rank, numel in use:
        sums[rank] = sums.get(rank, 0) + numel
    return list(sums.items())


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
    )
