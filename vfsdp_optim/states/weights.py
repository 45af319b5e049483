"""How an update in fp32 reaches parameters of fewer bits: rounded, through a master copy, or by
chance.

Touches the tensors it is handed; communicates nothing.

[Note: random rounding]
The random bits of an element are a hash of (name of its parameter, its index in the flattened
parameter, the parameter's step, which update of the step), so they are the same at every world
size, in every layout and after every restart, and nothing has to be saved: SplitMix64 (Steele et
al. 2014, doi:10.1145/2660193.2660195), started at a hash of all but the index, and read at the
index.
"""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from vfsdp_optim.states.scratch import Scratch

MASTER = "master"  # key of the state

_LOW_BITS = 1 << 16  # values of what bfloat16 cuts off a float32


@dataclass(frozen=True, slots=True)
class Place:
    """Which elements some numbers are.

    Attributes:
        start: position of the first among the numbers.
        numel: how many.
        stream: hash of what they have in common; see [Note: random rounding].
        first: index of the first in the flattened parameter.
    """

    start: int
    numel: int
    stream: int
    first: int


class WeightRule(ABC):
    """What is updated in the place of a parameter, and how the parameter follows.

    Attributes:
        draws: whether `close` reads places.
    """

    draws: ClassVar[bool] = False

    @abstractmethod
    def open(self, param: Tensor, master: Tensor | None, scratch: Scratch) -> Tensor:
        """Return the numbers to update, 1-D as `param` is."""

    @abstractmethod
    def close(
        self, param: Tensor, numbers: Tensor, places: Sequence[Place], scratch: Scratch
    ) -> None:
        """Write the parameter from the updated result of `open`."""


class InPlace(WeightRule):
    """The parameter itself is updated."""

    def open(self, param: Tensor, master: Tensor | None, scratch: Scratch) -> Tensor:
        """Return the parameter."""
        return param

    def close(
        self, param: Tensor, numbers: Tensor, places: Sequence[Place], scratch: Scratch
    ) -> None:
        """Do nothing."""


class MasterCopy(WeightRule):
    """An fp32 copy is updated; the parameter is its rounding.

    Where it is not, somebody wrote the parameter since (the first step, a loaded model), and what
    was written counts.
    """

    def open(self, param: Tensor, master: Tensor | None, scratch: Scratch) -> Tensor:
        """Return the copy, brought up to date with the parameter."""
        if master is None:
            raise RuntimeError("expected a master copy")  # the optimizer makes the state
        unchanged = param == master.to(param.dtype)
        return torch.where(unchanged, master, param, out=master)

    def close(
        self, param: Tensor, numbers: Tensor, places: Sequence[Place], scratch: Scratch
    ) -> None:
        """Round to nearest."""
        param.copy_(numbers)


class RandomRounding(WeightRule):
    """A bfloat16 parameter is updated in fp32 and rounded up or down by chance, in proportion to
    the distance, so that the mean of many roundings is the number. See [Note: random rounding]."""

    draws = True

    def open(self, param: Tensor, master: Tensor | None, scratch: Scratch) -> Tensor:
        """Return an fp32 copy."""
        return scratch.take(param.numel(), torch.float32, param.device, "weights").copy_(param)

    def close(
        self, param: Tensor, numbers: Tensor, places: Sequence[Place], scratch: Scratch
    ) -> None:
        """Round by chance; infinities and NaN stay what they are."""
        noise = scratch.take(param.numel(), torch.int64, param.device, "weights")
        noise.zero_()  # between the places lies padding
        for place in places:
            random_bits(place, noise[place.start : place.start + place.numel])
        noise.masked_fill_(~numbers.isfinite(), 0)
        bits = numbers.view(torch.int32)
        bits.add_(noise).bitwise_and_(-_LOW_BITS)
        param.copy_(numbers)


def stream_of(fqn: str, step: float, update: int) -> int:
    """Return a 64-bit hash of a parameter's name, its step and the number of the update in it."""
    text = f"{fqn}\0{int(step)}\0{update}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little", signed=True)


def random_bits(place: Place, out: Tensor) -> None:
    """Write 16 random bits for each element of a place to `out`, (numel,) int64."""
    torch.arange(place.first, place.first + place.numel, out=out, device=out.device)
    out.mul_(_signed(0x9E3779B97F4A7C15)).add_(place.stream)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        out.bitwise_xor_(_shifted(out, shift)).mul_(_signed(factor))
    # SplitMix64 ends with another shift and xor, which leave the upper bits as they are.
    out.bitwise_right_shift_(48).bitwise_and_(_LOW_BITS - 1)


def _shifted(x: Tensor, shift: int) -> Tensor:
    """Return int64 shifted right with zeros, as if unsigned."""
    return (x >> shift).bitwise_and_((1 << 64 - shift) - 1)


def _signed(x: int) -> int:
    return x - (1 << 64) if x >> 63 else x
