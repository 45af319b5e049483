"""What an optimizer does with each parameter in a step, as rows and as a table. Pure data."""

from collections.abc import Sequence
from dataclasses import dataclass
from io import StringIO

from rich.console import Console
from rich.table import Table

from vfsdp_optim.matrices import Job, plan_jobs
from vfsdp_optim.runs import Member


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


@dataclass(frozen=True, slots=True)
class OptimizerPlan:
    """Rows, and what they add up to; prints as a table.

    Attributes:
        rows: one for each parameter with state.
        loads: by rank, its share of the matrix work; all equal to 1 / ranks is perfect balance.
        waves: exchanges of owned units in a step.
    """

    rows: tuple[PlanRow, ...]
    loads: tuple[float, ...]
    waves: int

    @property
    def moved_bytes(self) -> int:
        """Bytes that travel in one step, all ranks together."""
        return sum(row.moved_bytes for row in self.rows)

    def table(self) -> Table:
        """Return the rows and a line of totals."""
        table = Table(show_footer=True)
        resident, owned = sum(r.resident for r in self.rows), sum(r.owned for r in self.rows)
        busiest = max(self.loads, default=0.0) * len(self.loads)
        table.add_column("parameter", f"{len(self.rows)} parameters")
        table.add_column("shape")
        table.add_column("algorithm")
        table.add_column("matrices", f"busiest rank {busiest:.2f} x mean" if self.loads else "")
        table.add_column("resident", str(resident), justify="right")
        table.add_column("owned", f"{owned} in {self.waves} waves", justify="right")
        table.add_column("owners")
        table.add_column("lr scale", justify="right")
        table.add_column("bytes moved", f"{self.moved_bytes:,}", justify="right")
        for row in self.rows:
            table.add_row(
                row.fqn,
                "x".join(map(str, row.shape)),
                row.algorithm,
                row.matrices,
                str(row.resident) if row.matrices else "",
                str(row.owned) if row.matrices else "",
                ",".join(map(str, row.owners)),
                "varies" if row.scale is None else f"{row.scale:.3g}",
                f"{row.moved_bytes:,}",
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
    rows = {
        m.number: PlanRow(m.fqn, tuple(m.param.shape), a)
        for m, a in zip(members, algorithms, strict=True)
    }
    loads: list[int] = []
    waves = 0
    for jobs in jobs_by_ranks:
        plan = plan_jobs(jobs, max_exchange_bytes)
        waves += len(plan.waves)
        loads += [0] * (plan.world_size - len(loads))
        for rank, load in enumerate(plan.loads):
            loads[rank] += load
        units: dict[int, list[int]] = {}
        for i, job in enumerate(jobs):
            units.setdefault(job.member.number, []).append(i)
        for number, indices in units.items():
            first = jobs[indices[0]]
            itemsize = first.algorithm.wire_dtype(first.group, first.member.param.device).itemsize
            resident = sum(plan.is_resident(i) for i in indices)
            moved = sum(
                plan.units[i].gathered(plan.owners[i]) + plan.units[i].returned(plan.owners[i])
                for i in indices
            )
            scales = {jobs[i].scale for i in indices}
            rows[number] = PlanRow(
                fqn=first.member.fqn,
                shape=tuple(first.member.param.shape),
                algorithm=first.algorithm.name,
                matrices=_matrices([jobs[i] for i in indices]),
                resident=resident,
                owned=len(indices) - resident,
                owners=tuple(sorted({plan.owners[i] for i in indices})),
                scale=scales.pop() if len(scales) == 1 else None,
                moved_bytes=moved * itemsize,
            )
    total = sum(loads)
    shares = tuple(load / total for load in loads) if total else ()
    return OptimizerPlan(tuple(rows[m.number] for m in members), shares, waves)


def _matrices(jobs: Sequence[Job]) -> str:
    counts: dict[tuple[int, int], int] = {}
    for job in jobs:
        shape = job.unit.rows, job.unit.cols
        counts[shape] = counts.get(shape, 0) + job.unit.batch
    return ", ".join(
        f"{n} x {rows}x{cols}" if n > 1 else f"{rows}x{cols}" for (rows, cols), n in counts.items()
    )
