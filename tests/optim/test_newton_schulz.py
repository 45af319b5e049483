"""Newton-Schulz: torch's bits in bfloat16, the right matrix in float32, and an input left alone."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim._muon import _zeropower_via_newtonschulz

from vfsdp_optim.newton_schulz import (
    COEFFICIENTS,
    coefficient_schedule,
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


@pytest.mark.parametrize("name", ["keller5", "you5"])
@given(rows=sizes, cols=sizes, seed=seeds)
def test_orthogonalize_applies_the_polynomial_to_singular_values(name, rows, cols, seed):
    x = random_matrix(rows, cols, seed)
    u, s, vt = torch.linalg.svd(x.double(), full_matrices=False)
    s = s / s.norm()
    for a, b, c in (COEFFICIENTS[name] * 5)[:5]:
        s = a * s + b * s**3 + c * s**5
    expected = ((u * s) @ vt).float()
    actual = orthogonalize(x, coefficients=name, dtype=torch.float32)
    # The polynomials have slopes up to 4.1 at 0, so that five steps amplify float32's 6e-8 by 1e3.
    torch.testing.assert_close(actual, expected, atol=3e-4, rtol=0)


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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_orthogonalize_of_zero_is_zero(dtype):
    assert not orthogonalize(torch.zeros(4, 6), dtype=dtype).any()


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
        ("you5", 4, "ns_steps=5"),
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


def test_cost_counts_the_products_of_a_step():
    # (s, l) (l, s), (s, s) (s, s), (s, s) (s, l)
    short, long = 3, 10
    step = short * long * short + short**3 + short * short * long
    assert newton_schulz_cost(short, long, 5) == newton_schulz_cost(long, short, 5) == 5 * step
