"""Numbers as 8-bit codes in blocks of 256 with an fp32 scale each: maps and an exact quantizer.

The formats are those of bitsandbytes (`DynamicMap`), so that its kernels and checkpoints can be
used; the maps are computed here and tested to be the same. One specification for every device:

- A block is 256 consecutive elements; its scale `absmax` is the largest magnitude in it. An element
  decodes to `map[code] * absmax`, rounded once.
- An element x becomes the code whose map value is nearest to x / absmax (rounded once to fp32);
  in a tie, the smaller of the two.
- Signed map: a quotient below zero never becomes zero or positive, but may become the largest
  negative value of the map; one above zero never becomes negative, but may become zero.
- Unsigned map: in a block with an element that is not zero every code is at least 1. A second
  moment that vanishes beside a first moment that does not would make a step of m / eps.
- A block of zeros has absmax 0, and decodes to zeros whatever its codes are.
- A block with a NaN or an infinity decodes to what is not finite.

Touches the tensors it is handed; keeps tables per device.
"""

import hashlib
from functools import cache

import torch
from torch import Tensor

from vfsdp_optim.states.scratch import Scratch

BLOCK = 256  # elements; the only size of bitsandbytes' optimizer kernels
VERSION = 1  # of the format, in checkpoints
_EXPONENTS = 7  # decades of a map below 1
_HALF = 1 << 16  # values of the upper half of a float32


