"""Newton-Schulz: Gram against standard iteration, batches against loops, errors of all sets.

    python benchmarks/newton_schulz.py            # tables
    python benchmarks/newton_schulz.py --json     # and one line of JSON at the end

Candidates take turns in one process, and only ratios are reported, of the medians. Multiply-adds
are counted at the operators. Errors are those of a matrix of normal numbers, and of matrices with
singular values from 1 down to 1 / condition, against the polar factor of an SVD in float64.

The line of JSON holds

    gram_flops_ratio_4to1    multiply-adds of Gram over those of standard, 4 : 1, float32
    gram_time_ratio_4to1     their times
    batched_speedup_small    64 matrices of 128 x 128: one by one over as one batch

Muon computes them one by one; the batch is written out below. On one thread of a CPU it gains up to
64 x 64, where calls cost more than products.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from sharding.report import render_table
from vfsdp_optim.newton_schulz import (
    ALGORITHMS,
    COEFFICIENTS,
    coefficient_schedule,
    orthogonalize,
)
from vfsdp_optim.states.scratch import Scratch

CONDITIONS = (1e2, 1e4, 1e6)
BATCHES = ((64, 16, 16), (64, 32, 32), (64, 64, 64), (64, 128, 128), (16, 128, 512))


def polar_factor(x: Tensor) -> Tensor:
    """U V^T of x = U S V^T, in float64."""
    u, _, vt = torch.linalg.svd(x.double(), full_matrices=False)
    return u @ vt


def of_condition(rows: int, cols: int, condition: float) -> Tensor:
    """A matrix with singular values from 1 down to 1 / condition, in a geometric series."""
    u, _, vt = torch.linalg.svd(torch.randn(rows, cols, dtype=torch.float64), full_matrices=False)
    return (u * condition ** -torch.linspace(0, 1, min(rows, cols), dtype=torch.float64)) @ vt


def errors(rows: int, cols: int, device: str) -> list[list[str]]:
    """Rows of the table: relative errors of the sets and algorithms, in Frobenius norm."""
    matrices = [torch.randn(rows, cols), *(of_condition(rows, cols, c) for c in CONDITIONS)]
    factors = [polar_factor(x) for x in matrices]
    table = []
    for dtype in (torch.float32, torch.bfloat16):
        for name in COEFFICIENTS:
            for algorithm in ALGORITHMS:
                cells = []
                for x, factor in zip(matrices, factors, strict=True):
                    options = dict(coefficients=name, algorithm=algorithm, dtype=dtype)
                    y = orthogonalize(x.to(device), **options).cpu().double()
                    cells.append(f"{(y - factor).norm() / factor.norm():.4f}")
                table.append([str(dtype).removeprefix("torch."), name, algorithm, *cells])
    return table


def medians(steps: Mapping[str, Callable[[], object]], rounds: int, device: str) -> list[float]:
    """Median seconds of candidates that take turns, after two rounds that do not count."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for i in range(rounds + 2):
        for name in steps if i % 2 else reversed(steps):
            start = time.perf_counter()
            steps[name]()
            if device == "cuda":
                torch.cuda.synchronize()
            times[name].append(time.perf_counter() - start)
    return [statistics.median(each[2:]) for each in times.values()]


def gram_ratios(size: int, rounds: int, device: str) -> tuple[float, float]:
    """Multiply-adds and time of Gram over standard, of (size, 4 size) in float32."""
    x = torch.randn(size, 4 * size, device=device)
    scratch = Scratch()

    def step(algorithm: str) -> Tensor:
        return orthogonalize(x, dtype=torch.float32, algorithm=algorithm, take=scratch.take)

    counts = []
    for algorithm in ALGORITHMS:
        with FlopCounterMode(display=False) as counter:
            step(algorithm)
        counts.append(counter.get_total_flops())
    seconds = medians({a: lambda a=a: step(a) for a in ALGORITHMS}, rounds, device)
    return counts[1] / counts[0], seconds[1] / seconds[0]


def batched(x: Tensor, schedule: tuple[tuple[float, float, float], ...], memory: Scratch) -> Tensor:
    """The chain of `orthogonalize` on a stack of matrices, (batch, rows, cols), rows <= cols."""

    def room(name: str, cols: int) -> Tensor:
        numel = x.size(0) * x.size(1) * cols
        return memory.take(numel, x.dtype, x.device, name).view(x.size(0), x.size(1), cols)

    rows, cols = x.shape[1:]
    norms = torch.linalg.matrix_norm(x, keepdim=True).clamp(min=1e-7)
    y = torch.div(x, norms, out=room("even", cols))
    gram, polynomial = room("gram", rows), room("polynomial", rows)
    for step, (a, b, c) in enumerate(schedule):
        torch.bmm(y, y.mT, out=gram)
        torch.baddbmm(gram, gram, gram, beta=b, alpha=c, out=polynomial)
        out = room("even" if step % 2 else "odd", cols)
        y = torch.baddbmm(y, polynomial, y, beta=a, out=out)
    return y


def batched_speedup(shape: tuple[int, int, int], rounds: int, device: str) -> float:
    """Time of `orthogonalize` of one matrix after the other, over that of all at once."""
    x = torch.randn(shape, device=device)
    scratch, schedule = Scratch(), coefficient_schedule("keller", 5)

    def looped() -> None:
        for matrix in x:
            orthogonalize(matrix, dtype=torch.float32, take=scratch.take)

    steps = {"looped": looped, "batched": lambda: batched(x, schedule, scratch)}
    one_by_one, at_once = medians(steps, rounds, device)
    return one_by_one / at_once


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--size", type=int, default=512, help="short side of the 4 : 1 matrix")
    parser.add_argument("--rounds", type=int, default=7, help="timed rounds")
    parser.add_argument("--threads", type=int, default=1, help="of torch, on the CPU")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--json", action="store_true", help="last line is JSON")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    rounds, device = arguments.rounds, arguments.device
    flops, seconds = gram_ratios(arguments.size, rounds, device)
    speedups = {shape: batched_speedup(shape, rounds, device) for shape in BATCHES}
    conditions = [f"condition {c:.0e}" for c in CONDITIONS]
    header = ["64 x 256", "set", "algorithm", "normal", *conditions]
    print(render_table("error against an SVD in float64", header, errors(64, 256, device)))
    rows = [
        ["Gram / standard, multiply-adds", f"{flops:.3f}"],
        ["the same, time", f"{seconds:.3f}"],
    ]
    for (batch, short, long), speedup in speedups.items():
        rows.append([f"{batch} of {short} x {long}: looped / batched", f"{speedup:.2f}"])
    title = f"4 : 1 with {arguments.size} rows, {device}, {arguments.threads} threads"
    print(render_table(title, ["float32, 5 steps", "ratio"], rows))
    if arguments.json:
        line = {
            "gram_flops_ratio_4to1": round(flops, 3),
            "gram_time_ratio_4to1": round(seconds, 3),
            "batched_speedup_small": round(speedups[64, 128, 128], 2),
        }
        print(json.dumps(line))


if __name__ == "__main__":
    main()
