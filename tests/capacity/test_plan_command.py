"""`vfsdp plan` from the command line: what it prints and writes, and what it refuses."""

import json
import re
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from vfsdp_optim.__main__ import main

TABLE = {
    "model": "small",
    "buckets": [
        {
            "bucket": "root",
            "count": 1,
            "tensors": [{"name": "embed", "shape": [512, 64], "dtype": "float32"}],
        },
        {
            "bucket": "layer",
            "count": 3,
            "tensors": [
                {"name": "up", "shape": [256, 64], "dtype": "float32"},
                {"name": "down", "shape": [64, 256], "dtype": "float32"},
                {"name": "norm", "shape": [64], "dtype": "float32"},
            ],
        },
    ],
}


def table(folder: Path, **changes: Any) -> str:
    path = folder / "table.json"
    path.write_text(json.dumps({**TABLE, **changes}))
    return str(path)


def with_tensor(**changes: Any) -> list[dict[str, Any]]:
    tensor = {"name": "w", "shape": [4, 4], "dtype": "float32", **changes}
    return [{"bucket": "root", "count": 1, "tensors": [tensor]}]


def build() -> nn.Module:
    return nn.Linear(64, 64)


def fail() -> nn.Module:
    raise RuntimeError("no\nmodel")


def test_table_has_a_column_for_each_number_of_ranks(tmp_path, capsys):
    assert main(["plan", "--model", table(tmp_path), "--ranks", "2,8", "--optimizer", "muon"]) == 0
    printed = capsys.readouterr().out
    for row in (
        "ranks 2 8",
        "shards x copies 2 x 1 8 x 1",
        "padding",
        "least with these cuts",
        "parameters",
        "gradients",
        "optimizer states",
        "unsharded parameters",
        "communication buffers",
        "exchange slots, scratch",
        "gathered per step",
        "reduced per step",
        "exchanged per step",
        "matrix work, busiest / mean",
        "FSDP2 Shard(0): padding",
        "its bytes per rank",
        "activations not included",
    ):
        plain = " ".join(printed.replace("│", " ").replace("┃", " ").split())
        assert row in plain, row


