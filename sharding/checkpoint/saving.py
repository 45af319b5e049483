"""Saving: all ranks write the files of one step together, at once or while training goes on.

May touch: the folder of checkpoints, and the process group of `messages`. Reads models, optimizers
and other objects through their state dicts.

[Note: a save in the background]
`save` copies what the rank has to the host, then a thread writes. It communicates on a process
group that nothing else uses, so its messages cannot meet those of a step. The next `save`, and
`load`, wait for it: one at a time, in the same order on all ranks.
"""

from __future__ import annotations

import os
import threading
import time
import warnings
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from sharding.checkpoint.contents import (
    Contents,
    KeyPath,
    Sealed,
    contents_of,
    differing,
    digests,
    flat,
    named_objects,
    of_rank,
)
from sharding.checkpoint.dcp_metadata import METADATA
from sharding.checkpoint.messages import Messages
from sharding.checkpoint.step_folders import (
    FileRecord,
    Manifest,
    begin_part,
    delete_old,
    part_of,
    put_in_place,
    record_of,
    write_manifest,
)

_SEEN_WITHIN = 5.0  # seconds
KEPT = 2  # checkpoints; should the newest be damaged, the other is there


class Saving:
    """A checkpoint that is being saved.

    Attributes:
        step: Of the training.
    """

    def __init__(self, step: int) -> None:
        self.step = step
        self._future: Future[Path] = Future()
        self._asked = False

    def done(self) -> bool:
        """Return whether it is whole, or has failed."""
        return self._future.done()

    def result(self, timeout: float | None = None) -> Path:
        """Wait until the checkpoint is whole, and return its folder.

        Raises:
            Exception: What went wrong on this rank.
            RuntimeError: It went wrong on another rank.
            TimeoutError: It is not done after so many seconds.
        """
        path = self._future.result(timeout)
        self._asked = True
        return path

    def _run(self, job: Writing) -> None:
        try:
            self._future.set_result(job.write())
        except BaseException as error:
            self._future.set_exception(error)

    def _settle(self) -> None:
        """Wait; raise what went wrong where nobody has asked for it."""
        error = self._future.exception()
        if error is not None and not self._asked:
            self._asked = True
            raise RuntimeError(
                f"the checkpoint of step {self.step}, saved in the background, was not written: "
                f"{type(error).__name__}: {error}"
            ) from error


_in_background: list[Saving] = []  # one at most


def settle() -> None:
    """Wait for what is being saved in the background.

    Raises:
        RuntimeError: It has failed, and nobody has asked for its result.
    """
    while _in_background:
        _in_background.pop()._settle()


def save(
    folder: str | os.PathLike[str],
    step: int,
    *,
    model: nn.Module | Mapping[str, nn.Module] | None = None,
    optimizer: torch.optim.Optimizer | Mapping[str, torch.optim.Optimizer] | None = None,
    extra: Mapping[str, Any] | None = None,
    keep: int | None = KEPT,
    asynchronous: bool = False,
) -> Saving:
    """Save a checkpoint of a step; every rank of the default process group calls it.

    It is written beside the others and gets its name when all of it is on the disk: a kill at any
    moment loses this step and no older one. The files are those of torch.distributed.checkpoint,
    with a manifest of their sizes and digests.

    Args:
        folder: Of the checkpoints of one run, seen by all ranks; made where it is not there.
        step: How many steps are done. A checkpoint of this step is replaced.
        model: Sharded by this library or by torch, replicated, or in one process; several by name,
            such as a copy with averaged weights.
        optimizer: Of this library or of torch; several by name.
        extra: What else a run remembers, by name: objects with `state_dict` and `load_state_dict`
            (schedulers, data loaders), and tensors, numbers, text, and lists and dicts of them.
            What differs between ranks, such as the state of random generators, each rank saves for
            itself.
        keep: How many checkpoints stay: those saved last. None keeps all.
        asynchronous: Return when a copy of the state is on the host, and write meanwhile. Call
            `result()` of what is returned before the process group is destroyed.

    Returns:
        Whose `result()` waits for the folder of the checkpoint.

    Raises:
        TypeError: `step` or `keep` is no integer, or there is something that cannot be saved.
        ValueError: `step` is negative, `keep` is below 1, or there is nothing to save.
        RuntimeError: Something went wrong on another rank, or with an earlier save.
    """
    settle()
    messages = Messages(apart=asynchronous)

    def local() -> tuple[int, dict[str, str]]:
        _check(step, keep)
        contents = contents_of(
            named_objects(model, nn.Module, "model"),
            named_objects(optimizer, torch.optim.Optimizer, "optimizer"),
            {} if extra is None else extra,
        )
        if not contents.values:
            raise ValueError("expected a model, an optimizer or extra to save, got nothing")
        mine.append(contents)
        return step, digests(contents)

    mine: list[Contents] = []
    apart, order = messages.together(
        local, lambda by_rank: _begun(Path(folder), by_rank), "save a checkpoint"
    )
    values = _placed(mine[0], apart, messages.rank)
    if asynchronous:
        values = {place: _copied(value) for place, value in values.items()}
    manifest = Manifest(step, order, messages.size, apart, {})
    job = Writing(messages, Path(folder), manifest, values, keep)
    saving = Saving(step)
    if asynchronous:
        _in_background.append(saving)
        threading.Thread(target=saving._run, args=(job,), name="checkpoint").start()
    else:
        saving._future.set_result(job.write())
    return saving


