"""Moves units that no rank holds whole to their owners, and their updates back. May touch:
collectives, memory.

[Note: slots of the exchange]
A wave needs two runs of memory on a rank: `held`, the pieces it holds of units that others own,
ordered by owner; and `owned`, the pieces of the units it owns, ordered by source rank, its own
pieces last. A gather sends `held` and fills `owned`; the owner overwrites each piece by its update;
the return is the same exchange backwards, from `owned` into `held`. Own pieces do not travel. Where
units have several copies, an owner is sent the pieces of its own copy only, and returns the update
to the holders of all: the ways differ, and each has its own memory. Two slots, as large as the
largest wave needs, are allocated once and used in turn. While a wave is computed the other slot is
busy first with the return of the wave before, then with the arrival of the next.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor

from sharding.planning.ownership import OwnerPlan
from sharding.transport.collectives import all_to_all
from sharding.transport.gradient_marks import Marks
from sharding.transport.waits import waiting_for

SLOTS = 2
# Elements: `owned` starts at a multiple of it in a slot, so that transports and copies are aligned.
SLOT_ALIGN = 64


@dataclass(frozen=True, slots=True)
class _Way:
    """Where each piece of one wave lies in this rank's slots, on the way to the owners or back. All
    numbers are elements.

    Attributes:
        held_splits: of `held`, by owner.
        owned_splits: of `owned`, by the rank at the other end, this rank's own pieces not counted.
        held_numel: length used of `held`.
        owned_numel: length used of `owned`.
        held: unit -> (start, stop) of this rank's piece in `held`.
        owned: unit -> its pieces as (start in the unit, start in `owned`, numel), in the order of
            the unit.
        own: unit -> (start, stop) of this rank's own piece in `owned`.
        units: the units of the wave of which this rank has a piece in either, in order.
    """

    held_splits: tuple[int, ...]
    owned_splits: tuple[int, ...]
    held_numel: int
    owned_numel: int
    held: dict[int, tuple[int, int]]
    owned: dict[int, tuple[tuple[int, int, int], ...]]
    own: dict[int, tuple[int, int]]
    units: tuple[int, ...]

    @property
    def owned_start(self) -> int:
        """Where `owned` starts in a slot, behind `held`."""
        return _owned_start(self.held_numel)


def _owned_start(held_numel: int) -> int:
    return -(-held_numel // SLOT_ALIGN) * SLOT_ALIGN


def slot_count(plan: OwnerPlan) -> int:
    """Return how many slots each way has; see [Note: slots of the exchange]."""
    return min(SLOTS, len(plan.waves))


def slot_numels(plan: OwnerPlan) -> tuple[int, ...]:
    """Return the elements that `Exchange` reserves on each rank, in the slots of both ways.

    Marks, a few elements for each peer, are left out; they depend on what is a parameter.
    """
    copies = any(plan.units[i].replicas > 1 for wave in plan.waves for i in wave)
    reserved = [0] * plan.world_size
    for back in (False, True) if copies else (False,):
        largest = [0] * plan.world_size
        for wave in plan.waves:
            for rank, numel in _wave_numels(plan, wave, copies=back).items():
                largest[rank] = max(largest[rank], numel)
        reserved = [a + slot_count(plan) * b for a, b in zip(reserved, largest, strict=True)]
    return tuple(reserved)


def _wave_numels(plan: OwnerPlan, wave: tuple[int, ...], *, copies: bool) -> dict[int, int]:
    """Return the elements of a slot that each rank fills in one wave."""
    held: dict[int, int] = {}
    owned: dict[int, int] = {}
    for i in wave:
        owner = plan.owners[i]
        for rank, start, stop in plan.units[i].way_pieces(owner, copies=copies):
            owned[owner] = owned.get(owner, 0) + stop - start
            if rank != owner:
                held[rank] = held.get(rank, 0) + stop - start
    return {
        rank: _owned_start(held.get(rank, 0)) + owned.get(rank, 0)
        for rank in held.keys() | owned.keys()
    }


class _SlotMemory:
    """The memory of one way, as large as the largest wave needs, for two waves in flight."""

    def __init__(self, ways: Sequence[_Way], dtype: torch.dtype, device: torch.device) -> None:
        numel = max((way.owned_start + way.owned_numel for way in ways), default=0)
        count = min(SLOTS, len(ways))
        self._tensors = [torch.empty(numel, dtype=dtype, device=device) for _ in range(count)]
        self._ways = ways

    @property
    def nbytes(self) -> int:
        """Bytes of both."""
        return sum(tensor.nbytes for tensor in self._tensors)

    def held(self, wave: int) -> Tensor:
        """Return the pieces of units that other ranks own, 1-D."""
        return self._tensors[wave % SLOTS][: self._ways[wave].held_numel]

    def owned(self, wave: int) -> Tensor:
        """Return the pieces of units that this rank owns, 1-D, its own pieces last."""
        way = self._ways[wave]
        return self._tensors[wave % SLOTS][way.owned_start : way.owned_start + way.owned_numel]

    def travelling(self, wave: int) -> Tensor:
        """Return `owned` without this rank's own pieces."""
        return self.owned(wave)[: sum(self._ways[wave].owned_splits)]

    def piece(self, wave: int, unit: int) -> Tensor:
        """Return this rank's elements of a unit, 1-D."""
        way = self._ways[wave]
        if unit in way.own:
            start, stop = way.own[unit]
            return self.owned(wave)[start:stop]
        start, stop = way.held[unit]
        return self.held(wave)[start:stop]

    def parts(self, wave: int, unit: int) -> list[tuple[int, Tensor]]:
        """Return the pieces of an owned unit as (start within the unit, 1-D slot)."""
        owned = self.owned(wave)
        return [
            (start, owned[offset : offset + numel])
            for start, offset, numel in self._ways[wave].owned[unit]
        ]


