"""The 8-bit codec: bitsandbytes' formats, an exact quantizer, rules where rounding would hurt."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from vfsdp_optim.states.block_codec import BLOCK, CODES_FORMAT, DynamicMap
from vfsdp_optim.states.scratch import Scratch
from vfsdp_optim.testing.oracle import decode_blocks, encode_blocks

SIGNED, UNSIGNED = DynamicMap(True), DynamicMap(False)
KINDS = pytest.mark.parametrize("codec", [SIGNED, UNSIGNED], ids=["signed", "unsigned"])


@pytest.fixture(scope="module")
def functional():
    """The functions of bitsandbytes, whose import takes seconds."""
    import bitsandbytes.functional

    return bitsandbytes.functional


def encode(codec: DynamicMap, x: Tensor) -> tuple[Tensor, Tensor]:
    codes, absmax = torch.empty(x.shape, dtype=torch.uint8), torch.empty(x.numel() // BLOCK)
    codec.encode(x.clone(), codes, absmax, Scratch())
    return codes, absmax


def decode(codec: DynamicMap, codes: Tensor, absmax: Tensor) -> Tensor:
    out = torch.empty(codes.shape)
    codec.decode(codes, absmax, out, Scratch())
    return out


def round_trip(codec: DynamicMap, x: Tensor) -> Tensor:
    return decode(codec, *encode(codec, x))


def floats(bits: Tensor) -> Tensor:
    """float32 with these int64 bit patterns."""
    return torch.where(bits >= 1 << 31, bits - (1 << 32), bits).to(torch.int32).view(torch.float32)


@KINDS
def test_codec_has_the_map_of_bitsandbytes(codec, functional):
    assert torch.equal(codec.values, functional.create_dynamic_map(codec.signed))


@KINDS
def test_codec_decodes_all_codes_as_bitsandbytes_does(codec, functional):
    codes = torch.arange(256, dtype=torch.uint8).repeat(40)
    absmax = torch.logspace(-38, 38, 40)
    expected = torch.ops.bitsandbytes.dequantize_blockwise(
        codes, absmax, codec.values, BLOCK, torch.float32
    )
    assert torch.equal(decode(codec, codes, absmax), expected)


def test_codec_names_its_format():
    # Written into checkpoints: another text would make all of them unreadable.
    assert CODES_FORMAT == "dynamic8 version 1, blocks of 256, maps ff5a4c58a17762b2"


@KINDS
@given(
    seed=st.integers(0, 10**6),
    spread=st.sampled_from([0.0, 1.0, 4.0, 12.0]),
    scale=st.sampled_from([1e-42, 1e-38, 1e-20, 1.0, 1e15]),
    zeros=st.sampled_from([0.0, 0.5, 1.0]),
)
def test_codec_is_the_brute_force_nearest(codec, seed, spread, scale, zeros):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(2, BLOCK, generator=generator)
    x *= torch.exp(spread * torch.randn(2, BLOCK, generator=generator).clamp(-4, 4)) * scale
    x[torch.rand(x.shape, generator=generator) < zeros] = 0
    x = x if codec.signed else x.abs()
    codes, absmax = encode(codec, x.view(-1))
    expected = encode_blocks(x, codec.values)
    assert torch.equal(codes.view(2, BLOCK), expected[0])
    assert torch.equal(absmax, expected[1])
    numbers = decode(codec, codes, absmax)
    assert torch.equal(numbers, decode_blocks(*expected, codec.values).view(-1))


@KINDS
def test_codec_decides_every_bound_exactly(codec):
    """The numbers on both sides of each midpoint, and all float32 with few mantissa bits."""
    bounds = codec.bounds[:-1]
    bounds = bounds[bounds.isfinite()]
    around = torch.cat([torch.nextafter(bounds, torch.full((), x)) for x in (-9.0, 9.0)])
    halves = floats(torch.arange(1 << 16) << 16)
    numbers = torch.cat([bounds, around, halves[halves.abs() <= 1]])
    numbers = numbers if codec.signed else numbers[numbers >= 0]
    numbers = torch.cat([numbers, numbers.new_zeros(-len(numbers) % (BLOCK - 1))])
    x = torch.cat([numbers.view(-1, BLOCK - 1), torch.ones(len(numbers) // (BLOCK - 1), 1)], dim=1)
    codes, absmax = encode(codec, x.view(-1))
    assert bool((absmax == 1).all())
    distance = (codec.values.double() - numbers.double()[:, None]).abs()  # (numbers, 256)
    nearest = distance.argmin(dim=1)
    if codec.signed:
        nearest -= ((numbers < 0) & (codec.values[nearest] >= 0)).long()
    else:
        nearest.clamp_(min=1)
    assert torch.equal(codes.view(-1, BLOCK)[:, :-1].reshape(-1).long(), nearest)


@KINDS
def test_codec_table_leaves_one_comparison(codec):
    """No numbers in [-1, 1] that share their upper 16 bits have more than two codes."""
    halves = torch.arange(1 << 16)
    ends = torch.stack([floats(halves << 16), floats((halves << 16) + 0xFFFF)])
    ends = ends[:, (ends.abs() <= 1).all(0) & ((ends >= 0) | codec.signed).all(0)]
    codes = torch.bucketize(ends, codec.bounds[:-1])
    assert int((codes[0] - codes[1]).abs().max()) == 1


@KINDS
def test_codec_keeps_blocks_of_zeros_and_their_neighbours_apart(codec):
    x = torch.zeros(3 * BLOCK)
    x[BLOCK : 2 * BLOCK] = 5.0
    numbers = round_trip(codec, x)
    assert torch.equal(numbers, x)
    zero = torch.zeros(BLOCK, dtype=torch.uint8)  # codes of a state that was never written
    assert not decode(codec, zero, torch.zeros(1)).any()


def test_codec_keeps_signs_beside_one_huge_element():
    x = torch.randn(BLOCK, generator=torch.Generator().manual_seed(0))
    for huge in (1e3, 1e6, 1e12, 1e30):
        for sign in (1.0, -1.0):
            x[7] = huge * sign
            numbers = round_trip(SIGNED, x)
            assert bool((numbers[x < 0] < 0).all())
            assert bool((numbers[x > 0] >= 0).all())  # may become zero, as in bitsandbytes


def test_codec_moves_no_zero_of_the_signed_map():
    """bitsandbytes' CPU quantizer makes 2e-5 of the block's largest of it."""
    x = torch.randn(4 * BLOCK, generator=torch.Generator().manual_seed(0))
    x[::3] = 0.0
    x[1::3] *= -0.0
    assert not round_trip(SIGNED, x)[::3].any()
    assert not round_trip(SIGNED, x)[1::3].any()


def test_codec_makes_no_zero_of_a_second_moment_beside_larger_ones():
    x = torch.full((BLOCK,), 1e-30)
    x[3] = 1.0
    codes, _ = encode(UNSIGNED, x)
    assert int(codes.min()) == 1
    assert bool((round_trip(UNSIGNED, x) > 0).all())


@KINDS
@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
def test_codec_keeps_a_nan_or_an_infinity_in_its_block(codec, bad):
    x = torch.ones(3 * BLOCK)
    x[BLOCK + 9] = bad
    codes, absmax = encode(codec, x)
    numbers = decode(codec, codes, absmax).view(3, BLOCK)
    assert not numbers[1].isfinite().any()
    assert torch.equal(numbers[[0, 2]], torch.ones(2, BLOCK))
    # A NaN has a sign that depends on how it came about; the codes must not.
    assert torch.equal(encode(codec, -x if codec.signed else x)[0][BLOCK : BLOCK + 9],
                       codes[BLOCK : BLOCK + 9])  # fmt: skip


@KINDS
def test_codec_rounds_to_within_half_a_step(codec):
    x = torch.randn(64 * BLOCK, generator=torch.Generator().manual_seed(0))
    x = x if codec.signed else x.abs()
    error = (round_trip(codec, x) - x).abs().view(-1, BLOCK) / x.view(-1, BLOCK).abs().amax(1)[
        :, None
    ]
    gaps = codec.values.diff()
    assert float(error.max()) <= float(gaps.max()) / 2 * (1 + 1e-5)
    relative = (round_trip(codec, x) - x).norm() / x.norm()
    assert float(relative) < (0.015 if codec.signed else 0.008)


@KINDS
def test_codec_does_not_depend_on_torchs_defaults(codec):
    """Scripts set a default dtype and device, and build models on the meta device."""
    try:
        torch.set_default_dtype(torch.bfloat16)
        with torch.device("meta"):
            other = DynamicMap(codec.signed)
    finally:
        torch.set_default_dtype(torch.float32)
    for name in ("values", "bounds", "entries", "pairs"):
        assert torch.equal(getattr(other, name), getattr(codec, name))
