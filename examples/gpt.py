"""A small GPT over bytes, to be read from top to bottom. Pure torch: knows no shards, no optimizer.

The choices are nanochat's (https://github.com/karpathy/nanochat/blob/master/nanochat/gpt.py) on a
CPU's scale: rotary positions, normalised queries and keys, squared-ReLU MLP, no biases, an output
head that is not tied to the embedding.

Letters in shapes: B sequences, T positions, D width, H heads, K width of a head, V = 256 bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 256


@dataclass(frozen=True, slots=True)
class GPTConfig:
    """The size of a model.

    Attributes:
        layers: How many blocks.
        width: D, of the residual stream.
        heads: H; `width` is a multiple of `2 * heads`, since rotary positions turn pairs.
        context: How many bytes the model can look back on.

    Raises:
        ValueError: `width` is no multiple of `2 * heads`.
    """

    layers: int
    width: int
    heads: int
    context: int

    def __post_init__(self) -> None:
        if self.width % (2 * self.heads):
            raise ValueError(
                f"expected width to be a multiple of 2 * heads = {2 * self.heads}, "
                f"got {self.width!r}: change width or heads"
            )


class Attention(nn.Module):
    """Causal self-attention: position t sees positions 0 to t.

    Queries, keys and values have a matrix each, because Muon orthogonalizes matrix by matrix.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.query = nn.Linear(config.width, config.width, bias=False)
        self.key = nn.Linear(config.width, config.width, bias=False)
        self.value = nn.Linear(config.width, config.width, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Maps (B, T, D) to (B, T, D); `cos` and `sin` come from `rotary_table`."""
        q, k, v = (
            linear(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)  # (B, H, T, K)
            for linear in (self.query, self.key, self.value)
        )
        # Normalised, q and k bound the attention logits: high learning rates stay stable
        # (arXiv:2302.05442, section 2).
        q, k = normalise(rotate(q, cos, sin)), normalise(rotate(k, cos, sin))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # (B, H, T, K)
        return self.out(y.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """Two matrices and a squared ReLU (Primer, arXiv:2109.08668) for each position on its own."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.width, 4 * config.width, bias=False)
        self.down = nn.Linear(4 * config.width, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Maps (B, T, D) to (B, T, D)."""
        return self.down(F.relu(self.up(x)).square())


class Block(nn.Module):
    """One layer. Both parts read a normalised residual stream and add to it."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.width)
        self.attention = Attention(config)
        self.mlp_norm = nn.RMSNorm(config.width)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Maps (B, T, D) to (B, T, D)."""
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.mlp(self.mlp_norm(x))


class GPT(nn.Module):
    """Bytes in, logits of the next byte out. Initialised from torch's global generator."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(VOCABULARY, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width)
        self.head = nn.Linear(config.width, VOCABULARY, bias=False)
        cos, sin = rotary_table(config.context, config.width // config.heads)
        self.register_buffer("cos", cos, persistent=False)  # (context, K / 2)
        self.register_buffer("sin", sin, persistent=False)  # (context, K / 2)
        self.apply(self._initialise)

    @staticmethod
    def _initialise(module: nn.Module) -> None:
        """Starts all layers as "add nothing" and the head as "any byte", as nanochat does."""
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=module.in_features**-0.5)
        if isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight)
        if isinstance(module, Attention):
            nn.init.zeros_(module.out.weight)
        if isinstance(module, MLP):
            nn.init.zeros_(module.down.weight)
        if isinstance(module, GPT):  # `apply` visits children first: these are the last word
            nn.init.normal_(module.head.weight, std=0.001)

    def forward(self, tokens: Tensor) -> Tensor:
        """Predicts the byte after each position.

        Args:
            tokens: (B, T) int64 in 0..255, T at most `config.context`.

        Returns:
            (B, T, V) float32 logits; those at position t depend on bytes 0 to t only.

        Raises:
            ValueError: T is larger than the context.
        """
        length = tokens.shape[1]
        if length > self.config.context:
            raise ValueError(
                f"expected at most {self.config.context} bytes, the context of this model, "
                f"got {length!r}: pass the last ones only"
            )
        cos, sin = self.cos[:length], self.sin[:length]
        x = normalise(self.embedding(tokens))  # (B, T, D)
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.head(self.norm(x)).float()


def rotary_table(context: int, width: int) -> tuple[Tensor, Tensor]:
    """Returns cos and sin, (context, width / 2) each, of every position's angles.

    References: RoFormer, arXiv:2104.09864, section 3.2.2.
    """
    frequencies = 10_000.0 ** (-torch.arange(0, width, 2) / width)  # (width / 2)
    angles = torch.arange(context)[:, None] * frequencies  # (context, width / 2)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns the pairs (x[i], x[i + K / 2]) of (B, H, T, K) by the angles of their positions."""
    a, b = x.chunk(2, dim=-1)  # (B, H, T, K / 2)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)


def normalise(x: Tensor) -> Tensor:
    """Scales the last axis to a root mean square of 1; has no gain to learn."""
    return F.rms_norm(x, x.shape[-1:])


@torch.no_grad()
def generate(
    model: nn.Module,
    prompt: Tensor,
    count: int,
    *,
    context: int,
    temperature: float = 0.8,
    seed: int = 0,
) -> Tensor:
    """Samples `count` bytes after a prompt.

    Every rank of a sharded model calls it alike. They all draw the same bytes: draws depend on
    `seed` and the logits only.

    Args:
        model: Maps (1, T) tokens to (1, T, V) logits.
        prompt: (T,) int64, at least one byte.
        count: Bytes to add.
        context: How many of the last bytes the model is shown.
        temperature: Divides the logits; below 1 prefers likely bytes.
        seed: Of the draws.

    Returns:
        (T + count,) int64, on the prompt's device.
    """
    generator = torch.Generator().manual_seed(seed)
    tokens = prompt
    for _ in range(count):
        logits = model(tokens[None, -context:])[0, -1]  # (V,)
        probabilities = (logits / temperature).softmax(dim=-1).cpu()
        drawn = torch.multinomial(probabilities, 1, generator=generator)  # (1,)
        tokens = torch.cat((tokens, drawn.to(tokens.device)))
    return tokens
