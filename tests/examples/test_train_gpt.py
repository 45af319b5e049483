"""Tests of the training script as its users start it: it learns, and a killed run goes on."""

import asyncio
import json
import shutil
import sys
from pathlib import Path

import pytest

from as_script import EXAMPLES, run_script
from sharding import checkpoint

sys.path.append(str(EXAMPLES))
from gpt_run import check, prepare

TINY = ["--size", "tiny", "--steps", "10", "--save-every", "5"]
SETTINGS = {"size": "tiny", "optimizer": "muon", "seed": 0}


def lessen(patch: pytest.MonkeyPatch) -> None:
    """A part of the library, and a short sample."""
    import gpt
    import stdlib_corpus

    part, read, generate = Path(asyncio.__file__).parent, stdlib_corpus.read_corpus, gpt.generate
    patch.setattr(stdlib_corpus, "read_corpus", lambda: read(part))
    patch.setattr(
        gpt, "generate", lambda model, prompt, _, **how: generate(model, prompt, 9, **how)
    )


def train(ranks: int, *arguments: object) -> str:
    """What the script prints with tiny settings on CPU ranks."""
    code, printed = run_script("train_gpt.py", ranks, *TINY, *arguments, prepare=lessen)
    assert code == 0, printed
    return printed


def report(directory: Path) -> dict:
    """Returns what a finished run has written."""
    return json.loads((directory / "report.json").read_text())


def save(directory: Path, step: int) -> Path:
    """Makes a checkpoint, of which the bookkeeping sees the name and that it is whole."""
    return checkpoint.save(directory, step, extra={"losses": [0.0] * step}, keep=None).result()


def test_killed_run_goes_on_with_ranks_that_share_the_batch_unevenly(tmp_path: Path) -> None:
    whole_run, killed = tmp_path / "whole", tmp_path / "killed"
    printed = train(2, "--checkpoint", whole_run)
    for name in ("bits per byte", "order-1 byte model", "padding", "owned"):
        assert name in printed
    assert (whole_run / "loss.png").stat().st_size > 1000

    # What a kill during the save after the last step leaves behind.
    shutil.copytree(whole_run, killed)
    (killed / "report.json").unlink()
    (killed / "step-00000010").rename(killed / "step-00000010.part")
    train(5, "--checkpoint", killed, "--resume=auto")

    one, other = report(whole_run), report(killed)
    assert len(one["losses"]) == 10
    assert one["losses"][-1] < one["losses"][0] - 0.5
    assert other["losses"][:5] == one["losses"][:5]  # remembered
    # Gradients averaged over 2 and over 5 ranks differ in the last bits of fp32.
    assert other["losses"][5:] == pytest.approx(one["losses"][5:], abs=1e-4)
    assert other["held_out_bits"] == pytest.approx(one["held_out_bits"], abs=1e-4)


def test_run_with_8bit_states_learns_and_shows_them(tmp_path: Path) -> None:
    assert "in 8 bits" in train(2, "--plan", "--states", "8bit")
    train(2, "--states", "8bit", "--checkpoint", tmp_path)
    losses = report(tmp_path)["losses"]
    assert losses[-1] < losses[0] - 0.5
    with pytest.raises(ValueError, match=r"expected --states 8bit, .*got '32bit'"):
        check(tmp_path, {**SETTINGS, "states": "32bit"}, "yes")


def test_run_starts_over_only_where_none_is_unfinished_and_resumes_its_own(tmp_path: Path) -> None:
    for resume in (None, "auto"):
        check(tmp_path, SETTINGS, resume)
    with pytest.raises(FileNotFoundError, match="without --resume"):
        check(tmp_path, SETTINGS, "yes")
    prepare(tmp_path, SETTINGS, resumed=False)
    save(tmp_path, 5)
    with pytest.raises(FileExistsError, match=r"found step 5: go on with --resume"):
        check(tmp_path, SETTINGS, None)
    for resume in ("yes", "auto"):
        check(tmp_path, SETTINGS, resume)
        with pytest.raises(ValueError, match=r"--optimizer muon.*got 'adamw'"):
            check(tmp_path, {**SETTINGS, "optimizer": "adamw"}, resume)
    (tmp_path / "report.json").touch()
    check(tmp_path, SETTINGS, None)
    (tmp_path / "step-00000005.part").mkdir()
    prepare(tmp_path, SETTINGS, resumed=True)
    assert checkpoint.latest(tmp_path) == 5
    prepare(tmp_path, SETTINGS, resumed=False)
    assert [path.name for path in tmp_path.iterdir()] == ["settings.json"]


def test_script_names_a_wrong_option_and_else_starts_its_ranks(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import train_gpt

    started: list[list[str]] = []
    monkeypatch.setattr(train_gpt, "torchrun", started.append)
    arguments = [*TINY, "--ranks", "3", "--checkpoint", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["train_gpt.py", *arguments, "--resume"])
    with pytest.raises(SystemExit) as end:
        train_gpt.main()
    assert end.value.code == 2
    assert "start a run without --resume" in capsys.readouterr().err
    assert not started
    monkeypatch.setattr(sys, "argv", ["train_gpt.py", *arguments])
    train_gpt.main()
    script = str(EXAMPLES / "train_gpt.py")
    assert started == [["--standalone", "--nproc-per-node", "3", script, *arguments]]
