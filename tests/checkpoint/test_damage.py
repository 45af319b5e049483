"""Kills in the middle of a save, damage to files, and folders that hold something else."""

import contextlib
import json
import os
import pickle
import random
import re
import shutil
import signal
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from ranks import run_ranks
from sharding import checkpoint
from sharding.checkpoint.dcp_metadata import parse_metadata
from vfsdp_optim import AdamW, fully_shard


def objects(value: float) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model and an optimizer all of whose numbers are `value`."""
    model = nn.Sequential(nn.Linear(40, 30), nn.LayerNorm(30))
    if dist.is_initialized():
        fully_shard(model)
    optimizer = AdamW(model.parameters(), lr=0.1)
    fill(model, optimizer, value)
    return model, optimizer


def tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [*model.parameters(), *(v for s in optimizer.state.values() for v in s.values())]


@torch.no_grad()
def fill(model: nn.Module, optimizer: torch.optim.Optimizer, value: float) -> None:
    for tensor in tensors(model, optimizer):
        tensor.fill_(value)


def numbers(model: nn.Module, optimizer: torch.optim.Optimizer) -> set[float]:
    """All numbers that this rank has of them."""
    local = [getattr(t, "_local_tensor", t).detach() for t in tensors(model, optimizer)]
    return set(torch.cat([t.flatten() for t in local]).tolist())


def save(folder: Path, step: int, value: float | None = None, **options: Any) -> Path:
    model, optimizer = objects(step if value is None else value)
    extra = {"value": step if value is None else value}
    saving = checkpoint.save(folder, step, model=model, optimizer=optimizer, extra=extra, **options)
    return saving.result()


def load(folder: Path, step: int | None = None) -> tuple[int, set[float], list[str]]:
    """What was loaded, all numbers then, and warnings; unchanged numbers where it raises."""
    model, optimizer = objects(0)
    extra = {"value": None}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            found = checkpoint.load(
                folder, model=model, optimizer=optimizer, extra=extra, step=step
            )
        except Exception:
            assert numbers(model, optimizer) == {0}, "changed by what was refused"
            raise
    assert numbers(model, optimizer) == {extra["value"]}
    return found, numbers(model, optimizer), [str(each.message) for each in caught]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# -- kills -----------------------------------------------------------------------------------------


def train_until_killed(folder: Path, told: int) -> None:
    """Goes on from the last checkpoint, and says after each save that it is done."""
    model, optimizer = objects(0)
    step = 0
    with contextlib.suppress(FileNotFoundError):
        step = checkpoint.load(folder, model=model, optimizer=optimizer)
    os.write(told, step.to_bytes(8))
    while True:
        step += 1
        fill(model, optimizer, step)
        checkpoint.save(
            folder, step, model=model, optimizer=optimizer, extra={"value": step}, keep=1 + step % 2
        )
        os.write(told, step.to_bytes(8))


def killed_run(folder: Path, seconds: float) -> int:
    """Trains in a process of its own, kills it so many seconds after its first word; returns the
    last step that it said was saved."""
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of newer Pythons, on forks beside threads
        child = os.fork()
    if not child:
        with contextlib.suppress(BaseException):
            train_until_killed(folder, writing)
        os._exit(1)
    os.close(writing)
    last = os.read(reading, 8)
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    with open(reading, "rb") as told:
        last = (last + told.read())[-8:]
    assert len(last) == 8, "the process ended by itself"
    return int.from_bytes(last)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that every example of a test goes on with."""
    return tmp_path_factory.mktemp("shared")


@given(seed=st.integers(0, 10**6))
def test_kill_at_any_moment_of_a_save_loses_no_older_checkpoint(shared: Path, seed: int) -> None:
    """Plain dcp.save into one folder lost the checkpoint in 27 of 70 kills."""
    folder = shared / "kills"
    last = killed_run(folder, random.Random(seed).random() * 0.06)
    if not last and checkpoint.latest(folder) is None:
        return
    step, found, _ = load(folder)
    assert found == {step}
    assert step in (last, last + 1)  # in place, and not yet told


# -- damage ----------------------------------------------------------------------------------------


def save_two(folder: Path) -> None:
    save(folder, 1)
    save(folder, 2)


