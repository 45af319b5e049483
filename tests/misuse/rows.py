"""A misuse of the library as a row of a table, and the fresh models that it is tried on."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from sharding import RaggedDTensor
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
        words: What the message must hold: the parameter or value, and words of the cure.
        before: What is allowed and comes first.
        spoils: The model, "model" or "plain", that is of no further use after `before`.
        alone: It needs ranks of its own, because they differ.
    """

    name: str
    misuse: Callable[[Scene], object]
    error: type[Exception]
    words: tuple[str, ...]
    before: Callable[[Scene], object] = nothing
    spoils: str = ""
    alone: bool = False
