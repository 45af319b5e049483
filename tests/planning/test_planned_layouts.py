"""`fully_shard(plan=...)`: a layout made offline is the layout that trains, or a clear refusal."""

import copy
import json
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


def refusal(plan: Any, change: str = "") -> tuple[str, str, bool]:
    """What `fully_shard` raises for a block, and whether the block stayed as it was."""
    block = GPT(CONFIG).blocks[0]
    structure = None
    if change == "dtype":
        block.mlp.up.bfloat16()
    if change == "shape":
        block.mlp.up = nn.Linear(32, 64, bias=False)
    if change == "bias":
        block.mlp.up.bias = nn.Parameter(torch.zeros(128))
    if change == "no norm":
        block.mlp_norm = nn.Identity()
    if change == "frozen":
        block.mlp.up.weight.requires_grad_(False)
    if change == "structure":
        structure = lambda fqn, p: Blocks(1536) if fqn == "mlp.up.weight" else None  # noqa: E731
    options = {"resident_padding": 0.5} if change == "padding" else {}
    before = list(block.parameters())
    optimizer = AdamW(block.parameters())
    try:
        fully_shard(block, plan=plan, structure=structure, optimizer=optimizer, **options)
    except (ValueError, TypeError) as error:
        same = all(a is b for a, b in zip(before, block.parameters(), strict=True))
        return type(error).__name__, str(error), same and type(block).__name__ == "Block"
    return "", "nothing was raised", False


@pytest.mark.parametrize(
    ("ranks", "change", "message"),
    [
        (3, "", "made for shards over 2, 4 ranks, and the mesh shards over 3; make one with vfsdp"),
        (2, "dtype", "mlp.up.weight is float32 in the plan and bfloat16 in Block"),
        (2, "shape", "mlp.up.weight has shape (128, 32) in the plan and (64, 32) in Block"),
        (2, "bias", "mlp.up.bias is in Block and not in the plan"),
        (2, "no norm", "mlp_norm.weight is in the plan and not in Block"),
        (2, "frozen", "mlp.up.weight is trainable in the plan and frozen in Block"),
        (4, "structure", "which Blocks(numel=1536) by structure=; Blocks(numel=256) by AdamW does"),
    ],
)
def test_plan_that_does_not_fit_names_the_first_difference(plan, ranks, change, message):
    for kind, text, unchanged in run_ranks(refusal, ranks, str(plan), change):
        assert kind == "ValueError"
        assert message in text
        assert text.startswith(f"plan '{plan}'")
        assert unchanged


def damaged(content: dict[str, Any], damage: str) -> dict[str, Any]:
    content = copy.deepcopy(content)
    layout = content["plans"][0]["buckets"][1]
    first, second = sorted(layout["params"], key=lambda p: p["offset"])[1:3]
    match damage:
        case "format":
            content["format"] = 0
        case "no plans":
            del content["plans"]
        case "empty":
            content["plans"] = []
        case "no segments":
            del layout["segments"]
        case "text":
            first["offset"] = "0"
        case "unaligned":
            first["offset"] += 8
        case "overlap":
            first["offset"] = second["offset"]
        case "too long":
            second["offset"] = first["offset"] = 2 * layout["segments"][0]["shard_numel"]
        case "shard":
            layout["segments"][0]["shard_numel"] += 1
        case "segment":
            first["segment"] = 3
        case "other dtype":
            layout["segments"][0]["dtype"] = "float64"
    return content


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("format", "plan: expected a plan of format 1, got format 0; make it anew with vfsdp"),
        ("no plans", "plan: expected a plan of format 1, got format 1"),
        ("empty", "plan: it has no buckets"),
        ("no segments", "plan: a bucket: segments: expected a list, got None"),
        ("text", "plan: a parameter of 'blocks.0-1': offset: expected a int, got '0'"),
        ("unaligned", "starts at"),
        ("overlap", "starts at"),
        ("too long", "bucket 'blocks.0-1'"),
        ("shard", "shard_numel: expected a positive multiple of 256, got"),
        ("segment", "there is no segment 3"),
        ("other dtype", "is in a segment of float64"),
    ],
)
def test_damaged_plan_says_what_is_wrong(plan: Path, damage: str, message: str) -> None:
    content = damaged(json.loads(plan.read_text()), damage)
    for kind, text, unchanged in run_ranks(refusal, 2, content):
        assert (kind, unchanged) == ("ValueError", True)
        assert message in text


def test_plan_and_a_wish_for_its_padding_are_refused_together(plan: Path) -> None:
    for kind, text, unchanged in run_ranks(refusal, 2, str(plan), "padding"):
        assert (kind, unchanged) == ("ValueError", True)
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