class Exchange:
    """Executes an `OwnerPlan`: one packed all-to-all to owners and one back per wave, however many
    units.

    Call order of a wave: write the `piece` of every unit of `sent_units`, `start_gather`,
    `wait_gather`, read the `parts` of every owned unit and write its `results`, `start_return`,
    `wait_return`, read the `update` of every unit of `held_units`. Waves overlap, at most two at a
    time, and every rank makes the calls in the same order, those with nothing to send or receive
    too.

    Args:
        plan: which unit goes where; the same on all ranks.
        rank: this rank within `group`.
        group: the ranks that hold the units.
        parameters: of each unit, the number of its parameter, from 0; see [Note: marks].
        dtype: dtype on the wire.
        device: where the slots live.
    """

    def __init__(
        self,
        plan: OwnerPlan,
        rank: int,
        group: dist.ProcessGroup,
        parameters: Sequence[int],
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.plan = plan
        self.rank = rank
        self._group = group
        self._dtype = dtype
        self._wave_of = {unit: w for w, wave in enumerate(plan.waves) for unit in wave}
        self.marks = Marks(plan, rank, parameters, dtype, device)
        heads = [0] * plan.world_size
        for peer in self.marks.peers:
            heads[peer] = self.marks.numel
        self._there = [
            _way(plan, wave, rank, heads if w == 0 else [0] * plan.world_size, copies=False)
            for w, wave in enumerate(plan.waves)
        ]
        if plan.waves:
            first = self._there[0]
            self._marks_sent = _positions(first.held_splits, heads).to(device)
            self._marks_received = _positions(first.owned_splits, heads).to(device)
        self._inputs = _SlotMemory(self._there, dtype, device)
        if any(plan.units[unit].replicas > 1 for unit in self._wave_of):
            no_heads = [0] * plan.world_size
            self._back = [_way(plan, wave, rank, no_heads, copies=True) for wave in plan.waves]
            self._updates = _SlotMemory(self._back, dtype, device)
        else:
            self._back, self._updates = self._there, self._inputs
        # A wave whose owners hold all their units needs no way there; every rank knows it.
        self._gathers_any = [
            w == 0 or any(plan.units[unit].gathered(plan.owners[unit]) for unit in wave)
            for w, wave in enumerate(plan.waves)
        ]
        self._gathers: list[dist.Work | None] = [None] * len(plan.waves)
        self._returns: list[dist.Work | None] = [None] * len(plan.waves)

    @property
    def moved_bytes(self) -> int:
        """Bytes that leave this rank in one step, in both directions."""
        there = sum(sum(way.held_splits) for way in self._there)
        back = sum(sum(way.owned_splits) for way in self._back)
        return (there + back) * self._dtype.itemsize

    @property
    def allocated_bytes(self) -> int:
        """Bytes of all slots on this rank."""
        apart = self._updates is not self._inputs
        return self._inputs.nbytes + (self._updates.nbytes if apart else 0)

    def sent_units(self, wave: int) -> tuple[int, ...]:
        """Return the units of a wave of which the owner gets this rank's elements."""
        return self._there[wave].units

    def held_units(self, wave: int) -> tuple[int, ...]:
        """Return the units of a wave of which this rank holds elements."""
        return self._back[wave].units

    def owned_units(self, wave: int) -> tuple[int, ...]:
        """Return the units of a wave that this rank computes."""
        return tuple(self._there[wave].owned)

    def piece(self, unit: int) -> Tensor:
        """Return the slot for this rank's elements of a unit that it sends, 1-D."""
        wave = self._wave_of[unit]
        return self._inputs.piece(wave, unit)

    def parts(self, unit: int) -> list[tuple[int, Tensor]]:
        """Return an owned unit as (start within the unit, 1-D slot), in the order of the unit."""
        wave = self._wave_of[unit]
        return self._inputs.parts(wave, unit)

    def results(self, unit: int) -> list[tuple[int, Tensor]]:
        """Return where the update of an owned unit goes, as `parts`; for each of its copies.

        Where there is one copy, these are the slots of `parts`.
        """
        wave = self._wave_of[unit]
        return self._updates.parts(wave, unit)

    def update(self, unit: int) -> Tensor:
        """Return the slot of the update of this rank's elements of a unit, 1-D."""
        wave = self._wave_of[unit]
        return self._updates.piece(wave, unit)

    def write_marks(self, missing: Collection[int]) -> None:
        """Say of which parameters this rank has no gradient, before the first `start_gather`."""
        self.marks.write(self._inputs.held(0), self._marks_sent, missing)

    def read_marks(self) -> frozenset[int]:
        """Return of which parameters other ranks have a gradient, after the first `wait_gather`."""
        return self.marks.read(self._inputs.owned(0), self._marks_received)

    def start_gather(self, wave: int) -> None:
        """Send the pieces of a wave to their owners, without waiting."""
        way = self._there[wave]
        if self._gathers_any[wave]:
            self._gathers[wave] = all_to_all(
                self._inputs.travelling(wave),
                self._inputs.held(wave),
                way.owned_splits,
                way.held_splits,
                self._group,
                async_op=True,
            )

    def wait_gather(self, wave: int) -> None:
        """Wait until the owned units of a wave are here; on CUDA only the current stream waits."""
        self._wait(self._gathers, wave, "gradients to their owners")

    def start_return(self, wave: int) -> None:
        """Send the updates of the owned units of a wave back, without waiting."""
        way = self._back[wave]
        self._returns[wave] = all_to_all(
            self._updates.held(wave),
            self._updates.travelling(wave),
            way.held_splits,
            way.owned_splits,
            self._group,
            async_op=True,
        )

    def wait_return(self, wave: int) -> None:
        """Wait until the updates of this rank's pieces of a wave are here."""
        self._wait(self._returns, wave, "updates from their owners")

    def _wait(self, works: list[dist.Work | None], wave: int, what: str) -> None:
        work, works[wave] = works[wave], None
        if work is not None:
            with waiting_for(f"wave {wave} of {what}", self._group):
                work.wait()


def _positions(splits: Sequence[int], heads: Sequence[int]) -> Tensor:
    """Return the positions of the heads of every rank's part; int64, 1-D."""
    starts = [0, *accumulate(splits)]
    ends = [(a, a + head) for a, head in zip(starts, heads, strict=False)]
    return torch.cat([torch.arange(*run, dtype=torch.int64, device="cpu") for run in ends])


def _way(
    plan: OwnerPlan, wave: tuple[int, ...], rank: int, heads: Sequence[int], *, copies: bool
) -> _Way:
    """Return where the pieces of a wave lie: those of the owner's copy, or of all copies.

    What goes to and comes from each rank begins with `heads` elements that belong to no unit.
    """
    held_splits, owned_splits = list(heads), list(heads)
    outgoing: list[list[tuple[int, int]]] = [[] for _ in range(plan.world_size)]  # (unit, numel)
    incoming: list[list[tuple[int, int, int]]] = [[] for _ in range(plan.world_size)]
    for i in wave:
        owner, unit = plan.owners[i], plan.units[i]
        for holder, start, stop in unit.way_pieces(owner, copies=copies):
            if holder == rank and owner != rank:
                outgoing[owner].append((i, stop - start))
                held_splits[owner] += stop - start
            if owner == rank:
                incoming[holder].append((i, start, stop - start))
                owned_splits[holder] += (stop - start) * (holder != rank)
    held, held_numel = {}, 0
    for owner, owner_pieces in enumerate(outgoing):
        held_numel += heads[owner]
        for i, numel in owner_pieces:
            held[i] = (held_numel, held_numel + numel)
            held_numel += numel
    owned: dict[int, list[tuple[int, int, int]]] = {}
    own, owned_numel = {}, 0
    for holder in [*(r for r in range(plan.world_size) if r != rank), rank]:
        owned_numel += heads[holder]
        for i, start, numel in incoming[holder]:
            owned.setdefault(i, []).append((start, owned_numel, numel))
            if holder == rank:
                own[i] = (owned_numel, owned_numel + numel)
            owned_numel += numel
    return _Way(
        held_splits=tuple(held_splits),
        owned_splits=tuple(owned_splits),
        held_numel=held_numel,
        owned_numel=owned_numel,
        held=held,
        owned={i: tuple(sorted(parts)) for i, parts in owned.items()},
        own=own,
        units=tuple(i for i in wave if i in held or i in own),
    )
