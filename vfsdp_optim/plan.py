"""What an optimizer does with each parameter in a step, as rows and as a table. Pure data."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from io import StringIO

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from sharding.planning.ownership import OwnerPlan
from sharding.transport.exchange import slot_numels
from vfsdp_optim.parameters.param_shard import Ranks
from vfsdp_optim.states.formats import PlainFormat
from vfsdp_optim.step.member import Member
from vfsdp_optim.step.sharded_units import Job, plan_jobs

_COLUMNS = """\
states: bits of a number. matrices: how many x their shape. resident: of them, units that lie whole
on a rank; owned: those that travel to an owner. lr scale: what lr is multiplied by. bytes moved,
saved: in a step, all ranks; saved is what resident units would move if cut evenly. bytes of states:
on this rank."""


@dataclass(frozen=True, slots=True)
class HeldBytes:
    """Bytes that one rank holds between steps.

    Attributes:
        weights: of its pieces of parameters.
        gradients: of their gradients, as torch keeps them; those of frozen parameters are none.
        states: of optimizer states, those of units that it owns included.
        states_32bit: what the same states would be in 32 bits.
    """

    weights: int = 0
    gradients: int = 0
    states: int = 0
    states_32bit: int = 0


@dataclass(frozen=True, slots=True)
class PlanRow:
    """One parameter.

    Attributes:
        fqn: its name.
        shape: global.
        algorithm: of its group.
        matrices: how many matrices it is, and their shape, such as "8 x 512x128"; empty if
            element-wise.
        resident: units that lie whole on a rank.
        owned: units that travel to an owner.
        owners: ranks that compute its units.
        scale: what the learning rate is multiplied by; None where units differ.
        moved_bytes: bytes that travel for it in one step, to owners and back, all ranks together.
        saved_bytes: bytes that would travel for its resident units if they were cut evenly over
            all ranks, as rows are by torch's fully_shard.
        states: how its states are kept, "32bit", "16bit" (as the weights are) or "8bit".
        unit_state_bytes: bytes of the states that its units have on their owners, all ranks
            together.
        memory: bytes on this rank.
    """

    fqn: str
    shape: tuple[int, ...]
    algorithm: str
    matrices: str = ""
    resident: int = 0
    owned: int = 0
    owners: tuple[int, ...] = ()
    scale: float | None = 1.0
    moved_bytes: int = 0
    saved_bytes: int = 0
    states: str = "32bit"
    unit_state_bytes: int = 0
    memory: HeldBytes = HeldBytes()


@dataclass(frozen=True, slots=True)
class OptimizerPlan:
    """Rows, and what they add up to; prints as a table.

    `str` explains the columns below it.

    Attributes:
        rows: one for each parameter with state.
        loads: by rank, its share of the matrix work; all equal to 1 / ranks is perfect balance.
        waves: exchanges of owned units in a step.
        skew: how much longer the matrix part takes than if its work were divided evenly: the sum
            over waves of the busiest rank's work, over the mean work of a rank.
        largest_share: work of the largest unit, over the mean work of a rank. Above 1 it bounds
            `skew`, and more ranks make the matrix part no faster.
        unit_state_bytes: by rank, bytes of the states that it has of the units it owns.
        slot_bytes: bytes that this rank reserves for the matrices that travel, from the first step
            on.
    """

    rows: tuple[PlanRow, ...]
    loads: tuple[float, ...]
    waves: int
    skew: float = 1.0
    largest_share: float = 0.0
    unit_state_bytes: tuple[int, ...] = ()
    slot_bytes: int = 0

    @property
    def memory(self) -> HeldBytes:
        """Bytes on this rank, of all parameters."""
        kinds = ("weights", "gradients", "states", "states_32bit")
        return HeldBytes(*(sum(getattr(r.memory, kind) for r in self.rows) for kind in kinds))

    @property
    def moved_bytes(self) -> int:
        """Bytes that travel in one step, all ranks together."""
        return sum(row.moved_bytes for row in self.rows)

    @property
    def saved_bytes(self) -> int:
        """Bytes that residency saves in one step, all ranks together."""
        return sum(row.saved_bytes for row in self.rows)

    def table(self) -> Table:
        """Return the rows and a line of totals."""
        table = Table(show_footer=True, caption=self._caption(), caption_justify="left")
        resident, owned = sum(r.resident for r in self.rows), sum(r.owned for r in self.rows)
        table.add_column("parameter", f"{len(self.rows)} parameters")
        table.add_column("shape")
        table.add_column("algorithm")
        packed = sum(row.states == "8bit" for row in self.rows)
        table.add_column("states", f"{packed} in 8 bits" if packed else "")
        table.add_column("matrices", f"skew {self.skew:.2f}" if self.loads else "")
        table.add_column("resident", str(resident), justify="right")
        table.add_column("owned", f"{owned} in {self.waves} waves", justify="right")
        table.add_column("owners")
        table.add_column("lr scale", justify="right")
        table.add_column("bytes moved", f"{self.moved_bytes:,}", justify="right")
        table.add_column("bytes saved", f"{self.saved_bytes:,}", justify="right")
        table.add_column("bytes of states", f"{self.memory.states:,}", justify="right")
        of_units = max(self.unit_state_bytes, default=0)
        if of_units:
            most = f"at most {of_units:,} a rank"
            table.add_column("bytes of states of units", most, justify="right")
        for row in self.rows:
            table.add_row(
                row.fqn,
                "x".join(map(str, row.shape)),
                row.algorithm,
                row.states,
                row.matrices,
                str(row.resident) if row.matrices else "",
                str(row.owned) if row.matrices else "",
                ",".join(map(str, row.owners)),
                "varies" if row.scale is None else f"{row.scale:.3g}",
                f"{row.moved_bytes:,}",
                f"{row.saved_bytes:,}",
                f"{row.memory.states:,}",
                *([f"{row.unit_state_bytes:,}"] if of_units else []),
            )
        return table

    def _caption(self) -> str:
        """Return what is held on this rank, and what the columns say."""
        held = self.memory
        total = held.weights + held.gradients + held.states + self.slot_bytes
        lines = [
            f"This rank holds {held.weights:,} bytes of weights, {held.gradients:,} of gradients, "
            f"{held.states:,} of states ({held.states_32bit:,} in 32 bits), {self.slot_bytes:,} of "
            f"slots for matrices that travel: {total:,}."
        ]
        if self.largest_share > 1:
            lines.append(
                f"The largest matrix is {self.largest_share:.2f} times a rank's equal share of the "
                "work: more ranks make the matrix part no faster."
            )
        return "\n".join([*lines, _COLUMNS])

    def of_all_ranks(self) -> "OptimizerPlan":
        """Return what every rank's plan says: this one without the bytes that a rank holds."""
        rows = tuple(replace(row, memory=HeldBytes()) for row in self.rows)
        return replace(self, rows=rows, slot_bytes=0)

    def __str__(self) -> str:
        """Return the table as text."""
        out = StringIO()
        Console(file=out, width=190).print(self.table())
        return out.getvalue()


