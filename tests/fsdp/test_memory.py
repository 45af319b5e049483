"""Long runs: memory and the number of live tensors stay what they were after the first steps."""

import gc
import resource

import torch
from torch import Tensor, nn

from ranks import run_ranks
from sharding import fully_shard
from vfsdp_optim import Muon

STEPS = 120


class Layer(nn.Module):
    """A residual matrix that no two ranks cut evenly, a norm and a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(40)
        self.linear = nn.Linear(40, 40)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(self.norm(x)).tanh()


def live_tensors() -> int:
    """How many tensors Python can reach."""
    gc.collect()
    return sum(isinstance(x, Tensor) for x in gc.get_objects())


def resident_bytes() -> int:
    """The resident set of this process."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    matrices = [p for p in model.parameters() if p.dim() == 2]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": matrices}, {"params": vectors, "algorithm": "adamw"}]
    return Muon(groups, max_exchange_bytes=40 * 40 * 4, on_nonfinite="skip")


def train_long() -> list[tuple[int, int]]:
    """Live tensors and resident bytes at the half, three quarters and the end of the steps.

    Each step accumulates two backwards, the second with synchronisation, and clips; every tenth
    looks at the states, evaluates, and zeroes in place.
    """
    torch.manual_seed(0)
    model = nn.Sequential(Layer(), Layer(), nn.Linear(40, 3))
    for layer in model[:2]:
        fully_shard(layer)
    fully_shard(model)
    optimizer = optimizer_of(model)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    seen = []
    for step in range(1, STEPS + 1):
        for i in range(2):
            model.set_requires_gradient_sync(i == 1)
            model(torch.ones(2, 40)).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 10 != 3)
        schedule.step()
        if step % 10 == 5:
            optimizer.state_dict()
            model.state_dict()
            with torch.no_grad():
                model(torch.ones(2, 40))
        if step in (STEPS // 2, STEPS * 3 // 4, STEPS):
            seen.append((live_tensors(), resident_bytes()))
    return seen


def test_long_run_keeps_memory_and_live_tensors_flat() -> None:
    """A graph, a gradient or an exchange kept per step would add hundreds of tensors."""
    for seen in run_ranks(train_long, 2, timeout=240):
        tensors = [count for count, _ in seen]
        # The scratch memory of reductions is a handful of tensors more or less.
        assert max(tensors) - min(tensors) <= 5
        # The allocator's own pools may grow; two leaked copies of the model a step would be 1.7 MB.
        assert seen[2][1] - seen[0][1] < 1 << 20
