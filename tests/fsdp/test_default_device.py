"""Tensors that the packages make for themselves lie where they are used, whatever
`torch.set_default_device` says.

torch.optim steps CPU parameters under a default device of "cuda" or "meta" (pytorch#149205,
pytorch#127197); a factory call without `device=` would make its tensor there.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.utils._device import _device_constructors

from ranks import run_ranks
from small_models import (
    assert_bits,
    build,
    full_gradients,
    local_bits,
    make_optimizer,
    set_gradients,
    shard,
)
from vfsdp_optim import Precision

ROOT = Path(__file__).parents[2]
FILES = sorted(path for name in ("sharding", "vfsdp_optim") for path in (ROOT / name).rglob("*.py"))
FACTORIES = {function.__name__ for function in _device_constructors()}


def without_device(source: str) -> Iterator[str]:
    """Yield the calls of torch's factories that leave the device to the default."""
    for node in ast.walk(ast.parse(source)):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and isinstance(node.func.value, ast.Name)
            and node.func.value.id == "torch"
            and node.func.attr in FACTORIES
            and "device" not in {keyword.arg for keyword in node.keywords}
        ):
            yield f"{node.lineno}: {ast.unparse(node)}"


def test_every_factory_call_names_its_device():
    calls = {str(path.relative_to(ROOT)): list(without_device(path.read_text())) for path in FILES}
    assert {name: found for name, found in calls.items() if found} == {}


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("torch.zeros(3)", 1),
        ("torch.arange(3, out=x)", 1),
        ("torch.tensor(0.0, **options)", 1),  # say it where it can be seen
        ("torch.randn(3, generator=g, device='cpu')", 0),
        ("torch.zeros_like(x), x.new_zeros(3), torch.Generator()", 0),
    ],
)
def test_check_finds_a_call_without_device(source, found):
    assert len(list(without_device(source))) == found


OPTIMIZERS = (
    ("muon", {}),
    ("muon", {"states": "8bit", "on_nonfinite": "skip"}),
    ("muon", {"states": Precision(stochastic_rounding=True)}),
    ("adamw", {"states": Precision(master_weights=True), "on_nonfinite": "raise"}),
)


def train_under(device: str | None, world_size: int) -> list[torch.Tensor]:
    """Return the bits after three steps, all from the construction on with a default device."""
    bits = []
    for name, options in OPTIMIZERS:
        dtype = torch.bfloat16 if isinstance(options.get("states"), Precision) else None
        model = build().to(dtype)
        if world_size > 1:
            shard(model)
        gradients = [[g.to(dtype) for g in full_gradients(model.parameters(), i)] for i in range(3)]
        torch.set_default_device(device)
        try:
            optimizer = make_optimizer(name, model, **options)
            for step, full in enumerate(gradients):
                set_gradients(model.parameters(), full)
                if step == 1 and torch.distributed.get_rank() == world_size - 1:
                    model.blocks[0].up.weight.grad = None  # its peers tell each other
                optimizer.step()
            optimizer.load_state_dict(optimizer.convert_state_dict(optimizer.state_dict()))
            assert all(torch.equal(p, p) for p in model.parameters())
        finally:
            torch.set_default_device(None)
        bits += local_bits(optimizer)
    return bits


def train_both(world_size: int) -> None:
    """Train under the default device, and without one."""
    assert_bits(train_under("meta", world_size), train_under(None, world_size))


@pytest.mark.parametrize("world_size", [1, 2])
def test_step_has_the_same_bits_under_a_default_device(world_size):
    run_ranks(train_both, world_size, world_size)
