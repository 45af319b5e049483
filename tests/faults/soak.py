"""Trains through random faults, and compares with a run that had none: bit by bit, again and again.

    python tests/faults/soak.py --minutes 30        # or: make soak MINUTES=30

A round draws an optimizer and a model, trains it undisturbed in one process, and then again in
pieces: each on 1, 2, 3 or 4 ranks, from the newest checkpoint to a kill, a stop or an exception on
one rank at a random moment, or to the end. On the way both runs have steps with NaN gradients,
which are skipped, steps in which a layer takes no part, and other learning rates. Gradients come
from rank 0 alone and are added up, so that they are the same on any number of ranks; then weights
and states have to be, too. Exits with 1 at the first difference, with what reproduces it.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from tqdm import tqdm

from sharding import checkpoint, fully_shard
from vfsdp_optim import SOAP, AdamW, Muon, Shampoo, param_groups

TIMEOUT = timedelta(seconds=5)
STEPS = 40
PATIENCE = 120  # seconds for a piece of a run; a stopped rank holds the others up for TIMEOUT
MAX_GROWTH = 48 << 20  # bytes of memory that a long run may grow by once it has begun
FORK = multiprocessing.get_context("fork")

Make = Callable[[nn.Module], torch.optim.Optimizer]
SKIP: dict[str, Any] = {"on_nonfinite": "skip"}
OPTIMIZERS: dict[str, Make] = {
    "adamw": lambda m: AdamW(m.named_parameters(), lr=1e-2, **SKIP),
    "adamw 8bit": lambda m: AdamW(m.named_parameters(), lr=1e-2, states="8bit", **SKIP),
    "muon": lambda m: Muon(param_groups(m), lr=1e-2, **SKIP),
    "muon 8bit": lambda m: Muon(param_groups(m), lr=1e-2, states="8bit", **SKIP),
    "shampoo": lambda m: Shampoo(
        param_groups(m, algorithm="shampoo"), lr=1e-2, precondition_frequency=3, **SKIP
    ),
    "soap": lambda m: SOAP(
        param_groups(m, algorithm="soap"), lr=1e-2, precondition_frequency=3, **SKIP
    ),
}


@dataclass(frozen=True, slots=True)
class Round:
    """What is trained; the same of both runs.

    Attributes:
        optimizer: A key of OPTIMIZERS.
        width: Of the layers, so that cuts fall inside rows, or not.
        seed: Of weights, data, and what happens in which step.
    """

    optimizer: str
    width: int
    seed: int

    def model(self) -> nn.Sequential:
        """Return the layers, initialised."""
        torch.manual_seed(self.seed)
        return nn.Sequential(*[nn.Linear(self.width, self.width) for _ in range(4)])


@dataclass(frozen=True, slots=True)
class Fault:
    """What ends a piece of a run.

    Attributes:
        kind: "kill", "stop", "raise", or "none".
        rank: Which one.
        step: In which.
        seconds: How long after the step began.
    """

    kind: str
    rank: int
    step: int
    seconds: float

    def strike(self) -> None:
        """Happen, in a thread's or the main thread's place."""
        if self.kind == "raise":
            raise ValueError("an error of the user's")
        signals = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
        os.kill(os.getpid(), signals[self.kind])


def train(spec: Round, folder: Path, fault: Fault) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Train from the newest checkpoint to the end; on the rank of the fault, to the fault."""
    rank = dist.get_rank()
    model = spec.model()
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    for module in model.modules():
        if isinstance(module, nn.Linear) or module is model:
            module.set_gradient_divide_factor(1.0)  # type: ignore[operator]
    optimizer = OPTIMIZERS[spec.optimizer](model)
    begin = 0
    if checkpoint.latest(folder) is not None:
        begin = checkpoint.load(folder, model=model, optimizer=optimizer)
    saving = None
    for step in range(begin, STEPS):
        if (rank, step) == (fault.rank, fault.step) and fault.kind != "none":
            if fault.kind == "raise":
                fault.strike()
            signal.signal(signal.SIGALRM, lambda *_: fault.strike())
            signal.setitimer(signal.ITIMER_REAL, fault.seconds)
        one_step(spec, model, optimizer, step, of_this_rank=rank == 0)
        if (step + 1) % 4 == 0:
            saving = checkpoint.save(
                folder, step + 1, model=model, optimizer=optimizer, asynchronous=step % 8 == 3
            )
    if saving is not None:
        saving.result()
    return model, optimizer


