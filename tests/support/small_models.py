"""Small models for tests, and how they are sharded, fed and compared."""

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import vfsdp_optim
from sharding import fully_shard
from vfsdp_optim.optimizer import StructuredOptimizer

VOCAB, WIDTH = 31, 12


class Block(nn.Module):
    """A norm and two matrices; widths that no number of ranks divides."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 35), nn.Linear(35, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Small(nn.Module):
    """Embedding, two blocks, head; `tied` shares the weight of the first and the last."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def build(tied: bool = False) -> Small:
    """The same weights in every process."""
    torch.manual_seed(0)
    return Small(tied)


def shard(model: Small, **options: object) -> Small:
    """One bucket per block and one for the rest."""
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def make_optimizer(name: str, model: nn.Module, **options: object) -> StructuredOptimizer:
    """`name` is "muon" (with an AdamW group) or "adamw"; decay is large enough to be seen."""
    options = {"lr": 0.1, "weight_decay": 0.5, **options}
    if name == "adamw":
        return vfsdp_optim.AdamW(model.named_parameters(), **options)
    groups = vfsdp_optim.param_groups(model, adamw={"lr": 0.05, "weight_decay": 0.5})
    return vfsdp_optim.Muon(groups, **options)


def full_gradients(parameters: Iterable[Tensor], seed: int) -> list[Tensor]:
    """A gradient of the full shape for each parameter, the same in every process."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(p.shape, generator=generator) for p in parameters]


def set_gradients(parameters: Iterable[Tensor], gradients: Iterable[Tensor]) -> None:
    """Set each `.grad` to this rank's part of a full gradient, laid out as the parameter is."""
    for p, gradient in zip(parameters, gradients, strict=True):
        p.grad = torch.zeros_like(p)
        p.grad.copy_(gradient)


def loss_of(model: nn.Module, seed: int) -> Tensor:
    """The mean loss of a drawn batch, the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, VOCAB, (4, 7), generator=generator)
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


def full(value: object) -> object:
    """A copy of the whole tensor of anything sharded, and what is no tensor as it is."""
    if isinstance(value, DTensor):
        value = value.full_tensor()
    return value.detach().clone() if isinstance(value, Tensor) else value


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """Full copies of all parameters by name."""
    return {name: full(p) for name, p in model.named_parameters()}


def local_bits(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Copies of this rank's bytes of all parameters and states, step counts too."""
    tensors = [p for group in optimizer.param_groups for p in group["params"]]
    tensors += [value for state in optimizer.state.values() for value in state.values()]
    local = [t._local_tensor if isinstance(t, DTensor) else t for t in tensors]
    return [t.detach().reshape(-1).view(torch.uint8).clone() for t in local]


def assert_bits(actual: list[Tensor], expected: list[Tensor]) -> None:
    """Assert that two results of `local_bits` are the same."""
    assert len(actual) == len(expected)
    for i, (a, b) in enumerate(zip(actual, expected, strict=True)):
        assert torch.equal(a, b), i


def assert_weights(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Assert that two results of `weights_of` are equal, element by element."""
    assert actual.keys() == expected.keys()
    for name, weight in actual.items():
        assert torch.equal(weight, expected[name]), name


class Parallel(nn.Module):
    """Adds two layers, computed in the order that each rank is told."""

    def __init__(self, *, backwards: bool) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(20, 20), nn.Linear(20, 20)
        self.backwards = backwards

    def forward(self, x: Tensor) -> Tensor:
        return self.b(x) + self.a(x) if self.backwards else self.a(x) + self.b(x)
