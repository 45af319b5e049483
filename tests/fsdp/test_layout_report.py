"""`layout(model)`: who holds what, and what residency saves, against the parameters' placements."""

import json
from dataclasses import replace

import pytest

from ranks import run_ranks
from training import Run, build_model, build_optimizer, shard
from vfsdp_optim import layout


def matrices_of(run: Run) -> tuple[str, str, list[tuple[int, int]]]:
    """The layout as JSON and as text; (elements, most of them on a rank) of Muon's matrices."""
    model = build_model(run)
    optimizer = build_optimizer(model, run)
    shard(model, run, optimizer if run.optimizer_first else None)
    held = []
    for name, p in model.named_parameters():
        if p.dim() == 2 and "blocks" in name:
            held.append((p.numel(), max(b - a for a, b in p.placement.all_bounds(p.numel()))))
    return layout(model).to_json(), str(layout(model)), held


def moved(held: list[tuple[int, int]]) -> int:
    return sum(numel - most for numel, most in held)


@pytest.mark.parametrize("world_size", [3, 4])
def test_units_and_saved_bytes_are_those_of_the_placements(world_size: int) -> None:
    run = Run(optimizer="muon", optimizer_first=True)
    _, _, unraised = run_ranks(matrices_of, world_size, replace(run, resident_padding=0))[0]
    for text, table, held in run_ranks(matrices_of, world_size, run):
        figures = json.loads(text)
        assert figures["world_size"] == world_size
        assert figures["replicas"] == 1
        rows = figures["buckets"]
        for row in rows:
            assert row["weight_bytes"] == row["gradient_bytes"] == 4 * sum(row["shard_numel"])
            assert row["gathered_bytes"] == world_size * row["weight_bytes"]
        assert f" {sum(row['weight_bytes'] for row in rows):,} │" in table
        assert "gathered: bytes of the whole bucket" in table
        assert sum(row["resident"] for row in rows) == sum(a == b for a, b in held)
        assert sum(row["owned"] for row in rows) == sum(a > b for a, b in held)
        saved = sum(row["saved_bytes"] for row in rows)
        assert saved == 2 * 4 * (moved(unraised) - moved(held)) > 0
        assert "bytes saved" in table
        assert f"{saved:,} │" in table


def test_undeclared_matrices_count_as_units_and_save_nothing() -> None:
    for text, _, held in run_ranks(matrices_of, 3, Run(optimizer="muon")):
        rows = json.loads(text)["buckets"]
        in_blocks = [row for row in rows if "blocks" in row["bucket"]]
        assert sum(row["resident"] for row in in_blocks) == sum(a == b for a, b in held)
        assert sum(row["owned"] for row in in_blocks) == sum(a > b for a, b in held)
        assert all(row["saved_bytes"] == 0 for row in rows)


def test_replicas_are_named() -> None:
    for text, table, _ in run_ranks(matrices_of, 4, Run(mesh=(2, 2))):
        assert json.loads(text)["replicas"] == 2
        assert table.startswith("layout on 2 ranks, 2 replicas")
