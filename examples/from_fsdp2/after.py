"""The script of before.py, on vfsdp_optim: what its diff shows is all that changes."""

import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from vfsdp_optim import AdamW, fully_shard

STEPS, MICRO_BATCHES, WIDTH, VOCABULARY = 20, 2, 32, 64


class Block(nn.Module):
    """A norm and two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        """Adds what the layers make of x."""
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    """Predicts a token from the one before it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens):
        """Returns logits."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def decay_groups(model, lr):
    """Returns parameters with and without decay."""
    plain = [p for name, p in model.named_parameters() if "norm" in name or name.endswith("bias")]
    rest = [p for p in model.parameters() if all(p is not other for other in plain)]
    return [dict(params=rest, lr=lr), dict(params=plain, lr=lr, weight_decay=0.0)]


def save(model, optimizer, folder):
    """Writes both, cut as they are."""
    of_model, of_optimizer = get_state_dict(model, optimizer)
    dcp.save(dict(model=of_model, optimizer=of_optimizer), checkpoint_id=folder)


def load(model, optimizer, folder):
    """Reads what `save` wrote, on any number of ranks."""
    of_model, of_optimizer = get_state_dict(model, optimizer)
    dcp.load(dict(model=of_model, optimizer=of_optimizer), checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=of_model, optim_state_dict=of_optimizer)


def train(folder=None, steps=STEPS):
    """Returns the losses; goes on from the checkpoint in `folder` if there is one."""
    torch.manual_seed(0)
    model = Model()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = AdamW(decay_groups(model, lr=3e-3), weight_decay=0.1)
    warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=5)
    resumed = bool(folder) and Path(folder).exists()
    if resumed:
        load(model, optimizer, folder)
    losses = []
    data = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(steps):
        for micro in range(MICRO_BATCHES):
            model.set_requires_gradient_sync(micro == MICRO_BATCHES - 1)
            tokens = torch.randint(VOCABULARY, (16,), generator=data)
            loss = nn.functional.cross_entropy(model(tokens), (3 * tokens + 1) % VOCABULARY)
            (loss / MICRO_BATCHES).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        warm_up.step()
        losses.append(loss.item())
    if folder and not resumed:
        save(model, optimizer, folder)
    return losses


if __name__ == "__main__":
    dist.init_process_group("gloo")
    print(train(os.environ.get("CHECKPOINT")))
    dist.barrier()
    dist.destroy_process_group()
