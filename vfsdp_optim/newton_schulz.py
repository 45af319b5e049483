"""Newton-Schulz orthogonalization of one matrix, and what it costs. Pure math on plain tensors."""

from collections.abc import Callable

import torch
from torch import Tensor

Coefficients = tuple[float, float, float]

# One triple (a, b, c) is one step: x <- a x + (b A + c A^2) x with A = x x^T.
COEFFICIENTS: dict[str, tuple[Coefficients, ...]] = {
    # Keller Jordan, https://kellerjordan.github.io/posts/muon/ ; the same triple in every step.
    # https://github.com/KellerJordan/Muon/blob/f90a42b28e00b8d9d2d05865fe90d9f39abcbcbd/muon.py#L16
    "keller5": ((3.4445, -4.7750, 2.0315),),
    # You Jiacheng, https://x.com/YouJiacheng/status/1905861218138804534 ; one triple for each of 5
    # steps.
    "you5": (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
}

# Elements before the norm is taken are brought to this power of two. Their squares neither
# overflow nor vanish, whatever the shape, and what is small beside the largest stays exact.
_LARGEST = 30
# float16 ends at 2^16; there only the quotient by the norm, at most 1, is safe.
_LARGEST_HALF = 0


def coefficient_schedule(
    coefficients: str | Coefficients | tuple[Coefficients, ...], steps: int
) -> tuple[Coefficients, ...]:
    """Return the triple of every step.

    Args:
        coefficients: a name in `COEFFICIENTS`, one triple for all steps, or one triple a step.
        steps: number of steps, below 100 as in torch.

    Raises:
        ValueError: an unknown name, something that is no triple, or another number of triples than
            of steps.
    """
    if not isinstance(steps, int) or not 0 <= steps < 100:
        raise ValueError(f"ns_steps: expected a whole number from 0 to 99, got {steps!r}")
    if isinstance(coefficients, str):
        if coefficients not in COEFFICIENTS:
            raise ValueError(
                f"ns_coefficients: expected one of {sorted(COEFFICIENTS)}, got {coefficients!r}"
            )
        triples = COEFFICIENTS[coefficients]
    elif not isinstance(coefficients, tuple | list):
        triples = (coefficients,)  # refused below
    elif len(coefficients) == 3 and all(isinstance(x, int | float) for x in coefficients):
        triples = (coefficients,)  # type: ignore[assignment]
    else:
        triples = tuple(coefficients)  # type: ignore[arg-type]
    if not all(isinstance(t, tuple | list) and len(t) == 3 for t in triples):
        raise ValueError(
            f"ns_coefficients: expected (a, b, c), or one such triple a step, got {coefficients!r}"
        )
    schedule = tuple((float(a), float(b), float(c)) for a, b, c in triples)
    if len(schedule) == 1:
        return schedule * steps
    if len(schedule) != steps:
        raise ValueError(
            f"ns_coefficients: {len(schedule)} triples were given for ns_steps={steps!r}; "
            f"use ns_steps={len(schedule)}, or a single triple"
        )
    return schedule


def orthogonalize(
    x: Tensor,  # (m, n)
    *,
    coefficients: str | Coefficients | tuple[Coefficients, ...] = "keller5",
    steps: int = 5,
    eps: float = 1e-7,
    dtype: torch.dtype = torch.bfloat16,
    take: Callable[[int, torch.dtype, torch.device, str], Tensor] | None = None,
) -> Tensor:
    """Return a matrix near U V^T of x = U S V^T: every singular value is brought close to 1.

    The operations and their order are those of torch.optim.Muon, so that with
    `dtype=torch.bfloat16` the result has the same bits. They are preceded by a multiplication by a
    power of two, which brings the largest element to about 1e9: it changes no bit of the result
    where torch's norm neither underflows, overflows nor falls below `eps`, and makes the result
    independent of the scale of `x` everywhere else. The work happens on a row-major copy: `x` keeps
    its values whatever its dtype (torch normalizes a bfloat16 momentum buffer in place,
    pytorch#190597), and the result does not depend on how `x` lies in memory. Nothing is read on
    the host.

    Args:
        x: (m, n), any floating dtype and strides.
        coefficients: see `coefficient_schedule`.
        steps: number of Newton-Schulz steps.
        eps: smallest norm that x is divided by, after its scale is removed: it matters to zeros
            alone, whose result is zero.
        dtype: dtype of the computation and of the result.
        take: (elements, dtype, device, name) to 1-D memory for intermediate values and the result,
            other memory for every name; None allocates.

    Returns:
        (m, n) in `dtype`, a transposed view if m > n.

    Raises:
        ValueError: `x` has not 2 dims, or the coefficients do not fit the steps.

    References:
        Jordan 2024, https://kellerjordan.github.io/posts/muon/
    """
    if x.ndim != 2:
        raise ValueError(f"x: expected a matrix with 2 dims, got shape {tuple(x.shape)!r}")
    schedule = coefficient_schedule(coefficients, steps)

    if x.numel() == 0:
        return x.to(dtype, copy=True)

    def matrix(name: str, rows: int, cols: int) -> Tensor:
        if take is None:
            return torch.empty(rows, cols, dtype=dtype, device=x.device)
        return take(rows * cols, dtype, x.device, name).view(rows, cols)

    y = _without_scale(x, out=matrix("even", *x.shape))
    tall = x.size(0) > x.size(1)
    if tall:
        y = y.T
    smallest = max(eps, torch.finfo(dtype).tiny)
    y.div_(y.norm().clamp(min=smallest))  # a spectral norm of at most 1
    short, long = y.shape
    gram, polynomial = matrix("gram", short, short), matrix("polynomial", short, short)
    for step, (a, b, c) in enumerate(schedule):
        torch.mm(y, y.T, out=gram)
        torch.addmm(gram, gram, gram, beta=b, alpha=c, out=polynomial)
        out = matrix("even" if step % 2 else "odd", short, long)
        y = torch.addmm(y, polynomial, y, beta=a, out=out)
    return y.T if tall else y


def _without_scale(x: Tensor, out: Tensor) -> Tensor:
    """Write x times a power of two to `out`: finite, with the largest element near 2^30.

    The factor is made of two: 2^160, which brings up the smallest float32, is itself no float32.
    """
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    lowest, highest = torch.aminmax(x)  # one pass without a copy, unlike x.abs()
    largest = torch.maximum(-lowest, highest).to(wide)  # ()
    target = _LARGEST_HALF if out.dtype == torch.float16 else _LARGEST
    exponent = target - torch.frexp(largest).exponent
    half = exponent // 2
    first, second = _power_of_two(half, wide), _power_of_two(exponent - half, wide)
    if {x.dtype, out.dtype} <= {torch.bfloat16, torch.float32} or x.dtype == out.dtype == wide:
        return torch.mul(x, first, out=out).mul_(second)
    return out.copy_(x.to(wide).mul(first).mul_(second))  # one of them has not the range


def _power_of_two(exponent: Tensor, dtype: torch.dtype) -> Tensor:
    """Return 2^exponent exactly, from its bits; `exponent` is 0-dim int32, the result normal."""
    if dtype == torch.float64:
        return ((exponent.long() + 1023) << 52).view(dtype)
    return ((exponent + 127) << 23).view(dtype)


def newton_schulz_cost(rows: int, cols: int, steps: int) -> int:
    """Return the multiply-adds of `orthogonalize`: two products with the long side and one without,
    a step.

    Example:
        >>> newton_schulz_cost(4, 8, steps=5)
        1600
    """
    short, long = min(rows, cols), max(rows, cols)
    return steps * short * short * (2 * long + short)
