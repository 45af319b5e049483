"""Long runs: memory and the number of live tensors stay what they were after the first steps."""

import gc
import resource

import pytest
import torch
from torch import nn

from ranks import run_ranks
from training import Run, build_model, build_optimizer, shard, tokens_of

STEPS = 200


def live_tensors() -> int:
    """How many tensors Python can reach."""
    gc.collect()
    return sum(isinstance(x, torch.Tensor) for x in gc.get_objects())


def resident_bytes() -> int:
    """The resident set of this process."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def train_long(name: str) -> list[tuple[int, int]]:
    """Live tensors and resident bytes after a quarter, half and all of the steps.

    Each step accumulates two backwards, the second with synchronisation, then clips; every tenth
    looks at the state, evaluates, or zeroes in place.
    """
    run = Run(optimizer=name)
    model = build_model(run)
    shard(model, run)
    optimizer = build_optimizer(model, run)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    seen = []
    for step in range(STEPS):
        for i, part in enumerate(tokens_of(step)[:4].chunk(2)):
            model.set_requires_gradient_sync(i == 1)
            model(part[:, :-1]).float().logsumexp(-1).mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 10 != 3)
        scheduler.step()
        if step % 10 == 5:
            optimizer.state_dict()
            model.state_dict()
            with torch.no_grad():
                model(tokens_of(step)[:2, :-1])
        if step + 1 in (STEPS // 4, STEPS // 2, STEPS):
            seen.append((live_tensors(), resident_bytes()))
    return seen


@pytest.mark.parametrize("name", ["muon", "adamw"])
def test_long_run_keeps_memory_and_live_tensors_flat(name: str) -> None:
    """A graph, a gradient or an exchange kept per step would add hundreds of tensors."""
    for seen in run_ranks(train_long, 2, name, timeout=120):
        tensors = [count for count, _ in seen]
        assert tensors == [tensors[0]] * 3
        _, half, end = (size for _, size in seen)
        # The allocator's own pools may still grow; a leak of one model per step would be 20 MB.
        assert end - half < 4 << 20