def make_plan(
    members: Sequence[Member],
    algorithms: Sequence[str],
    jobs_by_ranks: Mapping[tuple[Ranks, torch.dtype] | None, Sequence[Job]],
    max_exchange_bytes: int,
) -> OptimizerPlan:
    """Return the plan; `jobs_by_ranks` has one list of units for each set of ranks and
    wire dtype."""
    rows: dict[int, PlanRow] = {}
    loads: list[int] = []
    kept: list[int] = []
    waves = slowest = largest = slots = 0
    for shared, jobs in jobs_by_ranks.items():
        plan = plan_jobs(jobs, max_exchange_bytes)
        if shared is not None and plan.waves:
            ranks, wire = shared
            slots += wire.itemsize * slot_numels(plan)[ranks.ids.index(dist.get_rank())]
        waves += len(plan.waves)
        slowest += sum(plan.wave_loads)
        largest = max([largest, *(unit.cost for unit in plan.units)])
        loads += [0] * (plan.world_size - len(loads))
        kept += [0] * (plan.world_size - len(kept))
        for rank, load in enumerate(plan.loads):
            loads[rank] += load
        state_bytes = [job.state_bytes for job in jobs]
        units: dict[int, list[int]] = {}
        for i, (job, owner) in enumerate(zip(jobs, plan.owners, strict=True)):
            kept[owner] += state_bytes[i]
            units.setdefault(job.member.number, []).append(i)
        kinds: dict[object, _Kind] = {}
        for number, indices in units.items():
            of_member = [jobs[i] for i in indices]
            member = of_member[0].member
            key = member.group, member.param.shape, member.param.device
            kind = kinds.get(key) or kinds.setdefault(key, _Kind.of(of_member))
            rows[number] = _row(member, kind, plan, indices, sum(state_bytes[i] for i in indices))
    total = sum(loads)
    ordered = tuple(
        rows.get(m.number)
        or PlanRow(m.fqn, tuple(m.param.shape), a, states=_states(m), memory=_held(m))
        for m, a in zip(members, algorithms, strict=True)
    )
    if not total:
        return OptimizerPlan(ordered, (), waves, unit_state_bytes=tuple(kept), slot_bytes=slots)
    mean = total / len(loads)
    shares = tuple(load / total for load in loads)
    skew, share = slowest / mean, largest / mean
    return OptimizerPlan(ordered, shares, waves, skew, share, tuple(kept), slots)