def one_step(
    spec: Round,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    step: int,
    *,
    of_this_rank: bool,
) -> None:
    """Take a step, all of which is a function of its number."""
    draw = random.Random(f"{spec.seed} {step}")
    for group in optimizer.param_groups:
        group["lr"] = 1e-2 * draw.choice([0.1, 0.5, 1.0])
    generator = torch.Generator().manual_seed(draw.randrange(1 << 30))
    x = torch.randn(8, spec.width, generator=generator)
    left_out = draw.choice([None, None, 1, 2])  # a layer that takes no part
    for i, layer in enumerate(model.children()):
        if i != left_out:
            x = layer(x).tanh()
    loss = x.square().sum() * (1.0 if of_this_rank else 0.0)
    if draw.random() < 0.1:
        loss = loss * torch.nan
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def undisturbed_process(spec: Round, folder: Path) -> None:
    """Write the final state of a run without faults, and how its memory grew."""
    _begin(0, 1, folder)
    model, optimizer = train(spec, folder / "undisturbed", Fault("none", 0, 0, 0))
    before = _resident_bytes()
    for step in range(STEPS, 4 * STEPS):
        one_step(spec, model, optimizer, step, of_this_rank=True)
    (folder / "growth").write_text(str(_resident_bytes() - before))
    _end(0)


def one_rank(rank: int, ranks: int, spec: Round, folder: Path, fault: Fault) -> None:
    """Train on one of some ranks; ends with 0 where the run came to its end."""
    _begin(rank, ranks, folder / f"meeting-{time.monotonic_ns() if ranks == 0 else fault.step}")
    try:
        train(spec, folder / "disturbed", fault)
    except (RuntimeError, ValueError) as error:
        (folder / f"error-{rank}").write_text(f"{type(error).__name__}: {error}")
        _end(3)
    _end(0)


def final_state(spec: Round, folder: Path, found: Path) -> None:
    """Write the full state of a finished run, read from its last checkpoint in one process."""
    _begin(0, 1, folder / "reading")
    model, optimizer = train(spec, folder, Fault("none", 0, 0, 0))
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    torch.save(get_state_dict(model, optimizer, options=options), found)
    _end(0)


def _begin(rank: int, ranks: int, meeting: Path) -> None:
    torch.set_num_threads(1)
    meeting.mkdir(parents=True, exist_ok=True)
    store = dist.FileStore(str(meeting / "store"), ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=TIMEOUT)


