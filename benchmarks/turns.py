"""Fair times on a shared machine: candidates take turns in the same processes, ratios are reported.

Absolute times of a shared machine are noise; the ratio of two that were taken one after the other
in the same round is not.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from rich.progress import track

Row = tuple[float, float, float]  # lower quartile, median, upper quartile


def timed(step: Callable[[], object]) -> float:
    """Seconds that the slowest rank takes from a common start."""
    dist.barrier()
    start = time.perf_counter()
    step()
    seconds = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return seconds.item()


def take_turns(
    steps: Mapping[str, Callable[[], object]], rounds: int, description: str, repeat: int = 1
) -> dict[str, list[float]]:
    """Times of every candidate, by round; first in one order, then in the other.

    Args:
        steps: what to time.
        rounds: timed ones; two more come before, in which candidates allocate and plan.
        description: of the progress bar.
        repeat: calls in one measurement, where the barrier before them takes about as long as one.
    """
    times: dict[str, list[float]] = {name: [] for name in steps}
    hidden = dist.get_rank() != 0
    for i in track(range(rounds + 2), description=description, disable=hidden, transient=True):
        for name in steps if i % 2 else reversed(steps):
            step = steps[name]
            seconds = timed(lambda: [step() for _ in range(repeat)])  # noqa: B023
            if i >= 2:
                times[name].append(seconds / repeat)
    return times


def ratios(times: list[float], baseline: list[float]) -> Row:
    """Lower quartile, median and upper quartile of times / baseline, round by round."""
    low, median, high = statistics.quantiles(
        [a / b for a, b in zip(times, baseline, strict=True)], n=4
    )
    return low, median, high


def launch(main: Callable[[], None], script: str, ranks: int) -> None:
    """Runs `main` on the ranks of torchrun, or this script under torchrun."""
    if "RANK" in os.environ:
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        main()
        dist.destroy_process_group()
        sys.stdout.flush()
        sys.stderr.flush()
        # Threads of gloo that free a tensor while Python ends abort the process (pytorch#190489).
        os._exit(0)
    from torch.distributed.run import main as torchrun  # costs a second that ranks do not need

    torchrun(["--standalone", "--nproc-per-node", str(ranks), script, *sys.argv[1:]])
