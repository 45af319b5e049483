"""What a model of 45,000 parameters costs before its first step, and in Python at each step.

Run: python benchmarks/setup_cost.py [--layers 58 --experts 256] [--json]

The model is a mixture of experts with a tensor per expert, on the meta device and 64 ranks that do
not exist: groups, optimizer, layouts shaped by it, and the plan of a step. The check that each
step begins with (has anybody edited groups, parameters or state?) is timed on plain parameters,
beside the step of torch.optim.AdamW(fused=True) on them, which is nearly all Python and launches.
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


def set_up(layers: int, experts: int) -> tuple[int, dict[str, float]]:
    """Return the number of parameters, and seconds by what they were spent on."""
    with torch.device("meta"):
        model = nn.Sequential(*[Layer(experts) for _ in range(layers)])
    seconds: dict[str, float] = {}
    groups = timed("param_groups", seconds, lambda: param_groups(model))
    optimizer = timed("Muon", seconds, lambda: Muon(groups, lr=0.02))
    start = time.perf_counter()
    with Progress(transient=True) as progress:
        for layer in progress.track(model, description="fully_shard"):
            fully_shard(layer, optimizer=optimizer)
    seconds["fully_shard of all layers"] = time.perf_counter() - start
    timed("plan of a step", seconds, lambda: optimizer.plan())
    timed("check before a step", seconds, lambda: optimizer._current_working_set())
    return sum(1 for _ in model.parameters()), seconds


def per_step(count: int, rounds: int) -> tuple[float, float]:
    """Return milliseconds per 1,000 parameters: our check, and torch's fused step."""
    params = [nn.Parameter(torch.ones(16)) for _ in range(count)]
    for param in params:
        param.grad = torch.ones(16)
    ours, theirs = AdamW(params), torch.optim.AdamW(params, fused=True)
    for optimizer in (ours, theirs):
        optimizer.step()
    best = [float("inf")] * 2
    for _ in range(rounds):  # in turns: machines are shared
        for i, work in enumerate((ours._current_working_set, theirs.step)):
            start = time.perf_counter()
            work()
            best[i] = min(best[i], time.perf_counter() - start)
    return best[0] / count * 1e6, best[1] / count * 1e6


def main() -> None:
    """Measure, and print a table or one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=58)
    parser.add_argument("--experts", type=int, default=256)
    parser.add_argument("--json", action="store_true", help="figures as the last line")
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    count, seconds = set_up(args.layers, args.experts)
    dist.destroy_process_group()
    check, torch_step = per_step(2000, rounds=20)
    table = Table("", "seconds", title=f"{count:,} parameters on {RANKS} ranks")
    for what, each in seconds.items():
        table.add_row(what, f"{each:.2f}")
    table.add_row("sum", f"{sum(seconds.values()):.2f}")
    Console().print(table)
    print(
        f"per 1,000 plain parameters: check {check:.2f} ms, torch's fused step {torch_step:.2f} ms"
    )
    if args.json:
        figures = {
            "construct_s_45k": round(sum(seconds.values()) * 45_000 / count, 2),
            "step_check_ms_per_1k": round(check, 3),
            "torch_step_ms_per_1k": round(torch_step, 3),
        }
        print(json.dumps(figures))


if __name__ == "__main__":
    main()
