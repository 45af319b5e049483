"""What each optimizer computes, written plainly on full matrices: the specification to read.

Pure maths, in float64. No states, groups, shards or dtypes: one parameter, all its gradients, the
result. The optimizers do the same with less memory and in another order. The 8-bit codec is in
float32, because its result is a matter of bits.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

KELLER = (3.4445, -4.7750, 2.0315)  # https://kellerjordan.github.io/posts/muon/


def adamw(
    x: Tensor,
    gradients: Iterable[Tensor | None],
    *,
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the parameter, the mean of gradients and the mean of their squares after all steps.

    References:
        Loshchilov and Hutter 2019, arXiv:1711.05101, algorithm 2, with torch's decay: scaled by lr.
    """
    x, m, v = x.double(), torch.zeros_like(x).double(), torch.zeros_like(x).double()
    step = 0
    for g in gradients:
        if g is None:  # nothing happens: no decay, no count
            continue
        step += 1
        g = g.double()
        m = betas[0] * m + (1 - betas[0]) * g
        v = betas[1] * v + (1 - betas[1]) * g**2
        mean, square = m / (1 - betas[0] ** step), v / (1 - betas[1] ** step)
        x = x - lr * weight_decay * x - lr * mean / (square.sqrt() + eps)
    return x, m, v


def muon(
    x: Tensor,
    gradients: Iterable[Tensor | None],
    *,
    lr: float = 1e-3,
    weight_decay: float = 0.1,
    momentum: float = 0.95,
    nesterov: bool = True,
    coefficients: Sequence[tuple[float, float, float]] = (KELLER,) * 5,
    eps: float = 1e-7,
    match_rms_adamw: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return the parameter (m, n) and the momentum after all steps.

    References:
        Jordan 2024, https://kellerjordan.github.io/posts/muon/ ; torch.optim.Muon; for
        `match_rms_adamw`, Liu et al. 2025, arXiv:2502.16982, section 2.2.
    """
    rows, cols = x.shape
    scale = 0.2 * max(rows, cols) ** 0.5 if match_rms_adamw else max(1, rows / cols) ** 0.5
    x, b = x.double(), torch.zeros_like(x).double()
    for g in gradients:
        if g is None:
            continue
        g = g.double()
        b = momentum * b + (1 - momentum) * g
        update = momentum * b + (1 - momentum) * g if nesterov else b
        x = (
            x
            - lr * weight_decay * x
            - lr * scale * reference_orthogonalize(update, coefficients, eps)
        )
    return x, b


def reference_orthogonalize(
    x: Tensor, coefficients: Sequence[tuple[float, float, float]] = (KELLER,) * 5, eps: float = 1e-7
) -> Tensor:
    """Return about U V^T for x = U S V^T: each step maps the singular values s, scaled to a sum of
    squares of 1, to a s + b s^3 + c s^5."""
    x = x.double() / x.double().norm().clamp(min=eps)
    for a, b, c in coefficients:
        x = a * x + b * x @ x.T @ x + c * x @ x.T @ x @ x.T @ x
    return x


def encode_blocks(x: Tensor, values: Tensor, *, block: int = 256) -> tuple[Tensor, Tensor]:
    """Return codes (n, block) and scales (n,) of the finite numbers x (n, block) in 8 bits.

    Each number, over the largest magnitude of its block, becomes the nearest of `values`, the
    smaller one in a tie. With negative values, what is negative stays so; without, what is in a
    block of larger numbers does not become 0.

    Args:
        x: float32.
        values: (256,) float32, increasing.
        block: elements with one scale.

    References:
        Dettmers et al. 2022, arXiv:2110.02861; bitsandbytes 0.50.2, csrc/kernels.cu
        (kOptimizerStatic8bit2StateBlockwise) for the sign rule.
    """
    signed = bool(values[0] < 0)
    codes = torch.empty(x.shape, dtype=torch.uint8, device="cpu")
    scales = torch.empty(len(x), dtype=torch.float32, device="cpu")
    for i, numbers in enumerate(x):
        scales[i] = largest = numbers.abs().max()
        ratios = numbers / largest if largest > 0 else numbers
        for j, ratio in enumerate(ratios):
            code = int((values.double() - ratio.double()).abs().argmin())  # the first of equals
            if signed and ratio < 0 and values[code] >= 0:
                code -= 1
            codes[i, j] = code if signed else max(code, 1)
    return codes, scales


def decode_blocks(codes: Tensor, scales: Tensor, values: Tensor) -> Tensor:
    """Return the numbers (n, block) that `encode_blocks` rounded to."""
    return values[codes.long()] * scales[:, None]
