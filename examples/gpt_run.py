"""The checkpoints of train_gpt.py: what a run remembers, and when it may start over or go on."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sharding import checkpoint

SETTINGS, REPORT = "settings.json", "report.json"  # beside the checkpoints


@dataclass(slots=True)
class Run:
    """All that a training run remembers. Data and learning rates are functions of the step.

    Attributes:
        model: Sharded.
        optimizer: Of that model.
        losses: 0-d, of every step taken so far.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    losses: list[Tensor] = field(default_factory=list)

    @property
    def step(self) -> int:
        """How many steps are done."""
        return len(self.losses)

    def save(self, directory: Path) -> Any:
        """Saves this step in the background; `result()` waits for it. Every rank calls it."""
        losses = [loss.item() for loss in self.losses]
        return checkpoint.save(
            directory,
            self.step,
            model=self.model,
            optimizer=self.optimizer,
            extra={"losses": losses},
            asynchronous=True,
        )

    def load(self, directory: Path) -> None:
        """Continues from the last checkpoint. Every rank calls it."""
        extra = {"losses": None}
        checkpoint.load(directory, model=self.model, optimizer=self.optimizer, extra=extra)
        self.losses = list(torch.tensor(extra["losses"]))


def check(directory: Path, settings: dict[str, str | int], resume: str | None) -> None:
    """Refuses to resume from nothing or from another run, and to lose an unfinished one.

    Args:
        directory: Holds the checkpoints of one run.
        settings: Options that a resumed run shares with the saved one.
        resume: "yes", "auto" or None; see --resume.

    Raises:
        FileExistsError: Starting over would delete checkpoints of an unfinished run.
        FileNotFoundError: There is no checkpoint to resume from.
        ValueError: The checkpoints are of a run with other settings.
    """
    found = checkpoint.latest(directory)
    if resume is None:
        if found is not None and not (directory / REPORT).exists():
            raise FileExistsError(
                f"expected no unfinished run in {str(directory)!r}, found step {found}: "
                "go on with --resume, or choose another --checkpoint"
            )
    elif found is None and resume == "yes":
        raise FileNotFoundError(
            f"expected a checkpoint to resume from in {str(directory)!r}, found none that is "
            "whole: start a run without --resume"
        )
    elif found is not None:
        saved = json.loads((directory / SETTINGS).read_text())
        for name, value in settings.items():
            if saved[name] != value:
                raise ValueError(
                    f"expected --{name} {saved[name]}, as in {str(directory)!r}, got {value!r}: "
                    "resume with the same, or choose another --checkpoint"
                )


def prepare(directory: Path, settings: dict[str, str | int], *, resumed: bool) -> None:
    """Leaves in the directory what the run goes on from, and its settings. Rank 0 calls it."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / REPORT).unlink(missing_ok=True)  # what was finished goes on
    if not resumed:
        for path in sorted(directory.glob("step-*"), reverse=True):  # each after its .part
            # Under this name it is nothing to resume from, should a kill come here.
            shutil.rmtree(path if path.suffix else path.rename(f"{path}.part"))
    part = directory / f"{SETTINGS}.part"
    part.write_text(json.dumps(settings))
    part.replace(directory / SETTINGS)
