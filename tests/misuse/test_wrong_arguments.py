"""Arguments of a wrong type: the error names the argument, what came, and what to pass instead."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sharding import FullMatrix
from vfsdp_optim import AdamW, Muon, Precision, QKHeads, layout, param_groups


def weight(rows: int = 8) -> nn.Parameter:
    return nn.Parameter(torch.ones(rows, 4))


def heads(**numbers: Any) -> QKHeads:
    return QKHeads("w", **{"heads": 2, "head_dim": 2, **numbers})


def clip(max_logits: Any, **options: Any) -> None:
    Muon([("w", weight())]).qk_clip(max_logits, **options)


BETAS = r"param group 0: betas: expected two numbers in \[0, 1\), got "
WRONG: dict[str, tuple[Callable[[], object], str]] = {
    "betas of one": (lambda: AdamW([weight()], betas=0.9), BETAS + r"0\.9"),
    "betas of None": (lambda: AdamW([weight()], betas=None), BETAS + "None"),
    "betas of text": (lambda: AdamW([weight()], betas=("0.9", "0.99")), BETAS + r"\('0\.9', '0"),
    "names of a number": (
        lambda: AdamW([weight()], states=Precision(keep_32bit=5)),
        r"keep_32bit: expected names like \['head\.weight'\], got 5",
    ),
    "names of None": (
        lambda: AdamW([weight()], states=Precision(keep_32bit=None)),
        "keep_32bit: expected names .* got None",
    ),
    "half a step": (
        lambda: Muon([weight()], ns_steps=2.5),
        r"param group 0: ns_steps: expected a whole number .* got 2\.5",
    ),
    "steps of text": (
        lambda: Muon([weight()], ns_steps="5"),
        "ns_steps: expected a whole number from 0 to 99, got '5'",
    ),
    "one coefficient": (
        lambda: Muon([weight()], ns_coefficients=3),
        r"ns_coefficients: expected \(a, b, c\), .* got 3",
    ),
    "coefficients of None": (
        lambda: Muon([weight()], ns_coefficients=None),
        r"ns_coefficients: expected \(a, b, c\), .* got None",
    ),
    "module": (
        lambda: Muon(nn.Linear(2, 2)),
        r"params: expected parameters or groups, got a Linear; pass model\.named_parameters\(\)",
    ),
    "groups of a list": (
        lambda: AdamW([weight()]).add_param_group([weight()]),
        "param group 1: expected a dict with 'params', got a list",
    ),
    "group without parameters": (
        lambda: AdamW([{"lr": 0.1}]),
        r"param group 0: has no 'params', only \['lr'\]",
    ),
    "state dict of None": (
        lambda: AdamW([weight()]).load_state_dict(None),
        "state_dict: expected a dict, got None",
    ),
    "layout of an optimizer": (
        lambda: layout(AdamW([weight()])),
        r"model: expected an nn\.Module, got a AdamW",
    ),
    "glob that is no text": (
        lambda: param_groups(nn.Linear(2, 2), matrices={3: None}),
        "matrices: expected text as keys, got 3",
    ),
    "one name of a number": (
        lambda: param_groups(nn.Linear(2, 2), keep_32bit=3),
        r"keep_32bit: expected names such as \['head\.weight'\], got 3",
    ),
    "pattern that is no text": (lambda: FullMatrix(5), "einops pattern as text, got 5"),
    "row splits of a number": (
        lambda: FullMatrix(row_splits=5),
        r"row_splits=\(rows, \.\.\.\), got 5",
    ),
    "row splits of text": (
        lambda: FullMatrix(row_splits=("4", "4")),
        r"row_splits >= 1 each, got \('4', '4'\)",
    ),
    "heads given as the key": (lambda: QKHeads("w", 2, 2), "expected a name .*, got 2"),
    "head_dim of text": (lambda: heads(head_dim="2"), "expected whole numbers, got '2'"),
    "logits without heads": (lambda: clip(torch.ones(2)), "a dict QKHeads -> Tensor, got a Tensor"),
    "logits by name": (lambda: clip({"w": torch.ones(2)}), "expected QKHeads -> Tensor, got 'w'"),
    "logits in a list": (lambda: clip({heads(): [1.0, 2.0]}), "-> Tensor, got QKHeads.* -> list"),
    "threshold of text": (
        lambda: clip({heads(): torch.ones(2)}, threshold="100"),
        "threshold: expected a number > 0, got '100'",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_argument_of_a_wrong_type_is_named(name: str) -> None:
    call, words = WRONG[name]
    with pytest.raises((TypeError, ValueError), match=words):
        call()


@pytest.mark.parametrize(("cls", "known"), [(AdamW, "adamw"), (Muon, "adamw', 'muon")])
def test_unknown_algorithm_is_told_the_known_ones(cls: type[AdamW | Muon], known: str) -> None:
    expected = f"param group 0: algorithm: expected one of ['{known}'] or an Algorithm object, got"
    with pytest.raises(ValueError, match=re.escape(expected)):
        cls([{"params": [weight()], "algorithm": "sgd"}])


def test_group_that_was_refused_is_not_kept() -> None:
    optimizer = Muon([weight()])
    before: list[Tensor] = list(optimizer.param_groups[0]["params"])
    with pytest.raises(TypeError, match="param group 1"):
        optimizer.add_param_group(None)
    assert len(optimizer.param_groups) == 1
    assert optimizer.param_groups[0]["params"] == before
