"""Muon on shards: learns to write this file. Start it with python, or with torchrun."""

from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.run import main as torchrun

from vfsdp_optim import Muon, fully_shard, param_groups


def train() -> None:
    """Predicts each byte of this file from the 8 bytes before it."""
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)  # the same weights on every rank
    blocks = [nn.Sequential(nn.Linear(256, 256), nn.ReLU()) for _ in range(3)]
    model = nn.Sequential(nn.Embedding(256, 32), nn.Flatten(), *blocks, nn.Linear(256, 256))

    mesh = dist.init_device_mesh("cpu", (ranks,))
    for block in blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = Muon(param_groups(model, adamw=dict(lr=3e-3)), lr=0.02)
    if rank == 0:
        print(optimizer.plan())

    text = torch.tensor(list(Path(__file__).read_bytes())).unfold(0, 9, 1)[rank::ranks]
    for step in range(50):
        loss = nn.functional.cross_entropy(model(text[:, :8]), text[:, 8])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0 and step % 7 == 0:
            print(f"step {step}: loss {loss.item():.3f}")
    dist.barrier()  # else gloo's threads may abort the exit of a rank (pytorch#190489)
    dist.destroy_process_group()


if __name__ == "__main__":
    train() if dist.is_torchelastic_launched() else torchrun(["--nproc-per-node=2", __file__])
