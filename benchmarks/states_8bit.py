"""What 8-bit states cost and save: memory, error, held-out loss, time of a step.

    python benchmarks/states_8bit.py            # a table; about 5 minutes on 2 cores
    python benchmarks/states_8bit.py --json     # and one line of JSON at the end

- bytes per parameter: of the live state tensors of the 8-bit parameters of the example's model.
- update error: ||p8 - p32|| / ||p32 - p0|| after 50 steps of AdamW from the same weights and
  gradients: normal with mean 1/2 and deviation 1, every third always zero. The same for
  bitsandbytes' AdamW8bit on the CPU.
- bits per byte: of `train_gpt.py` on files that it held out, with 8-bit and 32-bit states.
- time: one process, one thread, 6 matrices of 1024 x 1024; all candidates take turns, and only
  ratios of medians are reported.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import bitsandbytes
import torch
from rich.progress import track
from torch import Tensor, nn

from sharding.report import render_table
from vfsdp_optim import AdamW, Muon, param_groups

ROOT = Path(__file__).parents[1]
TRAIN_GPT = ROOT / "examples" / "train_gpt.py"
MATRICES = [(1024, 1024)] * 6

MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


# -- memory ----------------------------------------------------------------------------------------


def bytes_per_param(optimizer: torch.optim.Optimizer, algorithm: str) -> float:
    """Bytes of live state storage a parameter, over those of an algorithm that are 8-bit."""
    held = elements = 0
    for group in optimizer.param_groups:
        for param in group["params"] if group["algorithm"] == algorithm else []:
            state = optimizer.state[param]
            if any(key.endswith(".codes") for key in state):
                tensors = [value for key, value in state.items() if key != "step"]
                held += sum(x.untyped_storage().nbytes() for x in tensors)
                elements += param.numel()
    return held / elements


def memory() -> dict[str, float]:
    """Bytes of state per 8-bit parameter."""
    sys.path.insert(0, str(TRAIN_GPT.parent))
    from train_gpt import GPT, SIZES

    model = GPT(SIZES["small"])
    adamw = AdamW(model.named_parameters(), states="8bit")
    muon = Muon(param_groups(model), states="8bit")
    return {
        "bytes_per_param_adamw": bytes_per_param(adamw, "adamw"),
        "bytes_per_param_muon": bytes_per_param(muon, "muon"),
    }


# -- error -----------------------------------------------------------------------------------------


def gradients(step: int, numel: int) -> Tensor:
    """(numel,) gradients of a step; of every third element always zero."""
    generator = torch.Generator().manual_seed(step)
    grad = torch.randn(numel, generator=generator).add_(0.5)
    grad[::3] = 0
    return grad


def trained(make: MakeOptimizer, steps: int = 50) -> tuple[Tensor, Tensor]:
    """Weights before and after `steps` steps of an optimizer."""
    start = torch.randn(1200, 256, generator=torch.Generator().manual_seed(0))
    param = nn.Parameter(start.clone())
    optimizer = make([param])
    for step in range(1, steps + 1):
        param.grad = gradients(step, param.numel()).view_as(param)
        optimizer.step()
    return start, param.detach()


def update_errors() -> dict[str, float]:
    """Relative error of the update of 50 steps."""
    options = dict(lr=1e-2, weight_decay=1e-2)
    start, exact = trained(lambda params: AdamW(params, **options))
    _, ours = trained(lambda params: AdamW(params, states="8bit", **options))
    _, theirs = trained(lambda params: bitsandbytes.optim.AdamW8bit(params, **options))
    scale = (exact - start).norm()
    return {
        "update_error": float((ours - exact).norm() / scale),
        "update_error_bitsandbytes": float((theirs - exact).norm() / scale),
    }


# -- loss ------------------------------------------------------------------------------------------


def bits_per_byte(states: str, steps: int, optimizer: str) -> float:
    """Held-out bits per byte of the example, trained on 2 ranks."""
    with tempfile.TemporaryDirectory(prefix="states-8bit-") as directory:
        command = [sys.executable, str(TRAIN_GPT), "--ranks", "2", "--steps", str(steps)]
        command += ["--optimizer", optimizer, "--states", states, "--checkpoint", directory]
        command += ["--save-every", str(steps)]
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        environment = {**os.environ, "PYTHONPATH": path}
        subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
        report = json.loads((Path(directory) / "report.json").read_text())
    return report["held_out_bits"]["GPT"]


# -- time ------------------------------------------------------------------------------------------


def step_times(rounds: int) -> dict[str, float]:
    """Median seconds of a step of AdamW in 32 and 8 bits and of bitsandbytes' AdamW8bit."""
    makers: dict[str, MakeOptimizer] = {
        "32bit": AdamW,
        "8bit": lambda params: AdamW(params, states="8bit"),
        "bitsandbytes": bitsandbytes.optim.AdamW8bit,
    }
    candidates = {name: make(large_parameters()) for name, make in makers.items()}
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for step in track(range(-2, rounds), "timing", disable=not sys.stderr.isatty()):
        for name, optimizer in candidates.items():
            start = time.perf_counter()
            optimizer.step()
            if step >= 0:
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def large_parameters() -> list[nn.Parameter]:
    """Parameters with gradients, the same at each call."""
    generator = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in MATRICES]
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator) * 0.01
    return params


def main() -> None:
    """Measures everything and prints it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print a line of JSON at the end")
    parser.add_argument("--rounds", type=int, default=40, help="of timing (default: 40)")
    parser.add_argument("--steps", type=int, default=300, help="of training (default: 300)")
    parser.add_argument("--optimizer", choices=("muon", "adamw"), default="muon", help="to train")
    args = parser.parse_args()
    torch.set_num_threads(1)
    figures = {**memory(), **update_errors()}
    times = step_times(args.rounds)
    bits = {name: bits_per_byte(name, args.steps, args.optimizer) for name in ("32bit", "8bit")}
    figures |= {
        "bpb_ratio": bits["8bit"] / bits["32bit"],
        "step_time_vs_32bit": times["8bit"] / times["32bit"],
        "step_speedup_vs_bitsandbytes": times["bitsandbytes"] / times["8bit"],
    }
    rows = [[name, f"{value:.4f}"] for name, value in figures.items()]
    rows += [[f"bits per byte, {name}", f"{value:.4f}"] for name, value in bits.items()]
    print(render_table("8-bit states", ["figure", "value"], rows))
    if args.json:
        order = """bytes_per_param_adamw bytes_per_param_muon update_error bpb_ratio
        step_time_vs_32bit step_speedup_vs_bitsandbytes""".split()
        print(json.dumps({name: round(figures[name], 4) for name in order}))


if __name__ == "__main__":
    main()
