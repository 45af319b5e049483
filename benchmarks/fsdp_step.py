"""Time of one training step: ours, torch's FSDP2 and DDP, in one run on CPU ranks.

    python benchmarks/fsdp_step.py            # a table
    python benchmarks/fsdp_step.py --json     # and one line of JSON at the end

Absolute times of a shared machine are noise, so all candidates take turns in the same processes
and only ratios are reported: the median and the quartiles over the rounds. All run the same model
on the same batches in fp32, free parameters between forward and backward (not the root's), and use
`torch.optim.AdamW(foreach=True)`; their losses are asserted equal. The optimizer alone is compared
on its own: `vfsdp_optim.AdamW` on our shards against torch's three implementations on FSDP2's.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
import torch.nn.functional as F
from rich.progress import track
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import vfsdp_optim
from sharding.report import render_table
from turns import launch, ratios, take_turns, timed

VOCAB, HEADS = 1000, 4


class Block(nn.Module):
    """Pre-norm attention and a gated MLP."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(width, 4 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, width) -> (B, T, width)."""
        batch, length, width = x.shape
        y = self.norm1(x)
        q, k, v = (
            linear(y).view(batch, length, HEADS, -1).transpose(1, 2)
            for linear in (self.q, self.k, self.v)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        x = x + self.o(y.reshape(batch, length, width))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Decoder(nn.Module):
    """Embedding, blocks, untied head; returns the mean cross entropy."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, VOCAB, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """(B, T + 1) tokens -> scalar loss."""
        x = self.embedding(tokens[:, :-1])
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), tokens[:, 1:].flatten())


class Candidate:
    """One way to train: a model, its optimizer, and the times of its steps."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model = model
        self.optimizer = optimizer
        self.times: list[float] = []

    def step(self, tokens: Tensor) -> float:
        """One training step on this rank's tokens; returns its loss."""
        loss = self.model(tokens)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()


def build(width: int, layers: int, mesh: DeviceMesh) -> dict[str, Candidate]:
    """The three candidates with equal weights."""

    def fresh() -> Decoder:
        torch.manual_seed(0)
        return Decoder(width, layers)

    def sharded(fully_shard: Callable[..., nn.Module]) -> nn.Module:
        model = fresh()
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        return fully_shard(model, mesh=mesh)

    models = {
        "ours": sharded(vfsdp_optim.fully_shard),
        "fsdp2": sharded(torch_fsdp.fully_shard),
        "ddp": DistributedDataParallel(fresh()),
    }
    return {
        name: Candidate(model, torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True))
        for name, model in models.items()
    }


def time_training(candidates: dict[str, Candidate], batch: int, length: int, rounds: int) -> None:
    """Lets the candidates take turns, first in one order and then in the other.

    Raises:
        RuntimeError: The candidates' losses differ by more than 1e-4.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    names = list(candidates)
    for i in track(range(rounds + 2), description="steps", disable=rank != 0, transient=True):
        generator = torch.Generator().manual_seed(i)
        tokens = torch.randint(0, VOCAB, (batch, length + 1), generator=generator)
        mine = tokens.chunk(world_size)[rank]
        losses: dict[str, float] = {}
        for name in names if i % 2 else reversed(names):
            candidate = candidates[name]
            seconds = timed(lambda: losses.update({name: candidate.step(mine)}))  # noqa: B023
            if i >= 2:  # the first rounds allocate and plan
                candidate.times.append(seconds)
        if max(losses.values()) - min(losses.values()) > 1e-4:
            raise RuntimeError(f"the candidates do not train alike: {losses} in round {i}")


def time_adamw(candidates: dict[str, Candidate], rounds: int) -> dict[str, list[float]]:
    """Times optimizer steps alone, on the shards of `candidates` with constant gradients.

    Ten steps at a time: the barrier before them takes about as long as one.
    """
    rank = dist.get_rank()
    fsdp2, ours = candidates["fsdp2"].model, candidates["ours"].model
    optimizers: dict[str, torch.optim.Optimizer] = {
        "default": torch.optim.AdamW(fsdp2.parameters()),
        "foreach": torch.optim.AdamW(fsdp2.parameters(), foreach=True),
        "fused": torch.optim.AdamW(fsdp2.parameters(), fused=True),
        "ours": vfsdp_optim.AdamW(ours.parameters()),
    }
    tokens = torch.randint(0, VOCAB, (1, 9), generator=torch.Generator().manual_seed(rank))
    for name in ("fsdp2", "ours"):
        candidates[name].model(tokens).backward()
    steps = {name: optimizer.step for name, optimizer in optimizers.items()}
    return take_turns(steps, rounds, "adamw", repeat=10)


def report(candidates: dict[str, Candidate], adamw: dict[str, list[float]], as_json: bool) -> None:
    """Prints the table and, if asked, the line of JSON."""
    ours = candidates["ours"].times
    speedup = ratios(candidates["fsdp2"].times, ours)
    versus_ddp = ratios(ours, candidates["ddp"].times)
    optimizer = {name: ratios(adamw[name], adamw["ours"]) for name in adamw if name != "ours"}
    rows = [
        ["step: FSDP2 / ours", *(f"{x:.2f}" for x in speedup)],
        ["step: ours / DDP", *(f"{x:.2f}" for x in versus_ddp)],
        *(
            [f"AdamW: torch {name} / ours", *(f"{x:.2f}" for x in values)]
            for name, values in optimizer.items()
        ),
    ]
    title = f"{dist.get_world_size()} ranks, 1 thread each, {len(ours)} rounds"
    print(render_table(title, ["ratio of times", "25 %", "median", "75 %"], rows))
    if as_json:
        print(
            json.dumps(
                {
                    "speedup_vs_fsdp2": round(speedup[1], 3),
                    "iqr": [round(speedup[0], 3), round(speedup[2], 3)],
                    "time_vs_ddp": round(versus_ddp[1], 3),
                    **{f"adamw_speedup_{name}": round(v[1], 3) for name, v in optimizer.items()},
                }
            )
        )


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--batch", type=int, default=8, help="sequences over all ranks")
    parser.add_argument("--rounds", type=int, default=40, help="timed rounds of all candidates")
    parser.add_argument("--json", action="store_true", help="last line is JSON")
    return parser.parse_args()


def main() -> None:
    """Runs on every rank."""
    arguments = parse_arguments()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    candidates = build(arguments.width, arguments.layers, mesh)
    time_training(candidates, arguments.batch, arguments.length, arguments.rounds)
    adamw = time_adamw(candidates, arguments.rounds)
    if dist.get_rank() == 0:
        report(candidates, adamw, arguments.json)


if __name__ == "__main__":
    launch(main, __file__, parse_arguments().ranks)
