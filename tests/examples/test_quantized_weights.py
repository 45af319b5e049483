"""Tests of the example that quantizes weights on their shards."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from as_script import run_script
from examples.quantized_weights import ROWS, make_model, train
from ranks import run_ranks
from vfsdp_optim import Muon, param_groups

SCRIPT = Path(__file__).parents[2] / "examples" / "quantized_weights.py"
STEPS = 6


def windows() -> Tensor:
    """Returns (N, 9) windows, the same on every rank: the mean of equal gradients is exact."""
    return torch.tensor(list(SCRIPT.read_bytes()[:400])).unfold(0, 9, 1)


def full_weights(model: nn.Module) -> list[Tensor]:
    return [getattr(p, "full_tensor", lambda p=p: p)().detach() for p in model.parameters()]


def train_sharded() -> tuple[list[float], list[Tensor], list[tuple[int, int]]]:
    model = make_model(True)
    losses = train(model, windows(), STEPS)
    bounds = [
        p.bounds for p in model.parameters() if p.dim() == 2 and p.shape[1] in (256, 640, 320)
    ]
    return losses, full_weights(model), bounds


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_training_with_quantized_weights_has_the_bits_of_the_unsharded_run(world_size: int) -> None:
    model = make_model(False)
    losses = train(model, windows(), STEPS)
    assert losses[-1] < losses[0] - 0.3
    for sharded, weights, bounds in run_ranks(train_sharded, world_size):
        assert sharded == losses
        assert all(torch.equal(a, b) for a, b in zip(weights, full_weights(model), strict=True))
        for (start, _), columns in zip(bounds, (256, 640, 320), strict=True):
            assert start % (ROWS * columns) == 0 or start in (640 * 256, 320 * 640, 256 * 320)


def test_quantized_weights_are_what_forward_sees() -> None:
    """Few levels in each block of rows; a different loss than that of the exact weights."""
    model = make_model(False)
    seen: list[Tensor] = []
    layer = model[2]
    layer.register_forward_hook(lambda m, i, o: seen.append(m.weight.detach().clone()))
    train(model, windows(), 1)
    assert [len(block.unique()) for block in seen[0].split(ROWS)] == [15] * 5
    assert len(layer.weight.detach().unique()) > 10_000  # the optimizer updated the exact ones


def train_exact_weights(model: nn.Module, text: Tensor, steps: int) -> None:
    """The same training without a quantizer."""
    optimizer = Muon(param_groups(model, adamw=dict(lr=3e-3)), lr=0.02, states="8bit")
    for _ in range(steps):
        nn.functional.cross_entropy(model(text[:, :8]), text[:, 8]).backward()
        optimizer.step()
        optimizer.zero_grad()


def collectives(quantized: bool) -> dict[str, int]:
    """Returns how many of each kind and size."""
    model = make_model(True)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        (train if quantized else train_exact_weights)(model, windows(), 3)
    events = profiler.key_averages(group_by_input_shape=True)
    return {f"{e.key} {e.input_shapes}": e.count for e in events if e.key.startswith("c10d::")}


def test_quantized_weights_put_no_scale_on_the_wire() -> None:
    quantized, exact = (run_ranks(collectives, 2, choice) for choice in (True, False))
    assert quantized == exact
    assert len(exact[0]) > 1


def test_script_trains_and_shows_its_layout() -> None:
    code, printed = run_script("quantized_weights.py", 2)
    assert code == 0, printed
    assert "layout on 2 ranks" in printed
    numbers = [float(word) for word in printed.split()[-8:]]
    assert numbers[-1] < numbers[0] - 1
    assert len(SCRIPT.read_text().splitlines()) <= 60
