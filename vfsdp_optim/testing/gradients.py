"""Full gradients by step and parameter: every rank, and the unsharded run, compute the same ones.

Touches no device and no process group; draws from generators of its own.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# (step from 1, name of the parameter, its full shape) -> full gradient, or None for none.
Gradients = Callable[[int, str, torch.Size], Tensor | None]

KINDS = ("random", "sparse", "zero", "missing", "tiny", "huge", "overflow")


@dataclass(frozen=True, slots=True)
class GradientStream:
    """Gradients that follow from kind and seed alone.

    Attributes:
        kind: "random": standard normal. "sparse": about three of four rows are zero. "zero": all
            zero. "missing": `None` in about two of five cases. "tiny", "huge": standard normal
            times 1e-30 or 1e15, where norms under- and overflow. "overflow": one element of about
            every other parameter is infinite or NaN.
        seed: any integer.

    Raises:
        ValueError: there is no such kind.
    """

    kind: str = "random"
    seed: int = 0

    def __post_init__(self) -> None:
        """Check the kind."""
        if self.kind not in KINDS:
            raise ValueError(f"gradients: expected one of {KINDS} or a callable, got {self.kind!r}")

    def __call__(self, step: int, name: str, shape: Sequence[int]) -> Tensor | None:
        """Return the float32 gradient of a parameter in a step, or None."""
        generator = seeded(self.seed, step, name)
        if self.kind == "zero":
            return torch.zeros(tuple(shape), device="cpu")
        x = torch.randn(tuple(shape), generator=generator, device="cpu")
        chance = torch.rand((), generator=generator, device="cpu").item()
        if self.kind == "missing":
            return None if chance < 0.4 else x
        if self.kind == "sparse":
            numbers = torch.rand(x.shape[:1], generator=generator, device="cpu")
            rows = numbers < 0.25  # (rows,), or () of 0-D
            return x * rows.view(x.shape[:1] + (1,) * max(x.dim() - 1, 0))
        if self.kind == "overflow" and chance < 0.5 and x.numel():
            where = int(torch.randint(x.numel(), (), generator=generator, device="cpu"))
            x.view(-1)[where] = float("inf") if chance < 0.25 else float("nan")
        return x * {"tiny": 1e-30, "huge": 1e15}.get(self.kind, 1.0)


def as_gradients(gradients: "str | Gradients", seed: int = 0) -> Gradients:
    """Return a callable for what the user passed: the name of a kind, or a callable."""
    return GradientStream(gradients, seed) if isinstance(gradients, str) else gradients


def seeded(*key: object) -> torch.Generator:
    """Return a generator whose draws follow from `key` alone, in every process."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=7).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "big"))
