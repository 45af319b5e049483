"""What a model of 45,000 parameters costs before its first step, and in Python at each step.

Run: python benchmarks/setup_cost.py [--layers 58 --experts 256] [--json]

The model is a mixture of experts with a tensor per expert, on the meta device and 64 ranks that do
not exist: groups, optimizer, layouts shaped by it, and the plan of a step. The check that each
step begins with (has anybody edited groups, parameters or state?) is timed on plain parameters,
beside the step of torch.optim.AdamW(fused=True) on them, which is nearly all Python and launches.
Our step on shards, of which this rank holds one in 64, is timed beside that of AdamW(foreach=True).
CPU time of the process beside seconds: on a busy machine those say little.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from vfsdp_optim import AdamW, Muon, fully_shard, param_groups

RANKS = 64


class Expert(nn.Module):
    """Three matrices, as in most mixtures of experts."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(dim, hidden, bias=False)
        self.up = nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)


class Layer(nn.Module):
    """Attention and experts; only its parameters matter here."""

    def __init__(self, experts: int, dim: int = 7168, hidden: int = 2048) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)
        self.experts = nn.ModuleList(Expert(dim, hidden) for _ in range(experts))


def timed(what: str, seconds: dict[str, float], work: Callable[[], object]) -> object:
    """Run `work` and add its seconds to a table."""
    start = time.perf_counter()
    result = work()
    seconds[what] = time.perf_counter() - start
    return result


def set_up(layers: int, experts: int) -> tuple[int, dict[str, float], float]:
    """Return the number of parameters, seconds by what they were spent on, and CPU seconds."""
    with torch.device("meta"):
        model = nn.Sequential(*[Layer(experts) for _ in range(layers)])
    seconds: dict[str, float] = {}
    cpu = time.process_time()
    groups = timed("param_groups", seconds, lambda: param_groups(model))
    optimizer = timed("Muon", seconds, lambda: Muon(groups, lr=0.02))
    start = time.perf_counter()
    with Progress(transient=True) as progress:
        for layer in progress.track(model, description="fully_shard"):
            fully_shard(layer, optimizer=optimizer)
    seconds["fully_shard of all layers"] = time.perf_counter() - start
    timed("plan of a step", seconds, lambda: optimizer.plan())
    timed("check before a step", seconds, lambda: optimizer._current_working_set())
    cpu = time.process_time() - cpu
    return sum(1 for _ in model.parameters()), seconds, cpu


def best_of(rounds: int, count: int, *works: Callable[[], object]) -> list[float]:
    """Return milliseconds per 1,000 of `count` parameters that each of `works` takes."""
    best = [float("inf")] * len(works)
    for _ in range(rounds):  # in turns: machines are shared
        for i, work in enumerate(works):
            start = time.perf_counter()
            work()
            best[i] = min(best[i], time.perf_counter() - start)
    return [seconds / count * 1e6 for seconds in best]


def per_step(count: int, rounds: int) -> list[float]:
    """Return what our check, torch's fused step, our step on shards and torch's foreach step take.

    Parameters have so few elements that nearly all is Python and calls.
    """
    params = [nn.Parameter(torch.ones(16)) for _ in range(count)]
    layers = [nn.Linear(4, 4, bias=False) for _ in range(count)]
    for first in range(0, count, 500):
        fully_shard(layers[first : first + 500])
    shards = [layer.weight for layer in layers]
    for param in (*params, *shards):
        param.grad = torch.ones_like(param)
    ours, few = AdamW(params), AdamW(shards)
    fused, foreach = (torch.optim.AdamW(params, **{key: True}) for key in ("fused", "foreach"))
    for optimizer in (ours, few, fused, foreach):
        optimizer.step()
    check = ours._current_working_set
    return best_of(rounds, count, check, fused.step, few.step, foreach.step)


def main() -> None:
    """Measure, and print a table or one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=58)
    parser.add_argument("--experts", type=int, default=256)
    parser.add_argument("--json", action="store_true", help="figures as the last line")
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    # First: a step looks at the buckets of all models that are alive.
    check, torch_step, few, foreach = per_step(2000, rounds=20)
    count, seconds, cpu = set_up(args.layers, args.experts)
    dist.destroy_process_group()
    table = Table("", "seconds", title=f"{count:,} parameters on {RANKS} ranks")
    for what, each in seconds.items():
        table.add_row(what, f"{each:.2f}")
    table.add_row("sum", f"{sum(seconds.values()):.2f}")
    table.add_row("CPU time of the process", f"{cpu:.2f}")
    Console().print(table)
    print(
        f"per 1,000 plain parameters: check {check:.2f} ms, torch's fused step {torch_step:.2f} ms,"
        f" foreach {foreach:.2f} ms; our step on shards, of which few are here, {few:.2f} ms"
    )
    if args.json:
        figures = {
            "construct_s_45k": round(sum(seconds.values()) * 45_000 / count, 2),
            "step_check_ms_per_1k": round(check, 3),
            "torch_step_ms_per_1k": round(torch_step, 3),
            "construct_cpu_s_45k": round(cpu * 45_000 / count, 2),
            "few_held_step_ms_per_1k": round(few, 3),
            "torch_foreach_step_ms_per_1k": round(foreach, 3),
        }
        print(json.dumps(figures))


if __name__ == "__main__":
    main()
