"""The fresh models that a misuse is tried on, and what most rows of the tables call."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from sharding import RaggedDTensor, fully_shard
from small_models import build, loss_of, make_optimizer, shard


class Scene:
    """A sharded model with its optimizer, and an equal model that is not sharded yet."""

    def __init__(self) -> None:
        self.model, self.plain = shard(build()), build()
        self.optimizer = make_optimizer("muon", self.model)
        self.other: torch.optim.Optimizer = self.optimizer  # the one that a row is about

    @property
    def head(self) -> RaggedDTensor:
        """A sharded parameter, 31 x 12."""
        return self.model.get_parameter("head.weight")

    def train(self) -> None:
        """One step of the sharded model."""
        loss_of(self.model, 1).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def nothing(scene: Scene) -> None:
    """What most rows need before."""


@dataclass(frozen=True)
class Misuse:
    """One row: what is wrong, and the error that says so.

    Attributes:
        words: What the message must hold, apart by "|": the parameter or value, the cure; all rows
            of a table say something else.
        before: What is allowed and comes first.
        spoils: The model, "model" or "plain", that is of no further use after `before`.
        alone: It needs ranks of its own, because they differ.
    """

    words: str
    misuse: Callable[[Scene], object]
    before: Callable[[Scene], object] = nothing
    spoils: str = ""
    alone: bool = False


def sharding(**options: object) -> Callable[[Scene], object]:
    """Return a call of `fully_shard` with these options."""
    return lambda s: fully_shard(s.plain, **options)


shard_plain = sharding()


def run_model(s: Scene) -> None:
    """Call the sharded model."""
    loss_of(s.model, 1)


def run_plain(s: Scene) -> None:
    """Call the other model, which the row has sharded."""
    loss_of(s.plain, 1)


def step(s: Scene) -> None:
    """Take a step of the row's optimizer."""
    s.other.step()
