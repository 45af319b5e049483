"""Moves units that no rank holds whole to their owners, and their updates back. May touch:
collectives, memory.

[Note: slots of the exchange]
A wave needs two flat tensors on a rank: `held`, the pieces it holds of units that others own,
ordered by owner; and `owned`, the pieces of the units it owns, ordered by source rank, its own
pieces last. A gather sends `held` and fills `owned`; the owner overwrites each piece by its update;
the return is the same exchange backwards, from `owned` into `held`. Own pieces do not travel. The
tensors are allocated once, as large as the largest wave needs, and used in turn by three waves: one
arrives, one is computed, one returns.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from sharding.collectives import all_to_all
from sharding.ownership import OwnerPlan

_MAX_SLOTS = 3


@dataclass(frozen=True, slots=True)
class _WaveLayout:
    """Where each piece of one wave lies in this rank's slot. All numbers are elements.

    Attributes:
        send_splits: of `held`, by owner.
        receive_splits: of `owned`, by source rank, this rank's own pieces not counted.
        held_numel: length used of `held`.
        owned_numel: length used of `owned`.
        held: unit -> (start, stop) of this rank's piece in `held`.
        owned: unit -> its pieces as (start in the unit, start in `owned`, numel), in the order of
            the unit.
        own: unit -> (start, stop) of this rank's own piece in `owned`.
        held_units: the units of the wave that this rank holds elements of, in order.
    """

    send_splits: tuple[int, ...]
    receive_splits: tuple[int, ...]
    held_numel: int
    owned_numel: int
    held: dict[int, tuple[int, int]]
    owned: dict[int, tuple[tuple[int, int, int], ...]]
    own: dict[int, tuple[int, int]]
    held_units: tuple[int, ...]


class Exchange:
    """Executes an `OwnerPlan`: one packed all-to-all to owners and one back per wave, however many
    units.

    Call order of a wave: write every `piece`, `start_gather`, `wait_gather`, overwrite every
    `parts` of the owned units, `start_return`, `wait_return`, read every `piece`. Waves overlap, at
    most three at a time, and every rank makes the calls in the same order, those with nothing to
    send or receive too.

    Args:
        plan: which unit goes where; the same on all ranks.
        rank: this rank within `group`.
        group: the ranks that hold the units.
        dtype: dtype on the wire.
        device: where the slots live.
    """

    def __init__(
        self,
        plan: OwnerPlan,
        rank: int,
        group: dist.ProcessGroup,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.plan = plan
        self.rank = rank
        self._group = group
        self._layouts = [_wave_layout(plan, wave, rank) for wave in plan.waves]
        self._wave_of = {unit: w for w, wave in enumerate(plan.waves) for unit in wave}
        slots = min(_MAX_SLOTS, len(plan.waves))
        held = max((layout.held_numel for layout in self._layouts), default=0)
        owned = max((layout.owned_numel for layout in self._layouts), default=0)
        self._held = [torch.empty(held, dtype=dtype, device=device) for _ in range(slots)]
        self._owned = [torch.empty(owned, dtype=dtype, device=device) for _ in range(slots)]
        self._gathers: list[dist.Work | None] = [None] * len(plan.waves)
        self._returns: list[dist.Work | None] = [None] * len(plan.waves)

    @property
    def moved_bytes(self) -> int:
        """Bytes that leave this rank in one step, in both directions."""
        numel = sum(sum(x.send_splits) + sum(x.receive_splits) for x in self._layouts)
        return numel * (self._held[0].element_size() if self._held else 0)

    def held_units(self, wave: int) -> tuple[int, ...]:
        """Return the units of a wave of which this rank holds elements."""
        return self._layouts[wave].held_units

    def owned_units(self, wave: int) -> tuple[int, ...]:
        """Return the units of a wave that this rank computes."""
        return tuple(self._layouts[wave].owned)

    def piece(self, unit: int) -> Tensor:
        """Return the slot of this rank's elements of `unit`, 1-D: written before, read after."""
        wave = self._wave_of[unit]
        layout = self._layouts[wave]
        if unit in layout.own:
            start, stop = layout.own[unit]
            return self._owned[wave % _MAX_SLOTS][start:stop]
        start, stop = layout.held[unit]
        return self._held[wave % _MAX_SLOTS][start:stop]

    def parts(self, unit: int) -> list[tuple[int, Tensor]]:
        """Return an owned unit as (start within the unit, 1-D slot), in the order of the unit."""
        wave = self._wave_of[unit]
        owned = self._owned[wave % _MAX_SLOTS]
        return [
            (start, owned[offset : offset + numel])
            for start, offset, numel in self._layouts[wave].owned[unit]
        ]

    def start_gather(self, wave: int) -> None:
        """Send the pieces of a wave to their owners, without waiting."""
        layout, slot = self._layouts[wave], wave % _MAX_SLOTS
        self._gathers[wave] = all_to_all(
            self._owned[slot][: sum(layout.receive_splits)],
            self._held[slot][: layout.held_numel],
            layout.receive_splits,
            layout.send_splits,
            self._group,
            async_op=True,
        )

    def wait_gather(self, wave: int) -> None:
        """Wait until the owned units of a wave are here; on CUDA only the current stream waits."""
        _wait(self._gathers, wave)

    def start_return(self, wave: int) -> None:
        """Send the updates of the owned units of a wave back, without waiting."""
        layout, slot = self._layouts[wave], wave % _MAX_SLOTS
        self._returns[wave] = all_to_all(
            self._held[slot][: layout.held_numel],
            self._owned[slot][: sum(layout.receive_splits)],
            layout.send_splits,
            layout.receive_splits,
            self._group,
            async_op=True,
        )

    def wait_return(self, wave: int) -> None:
        """Wait until the updates of this rank's pieces of a wave are here."""
        _wait(self._returns, wave)