def _check(step: Any, keep: Any) -> None:
    for name, value, least in (("step", step, 0), ("keep", keep, 1)):
        if name == "keep" and value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool):
            raise TypeError(f"{name}: expected an integer, got {value!r}")
        if value < least:
            raise ValueError(f"{name}: expected at least {least}, got {value!r}")


def _begun(
    folder: Path, by_rank: list[tuple[int, dict[str, str]]]
) -> list[tuple[tuple[str, ...], int]]:
    """Prepare the folder of the step; return what ranks save for themselves, and the order."""
    steps = [step for step, _ in by_rank]
    if len(set(steps)) > 1:
        raise ValueError(f"expected one step on all ranks, got {steps!r} by rank")
    apart = differing([digests_of_rank for _, digests_of_rank in by_rank])
    return [(apart, begin_part(folder, steps[0]))] * len(by_rank)


def _placed(
    contents: Contents, apart: tuple[str, ...], rank: int
) -> dict[KeyPath, Tensor | Sealed]:
    """Return what this rank has, with its own places for what differs between ranks."""
    return {
        of_rank(place, rank) if place in contents.own and flat(place) in apart else place: value
        for place, value in contents.values.items()
    }


@torch.no_grad()
def _copied(value: Tensor | Sealed) -> Tensor | Sealed:
    """Return a copy on the host, of this rank's piece where the tensor is sharded."""
    if isinstance(value, Sealed):
        return value
    return torch.empty_like(value, device="cpu", requires_grad=False).copy_(value)


# -- writing ---------------------------------------------------------------------------------------


class SealedSavePlanner(DefaultSavePlanner):
    """DCP's planner, for values that were made into bytes before."""

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        """Return what is written of a value."""
        if isinstance(object, Sealed):
            return BytesIO(object.content)
        return super().transform_object(write_item, object)


@dataclass(frozen=True, slots=True)
class Writing:
    """All that a thread needs to write a checkpoint.

    Attributes:
        messages: Between the ranks that write it.
        folder: Of the checkpoints.
        manifest: Without files.
        values: Of this rank.
        keep: How many checkpoints stay.
    """

    messages: Messages
    folder: Path
    manifest: Manifest
    values: Mapping[KeyPath, Tensor | Sealed]
    keep: int | None

    def write(self) -> Path:
        """Write the checkpoint and return its folder. A collective of `messages`."""
        part = part_of(self.folder, self.manifest.step)
        planner, writer = SealedSavePlanner(flatten_state_dict=False), FileSystemWriter(part)
        described: list[Metadata] = []

        def plan_here() -> tuple[SavePlan, list[KeyPath]]:
            _await(part)
            first = self.messages.rank == 0
            names = {flat(place): value for place, value in self.values.items()}
            planner.set_up_planner(names, is_coordinator=first)
            writer.set_up_storage_writer(first)
            return writer.prepare_local_plan(planner.create_local_plan()), list(self.values)

        def plan_all(planned: list[tuple[SavePlan, list[KeyPath]]]) -> list[SavePlan]:
            plans, metadata = planner.create_global_plan([plan for plan, _ in planned])
            metadata.planner_data = {
                flat(place): place for _, places in planned for place in places
            }
            described.append(metadata)
            return writer.prepare_global_plan(plans)

        plan = self.messages.together(plan_here, plan_all, "plan what to save")

        def write_here() -> tuple[list[WriteResult], dict[str, FileRecord]]:
            results = writer.write_data(planner.finish_plan(plan), planner).wait()
            files = part.glob(f"__{self.messages.rank}_*")
            return results, {file.name: record_of(file) for file in files}

        def finish(written: list[tuple[list[WriteResult], dict[str, FileRecord]]]) -> list[Path]:
            writer.finish(described[0], [results for results, _ in written])
            files = {METADATA: record_of(part / METADATA)}
            for _, records in written:
                files.update(records)
            write_manifest(part, replace(self.manifest, files=files))
            place = put_in_place(part)
            self._delete_old()
            return [place] * len(written)

        return self.messages.together(write_here, finish, "write its part of a checkpoint")

    def _delete_old(self) -> None:
        try:
            delete_old(self.folder, self.keep)
        except OSError as error:  # what was saved is whole
            warnings.warn(f"{self.folder}: older checkpoints stay: {error}", stacklevel=2)


def _await(part: Path) -> None:
    """Wait until a folder that rank 0 has made is seen here, as network file systems let it."""
    deadline = time.monotonic() + _SEEN_WITHIN
    while not part.is_dir():
        if time.monotonic() > deadline:
            raise FileNotFoundError(
                f"{part}, which rank 0 has made, is not there; pass a folder of a file system that "
                "all ranks share"
            )
        time.sleep(0.05)
