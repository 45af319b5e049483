"""Decides which rank computes each unit that no rank holds whole. Pure integers; imports no torch.

Every rank calls `plan_owners` with the same arguments and gets the same plan, so nothing is sent to
agree on it.
"""

import heapq
from dataclasses import dataclass
from itertools import pairwise

# A plan that moves fewer elements may be slower than the best balanced one by this share (1/64).
_BALANCE_SLACK = 64


@dataclass(frozen=True, slots=True)
class Grid:
    """The ranks of a group, as `replicas` copies of `shards` pieces each.

    Ranks of a mesh are numbered row by row; one axis of it is that of the shards, all others are
    replicas. Of a (replicas, shards) mesh, as HSDP has, the ranks of one copy follow each other.

    Attributes:
        shards: ranks that hold one copy together.
        replicas: copies.
        stride: distance between the ranks of neighbouring shards.

    Example:
        >>> grid = Grid(shards=3, replicas=2)
        >>> [[grid.rank(replica, shard) for shard in range(3)] for replica in range(2)]
        [[0, 1, 2], [3, 4, 5]]
    """

    shards: int
    replicas: int = 1
    stride: int = 1

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.shards * self.replicas

    def rank(self, replica: int, shard: int) -> int:
        """Return the rank that holds `shard` of copy `replica`."""
        outer, inner = divmod(replica, self.stride)
        return (outer * self.shards + shard) * self.stride + inner

    def coordinates(self, rank: int) -> tuple[int, int]:
        """Return (replica, shard) of a rank."""
        rest, inner = divmod(rank, self.stride)
        outer, shard = divmod(rest, self.shards)
        return outer * self.stride + inner, shard


@dataclass(frozen=True, slots=True)
class UnitSpec:
    """One unit (a matrix or a panel) and where its elements are stored.

    Attributes:
        fqn: name of the parameter the unit belongs to.
        index: number of the unit within that parameter.
        numel: elements of the unit.
        cost: work to compute its update, in any unit that is the same for all units.
        holders: (shard, elements held) of one copy, shards ascending; without a grid, shards are
            ranks. Shard after shard holds consecutive elements.
        grid: the ranks of every copy; None where there is one copy.
    """

    fqn: str
    index: int
    numel: int
    cost: int
    holders: tuple[tuple[int, int], ...]
    grid: Grid | None = None

    @property
    def replicas(self) -> int:
        """Copies of the unit."""
        return 1 if self.grid is None else self.grid.replicas

    @property
    def is_resident(self) -> bool:
        """Whether it has one copy, whole on one rank, so that nothing moves for it."""
        return len(self.holders) == 1 and self.replicas == 1

    def replica_of(self, rank: int) -> int:
        """Return the copy that `rank` belongs to."""
        return 0 if self.grid is None else self.grid.coordinates(rank)[0]

    def held_by(self, rank: int) -> int:
        """Return how many elements of the unit `rank` holds."""
        shard = rank if self.grid is None else self.grid.coordinates(rank)[1]
        return next((held for holder, held in self.holders if holder == shard), 0)

    def pieces(self, replica: int = 0) -> tuple[tuple[int, int, int], ...]:
        """Return (rank, start, stop) of what each holder of a copy has, within the unit."""
        result, start = [], 0
        for shard, held in self.holders:
            rank = shard if self.grid is None else self.grid.rank(replica, shard)
            result.append((rank, start, start + held))
            start += held
        return tuple(result)

    def all_pieces(self) -> tuple[tuple[int, int, int], ...]:
        """Return the pieces of every copy, ranks ascending."""
        copies = (self.pieces(replica) for replica in range(self.replicas))
        return tuple(sorted(piece for copy in copies for piece in copy))

    def gathered(self, owner: int) -> int:
        """Return how many elements travel to an owner; they come from its own copy."""
        return self.numel - self.held_by(owner)

    def returned(self, owner: int) -> int:
        """Return how many elements of the update travel to the holders of all copies."""
        return self.replicas * self.numel - self.held_by(owner)


@dataclass(frozen=True, slots=True)
class OwnerPlan:
    """Who computes which unit, and which owned units travel together.

    Attributes:
        units: all units, resident ones too.
        world_size: number of ranks.
        owners: rank that computes each unit, once however many copies there are; the only holder of
            a resident one.
        waves: indices of the owned units that travel in one exchange.
        loads: sum of cost on each rank.
    """

    units: tuple[UnitSpec, ...]
    world_size: int
    owners: tuple[int, ...]
    waves: tuple[tuple[int, ...], ...]
    loads: tuple[int, ...]

    def is_resident(self, i: int) -> bool:
        """Return whether unit `i` lies whole on one rank, so that nothing moves for it."""
        return self.units[i].is_resident

    @property
    def gathered_numel(self) -> int:
        """Elements that travel to owners in one step, all ranks together."""
        return sum(u.gathered(owner) for u, owner in zip(self.units, self.owners, strict=True))

    @property
    def returned_numel(self) -> int:
        """Elements that travel back in one step, to the holders of every copy."""
        return sum(u.returned(owner) for u, owner in zip(self.units, self.owners, strict=True))


