"""The figures of `vfsdp plan`, kept: of all models, and of optimizers from outside of the package.

capacity_figures.json was written when the planner restated its optimizers; it asks them since.
Gradient slots had a proof of 1 column then, and so they have here; that the columns of today are
counted is held against live tensors, in test_capacity_is_live.py.
Two models are compared in full, all of them where VFSDP_ALL_FIGURES is set, which takes minutes.
"""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from examples.lion import Lion, LionAlgorithm
from sharding.fsdp import buffer
from vfsdp_optim.algorithm import Algorithm
from vfsdp_optim.capacity.model_sources import model_names, read_model
from vfsdp_optim.capacity.parallelism import Parallelism, divide
from vfsdp_optim.capacity.prediction import Capacity, measure
from vfsdp_optim.capacity.training_setup import Setup
from vfsdp_optim.muon import MuonAlgorithm

FIGURES = json.loads((Path(__file__).parent / "capacity_figures.json").read_text())
LARGE = ("deepseek", "kimi", "gpt-oss", "qwen")
IN_FULL = ("gpt2-small", "llama3-8b")


def figures(found: Capacity) -> list[Any]:
    memory, traffic = found.memory, found.traffic
    return [
        *(memory.parameters, memory.gradients, memory.states, memory.unsharded),
        *(memory.communication, memory.exchange, memory.total),
        *(traffic.gather, traffic.reduce, traffic.exchange, found.matrices),
        found.skew and round(found.skew, 6),
        round(found.padding, 9),
    ]


def planned(model: str, ranks: int, **options: Any) -> Capacity:
    return measure(divide(read_model(model), Parallelism(ranks)), Setup(**options))


@pytest.mark.parametrize("model", model_names())
def test_figures_of_every_model_stay(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffer, "NUMEL", 1)  # as of the table
    keys = {"8 muon 8bit"} if model.startswith(LARGE) else {"64 muon 32bit", "1024 adamw 8bit"}
    in_full = model in IN_FULL or os.environ.get("VFSDP_ALL_FIGURES")
    for key in FIGURES[model] if in_full else keys:
        ranks, optimizer, states = key.split()
        found = planned(model, int(ranks), optimizer=optimizer, states=states)
        assert figures(found) == FIGURES[model][key], key


def test_optimizer_from_outside_is_known_to_a_plan_without_an_entry() -> None:
    adamw = planned("gpt2-small", 8, states="8bit").memory
    for choice in (Lion, LionAlgorithm(), "examples.lion:Lion", "examples.lion:LionAlgorithm"):
        lion = planned("gpt2-small", 8, optimizer=choice, states="8bit").memory
        assert 2 * lion.states == adamw.states  # one momentum beside two moments
        assert lion.parameters == adamw.parameters
    for ranks, states in ((8, "32bit"), (8, "8bit"), (64, "32bit"), (1024, "8bit")):
        handed = planned("gpt2-small", ranks, optimizer=MuonAlgorithm(), states=states)
        by_name = planned("gpt2-small", ranks, optimizer="muon", states=states)
        assert figures(handed) == figures(by_name)


class ReadsNumbers(LionAlgorithm):
    """An update that no plan can follow."""

    def update_run(self, group: dict[str, Any], run: Any, scratch: Any) -> None:
        norm: Tensor = run.grad.norm()
        norm.item()


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        (
            "lion",
            "optimizer: expected one of adamw, muon, shampoo, soap, or an Algorithm or a",
        ),
        ("examples.lion:Nothing", "optimizer 'examples.lion:Nothing': AttributeError"),
        ("examples.lion:ParamsT", "optimizer: expected one of adamw, muon, shampoo"),
        (ReadsNumbers(), "algorithm 'lion': a plan follows its update on tensors of the meta"),
    ],
)
def test_optimizer_that_cannot_be_planned_is_refused(choice: str | Algorithm, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        planned("gpt2-small", 8, optimizer=choice)
