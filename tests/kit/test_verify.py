"""`torchrun -m vfsdp_optim.testing.verify`: the table, the exit code, what is on the wire."""

import io
import os
import re
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import verify_subjects
from torch.distributed.tensor import DTensor, Replicate, Shard

from ranks import run_ranks
from vfsdp_optim.testing import RankError, verify
from vfsdp_optim.testing.verify import Row
from vfsdp_optim.testing.wire import wire_bytes

HERE = Path(__file__).parent


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run verify on 2 CPU ranks."""
    command = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    return subprocess.run(
        [sys.executable, *command, "-m", "vfsdp_optim.testing.verify", "--rounds", "2", *arguments],
        cwd=HERE,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=120,
    )


def verified(arguments: list[str]) -> tuple[int, str]:
    """The exit code of `verify` on this rank, and what it printed."""
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(io.StringIO()) as printed:
        patch.setattr(dist, "is_torchelastic_launched", lambda: True)
        for name in ("init_process_group", "destroy_process_group"):  # the pool has done and does
            patch.setattr(dist, name, lambda *args, **options: None)
        return verify.main(["--rounds", "2", *arguments]), printed.getvalue()


def cells(table: str, optimizer: str, layout: str) -> list[str]:
    """Return the cells of one row of a printed table."""
    rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in table.splitlines()]
    return next(row for row in rows if row[:2] == [optimizer, layout])


def test_verify_passes_for_ours_and_measures_beside_fsdp2():
    assert verify.parse_arguments([]).optimizer == ["adamw", "muon"]
    result = run("--steps", "2", "--optimizer", "adamw", "muon")
    assert result.returncode == 0, result.stdout + result.stderr
    ours = cells(result.stdout, "Muon", "ours")
    theirs = cells(result.stdout, "torch.optim.AdamW", "fsdp2")
    names = ("AdamW", "Muon")
    on_both = [cells(result.stdout, n, layout)[2] for n in names for layout in ("ours", "fsdp2")]
    assert [theirs[2], *on_both] == ["yes"] * 5
    assert len(ours[3]) == 8
    assert all(float(cell.replace(",", "")) > 0 for row in (ours, theirs) for cell in row[4:8])
    assert cells(result.stdout, "torch.optim.Muon + AdamW", "fsdp2")[2] == "no"
    text = "torch.optim.Muon + AdamW on FSDP2, for comparison:\nfirst difference: step 1"
    assert text in result.stdout
    assert result.stdout.endswith("equal, bit by bit: AdamW, Muon\n")
    assert "not counted" not in result.stderr


def test_verify_fails_for_an_optimizer_that_is_wrong_when_sharded_and_checks_8bit_states():
    subjects = ("verify_subjects:make_wrong", "verify_subjects:make_wrong_on_fsdp2")
    arguments = ["--model", "verify_subjects:make_model", "--steps", "2"]
    arguments += ["--optimizer", "muon_8bit", "adamw_8bit", "shampoo", "soap", *subjects]
    (code, printed), (other, _) = run_ranks(verified, 2, arguments)
    assert (code, other) == (1, 1), printed
    assert cells(printed, "Wrong", "ours")[2] == "no"
    assert "Wrong on our shards, seen by rank " in printed
    assert "first difference: step 1, parameter '0.weight', state 'exp_avg'" in printed
    # A user's own optimizer has to be equal on FSDP2 as well.
    assert cells(printed, "WrongOnFsdp2", "ours")[2] == "yes"
    assert "WrongOnFsdp2 on FSDP2, seen by rank 0:\nfirst difference: step 1" in printed
    assert "DIFFERENT" in printed
    assert [cells(printed, f"{n} 8bit", "ours")[2] for n in ("AdamW", "Muon")] == ["yes"] * 2
    on_both = [cells(printed, n, on)[2] for n in ("Shampoo", "SOAP") for on in ("ours", "fsdp2")]
    assert on_both == ["yes"] * 4
    assert not re.search("8bit +│ fsdp2", printed)


def test_verify_runs_on_the_backend_that_was_asked_for(monkeypatch):
    monkeypatch.setattr(dist, "is_torchelastic_launched", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    used = []
    monkeypatch.setattr(dist, "init_process_group", lambda backend: used.append(backend) or 1 / 0)
    for arguments in ([], ["--backend", "nccl"]):
        with pytest.raises(ZeroDivisionError):
            verify.main(arguments)
    assert used == ["gloo", "nccl"]


def examine(make_model, layout: str) -> Row:
    cpu = torch.device("cpu")
    return verify.examine(
        make_model, verify_subjects.make_sgd, layout, device=cpu, steps=1, rounds=1
    )


def test_scalar_parameters_are_compared_where_the_layout_takes_them():
    model_and_loss = verify_subjects.make_model_with_a_scalar
    ours, theirs = (
        run_ranks(examine, 2, model_and_loss, name)[0] for name in verify.VERIFIED_LAYOUTS
    )
    assert (ours.difference, ours.unsupported) == ("", "")
    assert theirs.unsupported == "torch's fully_shard takes no 0-D parameters, such as 'scale'"


def test_function_that_returns_no_loss_is_named():
    with pytest.raises(RankError, match=r"--model: expected .* \(model, loss\), got Linear"):
        run_ranks(examine, 1, verify_subjects.make_no_loss, "fsdp2")


@pytest.mark.parametrize("option", ["--steps", "--rounds"])
def test_number_of_steps_is_positive(option, capsys):
    with pytest.raises(SystemExit):
        verify.parse_arguments([option, "0"])
    assert "expected a positive number, got 0" in capsys.readouterr().err


def test_plans_that_differ_and_missing_support_are_failures():
    def rows(**of_second) -> list[list[Row]]:
        first = dict(optimizer="X", layout="ours", plan="aa")
        return [[Row(**first)], [Row(**{**first, **of_second})]]

    assert verify.failures(rows()) == []
    assert "the plans of the ranks differ" in verify.failures(rows(plan="bb"))[0]
    assert "seen by rank 1:\nwhy" in verify.failures(rows(difference="why"))[0]
    assert verify.failures([[Row("", "ours", unsupported="no", ours=True)]]) != []
    assert verify.failures([[Row("", "fsdp2", unsupported="no")]]) == []
    text = ["X on FSDP2, seen by rank 0:\nwhy"]
    assert verify.failures([[Row("X", "fsdp2", difference="why")]]) == text
    beside = Row("X", "fsdp2", difference="why", for_comparison=True)
    assert verify.failures([[beside]]) == []


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("verify_subjects", "adamw or module:function, got 'verify_subjects'"),
        ("verify_subjects:nothing", "nothing"),
        ("none:x", "x"),
    ],
)
def test_what_cannot_be_loaded_is_named(path, words):
    with pytest.raises(SystemExit, match=words):
        verify.named_factory(path, "adamw")


def test_verify_without_torchrun_says_how_to_start_it(capsys):
    assert verify.main([]) == 2
    assert "torchrun --nproc-per-node 2 -m vfsdp_optim.testing.verify" in capsys.readouterr().err


def count_known_traffic() -> dict[str, float]:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    x = torch.ones(12)  # 48 bytes
    full = torch.empty(12 * world_size)

    def uneven() -> None:
        splits = [1, 2, 9]
        out = torch.empty(splits[rank] * world_size)
        dist.all_to_all_single(out, x, [splits[rank]] * world_size, splits)

    def pair() -> None:
        if rank == 0:
            dist.send(x, 1)
        if rank == 1:
            dist.recv(x, 0)

    mesh = dist.init_device_mesh("cpu", (world_size,))
    sharded = DTensor.from_local(x, mesh, [Shard(0)])
    calls = {
        "all_gather": lambda: dist.all_gather(list(full.chunk(world_size)), x),
        "reduce_scatter": lambda: dist.reduce_scatter(x.clone(), list(full.chunk(world_size))),
        "all_reduce": lambda: dist.all_reduce(x.clone()),
        "uneven": uneven,
        "pair": pair,
        "dtensor": lambda: sharded.redistribute(mesh, [Replicate()]).to_local().sum(),
    }
    results = {name: wire_bytes(call, rank, world_size) for name, call in calls.items()}
    assert not any(unknown for _, unknown in results.values()), results
    return {name: sent for name, (sent, _) in results.items()}


def test_wire_bytes_are_those_that_a_rank_sends():
    results = run_ranks(count_known_traffic, 3)
    for rank, sent in enumerate(results):
        assert sent["all_gather"] == pytest.approx(2 * 48)
        assert sent["reduce_scatter"] == pytest.approx(2 * 48)
        assert sent["all_reduce"] == pytest.approx(2 * 48 * 2 / 3)
        assert sent["uneven"] == pytest.approx((12 - [1, 2, 9][rank]) * 4)
        assert sent["pair"] == (48 if rank == 0 else 0)
        assert sent["dtensor"] == pytest.approx(2 * 48)
