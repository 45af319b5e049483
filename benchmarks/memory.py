"""Memory of ours and of torch's FSDP2: what stays after a step, and planned peaks of large models.

    python benchmarks/memory.py            # tables; about a minute
    python benchmarks/memory.py --json     # and one line of JSON at the end

- alive_mib: storages that Python reaches on rank 0 after `zero_grad`, beyond parameters and states,
  of the model of fsdp_step.py on 2 CPU ranks. `on a CPU` keeps the scratch memory of reductions,
  whose page faults would cost 3 % of a step; devices with a caching allocator get it back, which
  `on a device` follows.
- peaks: bytes per rank from `vfsdp plan`, which the tests hold against live tensors: parameters,
  gradients, states, gathered parameters, buffers of reductions, the optimizer's scratch; beside
  them FSDP2's of the same kinds, with 32-bit states, and what share of them is saved.
"""

from __future__ import annotations

import argparse
import gc
import json
from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import vfsdp_optim
from fsdp_step import VOCAB, Decoder
from sharding.fsdp.buffer import Workspace
from sharding.report import render_table
from turns import launch
from vfsdp_optim.capacity.model_sources import read_model
from vfsdp_optim.capacity.parallelism import Parallelism, divide
from vfsdp_optim.capacity.prediction import Capacity, measure
from vfsdp_optim.capacity.step_buffers import StepDtypes
from vfsdp_optim.capacity.training_setup import Setup

MODELS = ("llama3-70b", "gpt-oss-120b")
RANKS = (64, 256, 1024)
OPTIMIZERS = (("adamw", "32bit"), ("muon", "8bit"))
MIB, GIB = 1 << 20, 1 << 30
BF16 = StepDtypes("bfloat16", "float32")


# -- after a step ----------------------------------------------------------------------------------


def nbytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages of tensors, each counted once."""
    storages: dict[int, int] = {}
    for tensor in tensors:
        local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
        storage = local.untyped_storage()
        storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())


def everywhere() -> list[Tensor]:
    """All tensors that Python reaches."""
    gc.collect()
    return [x for x in gc.get_objects() if issubclass(type(x), Tensor)]


def alive_beyond(
    fully_shard: Callable[..., nn.Module], width: int, layers: int
) -> tuple[float, float]:
    """MiB after the third `zero_grad` beyond parameters and states: on a CPU, and on a device."""
    before = nbytes(everywhere())
    torch.manual_seed(0)
    model = Decoder(width, layers)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    tokens = torch.arange(2 * 33).view(2, 33) % VOCAB
    for _ in range(3):
        model(tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
    states = [v for s in optimizer.state.values() for v in s.values() if isinstance(v, Tensor)]
    held = before + nbytes([*model.parameters(), *states, tokens])
    alive = nbytes(everywhere()) - held
    for workspace in [x for x in gc.get_objects() if type(x) is Workspace]:
        workspace.release("cuda")
    return alive / MIB, (nbytes(everywhere()) - held) / MIB


def after_a_step(width: int, layers: int) -> dict[str, float]:
    """The same of ours and of FSDP2."""
    ours, on_device = alive_beyond(vfsdp_optim.fully_shard, width, layers)
    theirs, _ = alive_beyond(torch_fsdp.fully_shard, width, layers)
    return {"ours, on a CPU": ours, "ours, on a device": on_device, "FSDP2": theirs}


# -- planned ---------------------------------------------------------------------------------------


def planned(model: str, ranks: int, optimizer: str, states: str) -> Capacity:
    """A model in fp32, computed in bf16, its gradients averaged in fp32."""
    divided = divide(read_model(model), Parallelism(ranks))
    return measure(divided, Setup(optimizer, states, precision=BF16))


def row_of(capacity: Capacity) -> list[str]:
    """Cells of a table, in GiB."""
    memory = capacity.memory
    fixed = memory.parameters + memory.gradients + memory.states
    sizes = (fixed, memory.unsharded, memory.communication, memory.exchange, memory.total)
    torch_bytes = capacity.torch
    sizes += (torch_bytes.unsharded, torch_bytes.communication, torch_bytes.total)
    return [*(f"{size / GIB:.2f}" for size in sizes), f"{saved(capacity):.0%}"]


def saved(capacity: Capacity) -> float:
    """Share of FSDP2's bytes, with 32-bit states, that ours does not take."""
    return 1 - capacity.memory.total / capacity.torch.total


def main() -> None:
    """Measure on all ranks, plan and print on rank 0."""
    arguments = parse_arguments()
    alive = after_a_step(arguments.width, arguments.layers)
    if dist.get_rank() != 0:
        return
    rows = [[name, f"{value:.2f}"] for name, value in alive.items()]
    print(render_table("after zero_grad, beyond parameters and states", ["", "MiB"], rows))
    rows = []
    peaks: dict[str, list[float]] = {}
    for model in MODELS:
        for optimizer, states in OPTIMIZERS:
            for ranks in arguments.plans:
                capacity = planned(model, ranks, optimizer, states)
                rows.append([model, f"{optimizer} {states}", f"{ranks:,}", *row_of(capacity)])
                peaks[f"{model} {optimizer} {states} {ranks}"] = [
                    round(capacity.memory.total / GIB, 3),
                    round(saved(capacity), 3),
                ]
    columns = "model|optimizer|ranks|at rest|gathered|reduced|scratch|peak"
    columns += "|FSDP2: gathered|reduced|peak|saved"

    print(render_table("planned, GiB per rank", columns.split("|"), rows))
    if arguments.json:
        figures = {
            "alive_mib": round(alive["ours, on a CPU"], 3),
            "alive_mib_on_a_device": round(alive["ours, on a device"], 3),
            "alive_mib_fsdp2": round(alive["FSDP2"], 3),
            "peak_gib_and_saved": peaks,
        }
        print(json.dumps(figures))


def parse_arguments() -> argparse.Namespace:
    """The command line, on the launching process and on the ranks."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print a line of JSON at the end")
    parser.add_argument("--width", type=int, default=256, help="of the model (default: 256)")
    parser.add_argument("--layers", type=int, default=4, help="of the model (default: 4)")
    parser.add_argument(
        "--plans", type=int, nargs="*", default=RANKS, help="ranks of plans (default: 64 256 1024)"
    )
    return parser.parse_args()


if __name__ == "__main__":
    launch(main, __file__, ranks=2)
