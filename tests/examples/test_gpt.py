"""Tests of the example's model: what it may look at, where it starts, and how it writes."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from examples.gpt import GPT, GPTConfig, generate, rotary_table, rotate

CONFIG = GPTConfig(layers=2, width=16, heads=2, context=12)


def trained_model() -> GPT:
    """Returns a model whose layers do something: at initialisation they add nothing."""
    torch.manual_seed(0)
    model = GPT(CONFIG)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model


def random_tokens(seed: int, length: int = CONFIG.context) -> torch.Tensor:
    """Returns (3, length) random bytes."""
    return torch.randint(256, (3, length), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("position", [0, 5, 11])
def test_gpt_sees_no_future_bytes(position: int) -> None:
    model, tokens = trained_model(), random_tokens(1)
    changed = tokens.clone()
    changed[:, position] = (changed[:, position] + 1) % 256
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(after[:, :position], before[:, :position])
    # All positions from there on do see it.
    assert (after[:, position:] - before[:, position:]).abs().amax(-1).min() > 1e-3


def test_gpt_knows_the_order_of_bytes() -> None:
    model, tokens = trained_model(), random_tokens(2)
    swapped = tokens[:, [1, 0, *range(2, CONFIG.context)]]
    assert (model(tokens)[:, -1] - model(swapped)[:, -1]).abs().max() > 1e-3


def test_rotary_positions_make_products_depend_on_the_distance() -> None:
    cos, sin = rotary_table(20, 8)
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 8, generator=generator)
    turned_q, turned_k = rotate(q.expand(20, 8), cos, sin), rotate(k.expand(20, 8), cos, sin)
    products = turned_q @ turned_k.T  # (20, 20): q at row, k at column
    for distance in range(-19, 20):
        diagonal = products.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), atol=1e-5, rtol=0)
    assert products[0].std() > 1e-2


def test_gpt_refuses_more_than_its_context() -> None:
    with pytest.raises(ValueError, match=r"at most 12 .*got 13"):
        GPT(CONFIG)(random_tokens(4, length=13))


def test_config_refuses_a_width_that_heads_cannot_share() -> None:
    with pytest.raises(ValueError, match=r"2 \* heads = 6, got 16"):
        GPTConfig(layers=1, width=16, heads=3, context=8)


def test_generate_keeps_the_prompt_and_repeats_for_a_seed() -> None:
    model = trained_model()
    prompt = random_tokens(5, length=4)[0]
    first = generate(model, prompt, 20, context=CONFIG.context, seed=7)
    torch.manual_seed(123)  # must not matter: ranks may differ in it
    assert torch.equal(first, generate(model, prompt, 20, context=CONFIG.context, seed=7))
    assert not torch.equal(first, generate(model, prompt, 20, context=CONFIG.context, seed=8))
    assert torch.equal(first[:4], prompt)
    assert first.shape == (24,)


def test_generate_writes_what_the_model_predicts() -> None:
    class Successor(nn.Module):
        """Predicts the byte after the last one with certainty."""

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return 1000.0 * F.one_hot((tokens + 1) % 256, 256)

    written = generate(Successor(), torch.tensor([254]), 4, context=3)
    assert written.tolist() == [254, 255, 0, 1, 2]
