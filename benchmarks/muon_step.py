"""Muon's step on shards: against torch's on FSDP2, and against what it has to compute and to send.

    python benchmarks/muon_step.py            # a table
    python benchmarks/muon_step.py --json     # and one line of JSON at the end

Candidates take turns in the same processes, and only ratios are reported. What is counted is
counted in a real step: bytes and collectives at the process group, multiply-adds at the operators.
The minimum of bytes is what each owner does not hold of its matrices, there and back; of
multiply-adds what one process computes of the whole model, which torch repeats on every rank. The
limit of the time is the busiest rank's multiply-adds at the speed that a rank reaches in products
of the same shapes, measured on all ranks at once: an exchange that is not hidden shows above it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import distribute_tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

import vfsdp_optim
from sharding.report import render_table
from turns import Row, launch, ratios, take_turns
from vfsdp_optim.testing.wire import WireBytes

Shape = tuple[int, int]

SMALL: list[Shape] = [(64, 64), (128, 64), (192, 64), (256, 64)] * 3
LARGE: list[Shape] = [(1024, 1024), (1024, 4096)]
TORCHS = {"ns_dtype": torch.bfloat16}  # torch's Muon computes in nothing else
OURS = {"ns_dtype": torch.float32}


def model_of(shapes: Sequence[Shape]) -> nn.Module:
    """A module of matrices."""
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(cols, rows, bias=False) for rows, cols in shapes])


def set_gradients(parameters: Iterable[nn.Parameter], mesh: DeviceMesh | None) -> None:
    """Gives every parameter this rank's part of the same full gradient."""
    generator = torch.Generator().manual_seed(1)
    for p in parameters:
        full = torch.randn(p.shape, generator=generator)
        if mesh is not None:
            p.grad = distribute_tensor(full, mesh, p.placements)
        else:
            p.grad = torch.zeros_like(p)
            p.grad.copy_(full)


def sharded(
    shapes: Sequence[Shape], mesh: DeviceMesh, optimizer: str = "Muon", **options: object
) -> torch.optim.Optimizer:
    """Our optimizer of matrices that `vfsdp_optim.fully_shard` divided, with gradients."""
    model = vfsdp_optim.fully_shard(model_of(shapes), mesh=mesh)
    set_gradients(model.parameters(), None)
    return getattr(vfsdp_optim, optimizer)(model.named_parameters(), **options)


def torchs(shapes: Sequence[Shape], mesh: DeviceMesh) -> torch.optim.Optimizer:
    """torch's Muon on its FSDP2."""
    model = torch_fsdp.fully_shard(model_of(shapes), mesh=mesh)
    set_gradients(model.parameters(), mesh)
    return torch.optim.Muon(model.parameters())


