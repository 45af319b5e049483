"""Time of AdamW's step against torch's fastest and bitsandbytes': theirs over ours, in turns.

    python benchmarks/adamw_step.py            # a table
    python benchmarks/adamw_step.py --json     # and one line of JSON at the end

One thread a rank. Every ratio is the median of those of single rounds; above 1 ours is faster.

- vs_fused_fsdp2: torch.optim.AdamW(fused=True) on FSDP2 over AdamW(fused=True) on our shards.
- vs_fused_plain, vs_foreach_plain: the same kernel, and the default bits, on the plain parameters
  of a 12-layer model, of which DDP's are.
- vs_fused_many_small, vs_foreach_many_small: the same on 2,000 tensors of 16 elements.
- step_8bit_vs_32bit: our step with 8-bit states over that with 32-bit ones, 6 matrices of 1024^2.
- vs_bitsandbytes: AdamW8bit of bitsandbytes over ours, on the same matrices.

On two cores that others used as well: 1.75, 1.05, 2.1, 2.5 and 1.2 (many small), 3.6 and 3.1. The
last but one depends on who else uses the cache: by the CPU time of one process alone it was 2.9.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any

import bitsandbytes
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import nn

import vfsdp_optim
from sharding.report import render_table
from turns import launch, ratios, take_turns

Shapes = list[tuple[int, ...]]
Steps = dict[str, Callable[[], object]]
WIDTH, LAYERS = 256, 12
JSON = """vs_fused_fsdp2 vs_fused_plain vs_foreach_plain vs_fused_many_small step_8bit_vs_32bit
vs_bitsandbytes""".split()


def layer(width: int) -> Shapes:
    """Shapes of a transformer layer: 9 tensors."""
    return [(width, width)] * 4 + [(4 * width, width), (width, 4 * width)] + [(width,)] * 3


MODEL = layer(WIDTH) * LAYERS
SMALL: Shapes = [(16,)] * 2000
LARGE: Shapes = [(1024, 1024)] * 6


def model_of(shapes: Shapes) -> nn.Module:
    """Parameters of these shapes."""
    generator = torch.Generator().manual_seed(0)
    return nn.ParameterList([torch.randn(shape, generator=generator) for shape in shapes])


def with_gradients(model: nn.Module) -> list[nn.Parameter]:
    """Parameters, each with a gradient laid out as it is."""
    params = list(model.parameters())
    for param in params:
        param.grad = torch.ones_like(param).mul_(0.01)
    return params


def steps_of(shapes: Shapes, optimizers: dict[str, Callable[..., Any]]) -> Steps:
    """Step of each optimizer on parameters of its own."""
    return {name: make(with_gradients(model_of(shapes))).step for name, make in optimizers.items()}


def fused(optimizer: Callable[..., Any]) -> Callable[..., Any]:
    """An optimizer that is given fused=True."""
    return lambda params: optimizer(params, fused=True)


def figures(rounds: int) -> dict[str, float]:
    """Measure everything."""
    ours, theirs = vfsdp_optim.AdamW, torch.optim.AdamW

    def ratio(a: str, b: str) -> float:
        return ratios(times[a], times[b])[1]

    sharded = {
        "theirs": fused(theirs)(with_gradients(torch_fsdp.fully_shard(model_of(MODEL)))).step,
        "ours": fused(ours)(with_gradients(vfsdp_optim.fully_shard(model_of(MODEL)))).step,
    }
    found: dict[str, float] = {}
    times = take_turns(sharded, rounds, "sharded", repeat=5)
    found["vs_fused_fsdp2"] = ratio("theirs", "ours")
    plain = {
        "fused": fused(theirs),
        "foreach": lambda params: theirs(params, foreach=True),
        "ours fused": fused(ours),
        "ours": ours,
    }
    steps = steps_of(MODEL, plain)
    times = take_turns(steps, rounds, "plain", repeat=2)
    found["vs_fused_plain"] = ratio("fused", "ours fused")
    found["vs_foreach_plain"] = ratio("foreach", "ours")
    steps = steps_of(SMALL, plain)
    times = take_turns(steps, rounds, "small")
    found["vs_fused_many_small"] = ratio("fused", "ours fused")
    found["vs_foreach_many_small"] = ratio("foreach", "ours")
    steps = steps_of(
        LARGE,
        {
            "32bit": ours,
            "8bit": lambda params: ours(params, states="8bit"),
            "bitsandbytes": bitsandbytes.optim.AdamW8bit,
        },
    )
    times = take_turns(steps, rounds, "8-bit")
    found["step_8bit_vs_32bit"] = ratio("8bit", "32bit")
    found["vs_bitsandbytes"] = ratio("bitsandbytes", "8bit")
    return found


def parse_arguments() -> argparse.Namespace:
    """Arguments, on the launching process and on the ranks."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print a line of JSON at the end")
    parser.add_argument("--rounds", type=int, default=20, help="timed ones (default: 20)")
    parser.add_argument("--ranks", type=int, default=2, help="processes (default: 2)")
    return parser.parse_args()


def main() -> None:
    """Measure and print on rank 0."""
    found = figures(parse_arguments().rounds)
    if dist.get_rank() == 0:
        rows = [[name, f"{value:.2f}"] for name, value in found.items()]
        print(render_table("AdamW's step", ["ratio of times", "median"], rows))
        if parse_arguments().json:
            print(json.dumps({name: round(found[name], 3) for name in JSON}))


if __name__ == "__main__":
    launch(main, __file__, parse_arguments().ranks)
