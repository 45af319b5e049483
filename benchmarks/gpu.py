"""On one accelerator: steps of optimizers at shapes of models, and memory of training.

    python benchmarks/gpu.py             # at most 8 minutes on one accelerator
    python benchmarks/gpu.py --json      # and one line of JSON at the end
    python benchmarks/gpu.py --tiny      # the same program in seconds on a CPU, as the tests run it

- steps: on one layer of a model of `vfsdp plan`, in fp32, each candidate alone on the device:
  median of rounds; launches are kernels of a step on a device, operators of torch on a CPU; peak is
  what a step allocates beside parameters, gradients and states.
- training: a model computed in bf16 under ours and FSDP2, NCCL with one rank: time of a step, and
  the peak that the allocator saw.

What this machine lacks (bitsandbytes, a device) is left out and named, and so is what the time did
not allow.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.profiler import ProfilerActivity, profile

import vfsdp_optim
from fsdp_step import VOCAB, Decoder
from sharding.report import render_table
from vfsdp_optim.capacity.model_sources import read_model

MODELS = ("gpt2-small", "llama3-8b", "qwen3-30b-a3b-fused")
SECONDS = 420  # after which no candidate begins
MIB = 1 << 20

Shapes = list[tuple[int, ...]]
Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


class Device:
    """Where everything runs: an accelerator or a CPU, and what each can tell."""

    def __init__(self) -> None:
        self.is_cuda = torch.cuda.is_available()
        self.name = torch.cuda.get_device_name() if self.is_cuda else "CPU"
        self.type = "cuda" if self.is_cuda else "cpu"

    def milliseconds(self, step: Callable[[], object]) -> float:
        """Time of one call."""
        if not self.is_cuda:
            start = time.perf_counter()
            step()
            return 1000 * (time.perf_counter() - start)
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        step()
        last.record()
        last.synchronize()
        return first.elapsed_time(last)

    def launches(self, step: Callable[[], object]) -> int:
        """Kernels of one call; operators on a CPU."""
        kind = ProfilerActivity.CUDA if self.is_cuda else ProfilerActivity.CPU
        with profile(activities=[kind]) as found:
            step()
            self.wait()
        events = found.events() or []
        if self.is_cuda:
            return sum(event.device_type == torch.autograd.DeviceType.CUDA for event in events)
        return sum(event.name.startswith("aten::") for event in events)

    def peak_mib(self, step: Callable[[], object], *, beyond: bool) -> float | None:
        """What the allocator saw in one call, beyond what was there or in all; None on a CPU."""
        if not self.is_cuda:
            return None
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated() if beyond else 0
        step()
        self.wait()
        return (torch.cuda.max_memory_allocated() - before) / MIB

    def wait(self) -> None:
        """Until all that was launched is done."""
        if self.is_cuda:
            torch.cuda.synchronize()

    def empty(self) -> None:
        """Give back what the last candidate held."""
        gc.collect()  # models are in cycles
        if self.is_cuda:
            torch.cuda.empty_cache()


# -- steps -----------------------------------------------------------------------------------------


def layer_of(model: str, tiny: bool) -> Shapes:
    """Shapes of the tensors of one layer."""
    shapes = [t.shape for t in read_model(model).buckets[-1].tensors]
    return [tuple(-(-n // 64) if n > 64 else n for n in s) for s in shapes] if tiny else shapes


def with_gradients(shapes: Shapes, device: Device) -> list[nn.Parameter]:
    """Parameters and gradients of these shapes, equal for all candidates."""
    generator = torch.Generator(device.type).manual_seed(0)
    params = []
    for shape in shapes:
        values, grad = (
            torch.randn(shape, generator=generator, device=device.type) for _ in range(2)
        )
        params.append(nn.Parameter(values))
        params[-1].grad = grad
    return params


def candidates(device: Device) -> tuple[dict[str, Make], dict[str, Make]]:
    """Optimizers of all tensors, and of matrices alone."""
    ours, muon = vfsdp_optim.AdamW, vfsdp_optim.Muon
    of_all: dict[str, Make] = {
        "torch AdamW fused": lambda params: torch.optim.AdamW(params, fused=True),
        "torch AdamW foreach": lambda params: torch.optim.AdamW(params, foreach=True),
        "AdamW": ours,
        "AdamW fused": lambda params: ours(params, fused=True),
        "AdamW 8bit": lambda params: ours(params, states="8bit"),
    }
    if device.is_cuda and find_spec("bitsandbytes"):
        import bitsandbytes  # optional, and slow to import

        of_all["bitsandbytes AdamW8bit"] = bitsandbytes.optim.AdamW8bit
    of_matrices: dict[str, Make] = {
        "torch Muon": torch.optim.Muon,
        "Muon": muon,
        "Muon gram": lambda params: muon(params, ns_algorithm="gram"),
        "Muon 8bit": lambda params: muon(params, states="8bit"),
    }
    return of_all, of_matrices


def measured(make: Make, shapes: Shapes, device: Device, rounds: int) -> dict[str, Any]:
    """One candidate alone on the device."""
    optimizer = make(with_gradients(shapes, device))
    for _ in range(2):
        optimizer.step()
    device.wait()
    return {
        "ms": statistics.median(device.milliseconds(optimizer.step) for _ in range(rounds)),
        "launches": device.launches(optimizer.step),
        "peak_mib": device.peak_mib(optimizer.step, beyond=True),
    }


# -- training --------------------------------------------------------------------------------------


def trained(fully_shard: Callable[..., nn.Module], device: Device, tiny: bool) -> dict[str, Any]:
    """Time and peak of steps of a model, on one rank."""
    width, layers, length, rounds = (32, 2, 16, 2) if tiny else (2048, 12, 2048, 10)
    torch.manual_seed(0)
    model = Decoder(width, layers).to(device.type)
    mesh = init_device_mesh(device.type, (1,))
    policy = torch_fsdp.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    tokens = torch.arange(2 * (length + 1), device=device.type).view(2, -1) % VOCAB

    def step() -> None:
        model(tokens).backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(2):
        step()
    return {
        "ms": statistics.median(device.milliseconds(step) for _ in range(rounds)),
        "launches": device.launches(step),
        "peak_mib": device.peak_mib(step, beyond=False),
    }


# -- all -------------------------------------------------------------------------------------------


def jobs(device: Device, tiny: bool) -> list[tuple[str, str, Callable[[], dict[str, Any]]]]:
    """(subject, candidate, measurement), the most telling first."""
    rounds = 2 if tiny else 20
    of_all, of_matrices = candidates(device)
    found: list[tuple[str, str, Callable[[], dict[str, Any]]]] = [
        ("training", name, lambda f=fully_shard: trained(f, device, tiny))
        for name, fully_shard in (
            ("ours", vfsdp_optim.fully_shard),
            ("FSDP2", torch_fsdp.fully_shard),
        )
    ]
    for model in MODELS:
        shapes = layer_of(model, tiny)
        matrices = [shape for shape in shapes if len(shape) == 2]
        for makes, taken in ((of_all, shapes), (of_matrices, matrices)):
            found += [
                (model, name, lambda m=make, s=taken: measured(m, s, device, rounds))
                for name, make in makes.items()
            ]
    return found


def table_rows(results: dict[str, dict[str, dict[str, Any]]]) -> Sequence[list[str]]:
    """One row a candidate."""
    return [
        [
            subject,
            name,
            f"{found['ms']:.3f}",
            f"{found['launches']:,}",
            "" if found["peak_mib"] is None else f"{found['peak_mib']:,.1f}",
        ]
        for subject, by_name in results.items()
        for name, found in by_name.items()
    ]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tiny", action="store_true", help="small shapes, few rounds")
    parser.add_argument("--json", action="store_true", help="print a line of JSON at the end")
    arguments = parser.parse_args()
    device, start = Device(), time.monotonic()
    backend = "nccl" if device.is_cuda else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    results: dict[str, dict[str, dict[str, Any]]] = {}
    left_out = [] if device.is_cuda else ["an accelerator", "bitsandbytes"]
    if device.is_cuda and not find_spec("bitsandbytes"):
        left_out.append("bitsandbytes")
    gc.freeze()  # what is imported is never garbage: `empty` need not look through it each time
    for subject, name, measure in jobs(device, arguments.tiny):
        if time.monotonic() - start > SECONDS:
            left_out.append(f"{name} of {subject}")
            continue
        results.setdefault(subject, {})[name] = measure()
        device.empty()
    columns = ["", "candidate", "ms", "launches", "peak MiB"]
    print(render_table(f"one rank, {device.name}", columns, list(table_rows(results))))
    if left_out:
        print("left out:", ", ".join(left_out))
    if arguments.json:
        print(json.dumps({"device": device.name, "left_out": left_out, "results": results}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