def damage(path: Path, draw: random.Random) -> str:
    """Damages a checkpoint as disks and copies do; returns the file that is to be named."""
    files = sorted(p for p in path.iterdir() if p.stat().st_size)
    file = draw.choice(files)
    content = bytearray(file.read_bytes())
    at = draw.randrange(len(content))
    kind = draw.choice(["flip", "zeros", "short", "gone", "swapped", "longer"])
    if kind == "flip":
        content[at] ^= 1 << draw.randrange(8)
    elif kind == "zeros":
        content[at : at + 4096] = bytes(len(content[at : at + 4096]))
    elif kind == "short":
        del content[at:]
    elif kind == "longer":
        content += b"\0"
    elif kind == "swapped":
        other = draw.choice([each for each in files if each != file])
        theirs = other.read_bytes()
        other.write_bytes(content)
        content = bytearray(theirs)
    if bytes(content) == file.read_bytes() and kind != "gone":
        return ""  # zeros were there
    file.unlink() if kind == "gone" else file.write_bytes(content)
    return file.name


@given(seed=st.integers(0, 10**6))
def test_damaged_checkpoint_is_never_loaded_and_the_one_before_it_is(
    shared: Path, seed: int
) -> None:
    """Half of the flipped bits in DCP's data loaded, silently wrong."""
    whole = shared / "whole"
    if not whole.exists():
        run_ranks(save_two, 2, whole)
    folder = shared / "damaged"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(whole, folder)
    named = damage(folder / "step-00000002", random.Random(seed))
    step, found, told = load(folder)
    if not named:
        assert (step, found, told) == (2, {2.0}, [])
        return
    assert (step, found) == (1, {1.0})
    (message,) = told
    assert message.startswith(f"loading {str(folder / 'step-00000001')!r}, because what is newer")
    assert named in message or "manifest.json" in message
    with pytest.raises(ValueError, match="step-00000002: "):
        load(folder, step=2)


# -- folders ---------------------------------------------------------------------------------------


def test_latest_and_load_of_folders_without_a_whole_checkpoint(tmp_path: Path) -> None:
    for folder in (tmp_path / "missing", tmp_path):
        assert checkpoint.latest(folder) is None
        with pytest.raises(FileNotFoundError) as error:
            load(folder)
        assert str(error.value) == f"expected a checkpoint in {str(folder)!r}, found none"
    half = save(tmp_path, 4)
    (half / "manifest.json").unlink()
    (tmp_path / "step-00000009.part").mkdir()
    (tmp_path / "step-00000001").write_text("no folder")
    assert checkpoint.latest(tmp_path) is None
    with pytest.raises(ValueError, match=r"manifest\.json is missing") as error2:
        load(tmp_path)
    assert str(error2.value) == (
        f"{str(tmp_path)!r} has no whole checkpoint to load: step-00000004: manifest.json is "
        "missing: not written by sharding.checkpoint.save, or not to its end"
    )
    save(tmp_path, 3)
    assert checkpoint.latest(tmp_path) == 3
    assert load(tmp_path)[2] == [
        f"loading {str(tmp_path / 'step-00000003')!r}, because what is newer is not whole: "
        "step-00000004: manifest.json is missing: not written by sharding.checkpoint.save, or not "
        "to its end"
    ]
    assert names(tmp_path) == ["step-00000001", "step-00000003", "step-00000004"]  # not ours: kept
    with pytest.raises(FileNotFoundError) as error:
        load(tmp_path, step=5)
    assert str(error.value) == (
        f"expected a checkpoint of step 5 in {str(tmp_path)!r}, found those of steps [3, 4]"
    )


def test_checkpoints_saved_last_stay_and_count_though_their_steps_are_smaller(tmp_path: Path):
    """Who goes back to an older step and on from there must not find the abandoned run again."""
    for step in (1, 2, 30, 40):
        save(tmp_path, step)
    assert names(tmp_path) == ["step-00000030", "step-00000040"]
    save(tmp_path, 31)
    assert names(tmp_path) == ["step-00000031", "step-00000040"]
    assert checkpoint.latest(tmp_path) == load(tmp_path)[0] == 31
    place = save(tmp_path, 40, value=7, keep=None)
    assert load(tmp_path)[:2] == (40, {7.0})
    save(tmp_path, 41, keep=None)
    assert names(tmp_path) == ["step-00000031", "step-00000040", "step-00000041"]

    # A kill between the renames of a step that is saved again.
    place.rename(place.with_name("step-00000040.old"))
    assert load(tmp_path, step=40)[1] == {7.0}
    save(tmp_path, 40, keep=1)
    assert names(tmp_path) == ["step-00000040"]
    (tmp_path / "step-00000040" / "notes.txt").write_text("mine")
    assert load(tmp_path)[2] == [
        f"{str(tmp_path / 'step-00000040')!r} holds ['notes.txt'], which save did not write; they "
        "are not read"
    ]


class Prints:
    """Calls a function where it is unpickled."""

    def __reduce__(self) -> Any:
        return print, ("run by a checkpoint",)


