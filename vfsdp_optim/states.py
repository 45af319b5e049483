"""Where optimizer state lives: flat tensors, in a format."""

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor


class StateFormat(ABC):
    """How one state of a run of parameters is kept in memory."""

    name: ClassVar[str]

    @abstractmethod
    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return the zero state of `numel` elements: 1-D, to be cut into views of any range."""


class PlainFormat(StateFormat):
    """One number an element, in the dtype asked for: what torch's optimizers keep."""

    name = "32bit"

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return `numel` zeros."""
        return torch.zeros(numel, dtype=dtype, device=device)
