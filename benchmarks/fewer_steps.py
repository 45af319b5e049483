"""How many steps Shampoo and SOAP take to AdamW's held-out loss, on the model of the example.

    python benchmarks/fewer_steps.py                  # about 25 minutes on 2 cores
    python benchmarks/fewer_steps.py --steps 300      # longer runs

Every optimizer runs with each of the learning rates below, whose schedule ends with the run.
AdamW's loss is the lowest of its runs at their end. The others are measured every few steps from
the middle on, where rates begin to fall; what counts is the first time that one is as low. Beside
them AdamW has the embedding, the head and the gains of norms, as in the example.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from rich.progress import track

from sharding.report import render_table
from turns import launch

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

import train_gpt
from stdlib_corpus import Corpus, read_corpus, spread_windows

RATES = {
    "adamw": (0.004, 0.008, 0.016, 0.032),
    "shampoo": (0.008, 0.016, 0.032),
    "soap": (0.002, 0.004, 0.008, 0.016),
}
Curve = dict[int, float]  # held-out bits a byte after some numbers of steps


def curve(args: argparse.Namespace, corpus: Corpus, world: train_gpt.World) -> Curve:
    """Trains with the options of `args`, and measures as its `every` says, and at the end."""
    length = train_gpt.SIZES[args.size].context
    count = train_gpt.HELD_OUT_BATCHES * train_gpt.SEQUENCES
    windows = spread_windows(corpus.held_out, count=count, length=length)
    run = train_gpt.build(args, world)
    peaks = [group["lr"] for group in run.optimizer.param_groups]
    measured: Curve = {}
    title, hidden = f"{args.optimizer} {args.lr}", world.rank != 0
    for step in track(range(1, args.steps + 1), title, disable=hidden, transient=True):
        train_gpt.take_step(run, peaks, corpus.training, args, world)
        due = args.every and step >= args.steps // 2 and step % args.every == 0
        if due or step == args.steps:
            measured[step] = train_gpt.held_out_bits(run.model, windows, world)
    return measured


def first_as_low(measured: Curve, target: float) -> int | None:
    """The first step after which the loss is no higher; None if there is none."""
    return min((step for step, bits in measured.items() if bits <= target), default=None)


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=120, help="of every run")
    parser.add_argument("--every", type=int, default=5, help="steps between measurements")
    parser.add_argument("--size", choices=train_gpt.SIZES, default="small")
    parser.add_argument("--optimizers", nargs="+", choices=[*RATES][1:], default=[*RATES][1:])
    parser.set_defaults(seed=0, states="32bit", dtype="fp32")
    return parser.parse_args()


def main() -> None:
    """Runs on every rank."""
    args, corpus = parse_arguments(), read_corpus()
    world = train_gpt.World(dist.get_rank(), dist.get_world_size(), torch.device("cpu"))
    curves: dict[tuple[str, float], Curve] = {}
    for name in ("adamw", *args.optimizers):
        for lr in RATES[name]:
            own = {"optimizer": name, "lr": lr, "every": 0 if name == "adamw" else args.every}
            curves[name, lr] = curve(argparse.Namespace(**{**vars(args), **own}), corpus, world)
    if world.rank == 0:
        print(report(curves, args.steps))


def report(curves: dict[tuple[str, float], Curve], steps: int) -> str:
    """All runs as a table, and a sentence for each optimizer."""
    ends = {key: measured[steps] for key, measured in curves.items()}
    target, rate = min((bits, lr) for (name, lr), bits in ends.items() if name == "adamw")
    rows, sentences = [], []
    for name, rates in RATES.items():
        steps_taken = {}
        for lr in rates:
            if (name, lr) in curves:
                steps_taken[lr] = first_as_low(curves[name, lr], target)
                rows.append([name, str(lr), f"{ends[name, lr]:.3f}", str(steps_taken[lr] or "-")])
        best = min(((n, lr) for lr, n in steps_taken.items() if n is not None), default=None)
        if name != "adamw" and steps_taken:
            how = "did not reach" if best is None else "reached"
            when = "" if best is None else f" after {best[0]} of {steps} steps (lr {best[1]})"
            tried = ", ".join(map(str, steps_taken))
            sentences.append(
                f"{name} {how} AdamW's held-out loss of {target:.3f} (lr {rate}){when}; "
                f"rates tried: {tried}"
            )
    headers = ["optimizer", "lr", "bits per byte", "as low as AdamW's best after"]
    table = render_table(f"held-out files, {steps} steps", headers, rows)
    return "\n".join([table, *sentences])


if __name__ == "__main__":
    launch(main, __file__, parse_arguments().ranks)
