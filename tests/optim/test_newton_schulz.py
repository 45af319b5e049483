"""Newton-Schulz: torch's bits in bfloat16, the right matrix in float32, and an input left alone."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.optim._muon import _zeropower_via_newtonschulz
from torch.utils.flop_counter import FlopCounterMode

from vfsdp_optim.newton_schulz import (
    ALGORITHMS,
    COEFFICIENTS,
    coefficient_schedule,
    gram_segments,
    newton_schulz_cost,
    orthogonalize,
)

KELLER = (3.4445, -4.7750, 2.0315)
sizes = st.integers(1, 24)
seeds = st.integers(0, 2**32 - 1)


def random_matrix(rows: int, cols: int, seed: int, dtype: torch.dtype = torch.float32):
    return torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed)).to(dtype)


@given(rows=sizes, cols=sizes, seed=seeds, steps=st.integers(0, 6), logscale=st.integers(-6, 6))
def test_orthogonalize_in_bfloat16_has_torchs_bits(rows, cols, seed, steps, logscale):
    x = random_matrix(rows, cols, seed) * 10.0**logscale
    expected = _zeropower_via_newtonschulz(x.clone(), KELLER, steps, 1e-7)
    assert torch.equal(orthogonalize(x, steps=steps), expected)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("name", COEFFICIENTS)
@given(rows=sizes, cols=sizes, seed=seeds)
def test_orthogonalize_applies_the_polynomial_to_singular_values(algorithm, name, rows, cols, seed):
    x = random_matrix(rows, cols, seed)
    u, s, vt = torch.linalg.svd(x.double(), full_matrices=False)
    s = s / s.norm()
    for a, b, c in coefficient_schedule(name, 5):
        s = a * s + b * s**3 + c * s**5
    expected = ((u * s) @ vt).float()
    actual = orthogonalize(x, coefficients=name, dtype=torch.float32, algorithm=algorithm)
    # The polynomials have slopes up to 8.2 at 0: five steps amplify float32's 6e-8 by 1e3; squared
    # in a Gram matrix, where it meets the slope of a zero singular value, by 1e5.
    torch.testing.assert_close(actual, expected, atol=3e-4, rtol=0)


def with_condition(rows: int, cols: int, condition: float) -> tuple[Tensor, Tensor]:
    """A matrix with singular values from 1 down, and its polar factor by construction."""
    short = min(rows, cols)
    left, right = (
        torch.linalg.qr(random_matrix(n, short, seed=n, dtype=torch.float64)).Q
        for n in (rows, cols)
    )
    values = condition ** -torch.linspace(0, 1, short, dtype=torch.float64)
    return (left * values) @ right.T, left @ right.T


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("name", COEFFICIENTS)
def test_gram_is_as_near_the_polar_factor_as_standard(name, dtype):
    # Without restarts, rounded eigenvalues below 0 grow 12-fold a step in half precision.
    schedule = coefficient_schedule(name, 5)
    for shape in ((24, 96), (96, 24), (48, 80)):
        for condition in (1e2, 1e4, 1e6):
            x, factor = with_condition(*shape, condition)
            exact = torch.linalg.svdvals(x / x.norm())
            for a, b, c in schedule:
                exact = a * exact + b * exact**3 + c * exact**5
            errors = []
            for algorithm in ALGORITHMS:
                y = orthogonalize(x, coefficients=name, dtype=dtype, algorithm=algorithm)
                assert torch.linalg.svdvals(y.double()).max() <= 1.02 * exact.max()
                errors.append((y.double() - factor).norm())
            assert errors[1] <= 1.1 * errors[0], (shape, condition, errors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gram_normalizes_before_it_rounds_to_half_precision(dtype):
    # DeepSpeed casts to float16 first: of elements of 1e-8 all but 0.3 % are zeros.
    x = random_matrix(8, 40, seed=0, dtype=dtype)
    expected = orthogonalize(x, algorithm="gram")
    assert torch.equal(orthogonalize(x * 2.0**-40, algorithm="gram"), expected)
    assert expected.norm() > 2


def test_gram_restarts_where_rounding_errors_would_be_seen():
    def lengths(name: str, steps: int, dtype: torch.dtype) -> list[int]:
        return [len(s) for s in gram_segments(coefficient_schedule(name, steps), dtype)]

    # The source restarts after the second of five steps of Polar Express in float16.
    assert lengths("polar_express", 5, torch.float16) == [2, 3]
    assert lengths("keller", 5, torch.float16) == [3, 2]
    assert lengths("keller", 5, torch.float32) == [5]
    assert lengths("keller", 0, torch.float32) == []
    assert sum(lengths("keller", 30, torch.float32)) == 30


def test_polar_express_repeats_its_last_triple_and_keeps_its_order():
    triples = coefficient_schedule("polar_express", 11)
    assert triples[7:] == ((1.875, -1.25, 0.375),) * 4
    assert triples[0] == pytest.approx((8.2051605, -22.9019, 16.460724), rel=1e-5)
    assert coefficient_schedule("polar_express", 5) == triples[:5]


def test_unknown_algorithm_is_an_error():
    with pytest.raises(ValueError, match=r"ns_algorithm: expected one of .*'gram'.*got 'fast'"):
        orthogonalize(torch.zeros(2, 3), algorithm="fast")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(5, 9), (9, 5), (1, 7), (7, 1)])
def test_orthogonalize_leaves_its_input_alone(dtype, shape):
    # torch normalizes a bfloat16 momentum buffer in place: pytorch#190597, pytorch#194664
    x = random_matrix(*shape, seed=0, dtype=dtype)
    before = x.clone()
    orthogonalize(x, dtype=dtype)
    assert torch.equal(x, before)


@given(rows=sizes, cols=sizes, seed=seeds)
def test_orthogonalize_does_not_depend_on_how_the_input_lies_in_memory(rows, cols, seed):
    x = random_matrix(rows, cols, seed)
    expected = orthogonalize(x, dtype=torch.float32)
    wide = torch.zeros(rows, cols + 3)
    wide[:, 1 : cols + 1] = x
    shifted = torch.cat([torch.zeros(1), x.flatten()])[1:].view(rows, cols)
    for other in (x.T.contiguous().T, wide[:, 1 : cols + 1], shifted):
        assert torch.equal(orthogonalize(other, dtype=torch.float32), expected)


def test_orthogonalize_takes_one_triple_a_step():
    x = random_matrix(6, 8, seed=1)
    one_by_one = orthogonalize(x, coefficients=(KELLER,) * 3, steps=3, dtype=torch.float32)
    assert torch.equal(one_by_one, orthogonalize(x, steps=3, dtype=torch.float32))
    other = orthogonalize(x, coefficients=(KELLER, KELLER, (2.0, -1.5, 0.5)), steps=3,
                          dtype=torch.float32)  # fmt: skip
    assert not torch.equal(one_by_one, other)


def test_orthogonalize_refuses_a_stack_of_matrices():
    with pytest.raises(ValueError, match=r"2 dims, got shape \(2, 3, 4\)"):
        orthogonalize(torch.zeros(2, 3, 4))


@pytest.mark.parametrize(
    ("coefficients", "steps", "fact"),
    [
        ("quintic", 4, "ns_steps=5"),
        ("unknown", 5, "'unknown'"),
        ((1.0, 2.0), 5, r"\(1\.0, 2\.0\)"),
        ((KELLER, (1.0, 2.0)), 2, r"\(1\.0, 2\.0\)"),
        (KELLER, 100, "got 100"),
        (KELLER, -1, "got -1"),
    ],
)
def test_coefficients_that_do_not_fit_are_an_error(coefficients, steps, fact):
    # A list whose length silently overrides ns_steps is a fault of another library.
    with pytest.raises(ValueError, match=fact):
        coefficient_schedule(coefficients, steps)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cost_counts_the_products_of_a_step(algorithm, dtype):
    for name in COEFFICIENTS:
        schedule = coefficient_schedule(name, 5)
        for shape in ((3, 4), (10, 3), (7, 7), (5, 60)):
            with FlopCounterMode(display=False) as counter:
                orthogonalize(
                    torch.ones(shape), coefficients=name, algorithm=algorithm, dtype=dtype
                )
            cost = newton_schulz_cost(*shape, schedule, algorithm, dtype)
            assert 2 * cost == counter.get_total_flops()


shapes_and_seeds = {
    "rows": st.integers(1, 30),
    "cols": st.integers(1, 30),
    "seed": st.integers(0, 2**31),
}


def drawn(rows: int, cols: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Normal numbers, some rows and elements far smaller than others."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, cols, generator=generator)
    x *= 10.0 ** torch.randint(-12, 1, (rows, 1), generator=generator)
    return x.to(dtype)


@given(**shapes_and_seeds, exponent=st.integers(-18, 55))
def test_scale_that_is_taken_out_changes_no_bit_where_torch_is_right(rows, cols, seed, exponent):
    # Between torch's eps and the overflow of its norm; subnormals of the quotient included.
    x = drawn(rows, cols, seed)
    x = x / x.abs().max() * 2.0**exponent
    expected = _zeropower_via_newtonschulz(x.clone(), KELLER, 5, 1e-7)
    assert torch.equal(orthogonalize(x), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.float16])
@pytest.mark.parametrize("computed", [torch.bfloat16, torch.float32, torch.float64, torch.float16])
@given(**shapes_and_seeds, exponent=st.integers(-100, 95))
def test_result_does_not_depend_on_the_scale_of_the_gradient(
    dtype, computed, rows, cols, seed, exponent
):
    # At 1e-11 of the usual norm torch's update is a tenth too small, at 1e20 it is NaN.
    if computed == torch.float16 and dtype == torch.float64:
        exponent = 8 * exponent
    x = torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed)).to(dtype)
    if dtype == torch.float16:
        exponent = exponent % 12  # what float16 has room for without losing bits
    expected = orthogonalize(x, dtype=computed)
    assert torch.equal(orthogonalize(x * 2.0**exponent, dtype=computed), expected)
    assert expected.isfinite().all()


@pytest.mark.parametrize("scale", [1e-30, 1e-20, 1e-10, 1e10, 1e20, 1e30, 3e38])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_update_of_muon_has_its_size_from_the_smallest_to_the_largest_gradient(scale, dtype):
    # megatron-lm#5394 and KellerJordan/Muon: below eps the update shrinks with the gradient.
    grad = torch.randn(8, 12, generator=torch.Generator().manual_seed(0))
    grad = grad / grad.abs().max()
    updates = []
    for factor in (1.0, scale):
        update = orthogonalize((grad * factor).to(dtype), dtype=dtype)
        assert update.isfinite().all()
        updates.append(update.float())
    # 1e-30 is no power of two: the elements are rounded anew.
    torch.testing.assert_close(updates[0], updates[1], rtol=0, atol=5e-2)


@pytest.mark.parametrize("eps", [0.0, 1e-7, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_zero_gradient_gives_a_zero_update(eps, dtype):
    update = orthogonalize(torch.zeros(5, 3), eps=eps, dtype=dtype)
    assert torch.equal(update, torch.zeros(5, 3, dtype=dtype))


@pytest.mark.parametrize("value", [2.0**-149, 2.0**-126, 3.4e38, -3.4e38])
def test_extreme_finite_matrix_never_gives_nan(value):
    for shape in ((1, 1), (4, 6), (6, 4)):
        for dtype in (torch.bfloat16, torch.float32):
            update = orthogonalize(torch.full(shape, value), dtype=dtype).float()
            assert update.isfinite().all()
            assert update.norm() > 0.5


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_nonfinite_matrix_gives_nan_and_no_plausible_update(value):
    x = torch.ones(4, 6)
    x[1, 2] = value
    assert orthogonalize(x).isnan().any()


def test_memory_that_is_given_is_used_and_gives_the_same_bits():
    taken: dict[tuple[str, torch.dtype], Tensor] = {}

    def take(numel: int, dtype: torch.dtype, device: torch.device, name: str) -> Tensor:
        assert taken.setdefault((name, dtype), torch.empty(300, dtype=dtype)).numel() >= numel
        return taken[name, dtype][:numel].fill_(torch.nan)

    for rows, cols in ((12, 24), (24, 12), (7, 7)):
        x = drawn(rows, cols, 1)
        for dtype in (torch.float32, torch.bfloat16):
            for steps, algorithm in itertools.product((0, 1, 4, 5), ALGORITHMS):
                own = orthogonalize(x, dtype=dtype, steps=steps, algorithm=algorithm)
                options = dict(dtype=dtype, steps=steps, algorithm=algorithm, take=take)
                result = orthogonalize(x, **options)
                assert torch.equal(own, result)
                memory = [t.untyped_storage().data_ptr() for t in taken.values()]
                assert result.untyped_storage().data_ptr() in memory
