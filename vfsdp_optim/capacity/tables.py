"""A capacity as a table and as JSON. Pure data."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.table import Table

from sharding.planning.plan_file import PLAN_FORMAT, bucket_to_json
from vfsdp_optim.capacity.optimizers import optimizer_name
from vfsdp_optim.capacity.parallelism import Parallelism
from vfsdp_optim.capacity.prediction import Capacity
from vfsdp_optim.capacity.shapes import ModelShapes

NOT_INCLUDED = "activations not included, nor the full gradient that autograd hands over"


def capacity_table(title: str, capacities: Sequence[Capacity]) -> Table:
    """Return one column per number of ranks; bytes are those of the rank that has most."""
    table = Table(title=title, title_justify="left", caption=NOT_INCLUDED, caption_justify="left")
    table.add_column("ranks", no_wrap=True)
    for capacity in capacities:
        header = f"{capacity.model.parallelism.ranks:,}"
        table.add_column(header, justify="right", no_wrap=True)
    for i, rows in enumerate(zip(*map(_rows, capacities), strict=True)):
        label = rows[0][0]
        values = [value for _, value in rows]
        if any(values):
            table.add_row(label, *values, end_section=i in _SECTIONS)
    return table


_SECTIONS = (2, 10, 14)


def _rows(capacity: Capacity) -> list[tuple[str, str]]:
    memory, traffic, torch = capacity.memory, capacity.traffic, capacity.torch
    ranks = capacity.model.parallelism
    of_units = max(capacity.unit_states_by_rank)
    proven = "proven" if capacity.optimal else "not proven"
    fixed = memory.parameters + memory.gradients + memory.states
    return [
        ("shards x copies", f"{ranks.shard_ranks:,} x {ranks.replicate}" + _others(ranks)),
        ("padding", f"{capacity.padding:.2%}"),
        ("least with these cuts", f"{capacity.bound:.2%} ({proven})"),
        ("parameters", bytes_text(memory.parameters)),
        ("gradients", bytes_text(memory.gradients)),
        ("optimizer states", bytes_text(memory.states)),
        ("  of whole units, on owners", bytes_text(of_units) if of_units else ""),
        ("unsharded parameters", bytes_text(memory.unsharded)),
        ("communication buffers", bytes_text(memory.communication)),
        ("exchange slots, scratch", bytes_text(memory.exchange)),
        ("bytes per rank", bytes_text(memory.total)),
        ("gathered per step", bytes_text(traffic.gather)),
        ("reduced per step", bytes_text(traffic.reduce)),
        ("averaged over copies", bytes_text(traffic.replicate) if ranks.replicate > 1 else ""),
        ("exchanged per step", bytes_text(traffic.exchange) if capacity.matrices else ""),
        (
            "matrix work, busiest / mean",
            "" if capacity.skew is None else f"{capacity.skew:.2f}",
        ),
        ("FSDP2 Shard(0): padding", f"{torch.padding:.2%}"),
        ("  its states, grads, params", f"{bytes_text(torch.at_rest)} (here {bytes_text(fixed)})"),
        ("  its unsharded parameters", bytes_text(torch.unsharded)),
        ("  its communication", bytes_text(torch.communication)),
        ("  its bytes per rank", f"{bytes_text(torch.total)} (here {bytes_text(memory.total)})"),
    ]


def _others(ranks: Parallelism) -> str:
    parts = [
        f"{key}={getattr(ranks, key)}" for key in ("tp", "ep", "pp") if getattr(ranks, key) > 1
    ]
    return f" ({', '.join(parts)})" if parts else ""


def bytes_text(size: int) -> str:
    """Return a size in the unit that suits it."""
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20)):
        if size >= factor:
            return f"{size / factor:,.2f} {unit}"
    return f"{size / 1024:,.1f} KiB"


def search_table(
    parallelism: Parallelism, found: dict[tuple[int, str], tuple[float, int]]
) -> Table:
    """Return padding by group size and granule; the parameters of a rank below it."""
    granules = list(dict.fromkeys(text for _, text in found))
    table = Table(
        title=f"{parallelism.ranks:,} ranks: padding, and parameters per rank",
        title_justify="left",
    )
    table.add_column("groups of")
    for text in granules:
        table.add_column(text, justify="right")
    for group in dict.fromkeys(group for group, _ in found):
        cells = []
        for text in granules:
            padding, size = found[group, text]
            mark = "[bold green]" if padding <= 0.02 else ""
            cells.append(f"{mark}{padding:.2%}, {bytes_text(size)}")
        copies = parallelism.shard_ranks // group * parallelism.replicate
        table.add_row(f"{group:,} (--replicate {copies})", *cells)
    return table


def to_json(
    model: ModelShapes,
    capacities: Sequence[Capacity],
    advice: Sequence[tuple[str, ...]],
    found: Sequence[dict[tuple[int, str], tuple[float, int]]],
) -> dict[str, Any]:
    """Return all figures, and the layouts that `fully_shard(plan=...)` reads; sizes are bytes."""
    plans = []
    for capacity, sentences in zip(capacities, advice, strict=True):
        ranks = capacity.model.parallelism
        plans.append(
            {
                **asdict(ranks),
                "shard_ranks": ranks.shard_ranks,
                "numel": capacity.numel,
                "padding": capacity.padding,
                "bound": capacity.bound,
                "optimal": capacity.optimal,
                "bytes_per_rank": asdict(capacity.memory),
                "wire_bytes_per_step": asdict(capacity.traffic),
                "matrices": capacity.matrices,
                "unit_states_of_a_rank": max(capacity.unit_states_by_rank),
                "matrix_skew": capacity.skew,
                "torch_fsdp2": asdict(capacity.torch),
                "advice": list(sentences),
                "buckets": [bucket_to_json(b.plan, b.count) for b in capacity.buckets],
            }
        )
    setup = capacities[0].setup
    document: dict[str, Any] = {
        "format": PLAN_FORMAT,
        "model": model.name,
        "source": model.source,
        "optimizer": (
            setup.optimizer if isinstance(setup.optimizer, str) else optimizer_name(setup.optimizer)
        ),
        "states": setup.states,
        "granularity": str(setup.granularity),
        "backend": setup.backend,
        "not_included": NOT_INCLUDED,
        "plans": plans,
    }
    for plan, table in zip(plans, found, strict=False):
        plan["suggestions"] = [
            {"shard_ranks": group, "granularity": text, "padding": padding, "parameters": size}
            for (group, text), (padding, size) in table.items()
        ]
    return document