class DynamicMap:
    """256 increasing fp32 values, and the tables by which a number finds the nearest.

    Seven decades, 10^(i - 7) to 10^(i - 6) for i = 0 ... 6, are cut into 2^i intervals each (twice
    as many if unsigned) whose midpoints are the values; with their negatives if signed, 0 and 1.

    The quantizer does not search. The upper 16 bits of a float32 (sign, exponent, 7 bits of the
    mantissa) index a table. Between -1 and 1 no such range of numbers meets more than two codes,
    and which of them a number has follows from its lower 16 bits: one addition carries into the
    upper half where they pass the bound between the codes. The entries also cancel what the upper
    bits of the number add. A negative number has larger lower bits where its code is smaller, so
    what is found is the code with its sign, and no sum leaves the range of int32.

    Codes are decoded two at a time.

    Attributes:
        signed: whether there are negative values.
        values: (256,) float32.
        bounds: (256,) float32: a number above bounds[c] has a code above c; the last is infinite.
        entries: (65536,) int32, by the upper 16 bits, which count from the sign bit alone on (a NaN
            has any sign): plus a number's bits, 2^16 times its code, and less than 2^16 more.
        pairs: (65536,) int64: the bits of two values, by two codes as they lie in memory.
        zero: the code of zeros in a block that has other numbers too.

    References:
        Dettmers et al. 2022, arXiv:2110.02861, section 2.1 and appendix F.
    """

    def __init__(self, signed: bool, device: torch.device | str = "cpu") -> None:
        self.signed = signed
        values = _VALUES[signed]
        bounds = _bounds(values, signed)
        self.zero = int(torch.bucketize(bounds.new_zeros(()), bounds[:-1]))
        made = values, bounds, _entries(bounds, self.zero), _pairs(values)
        self.values, self.bounds, self.entries, self.pairs = (x.to(device) for x in made)

    def encode(self, x: Tensor, codes: Tensor, absmax: Tensor, scratch: Scratch) -> None:
        """Write the codes and scales of `x`; `x` is overwritten.

        Args:
            x: (256 n,) float32, contiguous, not negative if the map is unsigned.
            codes: (256 n,) uint8, written.
            absmax: (n,) float32, written.
            scratch: working memory, 8 bytes an element of `x`.
        """
        blocks, bits = x.view(-1, BLOCK), x.view(torch.int32)
        index = scratch.take(x.numel(), torch.int32, x.device, "codec")
        magnitudes = blocks
        if self.signed:
            magnitudes = torch.abs(blocks, out=index.view(torch.float32).view(-1, BLOCK))
        torch.amax(magnitudes, dim=1, out=absmax)
        # Among zeros alone 0 / 0 makes NaN, whose code is that of zero.
        blocks.div_(absmax.unsqueeze(1))
        torch.bitwise_right_shift(bits, 16, out=index)
        index.add_(_HALF // 2)  # the sign bit was copied: no negative index
        found = scratch.take(x.numel(), torch.int32, x.device, "codec entries")
        torch.index_select(self.entries, 0, index, out=found)
        codes.copy_(found.add_(bits).bitwise_right_shift_(16).abs_())

    def decode(self, codes: Tensor, absmax: Tensor, out: Tensor, scratch: Scratch) -> None:
        """Write the numbers that codes (256 n,) and scales (n,) stand for to `out`, (256 n,)
        float32."""
        pairs = codes.view(torch.uint16)
        index = scratch.take(pairs.numel(), torch.int32, codes.device, "codec").copy_(pairs)
        torch.index_select(self.pairs, 0, index, out=out.view(torch.int64))
        out.view(-1, BLOCK).mul_(absmax.unsqueeze(1))


@cache
def dynamic_map(signed: bool, device: torch.device) -> DynamicMap:
    """Return the map of a device, made once."""
    return DynamicMap(signed, device)


def block_count(numel: int) -> int:
    """Return how many blocks `numel` elements fill, the last one perhaps in part."""
    return -(-numel // BLOCK)


def _map_values(signed: bool) -> Tensor:
    # Devices and dtypes are said: scripts and contexts change the defaults.
    values = [torch.tensor([0.0, 1.0], dtype=torch.float32, device="cpu")]
    for i in range(_EXPONENTS):
        intervals = 2**i if signed else 2 ** (i + 1)
        edges = torch.linspace(0.1, 1.0, intervals + 1, dtype=torch.float32, device="cpu")
        decade = (edges[:-1] + edges[1:]) / 2 * 10 ** (i + 1 - _EXPONENTS)
        values += [decade, -decade] if signed else [decade]
    return torch.cat(values).sort().values


# Made on import, where no context replaces tensors by others without values.
_VALUES = {signed: _map_values(signed) for signed in (True, False)}


def _format_text() -> str:
    maps = b"".join(values.numpy().tobytes() for values in _VALUES.values())
    digest = hashlib.sha256(maps).hexdigest()[:16]
    return f"dynamic8 version {VERSION}, blocks of {BLOCK}, maps {digest}"


# What a checkpoint says about its codes: format, version, block and hash of the maps.
CODES_FORMAT = _format_text()


def _bounds(values: Tensor, signed: bool) -> Tensor:
    """Return, for each code, the largest float32 that it or a smaller code is nearest to."""
    exact = (values[:-1].double() + values[1:].double()) / 2
    bounds = exact.float()
    # A float32 is above the exact midpoint where it is above its rounding toward minus infinity.
    too_high = bounds.double() > exact
    bounds[too_high] = torch.nextafter(bounds, torch.full_like(bounds, -torch.inf))[too_high]
    if signed:
        zero = int((values == 0).nonzero())
        bounds[zero - 1] = torch.nextafter(values[zero], values[0])
    else:
        bounds[0] = -torch.inf
    return torch.cat([bounds, bounds.new_full((1,), torch.inf)])


def _entries(bounds: Tensor, zero: int) -> Tensor:
    """Return `DynamicMap.entries`."""
    halves = torch.arange(-_HALF // 2, _HALF // 2, dtype=torch.int64, device=bounds.device)
    negative = halves < 0
    # The smallest numbers with these upper bits: the lower ones take a negative one further down.
    numbers = _floats((halves << 16) + torch.where(negative, _HALF - 1, 0))
    codes = torch.bucketize(numbers, bounds[:-1])  # bounds < number
    # A NaN has a sign that depends on how it came about.
    codes[numbers.isnan()] = zero
    bits = bounds[codes].view(torch.int32).to(torch.int64)
    low = bits & (_HALF - 1)
    cut = (bits >> 16 == halves) & bounds[codes].isfinite()  # whether there are two codes
    above = torch.where(cut, (codes << 16) + (_HALF - 1 - low), codes << 16)
    below = torch.where(cut, (-(codes + 1) << 16) + (_HALF - low), -codes << 16)
    return (torch.where(negative, below, above) - (halves << 16)).to(torch.int32)


def _floats(bits: Tensor) -> Tensor:
    """Return float32 with these bits, signed int64."""
    return bits.to(torch.int32).view(torch.float32)


def _pairs(values: Tensor) -> Tensor:
    """Return `DynamicMap.pairs`."""
    codes = torch.arange(_HALF, dtype=torch.int32, device=values.device).to(torch.uint16)
    return values[codes.view(torch.uint8).long()].view(torch.int64)
