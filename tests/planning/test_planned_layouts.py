"""`fully_shard(plan=...)`: a layout made offline is the layout that trains, or a clear refusal."""

import copy
import json
from collections.abc import Callable
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from examples.gpt import GPT, GPTConfig
from ranks import run_ranks
from sharding import Blocks, fully_shard
from sharding.fsdp.module_state import state_of
from vfsdp_optim import AdamW, Muon, param_groups
from vfsdp_optim.__main__ import main

CONFIG = GPTConfig(layers=2, width=32, heads=2, context=8)


def build() -> nn.Module:
    return GPT(CONFIG)


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Layouts of the model on 2 and 4 ranks, with 64 rows of every matrix kept together."""
    path = tmp_path_factory.mktemp("plans") / "plan.json"
    arguments = ["--model", f"{__name__}:build", "--ranks", "2,4", "--granularity", "64"]
    assert main(["plan", *arguments, "--optimizer", "muon", "--json", str(path)]) == 0
    return path


def train(plan: Any) -> tuple[list[float], list[Any]]:
    """Losses of three steps, and (S, offsets) of every bucket."""
    torch.manual_seed(0)
    model = GPT(CONFIG)
    optimizer = Muon(param_groups(model, adamw=dict(lr=0.01)), lr=0.01)
    for block in model.blocks:
        fully_shard(block, plan=plan, optimizer=optimizer)
    fully_shard(model, plan=plan, optimizer=optimizer)
    tokens = torch.arange(16).view(2, 8)
    losses = []
    for _ in range(3):
        loss = model(tokens).logsumexp(-1).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    states = [state_of(module) for module in (*model.blocks, model)]
    segments = [segment for s in states if s and s.bucket for segment in s.bucket.plan.segments]
    return losses, [(segment.shard_numel, segment.offsets) for segment in segments]


@pytest.mark.parametrize("ranks", [2, 4])
def test_model_trains_on_the_planned_layout(plan: Path, ranks: int) -> None:
    content = json.loads(plan.read_text())
    buckets = next(p for p in content["plans"] if p["ranks"] == ranks)["buckets"]
    offsets = {
        bucket["bucket"]: {p["fqn"]: p["offset"] for p in bucket["params"]} for bucket in buckets
    }
    shards = {bucket["bucket"]: bucket["segments"][0]["shard_numel"] for bucket in buckets}
    expected = [
        (shards[name], tuple(offsets[name].values()))
        for name in ("blocks.0-1", "blocks.0-1", "root")
    ]
    usual = run_ranks(train, ranks, None)
    for source in (str(plan), content):
        planned = run_ranks(train, ranks, source)
        for (losses, layout), (usual_losses, usual_layout) in zip(planned, usual, strict=True):
            assert layout == expected
            assert layout != usual_layout  # which keeps no rows together
            assert losses == usual_losses


def in_two_segments(content: dict[str, Any], ranks: int) -> dict[str, Any]:
    """The same parameters packed end to end, those of the MLP in a segment of their own."""
    content = copy.deepcopy(content)
    content["plans"] = [p for p in content["plans"] if p["ranks"] == ranks]
    layout = content["plans"][0]["buckets"][1]
    ends = [0, 0]
    for param in layout["params"]:
        param["segment"] = int(param["fqn"].startswith("mlp."))
        param["offset"], param["granule"] = ends[param["segment"]], 256
        param.pop("cuts", None)
        ends[param["segment"]] += -(-prod(param["shape"]) // 256) * 256
    layout["segments"] = [
        {"dtype": "float32", "shard_numel": -(-end // ranks // 256) * 256, "lower_bound": 256}
        for end in ends
    ]
    return content


@pytest.mark.parametrize("ranks", [2, 4])
def test_model_trains_on_a_planned_bucket_of_two_segments(plan: Path, ranks: int) -> None:
    content = in_two_segments(json.loads(plan.read_text()), ranks)
    usual = run_ranks(train, ranks, None)
    planned = run_ranks(train, ranks, content)
    for (losses, layout), (usual_losses, _) in zip(planned, usual, strict=True):
        assert len(layout) == 2 * CONFIG.layers + 1
        assert layout[1][0] == 8192 // ranks  # two matrices of 4,096
        assert losses == usual_losses


def unchanged(block: nn.Module) -> None:
    """What most refused plans are tried on."""


def refusal(
    plan: Any, change: Callable[[nn.Module], object] = unchanged, **options: Any
) -> tuple[str, str, bool]:
    """What `fully_shard` raises for a block, and whether the block stayed as it was."""
    block = GPT(CONFIG).blocks[0]
    change(block)
    before = list(block.parameters())
    optimizer = AdamW(block.parameters())
    try:
        fully_shard(block, plan=plan, optimizer=optimizer, **options)
    except (ValueError, TypeError) as error:
        same = all(a is b for a, b in zip(before, block.parameters(), strict=True))
        return type(error).__name__, str(error), same and type(block).__name__ == "Block"
    return "", "nothing was raised", False


def other_blocks(fqn: str, parameter: torch.Tensor) -> Blocks | None:
    return Blocks(1536) if fqn == "mlp.up.weight" else None


@pytest.mark.parametrize(
    ("ranks", "change", "options", "message"),
    [
        (3, unchanged, {}, "for shards over 2, 4 ranks, and the mesh shards over 3; make one with"),
        (2, lambda b: b.mlp.up.bfloat16(), {}, "mlp.up.weight is float32 in the plan and bfloat16"),
        (2, lambda b: setattr(b.mlp, "up", nn.Linear(32, 64, bias=False)), {},
         "mlp.up.weight has shape (128, 32) in the plan and (64, 32) in Block"),
        (2, lambda b: setattr(b.mlp.up, "bias", nn.Parameter(torch.zeros(128))), {},
         "mlp.up.bias is in Block and not in the plan"),
        (2, lambda b: setattr(b, "mlp_norm", nn.Identity()), {},
         "mlp_norm.weight is in the plan and not in Block"),
        (2, lambda b: b.mlp.up.requires_grad_(False), {},
         "mlp.up.weight is trainable in the plan and frozen in Block"),
        (4, unchanged, {"structure": other_blocks},
         "which Blocks(numel=1536) by structure=; Blocks(numel=256) by AdamW does"),
    ],
)  # fmt: skip
def test_plan_that_does_not_fit_names_the_first_difference(plan, ranks, change, options, message):
    for kind, text, same in run_ranks(partial(refusal, **options), ranks, str(plan), change):
        assert (kind, same) == ("ValueError", True)
        assert message in text
        assert text.startswith(f"plan '{plan}'")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda plan, layout, a, b: plan.update(format=0),
         "plan: expected a plan of format 1, got format 0; make it anew with vfsdp"),
        (lambda plan, layout, a, b: plan.pop("plans"), "a plan of format 1, got format 1"),
        (lambda plan, layout, a, b: plan.update(plans=[]), "plan: it has no buckets"),
        (lambda plan, layout, a, b: layout.pop("segments"),
         "plan: a bucket: segments: expected a list, got None"),
        (lambda plan, layout, a, b: a.update(offset="0"),
         "plan: a parameter of 'blocks.0-1': offset: expected a int, got '0'"),
        (lambda plan, layout, a, b: a.update(offset=a["offset"] + 8), "starts at"),
        (lambda plan, layout, a, b: a.update(offset=b["offset"]), "starts at"),
        (lambda plan, layout, a, b: (a.update(offset=1 << 20), b.update(offset=1 << 20)),
         "bucket 'blocks.0-1'"),
        (lambda plan, layout, a, b: layout["segments"][0].update(shard_numel=257),
         "shard_numel: expected a positive multiple of 256, got 257"),
        (lambda plan, layout, a, b: a.update(segment=3), "there is no segment 3"),
        (lambda plan, layout, a, b: layout["segments"][0].update(dtype="float64"),
         "is in a segment of float64"),
    ],
)  # fmt: skip
def test_damaged_plan_says_what_is_wrong(plan, damage, message):
    content = json.loads(plan.read_text())
    layout = content["plans"][0]["buckets"][1]
    damage(content, layout, *sorted(layout["params"], key=lambda p: p["offset"])[1:3])
    for kind, text, same in run_ranks(refusal, 2, content):
        assert (kind, same) == ("ValueError", True)
        assert message in text


def test_plan_and_a_wish_for_its_padding_are_refused_together(plan: Path) -> None:
    call = partial(refusal, resident_padding=0.5)
    for kind, text, same in run_ranks(call, 2, str(plan)):
        assert (kind, same) == ("ValueError", True)
        assert text == (
            "resident_padding=0.5 shapes a layout, and plan= is one; make the plan with "
            "--resident-padding 0.5, and pass plan= alone"
        )


def test_source_that_is_no_plan_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text.json").write_text("{")
    (tmp_path / "list.json").write_text("[]")
    for source, kind, message in [
        (7, "TypeError", "plan: expected the path of a file that vfsdp plan --json wrote"),
        (str(tmp_path / "none.json"), "ValueError", "no such file"),
        (str(tmp_path / "text.json"), "ValueError", "is no JSON"),
        (str(tmp_path / "list.json"), "ValueError", "expected a JSON object, got []"),
    ]:
        for got, text, unchanged in run_ranks(refusal, 2, source):
            assert (got, unchanged) == (kind, True)
            assert message in text
