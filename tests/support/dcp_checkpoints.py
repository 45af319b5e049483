"""A small model with every kind of state, and its state as plain full tensors."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import vfsdp_optim
from sharding import fully_shard

VOCAB, WIDTH, HIDDEN = 40, 24, 50


class Scale(nn.Module):
    """A parameter without dims, and extra state that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(()))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": self.calls}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]


class Net(nn.Module):
    """Embedding tied to the head, two MLPs, a norm with buffers, a frozen layer, extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH, padding_idx=0)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH))
            for _ in range(2)
        )
        self.norm = nn.BatchNorm1d(WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.scale = Scale()
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """(n,) tokens to (n, VOCAB) logits."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(self.scale(self.frozen(self.norm(x))))


def tokens_of(step: int) -> Tensor:
    return torch.randint(1, VOCAB, (8,), generator=torch.Generator().manual_seed(step))


def make_net(seed: int, *, sharded: bool = False, dtype: torch.dtype = torch.float32) -> Net:
    """A net whose parameters and buffers are all drawn from `seed`."""
    net = Net().to(dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in (*net.parameters(), *net.buffers()):
            drawn = torch.rand(tensor.shape, generator=generator) * 5
            tensor.copy_(drawn - 2 if tensor.is_floating_point() else drawn)
    net.norm.running_var.abs_()
    net.scale.calls = seed
    if sharded:
        shard_net(net)
    return net


def shard_net(net: Net, **options: Any) -> None:
    """Two buckets of blocks, and one for the rest."""
    for block in net.blocks:
        fully_shard(block, **options)
    fully_shard(net, **options)


def make_optimizer(net: nn.Module, kind: str, **kwargs: Any) -> torch.optim.Optimizer:
    """An optimizer over the trainable parameters."""
    trainable = [(name, p) for name, p in net.named_parameters() if p.requires_grad]
    if kind == "torch_adamw":
        return torch.optim.AdamW([p for _, p in trainable], lr=0.01, **kwargs)
    if kind == "adamw":
        return vfsdp_optim.AdamW([p for _, p in trainable], lr=0.01, **kwargs)
    if kind == "named_adamw":
        return vfsdp_optim.AdamW(trainable, lr=0.01, **kwargs)
    groups = vfsdp_optim.param_groups(net, adamw={"lr": 0.02})
    return vfsdp_optim.Muon(groups, lr=0.03, **kwargs)


def set_gradients(net: nn.Module, step: int) -> None:
    """The same full gradients on any number of ranks, as if they had been averaged."""
    for i, (_, parameter) in enumerate(sorted(net.named_parameters())):
        if parameter.requires_grad:
            generator = torch.Generator().manual_seed(100 * step + i)
            parameter.grad = torch.zeros_like(parameter)
            parameter.grad.copy_(torch.randn(parameter.shape, generator=generator))


def take_steps(net: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        set_gradients(net, step)
        optimizer.step()
        optimizer.zero_grad()


def plain(value: Any, of_sharded: Callable[[DTensor], Tensor] = DTensor.full_tensor) -> Any:
    """Copies, with full tensors in place of sharded ones, through dicts and lists."""
    if isinstance(value, Tensor):
        value = of_sharded(value) if isinstance(value, DTensor) else value
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: plain(item, of_sharded) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(plain(item, of_sharded) for item in value)
    return value


def full_state(net: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict[str, Any]:
    """Everything that a checkpoint holds; a collective where it is sharded."""
    state = {"model": plain(dict(net.state_dict()))}
    if optimizer is not None:
        state["optimizer"] = plain(optimizer.state_dict())
    return state


def local_state(net: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict[str, Any]:
    """The same with this rank's pieces, to compare what is cut alike; communicates nothing."""
    state = {"model": plain(dict(net.state_dict()), DTensor.to_local)}
    if optimizer is not None:
        state["optimizer"] = plain(optimizer.state_dict(), DTensor.to_local)
    return state


def difference(a: Any, b: Any, path: str = "") -> str:
    """The first place where two states differ in a bit, a dtype or a key; "" if nowhere."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        same = a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
        return "" if same else path
    if isinstance(a, dict) and isinstance(b, dict):
        if a.keys() != b.keys():
            return f"{path}: keys {sorted(map(str, a.keys() ^ b.keys()))}"
        return next(filter(None, (difference(a[k], b[k], f"{path}.{k}") for k in a)), "")
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        if len(a) != len(b):
            return f"{path}: lengths {len(a)} and {len(b)}"
        pairs = enumerate(zip(a, b, strict=True))
        return next(filter(None, (difference(x, y, f"{path}[{i}]") for i, (x, y) in pairs)), "")
    return "" if type(a) is type(b) and a == b else f"{path}: {a!r} and {b!r}"
