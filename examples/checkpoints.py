"""Checkpoints that survive a kill at any moment and load on another number of ranks.

A checkpoint is a directory `step-00000100` that torch.distributed.checkpoint (DCP) writes. DCP puts
`.metadata` in its place last and in one operation: a directory without it was cut short and is
never read. The two newest whole ones stay, so a kill at any moment loses the steps since the last
one and no more. `report.json` beside them says that the run has reached its end.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful

SETTINGS = "settings.json"
REPORT = "report.json"
KEPT = 2


class Run(Stateful):
    """All that a training run remembers. Data and learning rates are functions of the step.

    Attributes:
        model: Sharded.
        optimizer: Of that model.
        losses: 0-d, of every step taken so far.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model = model
        self.optimizer = optimizer
        self.losses: list[Tensor] = []

    @property
    def step(self) -> int:
        """How many steps are done."""
        return len(self.losses)

    def state_dict(self) -> dict[str, Any]:
        """Returns shards under the names of parameters: DCP can load them on any ranks."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        losses = [loss.item() for loss in self.losses]
        return {"model": model, "optimizer": optimizer, "losses": losses}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over what DCP has read into the tensors of `state_dict()`."""
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state_dict["model"],
            optim_state_dict=state_dict["optimizer"],
        )
        self.losses = list(torch.tensor(state_dict["losses"]))


def whole(directory: Path) -> list[Path]:
    """Returns the checkpoints in `directory` that were written to their end, oldest first."""
    return sorted(path.parent for path in directory.glob("step-*/.metadata"))


def check(directory: Path, settings: dict[str, Any], *, resume: bool) -> None:
    """Refuses to resume from nothing or from another run, and to lose an unfinished one.

    Args:
        directory: Holds the checkpoints of one run.
        settings: Options that a resumed run shares with the saved one, as JSON values.
        resume: Whether to go on from the newest checkpoint; otherwise the run starts over.

    Raises:
        FileExistsError: Starting over would delete checkpoints of an unfinished run.
        FileNotFoundError: There is no whole checkpoint to resume from.
        ValueError: The checkpoint was made with other settings.
    """
    found = whole(directory)
    if not resume:
        if found and not (directory / REPORT).exists():
            raise FileExistsError(
                f"expected no unfinished run in {str(directory)!r}, found {found[-1].name!r}: "
                "go on with --resume, or choose another --checkpoint"
            )
        return
    if not found:
        raise FileNotFoundError(
            f"expected a checkpoint to resume from in {str(directory)!r}, found none that is "
            "whole: start a run without --resume"
        )
    saved = json.loads((found[-1] / SETTINGS).read_text())
    for name, value in settings.items():
        if saved.get(name, value) != value:  # older runs had fewer settings
            raise ValueError(
                f"expected --{name} {saved[name]}, as in {str(found[-1])!r}, got {value!r}: "
                "resume with the same, or choose another --checkpoint"
            )


def save(directory: Path, run: Run, settings: dict[str, Any]) -> None:
    """Writes a checkpoint of the run, then deletes the third newest. Every rank calls it."""
    checkpoint = directory / f"step-{run.step:08}"
    if dist.get_rank() == 0:
        (directory / REPORT).unlink(missing_ok=True)  # what was finished goes on
        checkpoint.mkdir(parents=True, exist_ok=True)
        (checkpoint / SETTINGS).write_text(json.dumps(settings))
    dcp.save({"run": run}, checkpoint_id=checkpoint)
    if dist.get_rank() == 0:
        delete(directory, keep=whole(directory)[-KEPT:])


def load(directory: Path, run: Run) -> None:
    """Continues the run from the newest whole checkpoint. Every rank calls it."""
    dcp.load({"run": run}, checkpoint_id=whole(directory)[-1])


def delete(directory: Path, *, keep: Sequence[Path] = ()) -> None:
    """Deletes all checkpoints in `directory`, whole or cut short, but those to keep."""
    for path in directory.glob("step-*"):
        if path not in keep:
            (path / ".metadata").unlink(missing_ok=True)  # first: what is left never looks whole
            shutil.rmtree(path)
