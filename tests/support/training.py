"""A tiny language model and one training loop that runs in one process or on ranks alike."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.checkpoint import checkpoint

import vfsdp_optim
from sharding import MixedPrecisionPolicy, fully_shard

VOCAB, WIDTH, HEADS, BLOCKS, LENGTH = 61, 24, 2, 3, 12
GLOBAL_BATCH = 16


@dataclass(frozen=True)
class Run:
    """How to train; the same `Run` in one process and on ranks must give the same losses."""

    steps: int = 20
    optimizer: str = "adamw"  # "torch_adamw" | "adamw" | "muon"
    micro_batches: int = 1
    sync_every_micro_batch: bool = True
    checkpoint: str = ""  # "" | "inside" | "outside" of the sharded module
    reshard_after_forward: bool | None = None
    optimizer_first: bool = False  # the optimizer's declarations shape the layout
    resident_padding: float = 0.02
    mesh: tuple[int, ...] = ()  # sizes of a mesh (replicate, shard); default: all ranks shard
    all_reduce_every_micro_batch: bool = True
    compute_dtype: str = "float32"
    clip: float = 0.0  # max norm of clip_grad_norm_; 0: no clipping
    lr: float = 0.005
    seed: int = 0


class Block(nn.Module):
    """Attention and a gated MLP; biases and odd widths, so that shards are cut anywhere."""

    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.gate, self.up = nn.Linear(WIDTH, 50, bias=False), nn.Linear(WIDTH, 50)
        self.down = nn.Linear(50, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.checkpointed and torch.is_grad_enabled():
            return checkpoint(self.compute, x, use_reentrant=False)
        return self.compute(x)

    def compute(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class TinyGPT(nn.Module):
    """Embedding, blocks, untied head."""

    def __init__(self, checkpointing: str) -> None:
        super().__init__()
        self.checkpointing = checkpointing
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block(checkpointing == "inside") for _ in range(BLOCKS))
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            if self.checkpointing == "outside":
                x = checkpoint(block, x, use_reentrant=False)
            else:
                x = block(x)
        return self.head(self.norm(x))


def build_model(run: Run) -> TinyGPT:
    """The same weights in every process."""
    torch.manual_seed(run.seed)
    return TinyGPT(run.checkpoint)


def build_optimizer(model: nn.Module, run: Run) -> torch.optim.Optimizer:
    """The optimizer that `run` names, over all parameters of `model`."""
    if run.optimizer == "torch_adamw":
        return torch.optim.AdamW(model.parameters(), lr=run.lr, weight_decay=0.1, foreach=True)
    if run.optimizer == "adamw":
        return vfsdp_optim.AdamW(model.parameters(), lr=run.lr, weight_decay=0.1)
    groups = vfsdp_optim.param_groups(model, adamw=dict(lr=run.lr / 4, weight_decay=0.1))
    return vfsdp_optim.Muon(groups, lr=run.lr, weight_decay=0.1)


def shard(model: TinyGPT, run: Run, optimizer: torch.optim.Optimizer | None = None) -> None:
    """One bucket per block and one for the rest."""
    dtype = getattr(torch, run.compute_dtype)
    policy = MixedPrecisionPolicy()
    if dtype != torch.float32:
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    options = dict(mp_policy=policy, reshard_after_forward=run.reshard_after_forward)
    if run.mesh:
        options["mesh"] = mesh_of(run.mesh)
    if optimizer is not None:
        options["resident_padding"] = run.resident_padding
    for block in model.blocks:
        fully_shard(block, optimizer=optimizer, **options)
    fully_shard(model, optimizer=optimizer, **options)


def mesh_of(sizes: tuple[int, ...]) -> DeviceMesh:
    """A mesh that replicates over its first dim and shards over its second."""
    return init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard"))


def tokens_of(step: int) -> Tensor:
    """(GLOBAL_BATCH, LENGTH + 1) tokens of a step: counting by 1 to 3, modulo the vocabulary."""
    generator = torch.Generator().manual_seed(1000 + step)
    start = torch.randint(0, VOCAB, (GLOBAL_BATCH, 1), generator=generator)
    stride = torch.randint(1, 4, (GLOBAL_BATCH, 1), generator=generator)
    return (start + stride * torch.arange(LENGTH + 1)) % VOCAB


def train(run: Run) -> list[float]:
    """Trains on all ranks of the default group, or in this process; returns the global losses."""
    return train_model(run)[0]


def train_model(run: Run) -> tuple[list[float], nn.Module]:
    """The losses and the trained model."""
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    rank = dist.get_rank() if dist.is_initialized() else 0
    model = build_model(run)
    if dist.is_initialized():
        optimizer = build_optimizer(model, run) if run.optimizer_first else None
        shard(model, run, optimizer)
        optimizer = optimizer or build_optimizer(model, run)
    else:
        optimizer = build_optimizer(model, run)
    losses = []
    for step in range(run.steps):
        losses.append(_step(model, optimizer, run, step, rank, world_size))
    return losses, model


def _step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    run: Run,
    step: int,
    rank: int,
    world_size: int,
) -> float:
    parts = tokens_of(step).chunk(run.micro_batches)
    total = torch.zeros(())
    for i, part in enumerate(parts):
        mine = part.tensor_split(world_size)[rank]
        if dist.is_initialized() and not run.sync_every_micro_batch:
            model.set_requires_gradient_sync(i == len(parts) - 1)
        if dist.is_initialized() and not run.all_reduce_every_micro_batch:
            model.set_requires_all_reduce(i == len(parts) - 1)
        logits = model(mine[:, :-1]).float()
        loss = F.cross_entropy(logits.flatten(0, 1), mine[:, 1:].flatten()) / run.micro_batches
        loss.backward()
        total += loss.detach()
    if dist.is_initialized():
        dist.all_reduce(total, op=dist.ReduceOp.AVG)
    if run.clip:
        nn.utils.clip_grad_norm_(model.parameters(), run.clip)
    optimizer.step()
    optimizer.zero_grad()
    return total.item()
