"""Trains with 4-bit weights, one scale for each 128 rows. Start it with python, or with torchrun.

Forward and backward see quantized weights, the optimizer the exact ones. `structure=` keeps blocks
of 128 rows whole on a rank: each quantizes its own shard, and no scale ever travels.
"""

from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.run import main as torchrun

from sharding import RowPanels
from vfsdp_optim import Muon, fully_shard, layout, param_groups

ROWS = 128


def make_model(shard: bool) -> nn.Sequential:
    """Predicts a byte from the 8 bytes before it; the same weights on every rank."""
    torch.manual_seed(0)
    hidden = [nn.Linear(256, 640, bias=False), nn.ReLU(), nn.Linear(640, 320, bias=False)]
    model = nn.Sequential(nn.Embedding(256, 32), nn.Flatten(), *hidden, nn.Linear(320, 256))
    if shard:
        fully_shard(model, structure=lambda _, param: RowPanels(ROWS) if param.dim() == 2 else None)
    return model


def train(model: nn.Sequential, text: Tensor, steps: int) -> list[float]:
    """Learns (N, 9) windows of bytes; returns the loss of each step."""
    optimizer = Muon(param_groups(model, adamw=dict(lr=3e-3)), lr=0.02, states="8bit")
    weights = [layer.weight.detach() for layer in model if isinstance(layer, nn.Linear)]
    shards = [getattr(w, "_local_tensor", w).view(-1, w.shape[1]) for w in weights]  # whole rows
    losses = []
    for _ in range(steps):
        exact = [shard.clone() for shard in shards]
        for block in (block for shard in shards for block in shard.split(ROWS)):
            scale = block.abs().amax().clamp(min=1e-12) / 7 if len(block) else 1
            block.div_(scale).round_().mul_(scale)  # 15 levels
        loss = nn.functional.cross_entropy(model(text[:, :8]), text[:, 8])
        loss.backward()
        for shard, before in zip(shards, exact, strict=True):
            shard.copy_(before)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


if __name__ == "__main__" and not dist.is_torchelastic_launched():
    torchrun(["--nproc-per-node=2", __file__])
elif __name__ == "__main__":
    dist.init_process_group("gloo")
    text = torch.tensor(list(Path(__file__).read_bytes())).unfold(0, 9, 1)
    losses = train(model := make_model(True), text[dist.get_rank() :: dist.get_world_size()], 50)
    if dist.get_rank() == 0:
        print(layout(model), *(f"{loss:.3f}" for loss in losses[::7]))
    dist.barrier()  # else gloo's threads may abort the exit of a rank (pytorch#190489)
    dist.destroy_process_group()
