"""Training on ranks against one process on the same global batch.

Covers the whole chain: forward and backward hooks, gathers, reductions, accumulation, activation
checkpointing, the optimizers. Losses agree up to the order in which gradients are summed.
"""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from ranks import run_ranks
from sharding import layout
from sharding.report import Layout
from training import Run, train, train_model

STEPS = 6
TOLERANCE = 1e-5  # fp32 sums of 2 to 16 addends in another order, carried through the steps


@cache
def one_process(run: Run) -> list[float]:
    """The losses of a single process."""
    return train(run)


def train_on_ranks(run: Run) -> tuple[list[float], list[Tensor]]:
    """The losses, and this rank's elements of all parameters."""
    losses, model = train_model(run)
    return losses, [p.to_local().detach() for p in model.parameters()]


def assert_trains_alike(run: Run, ranks: int, tolerance: float = TOLERANCE) -> None:
    """Losses are those of one process, and replicas end with the same bits."""
    shared = ("steps", "optimizer", "micro_batches", "checkpoint", "clip")  # not of sharding alone
    expected = one_process(Run(**{name: getattr(run, name) for name in shared}))
    assert expected[-1] < expected[0] - 0.02, "the model did not train at all"
    results = run_ranks(train_on_ranks, ranks, run)
    for rank, (losses, pieces) in enumerate(results):
        assert losses == pytest.approx(expected, abs=tolerance, rel=0)
        twins = results[rank % run.mesh[1] if run.mesh else rank][1]
        for piece, twin in zip(pieces, twins, strict=True):
            assert torch.equal(piece, twin)


CHANGES: list[dict[str, Any]] = [
    {},
    {"checkpoint": "inside"},
    {"checkpoint": "outside"},
    {"micro_batches": 4},
    {"micro_batches": 4, "sync_every_micro_batch": False},
    {"reshard_after_forward": True},
    {"reshard_after_forward": False},
    {"checkpoint": "outside", "reshard_after_forward": False, "micro_batches": 4},
    {"optimizer_first": True},
    {"clip": 0.2},
]
ADAMW, MUON = Run(steps=STEPS, optimizer="adamw"), Run(steps=STEPS, optimizer="muon")
HSDP = Run(steps=STEPS, optimizer="torch_adamw", mesh=(2, 2))
LATE_AVERAGE = {"micro_batches": 4, "all_reduce_every_micro_batch": False}
CASES = [
    *((2, ADAMW, change) for change in CHANGES),
    *((4, MUON, change) for change in CHANGES),
    *((4, HSDP, change) for change in [*CHANGES[:8], CHANGES[9], LATE_AVERAGE]),
    *((4, replace(HSDP, optimizer="adamw"), change) for change in (CHANGES[8], LATE_AVERAGE)),
    *((4, replace(HSDP, optimizer="muon"), change) for change in (CHANGES[8], LATE_AVERAGE)),
    *((a * b, replace(HSDP, mesh=(a, b)), {}) for a, b in ((2, 1), (1, 2), (1, 1))),
    (2, replace(HSDP, mesh=()), {}),
    (2, MUON, {}),
    (4, ADAMW, {}),
]


@pytest.mark.parametrize(
    ("ranks", "run", "change"),
    CASES,
    ids=lambda part: (
        part.optimizer + "x".join(map(str, part.mesh)) if isinstance(part, Run) else None
    ),
)
def test_losses_equal_one_process_in_every_mode(
    ranks: int, run: Run, change: dict[str, object]
) -> None:
    assert_trains_alike(replace(run, **change), ranks)


@pytest.mark.parametrize(("ranks", "run"), [(2, ADAMW), (4, HSDP)], ids=["one mesh dim", "two"])
def test_bf16_compute_with_fp32_reduction_stays_close(ranks: int, run: Run) -> None:
    """bf16 rounds activations to 8 bits of mantissa: losses near 4.1 agree within about 1 %."""
    assert_trains_alike(replace(run, compute_dtype="bfloat16"), ranks, tolerance=0.04)


@pytest.mark.parametrize("world_size", [1, 3, 5])
def test_uneven_world_sizes_train(world_size: int) -> None:
    """16 sequences over 3 or 5 ranks are not even, so each rank's loss differs; all ranks agree."""
    losses = run_ranks(train, world_size, Run(optimizer="muon", steps=6))
    assert all(rank_losses == losses[0] for rank_losses in losses)
    assert losses[0][-1] < losses[0][0] - 0.02
    if world_size == 1:
        assert losses[0] == pytest.approx(one_process(Run(optimizer="muon", steps=6)), abs=1e-6)


def train_and_look(run: Run) -> tuple[list[float], dict[str, Tensor], Layout]:
    """The losses, the full weights and the layout."""
    losses, model = train_model(run)
    weights = {name: p.full_tensor().detach() for name, p in model.named_parameters()}
    return losses, weights, layout(model)


@pytest.mark.parametrize("world_size", [3, 5])
def test_residency_changes_no_bit(world_size: int) -> None:
    """The layout changes with the padding for residency; over gloo the averages do not."""
    run = Run(optimizer="muon", steps=4, optimizer_first=True)
    raised = run_ranks(train_and_look, world_size, replace(run, resident_padding=1.0))
    unraised = run_ranks(train_and_look, world_size, replace(run, resident_padding=0.0))
    for (losses, weights, plan), (other_losses, other_weights, other_plan) in zip(
        raised, unraised, strict=True
    ):
        assert losses == other_losses
        assert weights.keys() == other_weights.keys()
        for name, weight in weights.items():
            assert torch.equal(weight, other_weights[name]), name
        saved = [bucket.saved_bytes for bucket in plan.buckets]
        assert sum(saved) > 0
        assert all(bucket.saved_bytes == 0 for bucket in other_plan.buckets)
        resident, other_resident = (
            sum(bucket.resident for bucket in each.buckets) for each in (plan, other_plan)
        )
        assert resident > other_resident
