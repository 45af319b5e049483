"""The planner on real models and on small instances whose optimum is known. CPU, no ranks.

    python benchmarks/planner.py            # two minutes: figures of a study, 300 instances
    python benchmarks/planner.py --full     # all models, granularities and ranks, 2,000 instances
    python benchmarks/planner.py --json     # and one line of JSON at the end

The line of JSON holds, over everything that was run:

    optimal_share            of the small instances, in the family where it is lowest
    worst_small_ratio        S over the least S, the worst of all small instances
    cells_missed             starred figures of planner_figures.py that were not reached
    max_seconds_fused        CPU time of one plan: dense models and fused experts
    max_seconds_per_expert   the same for buckets of over 700 tensors

Beside our padding: segments (at most 2 and 4), the published heuristic, FSDP2's `Shard(0)`, and
plain concatenation, which cuts granules. The plans are made with the alignment of the figures
(tensors start anywhere, S is a multiple of 64); "default" is with the alignment that is used.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from planner_figures import Model, last_digit, models, one_segment, segments, specs
from planner_reference import (
    FAMILIES,
    least_shard,
    padded_by_concatenation,
    padded_by_fsdp2,
    published_shard,
    small_instance,
)
from sharding.planning.planner import SegmentPlan, TensorSpec, plan_segment
from sharding.planning.segments import plan_segments

STEP = 64  # S is a multiple of it in all figures
PER_EXPERT = 700  # tensors of a bucket that is timed as a per-expert one
GRANULARITIES = ("e1", "e16", "e32", "e128", "1", "16", "128")
ALL_RANKS = (2, 3, 4, 6, 8, 16, 32, 64, 128, 256, 512, 1000, 1024, 4096, 16384)


@dataclass
class Seconds:
    """The longest CPU time of a plan, by kind of bucket."""

    fused: float = 0.0
    per_expert: float = 0.0

    def plan(self, tensors: tuple[TensorSpec, ...], ranks: int) -> SegmentPlan:
        """A timed plan; one that was made before is in the cache and takes no time."""
        start = time.process_time()
        plan = plan_segment(tensors, ranks, align=1, shard_align=STEP)
        seconds = time.process_time() - start
        if len(tensors) > PER_EXPERT:
            self.per_expert = max(self.per_expert, seconds)
        else:
            self.fused = max(self.fused, seconds)
        return plan


@dataclass
class Padding:
    """Elements that belong to no tensor, as a percentage of those that do; over all buckets."""

    elements: int = 0
    padded: dict[str, int] = field(default_factory=dict)
    proven: bool = True

    def add(self, layout: str, count: int, padded: int) -> None:
        """Counts the elements over all ranks of some equal buckets."""
        self.padded[layout] = self.padded.get(layout, 0) + count * padded

    def percent(self, layout: str) -> float:
        """Padding of a layout."""
        return 100 * (self.padded[layout] / self.elements - 1)


def measure(model: Model, granularity: str, ranks: int, seconds: Seconds, full: bool) -> Padding:
    """One cell: one segment, and with `full` everything beside it."""
    cell = Padding()
    for count, shapes in model.buckets:
        tensors = specs(shapes, granularity)
        plan = seconds.plan(tensors, ranks)
        cell.elements += count * plan.numel
        cell.proven &= plan.optimal
        cell.add("one", count, ranks * plan.shard_numel)
        if not full:
            continue
        sizes = [(tensor.numel, tensor.granule.numel) for tensor in tensors]
        cell.add("published", count, ranks * published_shard(sizes, ranks, STEP))
        cell.add("FSDP2", count, padded_by_fsdp2([shape for _, shape in shapes], ranks))
        cell.add("cut anywhere", count, padded_by_concatenation(plan.numel, ranks, STEP))
        cell.add("default", count, ranks * plan_segment(tensors, ranks).shard_numel)
        for most in (2, 4):
            cell.add(f"{most} segments", count, ranks * total_shard(tensors, ranks, most))
    return cell


def total_shard(tensors: tuple[TensorSpec, ...], ranks: int, most: int) -> int:
    """The S of all segments together, with as many as help."""
    parts = plan_segments(tensors, ranks, most=most, gain=0.0, align=1, shard_align=STEP)
    return sum(plan.shard_numel for _, plan in parts)


def run_small(count: int, console: Console) -> tuple[float, float]:
    """The lowest share of optimal plans of a family, and the worst ratio to the optimum."""
    table = Table(
        title=f"{count} small instances of each family, alignment 1", title_justify="left"
    )
    for header in ("family", "optimal", "worst ratio", "proven", "published heuristic", "worst"):
        table.add_column(header, justify="left" if header == "family" else "right")
    lowest, worst_of_all = 1.0, 1.0
    for family in FAMILIES:
        ratios, published, proven = [], [], 0
        for seed in tqdm(range(count), desc=family, leave=False):
            tensors, sizes, ranks = small_instance(family, seed)
            least = least_shard(sizes, ranks)
            plan = plan_segment(tensors, ranks, align=1)
            ratios.append(plan.shard_numel / least)
            published.append(published_shard(sizes, ranks) / least)
            proven += plan.optimal
        share, theirs = (sum(r == 1 for r in found) / count for found in (ratios, published))
        lowest, worst_of_all = min(lowest, share), max(worst_of_all, *ratios)
        table.add_row(
            family,
            f"{share:.2%}",
            f"{max(ratios):.4f}",
            f"{proven / count:.2%}",
            f"{theirs:.2%}",
            f"{max(published):.4f}",
        )
    console.print(table)
    return lowest, worst_of_all


def run_figures(seconds: Seconds, console: Console) -> int:
    """How many starred figures were missed; prints all that were, and those of segments."""
    loaded = {name: Model.load(name) for name in models()}
    table = Table(title="figures that were not reached", title_justify="left")
    for header in ("model", "granularity", "ranks", "segments", "figure", "found"):
        table.add_column(header, justify="left" if header == "model" else "right")
    missed, close = 0, 0
    for model, granularity, ranks, figure, starred in tqdm(one_segment(), desc="one segment"):
        cell = measure(loaded[model], granularity, ranks, seconds, full=False)
        found = cell.percent("one")
        if found > float(figure) + last_digit(figure):
            missed += starred
            star = "*" if starred else ""
            table.add_row(model, granularity, str(ranks), "1", figure + star, f"{found:.3f}")
    for model, granularity, ranks, figures in tqdm(segments(), desc="segments"):
        for most, figure in zip((1, 2, 4), figures, strict=False):
            padded = elements = 0
            for count, shapes in loaded[model].buckets:
                tensors = specs(shapes, granularity)
                padded += count * ranks * total_shard(tensors, ranks, most)
                elements += count * sum(tensor.numel for tensor in tensors)
            found = 100 * (padded / elements - 1)
            close += found <= float(figure) + max(0.2, last_digit(figure))
            if found > float(figure) + max(0.2, last_digit(figure)):
                table.add_row(model, granularity, str(ranks), str(most), figure, f"{found:.3f}")
    if table.row_count:
        console.print(table)
    total = sum(len(figures) for *_, figures in segments())
    starred = sum(cell[-1] for cell in one_segment())
    console.print(f"figures with a star reached: {starred - missed} of {starred}")
    console.print(f"figures of segments within 0.2 points: {close} of {total}")
    return missed


def run_sweep(
    names: Sequence[str],
    granularities: Sequence[str],
    all_ranks: Sequence[int],
    seconds: Seconds,
    console: Console,
) -> None:
    """A table of paddings for each model; a star where S is proven to be the least."""
    layouts = ("one", "2 segments", "4 segments", "default", "published", "FSDP2", "cut anywhere")
    cells = [(g, ranks) for g in granularities for ranks in all_ranks]
    worse = 0
    for name in names:
        model = Model.load(name)
        table = Table(title=f"{name}: padding in percent", title_justify="left")
        for header in ("rows", "ranks", *layouts):
            table.add_column(header, justify="right")
        for granularity, ranks in tqdm(cells, desc=name, leave=False):
            cell = measure(model, granularity, ranks, seconds, full=True)
            percents = [f"{cell.percent(layout):.2f}" for layout in layouts]
            percents[0] += "*" if cell.proven else ""
            worse += cell.padded["one"] > cell.padded["published"]
            table.add_row(granularity, str(ranks), *percents)
        console.print(table)
    console.print(f"plans worse than the published heuristic: {worse}")


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs what the arguments ask for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--full", action="store_true", help="everything (half an hour or more)")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    parser.add_argument("--models", nargs="+", choices=models(), help="of the sweep")
    parser.add_argument("--ranks", nargs="+", type=int, help="of the sweep")
    parser.add_argument("--granularities", nargs="+", help="of the sweep, such as 16 e128")
    parser.add_argument("--instances", type=int, help="small ones of each family")
    options = parser.parse_args(arguments)
    full, console, seconds = options.full, Console(width=120), Seconds()
    quick = ["gpt_oss_120b", "llama3_70b", "deepseek_v3_perexpert"]
    run_sweep(
        options.models or (models() if full else quick),
        options.granularities or (GRANULARITIES if full else ("e16", "e128")),
        options.ranks or (ALL_RANKS if full else (64, 256, 1024)),
        seconds,
        console,
    )
    missed = run_figures(seconds, console)
    share, ratio = run_small(options.instances or (2000 if full else 300), console)
    figures = {
        "optimal_share": share,
        "worst_small_ratio": ratio,
        "cells_missed": missed,
        "max_seconds_fused": round(seconds.fused, 3),
        "max_seconds_per_expert": round(seconds.per_expert, 3),
    }
    console.print(figures)
    if options.json:
        print(json.dumps(figures))


if __name__ == "__main__":
    main()
