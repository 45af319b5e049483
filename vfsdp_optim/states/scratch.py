"""Working memory that keeps its size from step to step. Touches no other tensor."""

import torch
from torch import Tensor


class Scratch:
    """One tensor per purpose, dtype and device, made on first use and enlarged when needed."""

    def __init__(self) -> None:
        self._tensors: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}
        self._lent: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}

    @property
    def sizes(self) -> dict[tuple[str, torch.dtype], int]:
        """Elements of what is kept, by purpose and dtype."""
        return {(key[0], key[1]): tensor.numel() for key, tensor in self._tensors.items()}

    def take(
        self, numel: int, dtype: torch.dtype, device: torch.device, purpose: str = ""
    ) -> Tensor:
        """Return `numel` elements with undefined values; the next call for the same purpose may
        return the same ones."""
        key = purpose, dtype, device
        lent = self._lent.get(key)
        if lent is not None and lent.numel() == numel:  # most chunks are alike
            return lent
        tensor = self._tensors.get(key)
        if tensor is None or tensor.numel() < numel:
            tensor = self._tensors[key] = torch.empty(numel, dtype=dtype, device=device)
        lent = self._lent[key] = tensor[:numel]
        return lent
