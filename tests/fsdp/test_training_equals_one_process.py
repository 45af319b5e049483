"""Training on ranks against one process on the same global batch."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from ranks import run_ranks
from training import Run, train, train_model

STEPS = 4
TOLERANCE = 1e-5  # fp32 sums of 2 to 16 addends in another order, carried through the steps
ADAMW, MUON = (Run(steps=STEPS, lr=0.02, optimizer=optimizer) for optimizer in ("adamw", "muon"))
HSDP = replace(ADAMW, optimizer="torch_adamw", mesh=(2, 2))
OF_TRAINING = ("steps", "lr", "optimizer", "micro_batches", "checkpoint", "clip")

CHANGES: dict[str, dict[str, Any]] = {
    "plain": {},
    "inside": {"checkpoint": "inside"},
    "outside": {"checkpoint": "outside"},
    "accumulates": {"micro_batches": 4},
    "late sync": {"micro_batches": 4, "sync_every_micro_batch": False},
    "late average": {"micro_batches": 4, "all_reduce_every_micro_batch": False},
    "frees": {"reshard_after_forward": True},
    "keeps": {"reshard_after_forward": False},
    "all of it": {"checkpoint": "outside", "reshard_after_forward": False, "micro_batches": 4},
    "optimizer first": {"optimizer_first": True},
    "clips": {"clip": 0.2},
    "bfloat16": {"compute_dtype": "bfloat16"},
}
CASES: dict[int, list[tuple[Run, str]]] = {
    1: [(replace(HSDP, mesh=(1, 1)), "plain"), (MUON, "plain")],
    2: [
        *((ADAMW, change) for change in CHANGES if change != "late average"),
        *((replace(HSDP, mesh=mesh), "plain") for mesh in ((), (2, 1), (1, 2))),
        (MUON, "plain"),
    ],
    4: [
        *((MUON, c) for c in ("plain", "optimizer first", "clips")),
        *((HSDP, c) for c in ("accumulates", "late average", "late sync", "all of it")),
        *((HSDP, c) for c in ("clips", "bfloat16")),
        (replace(HSDP, optimizer="adamw"), "optimizer first"),
        *((replace(HSDP, optimizer="muon"), c) for c in ("optimizer first", "late average")),
    ],
}


@cache
def one_process(run: Run) -> list[float]:
    """The losses of a single process."""
    return train(run)


def train_on_ranks(runs: list[Run]) -> list[tuple[list[float], list[Tensor]]]:
    """Of each run the losses, and this rank's elements of all parameters."""
    trained = map(train_model, runs)
    return [
        (losses, [p.to_local().detach() for p in model.parameters()]) for losses, model in trained
    ]


@pytest.mark.parametrize("ranks", CASES)
def test_losses_equal_one_process_in_every_mode(ranks):
    """Losses are those of one process, and replicas end with the same bits."""
    runs = [replace(run, **CHANGES[change]) for run, change in CASES[ranks]]
    results = run_ranks(train_on_ranks, ranks, runs, timeout=240)
    for i, run in enumerate(runs):
        expected = one_process(Run(**{name: getattr(run, name) for name in OF_TRAINING}))
        assert expected[-1] < expected[0] - 0.02, "the model did not train at all"
        # bf16 rounds activations to 8 bits of mantissa: losses near 4.1 agree within about 1 %.
        close = 0.04 if run.compute_dtype == "bfloat16" else TOLERANCE
        for rank, of_rank in enumerate(results):
            assert of_rank[i][0] == pytest.approx(expected, abs=close, rel=0), run
            twin = results[rank % run.mesh[1] if run.mesh else rank]
            torch.testing.assert_close(of_rank[i][1], twin[i][1], rtol=0, atol=0)


@pytest.mark.parametrize("world_size", [3, 5])
def test_uneven_world_sizes_train(world_size):
    """16 sequences over 3 or 5 ranks are not even, so each rank's loss differs; all ranks agree."""
    losses = run_ranks(train, world_size, MUON)
    assert all(rank_losses == losses[0] for rank_losses in losses)
    assert losses[0][-1] < losses[0][0] - 0.02