def plan_owners(units: tuple[UnitSpec, ...], world_size: int, *, wave_numel: int) -> OwnerPlan:
    """Give every unit an owner so that ranks are equally loaded, then so that little moves.

    Resident units are computed where they lie and count as load from the start. The others are
    taken by descending cost (longest processing time first, Graham 1969, doi:10.1137/0117039). Of
    two assignments, one that takes the least loaded rank and one that takes the largest holder as
    long as no rank is loaded above the average, the second is chosen where it is at most 1/64
    slower.

    Args:
        units: what to assign.
        world_size: number of ranks.
        wave_numel: elements that a rank may receive in one wave; a larger unit is its owner's only
            one in a wave.

    Raises:
        ValueError: a unit is not held completely, or `wave_numel` or `world_size` is not positive.
    """
    if world_size < 1 or wave_numel < 1:
        raise ValueError(
            f"world_size and wave_numel must be positive, got world_size={world_size!r}, "
            f"wave_numel={wave_numel!r}"
        )
    for unit in units:
        _check_unit(unit, world_size)
    balanced = _assign(units, world_size, prefer_holders=False)
    local = _assign(units, world_size, prefer_holders=True)
    slowest = max(_loads(units, balanced, world_size), default=0)
    owners = balanced
    if max(_loads(units, local, world_size), default=0) <= slowest + slowest // _BALANCE_SLACK:
        owners = min(local, balanced, key=lambda choice: _moved_numel(units, choice))
    return OwnerPlan(
        units=units,
        world_size=world_size,
        owners=owners,
        waves=_waves(units, owners, wave_numel),
        loads=_loads(units, owners, world_size),
    )


def _check_unit(unit: UnitSpec, world_size: int) -> None:
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


def _assign(
    units: tuple[UnitSpec, ...], world_size: int, *, prefer_holders: bool
) -> tuple[int, ...]:
    owners = [unit.holders[0][0] if unit.is_resident else -1 for unit in units]
    loads = [0] * world_size
    for unit, owner in zip(units, owners, strict=True):
        if owner >= 0:
            loads[owner] += unit.cost
    average = -(-sum(unit.cost for unit in units) // world_size)
    by_load = [(load, rank) for rank, load in enumerate(loads)]
    heapq.heapify(by_load)
    for i in sorted(
        (i for i, owner in enumerate(owners) if owner < 0),
        key=lambda i: (-units[i].cost, -units[i].numel, i),
    ):
        unit = units[i]
        while (
            by_load[0][0] != loads[by_load[0][1]]
        ):  # left over from before that rank was given work
            heapq.heappop(by_load)
        lightest = by_load[0][1]
        limit = max(average, loads[lightest] + unit.cost) if prefer_holders else -1
        holders = [rank for rank, _, _ in unit.all_pieces()]
        choices = [r for r in holders if loads[r] + unit.cost <= limit] + [lightest]
        if not prefer_holders:
            choices += [r for r in holders if loads[r] == loads[lightest]]
        owner = min(choices, key=lambda r, u=unit: (-u.held_by(r), loads[r], r))  # type: ignore[misc]
        owners[i] = owner
        loads[owner] += unit.cost
        heapq.heappush(by_load, (loads[owner], owner))
    return tuple(owners)


def _waves(
    units: tuple[UnitSpec, ...], owners: tuple[int, ...], wave_numel: int
) -> tuple[tuple[int, ...], ...]:
    """Fill each owner's waves in the order of the units, so that all owners stay busy."""
    waves: list[list[int]] = []
    current: dict[int, int] = {}  # owner -> wave it is filling
    received: dict[int, int] = {}  # owner -> elements it receives in that wave
    for i, (unit, owner) in enumerate(zip(units, owners, strict=True)):
        if unit.is_resident or not unit.holders:
            continue
        # With copies, what returns to a rank in a wave is as much as this counts for an owner.
        copied = unit.replicas * unit.numel if unit.replicas > 1 else 0
        arriving = max(unit.gathered(owner), copied)
        if owner in current and received[owner] + arriving > wave_numel:
            current[owner] += 1
            received[owner] = 0
        wave = current.setdefault(owner, 0)
        received[owner] = received.get(owner, 0) + arriving
        if wave == len(waves):
            waves.append([])
        waves[wave].append(i)
    return tuple(tuple(wave) for wave in waves)


def _loads(
    units: tuple[UnitSpec, ...], owners: tuple[int, ...], world_size: int
) -> tuple[int, ...]:
    loads = [0] * world_size
    for unit, owner in zip(units, owners, strict=True):
        loads[owner] += unit.cost
    return tuple(loads)


def _moved_numel(units: tuple[UnitSpec, ...], owners: tuple[int, ...]) -> int:
    return sum(
        unit.gathered(owner) + unit.returned(owner)
        for unit, owner in zip(units, owners, strict=True)
    )