def collectives(optimizer: torch.optim.Optimizer) -> int:
    """Calls of the process group in one step."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        optimizer.step()
    return sum(e.count for e in profiler.key_averages() if e.key.startswith("c10d::"))


def flops(optimizer: torch.optim.Optimizer) -> int:
    """Floating-point operations of matrix products in one step on this rank."""
    with FlopCounterMode(display=False) as counter:
        optimizer.step()
    return counter.get_total_flops()


def total(value: float, op: dist.ReduceOp = dist.ReduceOp.SUM) -> float:
    """Sum over ranks, or another reduction."""
    tensor = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(tensor, op=op)
    return tensor.item()


def wire_ratio(optimizer: vfsdp_optim.Muon, mesh: DeviceMesh) -> float:
    """Bytes sent in a step by all ranks, over what owners do not hold, there and back."""
    with WireBytes(dist.get_rank(), mesh.size()) as counter:
        optimizer.step()
    if counter.unknown:
        raise RuntimeError(f"collectives that are not counted: {sorted(counter.unknown)}")
    least = 0
    parameters = dict(zip(*_named(optimizer), strict=True))
    for row in optimizer.plan().rows:
        (owner,) = row.owners  # each parameter is one matrix
        p = parameters[row.fqn]
        start, stop = p.placement.all_bounds(p.numel())[owner]
        least += 2 * (p.numel() - (stop - start)) * TORCHS["ns_dtype"].itemsize
    return total(counter.sent) / least


def _named(optimizer: torch.optim.Optimizer) -> tuple[list[str], list[nn.Parameter]]:
    (group,) = optimizer.param_groups
    return group["param_names"], group["params"]


def flops_ratio(optimizer: vfsdp_optim.Muon) -> float:
    """Operations of all ranks, over those of the whole model in one process."""
    model = model_of(SMALL)
    set_gradients(model.parameters(), None)
    whole = vfsdp_optim.Muon(model.parameters(), **TORCHS)
    return total(flops(optimizer)) / flops(whole)


def products(shapes: Sequence[Shape]) -> tuple[list[tuple[Tensor, Tensor]], int]:
    """Pairs of matrices to multiply as Newton-Schulz does, and the operations of doing so."""
    pairs: list[tuple[Tensor, Tensor]] = []
    for rows, cols in shapes:
        short, long = min(rows, cols), max(rows, cols)
        x, gram = torch.randn(short, long), torch.randn(short, short)
        pairs += [(x, x.T), (gram, gram), (gram, x)]
    return pairs, sum(2 * a.shape[0] * a.shape[1] * b.shape[1] for a, b in pairs)


def time_over_limit(mesh: DeviceMesh, rounds: int) -> Row:
    """Time of a step in float32, over the busiest rank's operations at the speed of a rank."""
    optimizer = sharded(LARGE, mesh, **OURS)
    optimizer.step()
    busiest = total(flops(optimizer), dist.ReduceOp.MAX)
    pairs, operations = products(LARGE[-1:])

    def multiply() -> None:
        for _ in range(5):
            for a, b in pairs:
                torch.mm(a, b)

    times = take_turns({"step": optimizer.step, "products": multiply}, rounds, "matmul limit")
    limits = [seconds * busiest / (5 * operations) for seconds in times["products"]]
    return ratios(times["step"], limits)


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=12, help="timed rounds of small steps")
    parser.add_argument("--large-rounds", type=int, default=5, help="timed rounds of large steps")
    parser.add_argument("--json", action="store_true", help="last line is JSON")
    return parser.parse_args()


def main() -> None:
    """Runs on every rank."""
    arguments = parse_arguments()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    theirs, ours = torchs(SMALL, mesh), sharded(SMALL, mesh, **TORCHS)
    both = take_turns({"torch": theirs.step, "ours": ours.step}, arguments.rounds, "against torch")
    speedup = ratios(both["torch"], both["ours"])
    waves = ours.plan().waves
    calls = {"torch": collectives(theirs), "ours": collectives(ours)}
    moved, computed = wire_ratio(ours, mesh), flops_ratio(ours)
    muon, adamw = sharded(SMALL, mesh, **OURS), sharded(SMALL, mesh, "AdamW")
    pair = take_turns({"muon": muon.step, "adamw": adamw.step}, arguments.rounds, "AdamW", 5)
    over_adamw = ratios(pair["muon"], pair["adamw"])
    over_limit = time_over_limit(mesh, arguments.large_rounds)
    if dist.get_rank() != 0:
        return
    timed = [
        ("12 matrices, bfloat16: torch on FSDP2 / ours", speedup),
        ("the same, float32: Muon / AdamW", over_adamw),
        ("1024 x 1024 and 1024 x 4096, float32: time / limit", over_limit),
    ]
    rows = [[name, *(f"{x:.2f}" for x in row)] for name, row in timed]
    counted = [
        ("bytes sent / least", f"{moved:.4f}"),
        ("operations of all ranks / of one process", f"{computed:.4f}"),
        (f"collectives in {waves} wave{'s' * (waves != 1)}", str(calls["ours"])),
        ("collectives of torch on FSDP2", str(calls["torch"])),
    ]
    title = f"{mesh.size()} ranks, 1 thread each, {arguments.rounds} rounds"
    print(render_table(title, ["ratio of times", "25 %", "median", "75 %"], rows))
    print(render_table("counted in one step", ["", "12 matrices"], counted))
    if arguments.json:
        line = {
            "speedup_vs_torch_fsdp2": round(speedup[1], 3),
            "wire_ratio": round(moved, 4),
            "flops_ratio": round(computed, 4),
            "time_over_matmul_limit": round(over_limit[1], 3),
            "collectives_per_wave": calls["ours"] / waves if waves else 0.0,
            "muon_over_adamw_step": round(over_adamw[1], 3),
        }
        print(json.dumps(line))


if __name__ == "__main__":
    launch(main, __file__, parse_arguments().ranks)