@dataclass(frozen=True, slots=True)
class _Kind:
    """What the rows of parameters of one group, shape and device have in common."""

    algorithm: str
    matrices: str
    scale: float | None
    itemsize: int

    @staticmethod
    def of(jobs: Sequence[Job]) -> "_Kind":
        """Return the kind of the parameter that has these units, all of them."""
        first = jobs[0]
        scales = {job.scale for job in jobs}
        return _Kind(
            first.algorithm.name,
            _matrices(jobs),
            scales.pop() if len(scales) == 1 else None,
            first.algorithm.wire_dtype(first.group, first.member.param.device).itemsize,
        )


def _row(
    member: Member, kind: _Kind, plan: OwnerPlan, indices: Sequence[int], state_bytes: int
) -> PlanRow:
    """Return the row of the parameter whose units are `indices`."""
    moved = saved = resident = 0
    for i in indices:
        unit, owner = plan.units[i], plan.owners[i]
        if unit.stays(owner):
            resident += 1
            saved += 2 * (unit.numel - unit.numel // plan.world_size)
        else:
            moved += unit.gathered(owner) + unit.returned(owner)
    return PlanRow(
        fqn=member.fqn,
        shape=tuple(member.param.shape),
        algorithm=kind.algorithm,
        matrices=kind.matrices,
        resident=resident,
        owned=len(indices) - resident,
        owners=tuple(sorted({plan.owners[i] for i in indices})),
        scale=kind.scale,
        moved_bytes=moved * kind.itemsize,
        saved_bytes=saved * kind.itemsize,
        states=_states(member),
        unit_state_bytes=state_bytes,
        memory=_held(member),
    )


def _states(member: Member) -> str:
    names = {state_format.name for state_format in member.formats.values()}
    if "8bit" in names:
        return "8bit"
    sizes = [f.dtype.itemsize for f in member.formats.values() if isinstance(f, PlainFormat)]
    return f"{8 * max(sizes, default=4)}bit"


def _held(member: Member) -> HeldBytes:
    """Return what this rank holds of a parameter."""
    weights, states = member.numel * member.param.element_size(), member.all_states.values()
    return HeldBytes(
        weights,
        weights if member.param.requires_grad else 0,
        sum(part.nbytes for state in states for part in state.parts().values()),
        sum(4 * state.numel for state in states),
    )


def _matrices(jobs: Sequence[Job]) -> str:
    counts: dict[tuple[int, int], int] = {}
    for job in jobs:
        shape = job.unit.rows, job.unit.cols
        counts[shape] = counts.get(shape, 0) + job.unit.batch
    return ", ".join(
        f"{n} x {rows}x{cols}" if n > 1 else f"{rows}x{cols}" for (rows, cols), n in counts.items()
    )
