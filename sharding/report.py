"""The layout of a sharded model as a table and as JSON. Reads plans; communicates nothing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from sharding.fsdp.bucket import Bucket
from sharding.fsdp.module_state import state_of
from sharding.planning.negotiation import BucketPlan, negotiate
from sharding.transport.axes import shard_size

_COLUMNS = """\
S: elements that every rank holds, one figure a segment. weights, gradients: their bytes on every
rank; gathered: bytes of the whole bucket while it is there. resident: units that lie whole on a
rank; owned: those that travel to an owner in a step. bytes saved: that do not travel in one,
against resident_padding=0.
"""


@dataclass(frozen=True, slots=True)
class BucketRow:
    """One bucket of a layout.

    Attributes:
        bucket: fqn of the module that was given to `fully_shard`; empty for the root.
        parameters: How many parameters it moves together.
        numel: Their elements.
        dtypes: One per segment.
        trainable: One per segment; frozen parameters have segments of their own.
        shard_numel: S of each segment, the elements that every rank holds.
        weight_bytes: Bytes of weights that every rank holds.
        gradient_bytes: Bytes of gradients that every rank holds, once there are any.
        gathered_bytes: Bytes of the whole bucket, while it is gathered.
        padding: Elements of padding over all ranks, as a share of `numel`.
        resident: Units that lie whole on one rank: those that `optimizer=` declared for its step,
            or, where nothing was declared, every parameter of 2 and more dimensions as one unit.
        owned: Units that do not, and travel to an owner rank in a step that needs them whole.
        saved_bytes: Bytes that residency keeps from travelling in a step, to owners and back, in a
            replica: against the layout of `resident_padding=0`, in the dtype of the parameters.
    """

    bucket: str
    parameters: int
    numel: int
    dtypes: tuple[str, ...]
    trainable: tuple[bool, ...]
    shard_numel: tuple[int, ...]
    weight_bytes: int
    gradient_bytes: int
    gathered_bytes: int
    padding: float
    resident: int
    owned: int
    saved_bytes: int


@dataclass(frozen=True, slots=True)
class Layout:
    """The layout of a model; prints as a table.

    Attributes:
        world_size: Ranks that the model is cut over.
        replicas: How often it is there: the size of dim 0 of a 2-D mesh.
        buckets: In module order.
    """

    world_size: int
    replicas: int
    buckets: tuple[BucketRow, ...]

    def to_json(self) -> str:
        """Return the same figures as JSON."""
        return json.dumps(asdict(self))

    def __str__(self) -> str:
        """Return a table with one row per bucket and a total."""
        headers = ["bucket", "parameters", "elements", "dtype", "S"]
        headers += ["weights", "gradients", "gathered", "padding"]
        headers += ["resident", "owned", "bytes saved"]
        rows = [_cells(row) for row in self.buckets]
        numel = sum(row.numel for row in self.buckets)
        padding = sum(row.padding * row.numel for row in self.buckets) / max(numel, 1)
        total = [
            "total",
            str(sum(row.parameters for row in self.buckets)),
            f"{numel:,}",
            "",
            f"{sum(sum(row.shard_numel) for row in self.buckets):,}",
            f"{sum(row.weight_bytes for row in self.buckets):,}",
            f"{sum(row.gradient_bytes for row in self.buckets):,}",
            f"{max((row.gathered_bytes for row in self.buckets), default=0):,} at most",
            f"{padding:.2%}",
            str(sum(row.resident for row in self.buckets)),
            str(sum(row.owned for row in self.buckets)),
            f"{sum(row.saved_bytes for row in self.buckets):,}",
        ]
        title = f"layout on {self.world_size} ranks"
        if self.replicas > 1:
            title += f", {self.replicas} replicas"
        return render_table(title, headers, rows, footer=total) + _COLUMNS


def layout(model: nn.Module) -> Layout:
    """Collect the layout of every bucket below `model`.

    Raises:
        TypeError: `model` is no module.
        ValueError: Nothing below `model` is fully sharded.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected an nn.Module, got a {type(model).__name__}")
    buckets: dict[str, Bucket] = {}
    for name, module in model.named_modules():
        state = state_of(module)
        bucket = None if state is None else state.bucket
        if bucket is not None and bucket not in buckets.values():
            buckets[name] = bucket
    if not buckets:
        raise ValueError(
            f"{type(model).__name__} has no sharded parameters; call fully_shard first"
        )
    mesh = next(iter(buckets.values())).mesh
    rows = tuple(_row(name, bucket) for name, bucket in buckets.items())
    return Layout(shard_size(mesh), mesh.size() // shard_size(mesh), rows)


def _row(name: str, bucket: Bucket) -> BucketRow:
    plan, segments = bucket.plan, bucket.plan.segments
    numel = sum(segment.numel for segment in segments)
    whole: list[bool] = []
    for i, (spec, (segment, index)) in enumerate(zip(plan.params, plan.location, strict=True)):
        if any(demand.when == "step" for demand in spec.demands):
            whole += plan.unit_verdicts(i)
        elif len(spec.shape) >= 2 and not spec.demands:
            whole.append(len(segments[segment].ranges(index)) <= 1)
    padding = sum(segment.padding for segment in segments) / max(numel, 1)
    held = [
        segment.shard_numel * getattr(torch, dtype).itemsize
        for segment, dtype in zip(segments, plan.dtypes, strict=True)
    ]
    return BucketRow(
        bucket=name,
        parameters=len(bucket.parameters),
        numel=numel,
        dtypes=plan.dtypes,
        trainable=plan.trainable,
        shard_numel=tuple(segment.shard_numel for segment in segments),
        weight_bytes=sum(held),
        gradient_bytes=sum(size for size, t in zip(held, plan.trainable, strict=True) if t),
        gathered_bytes=sum(held) * segments[0].world_size,
        padding=padding,
        resident=sum(whole),
        owned=len(whole) - sum(whole),
        saved_bytes=_saved_bytes(plan),
    )


def _saved_bytes(plan: BucketPlan) -> int:
    """Return what the raised granules are worth; see `BucketRow.saved_bytes`."""
    world_size = plan.segments[0].world_size
    unraised = negotiate(plan.name, plan.params, world_size, resident_padding=0)
    return 2 * sum(
        (unraised.moved_numel_of(i) - plan.moved_numel_of(i)) * getattr(torch, param.dtype).itemsize
        for i, param in enumerate(plan.params)
    )


def _cells(row: BucketRow) -> list[str]:
    return [
        row.bucket or "(root)",
        str(row.parameters),
        f"{row.numel:,}",
        " + ".join(
            dtype if trainable else f"{dtype} frozen"
            for dtype, trainable in zip(row.dtypes, row.trainable, strict=True)
        ),
        " + ".join(f"{size:,}" for size in row.shard_numel),
        f"{row.weight_bytes:,}",
        f"{row.gradient_bytes:,}",
        f"{row.gathered_bytes:,}",
        f"{row.padding:.2%}",
        str(row.resident),
        str(row.owned),
        f"{row.saved_bytes:,}",
    ]


def render_table(
    title: str,
    headers: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    footer: Sequence[str] | None = None,
    left: int = 1,
) -> str:
    """Return a table as plain text: the first `left` columns left-aligned, the others
    right-aligned."""
    table = Table(title=title, title_justify="left", show_footer=footer is not None)
    for i, header in enumerate(headers):
        table.add_column(
            header,
            justify="left" if i < left else "right",
            footer=footer[i] if footer is not None else "",
            no_wrap=True,
        )
    for row in rows:
        table.add_row(*row)
    console = Console(width=160, color_system=None)
    with console.capture() as capture:
        console.print(table)
    return capture.get()