def _wait(works: list[dist.Work | None], wave: int) -> None:
    work, works[wave] = works[wave], None
    if work is not None:
        work.wait()


def _wave_layout(plan: OwnerPlan, wave: tuple[int, ...], rank: int) -> _WaveLayout:
    send_splits = [0] * plan.world_size
    receive_splits = [0] * plan.world_size
    outgoing: list[list[tuple[int, int]]] = [[] for _ in range(plan.world_size)]  # (unit, numel)
    incoming: list[list[tuple[int, int, int]]] = [[] for _ in range(plan.world_size)]
    for unit in wave:
        owner = plan.owners[unit]
        for source, start, stop in plan.units[unit].pieces():
            if source == rank and owner != rank:
                outgoing[owner].append((unit, stop - start))
                send_splits[owner] += stop - start
            if owner == rank:
                incoming[source].append((unit, start, stop - start))
                receive_splits[source] += (stop - start) * (source != rank)
    held, held_numel = {}, 0
    for owner_pieces in outgoing:
        for unit, numel in owner_pieces:
            held[unit] = (held_numel, held_numel + numel)
            held_numel += numel
    owned: dict[int, list[tuple[int, int, int]]] = {}
    own, owned_numel = {}, 0
    for source in [*(r for r in range(plan.world_size) if r != rank), rank]:
        for unit, start, numel in incoming[source]:
            owned.setdefault(unit, []).append((start, owned_numel, numel))
            if source == rank:
                own[unit] = (owned_numel, owned_numel + numel)
            owned_numel += numel
    return _WaveLayout(
        send_splits=tuple(send_splits),
        receive_splits=tuple(receive_splits),
        held_numel=held_numel,
        owned_numel=owned_numel,
        held=held,
        owned={unit: tuple(sorted(parts)) for unit, parts in owned.items()},
        own=own,
        held_units=tuple(unit for unit in wave if unit in held or unit in own),
    )
