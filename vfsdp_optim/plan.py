"""What an optimizer does with each parameter in a step, as rows and as a table. Pure data."""

from collections.abc import Sequence
from dataclasses import dataclass
from io import StringIO

from rich.console import Console
from rich.table import Table

from sharding.planning.ownership import OwnerPlan
from vfsdp_optim.step.member import Member
from vfsdp_optim.step.sharded_units import Job, plan_jobs


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
        states: how its states are kept, "32bit" or "8bit".
        unit_state_bytes: bytes of the states that its units have on their owners, all ranks
            together.
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


@dataclass(frozen=True, slots=True)
class OptimizerPlan:
    """Rows, and what they add up to; prints as a table.

    Attributes:
        rows: one for each parameter with state.
        loads: by rank, its share of the matrix work; all equal to 1 / ranks is perfect balance.
        waves: exchanges of owned units in a step.
        skew: how much longer the matrix part takes than if its work were divided evenly: the sum
            over waves of the busiest rank's work, over the mean work of a rank.
        largest_share: work of the largest unit, over the mean work of a rank. Above 1 it bounds
            `skew`, and more ranks make the matrix part no faster.
        unit_state_bytes: by rank, bytes of the states that it has of the units it owns.
    """

    rows: tuple[PlanRow, ...]
    loads: tuple[float, ...]
    waves: int
    skew: float = 1.0
    largest_share: float = 0.0
    unit_state_bytes: tuple[int, ...] = ()

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
        table = Table(show_footer=True)
        resident, owned = sum(r.resident for r in self.rows), sum(r.owned for r in self.rows)
        if self.largest_share > 1:
            table.caption = (
                f"The largest matrix is {self.largest_share:.2f} times a rank's equal share of the "
                "work: more ranks make the matrix part no faster."
            )
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
                *([f"{row.unit_state_bytes:,}"] if of_units else []),
            )
        return table

    def __str__(self) -> str:
        """Return the table as text."""
        out = StringIO()
        Console(file=out, width=160).print(self.table())
        return out.getvalue()


def make_plan(
    members: Sequence[Member],
    algorithms: Sequence[str],
    jobs_by_ranks: Sequence[Sequence[Job]],
    max_exchange_bytes: int,
) -> OptimizerPlan:
    """Return the plan; `jobs_by_ranks` has one list of units for each set of ranks and
    wire dtype."""
    rows: dict[int, PlanRow] = {}
    loads: list[int] = []
    kept: list[int] = []
    waves = slowest = largest = 0
    for jobs in jobs_by_ranks:
        plan = plan_jobs(jobs, max_exchange_bytes)
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
        rows.get(m.number) or PlanRow(m.fqn, tuple(m.param.shape), a, states=_states(m))
        for m, a in zip(members, algorithms, strict=True)
    )
    if not total:
        return OptimizerPlan(ordered, (), waves, unit_state_bytes=tuple(kept))
    mean = total / len(loads)
    shares = tuple(load / total for load in loads)
    return OptimizerPlan(ordered, shares, waves, slowest / mean, largest / mean, tuple(kept))


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
    )


def _states(member: Member) -> str:
    for state_format in member.formats.values():
        if state_format.name == "8bit":
            return "8bit"
    return "32bit"


def _matrices(jobs: Sequence[Job]) -> str:
    counts: dict[tuple[int, int], int] = {}
    for job in jobs:
        shape = job.unit.rows, job.unit.cols
        counts[shape] = counts.get(shape, 0) + job.unit.batch
    return ", ".join(
        f"{n} x {rows}x{cols}" if n > 1 else f"{rows}x{cols}" for (rows, cols), n in counts.items()
    )
