"""Text that every machine has, Python's standard library, and byte models to compare a GPT with.

Reads files into torch tensors; knows no model and no ranks. Left out are `site-packages` and
`dist-packages`, which differ by machine, and tests, which some systems package apart.
"""

from __future__ import annotations

import sysconfig
import zlib
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

LEFT_OUT = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test"})
START_OF_FILE = b"\x00"  # a byte that source code cannot contain
HELD_OUT_ONE_IN = 10


@dataclass(frozen=True, slots=True)
class Corpus:
    """All training files and all held-out files, joined in the order of their paths.

    Attributes:
        training: 1-D uint8.
        held_out: 1-D uint8.
    """

    training: Tensor
    held_out: Tensor


def is_held_out(path: str) -> bool:
    """Whether a file is held out: a function of its relative path, the same on every machine."""
    return zlib.crc32(path.encode()) % HELD_OUT_ONE_IN == 0


def source_files(root: Path) -> list[str]:
    """Returns the sorted paths, relative to `root` and with slashes, of all files that count."""
    paths = [path.relative_to(root) for path in root.rglob("*.py")]
    return sorted(path.as_posix() for path in paths if LEFT_OUT.isdisjoint(path.parts))


def read_corpus(root: Path | None = None) -> Corpus:
    """Reads every source file below `root`, by default this Python's standard library.

    Raises:
        RuntimeError: There is no text, as where Python comes without its sources.
    """
    root = Path(sysconfig.get_paths()["stdlib"]) if root is None else root
    training, held_out = bytearray(), bytearray()
    for path in source_files(root):
        text = held_out if is_held_out(path) else training
        text += START_OF_FILE + (root / path).read_bytes()
    if not training or not held_out:
        raise RuntimeError(
            f"expected *.py files in {str(root)!r}, found {len(training)} bytes to train on and "
            f"{len(held_out)} to hold out: use a Python that has the sources of its library"
        )
    return Corpus(
        torch.frombuffer(training, dtype=torch.uint8),
        torch.frombuffer(held_out, dtype=torch.uint8),
    )


def training_batch(text: Tensor, *, step: int, seed: int, sequences: int, length: int) -> Tensor:
    """Returns the batch of one step over all ranks.

    It is a function of the seed and the step, so any number of ranks can resume at any step.

    Args:
        text: 1-D uint8.
        step: Counted from 0.
        seed: Of the whole run.
        sequences: B, over all ranks.
        length: T, bytes to predict in a sequence.

    Returns:
        (B, T + 1) int64: inputs are [:, :-1], targets are [:, 1:].
    """
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    starts = torch.randint(len(text) - length, (sequences, 1), generator=generator)
    return text[starts + torch.arange(length + 1)].long()


def spread_windows(text: Tensor, *, count: int, length: int) -> Tensor:
    """Returns windows at equal distances over the text, (count, length + 1) int64.

    Raises:
        ValueError: They would overlap.
    """
    if count * (length + 1) > len(text):
        raise ValueError(
            f"expected at least {count * (length + 1)} bytes for {count} windows of {length + 1}, "
            f"got {len(text)!r}: ask for fewer or shorter windows"
        )
    starts = torch.arange(count)[:, None] * (len(text) // count)
    return text[starts + torch.arange(length + 1)].long()


class ByteModel:
    """Counts which byte follows which `order` bytes.

    A context seen rarely leans on the next shorter one. With b a byte, c the context, c' the
    context without its first byte, n() counts in the text and s the strength:

        P(b | c) = (n(c, b) + s * P(b | c')) / (n(c) + s),    P(b) from the uniform 1 / 256

    References: MacKay and Peto 1995, "A hierarchical Dirichlet language model".

    Args:
        text: 1-D uint8, longer than `order`.
        order: 0 to 2; the table has 256 ** (order + 1) entries.
        strength: How many observations the shorter context is worth.

    Raises:
        ValueError: `order` is outside 0..2.

    Attributes:
        probabilities: (256,) * (order + 1) float32; the last axis is the next byte.
    """

    def __init__(self, text: Tensor, *, order: int, strength: float = 16.0) -> None:
        if order not in (0, 1, 2):
            raise ValueError(f"expected order 0, 1 or 2, got {order!r}: longer tables do not fit")
        self.order = order
        self.shorter = ByteModel(text, order=order - 1, strength=strength) if order else None
        prior = self.shorter.probabilities if self.shorter else torch.full((256,), 1 / 256)
        runs = text.unfold(0, order + 1, 1).T.long()  # (order + 1, N - order): context, next byte
        index = sum(row * 256**i for i, row in enumerate(reversed(runs)))  # base 256
        counts = torch.bincount(index, minlength=256 ** (order + 1)).view((256,) * (order + 1))
        totals = counts.sum(dim=-1, keepdim=True)
        self.probabilities = (counts + strength * prior) / (totals + strength)

    def bits(self, windows: Tensor) -> float:
        """Returns the mean bits a byte over bytes 1 to L - 1 of (N, L) windows.

        As for a GPT, what came before the window is unknown: the second byte of a window has a
        context of one byte.
        """
        return -self.predictions(windows).double().log2().mean().item()

    def predictions(self, windows: Tensor) -> Tensor:
        """Returns the probabilities given to bytes 1 to L - 1 of (N, L) windows, (N, L - 1)."""
        runs = windows.unfold(1, self.order + 1, 1)  # (N, L - order, order + 1)
        known = self.probabilities[runs.unbind(-1)]  # (N, L - order)
        if self.shorter is None:
            return known[:, 1:]
        return torch.cat((self.shorter.predictions(windows[:, : self.order]), known), dim=1)
