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
    mantissa) index a table of codes. Between -1 and 1 no such range of numbers meets more than two
    codes, so that one comparison with the upper bound of the table's code decides.

    Attributes:
        signed: whether there are negative values.
        values: (256,) float32.
        bounds: (256,) float32: a number above bounds[c] has a code above c; the last is infinite.
        codes: (65536,) uint8: the smallest code of the numbers with these upper bits, which count
            from the sign bit alone on (a NaN has any sign).
        uppers: (65536,) float32: `bounds` of `codes`.
        zero: the code of zeros in a block that has other numbers too.

    References:
        Dettmers et al. 2022, arXiv:2110.02861, section 2.1 and appendix F.
    """

    def __init__(self, signed: bool, device: torch.device | str = "cpu") -> None:
        self.signed = signed
        values = _VALUES[signed]
        bounds = _bounds(values, signed)
        codes = _codes_of_halves(bounds)
        self.zero = int(codes[_HALF // 2])
        self.values, self.bounds, self.codes = (x.to(device) for x in (values, bounds, codes))
        self.uppers = self.bounds[self.codes.long()]

    def encode(self, x: Tensor, codes: Tensor, absmax: Tensor, scratch: Scratch) -> None:
        """Write the codes and scales of `x`; `x` is overwritten.

        Args:
            x: (256 n,) float32, contiguous.
            codes: (256 n,) uint8, written.
            absmax: (n,) float32, written.
            scratch: working memory, 13 bytes an element of `x`.
        """
        blocks = x.view(-1, BLOCK)
        torch.amax(blocks.abs(), dim=1, out=absmax)
        blocks.div_(absmax.masked_fill(absmax == 0, 1.0).unsqueeze(1))
        narrow = scratch.take(x.numel(), torch.int32, x.device, "codec")
        torch.bitwise_right_shift(x.view(torch.int32), 16, out=narrow)
        narrow.add_(_HALF // 2)  # the sign bit was copied: no negative index
        index = scratch.take(x.numel(), torch.int64, x.device, "codec")
        index.copy_(narrow)
        torch.index_select(self.codes, 0, index, out=codes)
        uppers = narrow.view(torch.float32)
        torch.index_select(self.uppers, 0, index, out=uppers)
        above = scratch.take(x.numel(), torch.bool, x.device, "codec")
        codes.add_(torch.gt(x, uppers, out=above).view(torch.uint8))

    def decode(self, codes: Tensor, absmax: Tensor, out: Tensor, scratch: Scratch) -> None:
        """Write the numbers that codes (256 n,) and scales (n,) stand for to `out`, (256 n,)
        float32."""
        index = scratch.take(codes.numel(), torch.int64, codes.device, "codec").copy_(codes)
        torch.index_select(self.values, 0, index, out=out)
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


def _codes_of_halves(bounds: Tensor) -> Tensor:
    """Return the smallest code of all float32 with the same upper 16 bits, in [-1, 1]."""
    halves = torch.arange(_HALF, dtype=torch.int64, device=bounds.device)
    negative = halves >= _HALF // 2
    # The lower bits take a negative number further down.
    lowest = (halves << 16) + torch.where(negative, 0xFFFF, 0)
    signed_bits = torch.where(lowest >= 1 << 31, lowest - (1 << 32), lowest).to(torch.int32)
    numbers = signed_bits.view(torch.float32)
    codes = torch.bucketize(numbers, bounds[:-1])  # bounds < number, as in `encode`
    # A NaN has a sign that depends on how it came about.
    codes[numbers.isnan()] = int(torch.bucketize(bounds.new_zeros(()), bounds[:-1]))
    return codes.roll(_HALF // 2).to(torch.uint8)