def test_json_has_the_figures_and_layouts_of_every_number_of_ranks(tmp_path, capsys):
    arguments = ["plan", "--model", table(tmp_path), "--ranks", "2,8", "--states", "8bit"]
    assert main([*arguments, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert main([*arguments, "--json", str(tmp_path / "plan.json")]) == 0
    assert json.loads((tmp_path / "plan.json").read_text()) == printed
    assert [plan["ranks"] for plan in printed["plans"]] == [2, 8]
    two = printed["plans"][0]
    # 3 * (2 * 16,384 + 256 for the norm and its padding) + 32,768 elements over 2 ranks.
    assert two["bytes_per_rank"]["parameters"] == 4 * (3 * (32768 + 512) + 32768) // 2
    assert two["padding"] == pytest.approx(3 * (512 - 64) / two["numel"])
    assert [bucket["bucket"] for bucket in two["buckets"]] == ["root", "layer"]
    assert two["buckets"][1]["count"] == 3


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_picture_is_written_for_few_and_many_ranks(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"plan.{suffix}"
    assert main(["plan", "--model", table(tmp_path), "--ranks", "8,1024", "--plot", str(path)]) == 0
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG" if suffix == "png" else b"<?xml")
    if suffix == "svg":  # names of blocks, hatched padding, a legend
        text = content.decode()
        assert all(word in text for word in ("embed", "padding", "1,024 ranks", "pattern"))


def test_suggestions_compare_groups_and_granules(capsys):
    arguments = ["plan", "--model", "llama3-8b", "--ranks", "256", "--granularity", "128"]
    assert main([*arguments, "--suggest"]) == 0
    printed = capsys.readouterr().out
    assert "granule too coarse: layer pads" in printed
    assert "finer granule: --granularity" in printed
    assert "HSDP groups of" in printed
    assert "8 (--replicate 32)" in printed


def test_fewest_ranks_that_fit_are_suggested_and_plan_as_promised(capsys):
    """`--suggest --memory` finds ranks, states, granule and groups; the parts say the same."""
    model = ["--model", "llama3-8b", "--memory"]
    assert main(["plan", *model, "24GiB", "--suggest"]) == 0
    printed = capsys.readouterr().out
    last = printed.splitlines()[-1]
    found = re.fullmatch(
        r"suggested: --ranks (\d+) --states (\w+) --replicate 1 --granularity (\w+)"
        r"(; HSDP groups of \d+ fit too .*)?",
        last,
    )
    assert found is not None, last
    ranks = int(found[1])
    assert f"{ranks} ranks, {found[2]} states: fits 24 GiB" in printed
    assert main(["plan", *model, "24GiB", "--states", found[2], "--ranks", f"{ranks},{ranks}"]) == 0
    again = capsys.readouterr().out
    assert again.count(f"{ranks} ranks, {found[2]} states: fits 24 GiB, ") == 1
    if ranks > 8:
        assert main(["plan", *model, "24GiB", "--ranks", str(ranks // 2)]) == 0
        assert "does not fit 24 GiB" in capsys.readouterr().out


def test_memory_that_nothing_fits_says_what_is_needed(capsys):
    arguments = ["--model", "llama3-8b", "--suggest", "--memory"]
    assert_refused([*arguments, "2GB"], "80% of 2 GB is 1.49 GiB; pass --tp, --pp or", capsys)
    assert_refused([*arguments, "much"], "memory: expected a size such as 80GiB", capsys)
    assert_refused(arguments[:3], "ranks: expected numbers of ranks such as --ranks 8,64", capsys)
    assert_refused([*arguments, "8GB", "--tp", "3"], "ranks: none of 8, 16, 32, 64", capsys)


def test_names_are_understood_as_people_write_them(capsys):
    names = ["--optimizer", "Muon", "--dtype", "bf16", "--reduce-dtype", "fp32", "--ranks", "8,8"]
    assert main(["plan", "--model", "llama3-8b", *names]) == 0
    printed = capsys.readouterr().out
    assert "Muon, 32bit states" in printed
    assert printed.count("8 x 1") == 1


def test_segments_are_reported_with_what_they_save(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "--model", "gpt-oss-120b", "--ranks", "256", "--granularity", "e128"]
    assert main([*arguments, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)["plans"][0]
    assert plan["padding"] <= 0.008
    assert len(plan["buckets"][1]["segments"]) > 1
    (sentence,) = plan["advice"]
    assert "segments: layer moves in 2 segments" in sentence
    assert "in one segment it would pad 5.7" in sentence


def test_padding_for_residency_is_reported_and_can_be_avoided(capsys):
    arguments = ["plan", "--model", "gpt-oss-120b", "--ranks", "8", "--optimizer", "muon", "--json"]
    assert main(arguments) == 0
    plan = json.loads(capsys.readouterr().out)["plans"][0]
    sentence = next(s for s in plan["advice"] if s.startswith("residency: layer pads 1.19%"))
    assert sentence.endswith("--resident-padding 0 pads 0.00%")
    assert main([*arguments, "--resident-padding", "0"]) == 0
    even = json.loads(capsys.readouterr().out)["plans"][0]
    assert even["padding"] < 1e-5
    assert even["wire_bytes_per_step"]["exchange"] > plan["wire_bytes_per_step"]["exchange"]


def test_advice_that_is_followed_pads_what_it_promised(capsys):
    arguments = ["plan", "--model", "llama3-8b", "--ranks", "256", "--json"]
    assert main([*arguments, "--granularity", "128"]) == 0
    advice = json.loads(capsys.readouterr().out)["plans"][0]["advice"]
    promises = [sentence for sentence in advice if " pads " in sentence and "--" in sentence]
    assert len(promises) == 2
    for sentence in promises:
        flag, value, _, padding = sentence.replace(",", "").partition("--")[2].split()[:4]
        granularity = ["--granularity", "128"] if flag == "replicate" else []
        assert main([*arguments, *granularity, f"--{flag}", value]) == 0
        found = json.loads(capsys.readouterr().out)["plans"][0]["padding"]
        assert f"{found:.2%}" == padding


REFUSED = [
    (["--ranks", "0"], "ranks: expected at least 1, got 0"),
    (["--ranks", "-4"], "ranks: expected at least 1, got -4"),
    (["--ranks", "8,x"], "argument --ranks: expected numbers of ranks such as 8,64, got '8,x'"),
    (["--ranks", "8", "--tp", "3"], "8 ranks cannot be divided by replicate=1 * tp=3 * pp=1"),
    (["--ranks", "8", "--replicate", "0"], "replicate: expected at least 1, got 0"),
    (["--ranks", "8", "--ep", "2"], "ep=2: the model has no experts"),
    (["--ranks", "8", "--pp", "4"], "pp=4: the model has only 3 blocks"),
    (
        ["--ranks", "8", "--optimizer", "sgd"],
        "optimizer: expected one of adamw, muon, shampoo, soap, or an Algorithm or a "
        "StructuredOptimizer as module:Class, got 'sgd'",
    ),
    (["--ranks", "8", "--states", "4bit"], "states: expected one of 32bit, 8bit, got '4bit'"),
    (["--ranks", "8", "--dtype", "int8"], "dtype: expected one of float64, float32, bfloat16"),
    (["--ranks", "8", "--granularity", "e0"], "granularity: expected 'element', a number of rows"),
    (["--ranks", "8", "--resident-padding", "-1"], "resident_padding must be >= 0, got -1.0."),
    (["--ranks", "8", "--experts", "two"], "experts: expected 'separate' or 'fused', got 'two'"),
    (["--ranks", "8", "--backend", "mpi"], "backend: expected one of nccl, gloo, got 'mpi'"),
    (["--ranks", "8", "--plot", "plan.gif"], "plot: expected a file name ending in .png or .svg"),
    (["--ranks", "8", "--plot", "/no/such/x.png"], "plot: there is no folder '/no/such'"),
    (["--ranks", "8", "--json", "/no/such/x.json"], "json: cannot write '/no/such/x.json'"),
    ([], "ranks: expected numbers of ranks such as --ranks 8,64, or --suggest"),
    (["--ranks", "8", "--wrong"], "unrecognized arguments: --wrong"),
]


@pytest.mark.parametrize(("arguments", "message"), REFUSED)
def test_wrong_argument_is_one_line_and_exit_code_2(tmp_path, capsys, arguments, message):
    assert_refused(["--model", table(tmp_path), *arguments], message, capsys)


def assert_refused(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = main(["plan", *arguments])
    except SystemExit as end:
        code = end.code
    printed = capsys.readouterr()
    assert code == 2
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    assert message in printed.err
    assert printed.err.startswith("vfsdp")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"buckets": [{"count": 1, "tensors": []}]}, "bucket 0: key 'bucket' is missing"),
        ({"buckets": [{"bucket": "a", "count": 1}]}, "bucket 0: key 'tensors' is missing"),
        ({"buckets": [{"bucket": "a", "count": 0, "tensors": []}]}, "count: expected a positive"),
        (
            {"buckets": with_tensor(shape=[4, -4])},
            "shape: expected a list of sizes >= 0, got [4, -4]",
        ),
        ({"buckets": with_tensor(shape=None)}, "tensor 'w': shape: expected a list, got None"),
        ({"buckets": with_tensor(dtype="fp4")}, "tensor 'w': dtype: expected one of float64"),
        ({"buckets": with_tensor(shape=[0])}, "has no parameters"),
        ({"buckets": 3}, "buckets: expected a list, got 3"),
    ],
)
def test_wrong_table_is_one_line_that_says_where(tmp_path, capsys, changes, message):
    assert_refused(["--model", table(tmp_path, **changes), "--ranks", "8"], message, capsys)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.safetensors", b"\x10\x00", "the safetensors header is truncated: it needs 8 bytes"),
        ("b.safetensors", struct.pack("<Q", 500) + b"{}", "is truncated: it needs 508 bytes"),
        ("c.safetensors", struct.pack("<Q", 2) + b"{]", "the safetensors header: is no JSON"),
        ("d.safetensors", struct.pack("<Q", 2) + b"\xff\xff", "the safetensors header is no text"),
        (
            "e.safetensors",
            struct.pack("<Q", 39) + b'{"w": {"dtype": "F8_E4M3", "shape": []}}'[:39],
            "the safetensors header: is no JSON",
        ),
        (
            "f.safetensors",
            struct.pack("<Q", 40) + b'{"w": {"dtype": "F8_E4M3", "shape": []}}',
            "dtype 'F8_E4M3' is that of a quantized checkpoint",
        ),
        ("g.json", b"{", "is no JSON"),
        ("h.json", b"[]", "expected a JSON object, got list"),
        ("i.json", b'{"a": 1}', "expected a shape table (key 'buckets'), a safetensors index"),
        (
            "j.json",
            b'{"weight_map": {"w": "k.safetensors"}}',
            "k.safetensors, which it names, is not",
        ),
        ("k.json", b'{"model_type": "llama"}', "key 'hidden_size' is missing"),
        ("l.json", b"\xff", "cannot be read as text"),
    ],
)
def test_broken_file_is_one_line_that_says_why(tmp_path, capsys, name, content, message):
    path = tmp_path / name
    path.write_bytes(content)
    assert_refused(["--model", str(path), "--ranks", "8"], message, capsys)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("gpt-6", "no such file, and no table of that name; tables: deepseek-v3-fused"),
        ("no_module:build", "ModuleNotFoundError: No module named 'no_module'"),
        (f"{__name__}:nothing", "has no attribute 'nothing'"),
        (f"{__name__}:fail", "RuntimeError: no model"),
        (f"{__name__}:table", "TypeError"),
        ("json:dumps", "TypeError"),
        ("time:time", "expected a function that returns an nn.Module, got"),
    ],
)
def test_unknown_model_is_one_line(capsys, model, message):
    assert_refused(["--model", model, "--ranks", "8"], message, capsys)


def test_module_of_the_working_directory_is_found_by_python_m(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("from torch import nn\ndef build(): return nn.Linear(8, 8)\n")
    command = [sys.executable, "-m", "vfsdp_optim", "plan", "--model", "mine:build", "--ranks", "2"]
    root = Path(__file__).parents[2]
    done = subprocess.run(
        command, cwd=tmp_path, env={"PYTHONPATH": str(root)}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "0.00 billion parameters" in done.stdout
