"""The optimizers compute what the specification says: float64 against plain full matrices."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from vfsdp_optim import AdamW, Muon
from vfsdp_optim.testing import oracle


def random(shape, seed) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).double()


def train(make_optimizer, x: Tensor, gradients: list[Tensor | None]):
    """Return the parameter and the optimizer's state after all steps."""
    p = nn.Parameter(x.clone())
    optimizer = make_optimizer([p])
    for gradient in gradients:
        p.grad = gradient
        optimizer.step()
    return p.detach(), optimizer.state[p]


def draw_gradients(shape, seed, missing) -> list[Tensor | None]:
    return [None if step == missing else random(shape, seed + step) for step in range(1, 6)]


@given(
    shape=st.sampled_from([(7,), (3, 5), ()]),
    seed=st.integers(0, 1000),
    betas=st.sampled_from([(0.9, 0.999), (0.0, 0.5)]),
    weight_decay=st.sampled_from([0.0, 0.3]),
    missing=st.integers(1, 7),
)
def test_adamw_is_what_the_oracle_says(shape, seed, betas, weight_decay, missing):
    options = dict(lr=0.1, betas=betas, weight_decay=weight_decay, eps=1e-6)
    x, gradients = random(shape, seed), draw_gradients(shape, seed, missing)
    expected, mean, square = oracle.adamw(x, gradients, **options)
    actual, state = train(lambda params: AdamW(params, **options), x, gradients)
    # Rounding of float64, in another order.
    torch.testing.assert_close(actual, expected, atol=1e-12, rtol=1e-10)
    torch.testing.assert_close(state["exp_avg"], mean, atol=1e-14, rtol=1e-10)
    torch.testing.assert_close(state["exp_avg_sq"], square, atol=1e-14, rtol=1e-10)
    # torch's own is the same function.
    theirs, _ = train(lambda params: torch.optim.AdamW(params, **options), x, gradients)
    torch.testing.assert_close(theirs, expected, atol=1e-12, rtol=1e-10)


@given(
    shape=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    seed=st.integers(0, 1000),
    nesterov=st.booleans(),
    match_rms_adamw=st.booleans(),
    missing=st.integers(1, 7),
)
def test_muon_is_what_the_oracle_says(shape, seed, nesterov, match_rms_adamw, missing):
    options = dict(lr=0.1, weight_decay=0.3, momentum=0.8, nesterov=nesterov)
    x, gradients = random(shape, seed), draw_gradients(shape, seed, missing)
    expected, momentum = oracle.muon(x, gradients, **options, match_rms_adamw=match_rms_adamw)
    adjust = "match_rms_adamw" if match_rms_adamw else "original"
    actual, state = train(
        lambda params: Muon(params, **options, adjust_lr_fn=adjust, ns_dtype=torch.float64),
        x,
        gradients,
    )
    torch.testing.assert_close(state["momentum_buffer"], momentum, atol=1e-14, rtol=1e-10)
    # Matrices travel in float32 (6e-8 of their norm); five Newton-Schulz steps amplify what is
    # small by up to 3.4445**5 = 485, then lr = 0.1 and a scale of at most 3, five times.
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("shape", [(6, 6), (4, 9), (9, 4)])
def test_oracle_brings_singular_values_near_one(shape):
    values = torch.linalg.svdvals(oracle.reference_orthogonalize(random(shape, 0)))
    assert values.min() > 0.6
    assert values.max() < 1.3