def test_files_that_fit_their_digests_run_nothing_and_stay_in_their_folder(tmp_path, capsys):
    """CVE-2025-32434 and its kind: pickles in checkpoints call what they name."""
    for content, fault in (
        (pickle.dumps(Prints()), "it asks for builtins.print, which no metadata needs"),
        (b"", "no description of a checkpoint"),
        (pickle.dumps({}), "no description of a checkpoint"),
    ):
        with pytest.raises(ValueError, match=fault):
            parse_metadata(content)
    place = save(tmp_path, 1)
    content = (place / ".metadata").read_bytes()
    assert parse_metadata(content, ["__0_0.distcp"]).storage_data
    with pytest.raises(ValueError, match=r"names '__0_0.distcp', which is no file"):
        parse_metadata(content, [])
    outside = content.replace(b"__0_0.distcp", b"../../passwd")
    with pytest.raises(ValueError, match=r"names '../../passwd', which is no file"):
        parse_metadata(outside)
    manifest = json.loads((place / "manifest.json").read_text())
    manifest["content"]["files"]["../x"] = [1, ""]
    manifest["sha256"] = checkpoint.step_folders._digest(manifest["content"])
    (place / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match=r"names '../x', which is no file of its folder"):
        load(tmp_path)
    assert capsys.readouterr().out == ""


def refusals(folder: Path) -> list[str]:
    """Errors of one rank, or of all, on every rank; none changes anything."""
    rank = dist.get_rank()
    model, optimizer = objects(5)
    place = checkpoint.save(folder, 1, model=model, optimizer=optimizer, extra={"a": 1}).result()
    other = fully_shard(nn.Sequential(nn.Linear(40, 31), nn.LayerNorm(31)))
    small = AdamW(list(model.parameters())[:2], lr=0.1)
    calls: list[Any] = [
        lambda: checkpoint.save(folder, -1, model=model),
        lambda: checkpoint.save(folder, 2.0, model=model),
        lambda: checkpoint.save(folder, 2 + rank, model=model),
        lambda: checkpoint.save(folder, 2),
        lambda: checkpoint.save(folder, 2, model=model, keep=0),
        lambda: checkpoint.save(folder, 2, model=[model]),
        lambda: checkpoint.save(folder, 2, extra={"a": print if rank else 1}),
        lambda: checkpoint.save(folder, 2, extra={"a": model[0].weight}),
        lambda: checkpoint.load(folder, model=other),
        lambda: checkpoint.load(folder, model={"m": model}),
        lambda: checkpoint.load(folder, model=model, optimizer=small),
        lambda: checkpoint.load(folder, model=model, extra={"b": 0}),
        lambda: checkpoint.load(folder / str(rank) if rank else folder, model=model),
    ]
    found = []
    for call in calls:
        fill(model, optimizer, 9)
        with pytest.raises((ValueError, TypeError, OSError)) as error:
            call()
        found.append(f"{type(error.value).__name__}: {error.value}".replace(str(place), "PLACE"))
        assert numbers(model, optimizer) == {9}, found[-1]
        assert names(folder) == ["step-00000001"]
    return found


def test_save_and_load_refuse_on_every_rank_and_change_nothing(tmp_path: Path) -> None:
    first, second = run_ranks(refusals, 2, tmp_path)
    shape = "expected shape (31, 40), got (30, 40)"
    expected = [
        "ValueError: step: expected at least 0, got -1",
        "TypeError: step: expected an integer, got 2.0",
        "ValueError: expected one step on all ranks, got [2, 3] by rank",
        "ValueError: expected a model, an optimizer or extra to save, got nothing",
        "ValueError: keep: expected at least 1, got 0",
        "TypeError: model: expected a Module or a dict of them by name, got [FSDPSequential(",
        "TypeError: extra['a']: expected tensors, numbers, text",
        "TypeError: extra['a']: expected no RaggedDTensor in it, whose pieces lie on several",
        f"ValueError: PLACE: model does not fit the model: 0.weight: {shape}",
        "ValueError: PLACE has no 'model.m', only model ['0.bias', '0.weight', '1.bias', '1.weight",
        "ValueError: loaded state dict does not have the parameters of the optimizer: missing [], ",
        "ValueError: extra['b']: the checkpoint has only ['a']",
        "FileNotFoundError: PLACE: rank 1 sees other files than rank 0: ",
    ]
    for rank, found in enumerate((first, second)):
        for text, start in zip(found, expected, strict=True):
            of_other = re.sub(r"rank \d cannot [^:]*: ", "", text)
            assert of_other.startswith(start), (rank, text)
    assert first[6].startswith("TypeError: rank 1 cannot save a checkpoint: extra['a']: expected")
    assert second[2].startswith("ValueError: rank 0 cannot save a checkpoint: expected one step")