def _end(code: int) -> None:
    sys.stdout.flush()
    os._exit(code)  # what gloo has in flight would be waited for


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def differences(a: Any, b: Any, path: str = "") -> list[str]:
    """Return where two states differ, in values, keys or types."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return [] if a.dtype == b.dtype and torch.equal(a, b) else [path]
    if isinstance(a, dict) and isinstance(b, dict) and a.keys() == b.keys():
        return [found for key in a for found in differences(a[key], b[key], f"{path}[{key!r}]")]
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)) and len(a) == len(b):
        pairs = enumerate(zip(a, b, strict=True))
        return [found for i, (x, y) in pairs for found in differences(x, y, f"{path}[{i}]")]
    return [] if type(a) is type(b) and a == b else [path]


class Soak:
    """Rounds of two runs each, and what happened in them.

    Args:
        seed: Of everything that is drawn.
        bar: Shows what is going on.
    """

    def __init__(self, seed: int, bar: tqdm[Any]) -> None:
        self._seed = seed
        self._draw = random.Random(seed)
        self._bar = bar
        self.counts: Counter[str] = Counter()

    def round(self) -> list[str]:
        """Train both ways; return what was wrong."""
        spec = Round(
            self._draw.choice(sorted(OPTIMIZERS)),
            self._draw.choice([8, 12, 13, 24]),
            self._draw.randrange(1 << 30),
        )
        self.counts["rounds"] += 1
        self.counts[spec.optimizer] += 1
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            if _exit_codes([(undisturbed_process, (spec, folder))]) != [0]:
                return [f"{spec}: the undisturbed run failed"]
            growth = int((folder / "growth").read_text())
            wrong = [f"memory grew by {growth >> 20} MiB"] if growth > MAX_GROWTH else []
            wrong += self._disturbed(spec, folder) or _compared(spec, folder)
        return [f"{spec}, --seed {self._seed}: {what}" for what in wrong]

    def _disturbed(self, spec: Round, folder: Path) -> list[str]:
        """Train in pieces until the end is reached."""
        for piece in range(STEPS):
            ranks = self._draw.choice([1, 2, 3, 4])
            kind = self._draw.choice(["kill", "stop", "raise", "none"])
            done = checkpoint.latest(folder / "disturbed") or 0
            fault = Fault(
                kind,
                self._draw.randrange(ranks),
                self._draw.randrange(done, STEPS),
                self._draw.random() * 0.03,
            )
            self.counts["pieces"] += 1
            self.counts[f"{kind} on {ranks} rank{'s' if ranks > 1 else ''}"] += 1
            self._bar.set_postfix_str(f"{spec.optimizer}: {kind} on {ranks}, step {done}")
            meeting = folder / f"piece-{piece}"
            calls = [(one_rank, (r, ranks, spec, meeting, fault)) for r in range(ranks)]
            meeting.mkdir()
            (meeting / "disturbed").symlink_to(folder / "disturbed")
            (folder / "disturbed").mkdir(exist_ok=True)
            codes = _exit_codes(calls, faulty=fault.rank if kind == "stop" else None)
            if None in codes:
                return [f"{fault}: ranks hang: {codes}"]
            if all(code == 0 for code in codes):
                return []
            if kind == "none":
                errors = [path.read_text() for path in meeting.glob("error-*")]
                return [f"a run without a fault ended with {codes}: {errors}"]
            self.counts["steps lost"] += max(
                fault.step - (checkpoint.latest(folder / "disturbed") or 0), 0
            )
        return [f"did not come to its end in {STEPS} pieces"]


def _compared(spec: Round, folder: Path) -> list[str]:
    states = []
    for run in ("undisturbed", "disturbed"):
        found = folder / f"{run}.pt"
        if _exit_codes([(final_state, (spec, folder / run, found))]) != [0]:
            return [f"the state of the {run} run cannot be read"]
        states.append(torch.load(found, weights_only=True))
    wrong = differences(*states)
    return [f"{len(wrong)} differences, such as {wrong[:3]}"] if wrong else []


def _exit_codes(
    calls: list[tuple[Callable[..., None], tuple[Any, ...]]], faulty: int | None = None
) -> list[int | None]:
    """Run calls as processes; None for one that hangs, and is not the one that was stopped."""
    processes: list[BaseProcess] = [FORK.Process(target=fn, args=args) for fn, args in calls]
    for process in processes:
        process.start()
    end = time.monotonic() + PATIENCE
    for rank, process in enumerate(processes):
        if rank != faulty or len(processes) == 1:
            # Alone, a stopped rank has nobody who would notice.
            process.join(1.0 if rank == faulty else max(end - time.monotonic(), 0))
    codes = [
        -signal.SIGSTOP if rank == faulty and process.exitcode is None else process.exitcode
        for rank, process in enumerate(processes)
    ]
    for process in processes:
        process.kill()
        process.join()
    return codes


def main(arguments: list[str] | None = None) -> int:
    """Run rounds for some minutes, or a number of them; print what happened."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=_Raw)
    parser.add_argument(
        "--minutes", type=float, default=5.0, help="how long (default: %(default)s)"
    )
    parser.add_argument("--rounds", type=int, help="how many rounds, instead of --minutes")
    parser.add_argument("--seed", type=int, default=0, help="of all draws (default: %(default)s)")
    options = parser.parse_args(arguments)
    end = time.monotonic() + 60 * options.minutes
    with tqdm(total=options.rounds, unit="round", disable=None) as bar:
        soak = Soak(options.seed, bar)
        wrong: list[str] = []
        while not wrong:
            if options.rounds is None and time.monotonic() >= end:
                break
            if options.rounds is not None and soak.counts["rounds"] >= options.rounds:
                break
            wrong = soak.round()
            bar.update()
    table = Table("what", "times", title="soak")
    for what, times in sorted(soak.counts.items()):
        table.add_row(what, str(times))
    Console().print(table)
    for each in wrong:
        print(f"WRONG: {each}")
    print(json.dumps({"rounds": soak.counts["rounds"], "wrong": len(wrong)}))
    return 1 if wrong else 0


class _Raw(argparse.RawDescriptionHelpFormatter):
    pass


if __name__ == "__main__":
    sys.exit(main())
