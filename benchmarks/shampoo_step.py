"""Shampoo's step on shards: against the unsharded one, and against what it has to keep and send.

    python benchmarks/shampoo_step.py            # a table
    python benchmarks/shampoo_step.py --json     # and one line of JSON at the end

Candidates take turns in the same processes with one thread each, and only ratios are reported. The
spike is the longest of 30 steps over their median: roots are computed once in 10 steps, and blocks
take turns. Those 30 steps are timed three times, and a step counts with its shortest time: what a
neighbour on the machine takes is no property of the step. The minimum of bytes is what each owner
does not hold of its panels, there and back. Beside it stand distances from the unsharded update,
of ours and of what others do: see shampoo_elsewhere.py.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

import vfsdp_optim
from muon_step import Shape, model_of, set_gradients, sharded, total
from shampoo_elsewhere import INSTALLED, MISSING, distances, time_ratio
from sharding.report import render_table
from turns import Row, launch, ratios, take_turns, timed
from vfsdp_optim.testing.wire import WireBytes

SHAPES: list[Shape] = [(256, 256), (512, 256), (256, 512)] * 3
BLOCKS = {"block_size": (128, 256)}
STEPS, RUNS = 30, 3
WHOLE: list[Shape] = [(64, 64), (128, 64), (192, 64), (256, 64)] * 3
# A panel for each of them, so that all but the owner's part travels.
PANELS = {"block_size": (256, 64)}


def unsharded(shapes: Sequence[Shape], optimizer: str, **options: object) -> torch.optim.Optimizer:
    """The optimizer of the whole model in this process."""
    model = model_of(shapes)
    set_gradients(model.parameters(), None)
    return getattr(vfsdp_optim, optimizer)(model.named_parameters(), **options)


def factor_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes on this rank of factors and of what is computed from them."""
    count = 0
    for state in optimizer.state.values():
        for key, value in state.items():
            if key.startswith(("left", "right")):
                local = value.to_local() if isinstance(value, DTensor) else value
                count += local.numel() * local.element_size()
    return count


def wire_ratio(optimizer: torch.optim.Optimizer, mesh: DeviceMesh) -> float:
    """Bytes sent in a step by all ranks, over what owners do not hold, there and back."""
    with WireBytes(dist.get_rank(), mesh.size()) as counter:
        optimizer.step()
    if counter.unknown:
        raise RuntimeError(f"collectives that are not counted: {sorted(counter.unknown)}")
    (group,) = optimizer.param_groups
    parameters = dict(zip(group["param_names"], group["params"], strict=True))
    least = 0
    for row in optimizer.plan().rows:
        (owner,) = row.owners  # each parameter is one panel
        p = parameters[row.fqn]
        start, stop = p.placement.all_bounds(p.numel())[owner]
        least += 2 * (p.numel() - (stop - start)) * p.element_size()
    return total(counter.sent) / least


def spikes(optimizer: torch.optim.Optimizer) -> tuple[float, float]:
    """The longest of 30 steps over their median, on the slowest rank: of the shortest times, and
    the median of what single runs show."""
    for _ in range(STEPS):  # every block has its roots
        optimizer.step()
    runs = [[timed(optimizer.step) for _ in range(STEPS)] for _ in range(RUNS)]
    shortest = [min(times) for times in zip(*runs, strict=True)]
    raw = [max(times) / statistics.median(times) for times in runs]
    return max(shortest) / statistics.median(shortest), statistics.median(raw)


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=10, help="timed rounds of 10 steps")
    parser.add_argument("--optimizer", choices=("Shampoo", "SOAP"), default="Shampoo")
    parser.add_argument("--json", action="store_true", help="last line is JSON")
    return parser.parse_args()


def measure(arguments: argparse.Namespace, mesh: DeviceMesh) -> tuple[Row, float, dict[str, float]]:
    """The ratio of times, the spike of a single run, and the line of JSON."""
    name = arguments.optimizer
    whole, parts = unsharded(SHAPES, name, **BLOCKS), sharded(SHAPES, mesh, name, **BLOCKS)
    pair = take_turns({"parts": parts.step, "whole": whole.step}, arguments.rounds, name, 10)
    times = ratios(pair["parts"], pair["whole"])
    memory = total(factor_bytes(parts)) / factor_bytes(whole)
    steady, raw = spikes(parts)
    line = {
        "sharded_over_unsharded": round(times[1], 3),
        "spike": round(steady, 3),
        "factor_memory_ratio": round(memory, 4),
        "wire_ratio": round(wire_ratio(sharded(WHOLE, mesh, name, **PANELS), mesh), 4),
    }
    return times, raw, line


def main() -> None:
    """Runs on every rank."""
    arguments = parse_arguments()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    times, raw, line = measure(arguments, mesh)
    away = distances(arguments.optimizer, mesh)
    timed = [("step of sharded / unsharded", times)]
    if INSTALLED and arguments.optimizer == "Shampoo":
        beside = time_ratio(SHAPES, mesh, arguments.rounds)
        timed.append(("facebookresearch's on FSDP2 / ours", beside))
    if dist.get_rank() != 0:
        return
    title = f"{arguments.optimizer}, {mesh.size()} ranks, 1 thread each, {len(SHAPES)} matrices"
    rows = [[name, *(f"{x:.2f}" for x in row)] for name, row in timed]
    print(render_table(title, ["ratio of times", "25 %", "median", "75 %"], rows))
    counted = [
        ("longest of 30 steps / median", f"{line['spike']:.2f}"),
        ("the same, in a single run", f"{raw:.2f}"),
        ("bytes of factors, all ranks / unsharded", f"{line['factor_memory_ratio']:.4f}"),
        ("bytes sent / least", f"{line['wire_ratio']:.4f}"),
    ]
    print(render_table("beside it", ["", "ratio"], [list(row) for row in counted]))
    wrong = [[name, f"{100 * x:.1f} %"] for name, x in away]
    print(render_table("10 steps", ["update", "away from the unsharded one"], wrong))
    if not INSTALLED:
        print(MISSING)
    if arguments.json:
        print(json.dumps(line))


if __name__ == "__main__":
    launch(main, __file__, parse_arguments().ranks)
