"""Newton-Schulz orthogonalization of one matrix, and what it costs. Pure math on plain tensors."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Coefficients = tuple[float, float, float]

# One triple (a, b, c) is one step: x <- a x + (b A + c A^2) x with A = x x^T.
COEFFICIENTS: dict[str, tuple[Coefficients, ...]] = {
    # Keller Jordan, https://kellerjordan.github.io/posts/muon/ ; the same triple in every step.
    # https://github.com/KellerJordan/Muon/blob/f90a42b28e00b8d9d2d05865fe90d9f39abcbcbd/muon.py#L16
    "keller": ((3.4445, -4.7750, 2.0315),),
    # You Jiacheng, https://x.com/YouJiacheng/status/1905861218138804534 ; one triple for each of 5
    # steps.
    "quintic": (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
    # Amsel et al. 2025, arXiv:2505.16932, algorithm 1, without its safety factor; the best
    # polynomial for what the ones before leave of [0.001, 1]. More steps repeat the last triple.
    "polar_express": (
        (8.28721201814563, -23.595886519098837, 17.300387312530933),
        (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
        (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
        (3.3184196573706015, -2.488488024314874, 0.51004894012372),
        (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
        (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
        (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
        (1.875, -1.25, 0.375),
    ),
}
# What a singular value may be above 1 by rounding, in units of 1: the paper's. All but the last
# polynomial are stretched by it; its division of the norm by the same is left out, since the first
# polynomial allows for it already.
_POLAR_SAFETY = 1.01

ALGORITHMS = ("standard", "gram")

# How large the error of a Gram matrix may grow, beside its largest eigenvalue of about 1, before it
# is computed anew.
_GRAM_ERROR = 0.1

# Elements before the norm is taken are brought to this power of two. Their squares neither
# overflow nor vanish, whatever the shape, and what is small beside the largest stays exact.
_LARGEST = 30
# float16 ends at 2^16; there only the quotient by the norm, at most 1, is safe.
_LARGEST_HALF = 0


def coefficient_schedule(
    coefficients: str | Coefficients | Sequence[Coefficients], steps: int
) -> tuple[Coefficients, ...]:
    """Return the triple of every step.

    Args:
        coefficients: a name in `COEFFICIENTS`, one triple for all steps, or one triple a step.
            "quintic" has 5 steps, "polar_express" any number.
        steps: number of steps, below 100 as in torch.

    Raises:
        ValueError: an unknown name, something that is no triple, or another number of triples than
            of steps.
    """
    if not isinstance(steps, int) or not 0 <= steps < 100:
        raise ValueError(f"ns_steps: expected a whole number from 0 to 99, got {steps!r}")
    triples: Sequence[Any]
    if isinstance(coefficients, str):
        if coefficients not in COEFFICIENTS:
            raise ValueError(
                f"ns_coefficients: expected one of {sorted(COEFFICIENTS)}, got {coefficients!r}"
            )
        if coefficients == "polar_express":
            return _polar_express(steps)
        triples = COEFFICIENTS[coefficients]
    elif not isinstance(coefficients, tuple | list):
        triples = (coefficients,)  # refused below
    elif len(coefficients) == 3 and all(isinstance(x, int | float) for x in coefficients):
        triples = (coefficients,)
    else:
        triples = tuple(coefficients)
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


def _polar_express(steps: int) -> tuple[Coefficients, ...]:
    table = COEFFICIENTS["polar_express"]
    safe = [(a / _POLAR_SAFETY, b / _POLAR_SAFETY**3, c / _POLAR_SAFETY**5) for a, b, c in table]
    return (*safe[:-1], *table[-1:] * steps)[:steps]


def gram_segments(
    schedule: Sequence[Coefficients], dtype: torch.dtype
) -> tuple[tuple[Coefficients, ...], ...]:
    """Return the steps of Gram iteration that share one Gram matrix, restart by restart.

    A step maps a small eigenvalue e of the Gram matrix to about a^2 e, and its rounding error with
    it, whose sign is free: where it grew far enough, small singular values would diverge. So the
    matrix is computed anew before that.

    Args:
        schedule: the triple of every step.
        dtype: of the products.

    Example:
        >>> [len(s) for s in gram_segments(coefficient_schedule("polar_express", 5), torch.float16)]
        [2, 3]
    """
    segments: list[list[Coefficients]] = []
    error = torch.inf
    for step, triple in enumerate(schedule):
        if step:
            error *= schedule[step - 1][0] ** 2
        if error > _GRAM_ERROR:
            segments.append([])
            error = torch.finfo(dtype).eps / 2
        segments[-1].append(triple)
    return tuple(tuple(segment) for segment in segments)


def gram_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the products of Gram iteration: float16 for bfloat16, which has too few
    digits to iterate twice; elements are at most about 1."""
    return torch.float16 if dtype == torch.bfloat16 else dtype


def orthogonalize(
    x: Tensor,  # (m, n)
    *,
    coefficients: str | Coefficients | Sequence[Coefficients] = "keller",
    steps: int = 5,
    algorithm: str = "standard",
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
        algorithm: "standard", or "gram": iterate on the Gram matrix of the short side, which takes
            fewer products with the long side, wherever these are fewer multiply-adds (from about
            1.5 : 1 on). The polynomials and their order are the same. The norm is that in float32,
            and bfloat16 is computed in float16.
        eps: smallest norm that x is divided by, after its scale is removed: it matters to zeros
            alone, whose result is zero.
        dtype: dtype of the computation and of the result.
        take: (elements, dtype, device, name) to 1-D memory for intermediate values and the result,
            other memory for every name; None allocates.

    Returns:
        (m, n) in `dtype`, a transposed view if m > n.

    Raises:
        ValueError: `x` has not 2 dims, an unknown algorithm, or the coefficients do not fit the
            steps.

    References:
        Jordan 2024, https://kellerjordan.github.io/posts/muon/ ; Dao-AILab 2026,
        https://github.com/Dao-AILab/gram-newton-schulz (gram, with restarts).
    """
    if x.ndim != 2:
        raise ValueError(f"x: expected a matrix with 2 dims, got shape {tuple(x.shape)!r}")
    schedule = coefficient_schedule(coefficients, steps)

    if x.numel() == 0:
        return x.to(dtype, copy=True)

    def matrix(name: str, rows: int, cols: int, dtype: torch.dtype = dtype) -> Tensor:
        if take is None:
            return torch.empty(rows, cols, dtype=dtype, device=x.device)
        return take(rows * cols, dtype, x.device, name).view(rows, cols)

    if _uses_gram(algorithm, x.size(0), x.size(1), schedule, dtype):
        return _iterate_on_gram(x, schedule, eps, dtype, matrix)
    tall = x.size(0) > x.size(1)
    y = _normalized(x, matrix("even", *x.shape), eps)
    y = _iterate(y.T if tall else y, schedule, matrix)
    return y.T if tall else y


def _normalized(x: Tensor, out: Tensor, eps: float) -> Tensor:
    """Write x over its norm to `out`: a spectral norm of at most 1."""
    out = _without_scale(x, out)
    return out.div_(out.norm().clamp(min=max(eps, torch.finfo(out.dtype).tiny)))


def _iterate(y: Tensor, schedule: Sequence[Coefficients], matrix: Callable[..., Tensor]) -> Tensor:
    short, long = y.shape
    gram, polynomial = matrix("gram", short, short), matrix("polynomial", short, short)
    for step, (a, b, c) in enumerate(schedule):
        torch.mm(y, y.T, out=gram)
        torch.addmm(gram, gram, gram, beta=b, alpha=c, out=polynomial)
        out = matrix("even" if step % 2 else "odd", short, long)
        y = torch.addmm(y, polynomial, y, beta=a, out=out)
    return y


def _iterate_on_gram(
    x: Tensor,
    schedule: Sequence[Coefficients],
    eps: float,
    dtype: torch.dtype,
    matrix: Callable[..., Tensor],
) -> Tensor:
    """Return the same by G = y y^T alone: all steps of a segment are one product Q y, where a step
    P = a + b G + c G^2 makes P Q of Q and P G P of G, all of which commute."""
    computed = gram_dtype(dtype)
    # Half precision begins after the division: elements of 1e-8 are zeros there.
    wide = torch.float32 if computed == torch.float16 else computed
    y = _normalized(x, matrix("even", *x.shape, wide), eps)
    if computed != wide:
        y = matrix("even", *x.shape, computed).copy_(y)
    tall = x.size(0) > x.size(1)
    y = y.T if tall else y
    short, long = y.shape
    names = iter(["odd", "even"] * len(schedule))

    def square(name: str) -> Tensor:
        return matrix(name, short, short, computed)

    for segment in gram_segments(schedule, computed):
        gram, other = square("gram"), square("other gram")
        q, next_q = square("q"), square("next q")
        torch.mm(y, y.T, out=gram)
        for step, (a, b, c) in enumerate(segment):
            # Without its a: added where it is multiplied, which leaves small values their digits.
            polynomial = torch.addmm(gram, gram, gram, beta=b, alpha=c, out=square("polynomial"))
            if step == 0:
                q.copy_(polynomial).diagonal().add_(a)
            else:
                torch.addmm(q, polynomial, q, beta=a, out=next_q)
                q, next_q = next_q, q
            if step + 1 < len(segment):
                torch.addmm(gram, polynomial, gram, beta=a, out=other)
                torch.addmm(other, other, polynomial, beta=a, out=gram)
        y = torch.mm(q, y, out=matrix(next(names), short, long, computed))
    if computed != dtype:
        y = matrix("result", short, long).copy_(y)
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


def newton_schulz_cost(
    rows: int,
    cols: int,
    schedule: Sequence[Coefficients],
    algorithm: str = "standard",
    dtype: torch.dtype = torch.float32,
) -> int:
    """Return the multiply-adds of `orthogonalize`.

    Standard: two products with the long side and one without, a step.

    Args:
        rows: of the matrix.
        cols: of the matrix.
        schedule: the triple of every step.
        algorithm: as there.
        dtype: as there; restarts of Gram iteration depend on it.

    Example:
        >>> newton_schulz_cost(4, 8, coefficient_schedule("keller", 5))
        1600
    """
    short, long = min(rows, cols), max(rows, cols)
    if _uses_gram(algorithm, rows, cols, schedule, dtype):
        return _gram_cost(short, long, schedule, dtype)
    return len(schedule) * short * short * (2 * long + short)


def _gram_cost(short: int, long: int, schedule: Sequence[Coefficients], dtype: torch.dtype) -> int:
    """Two products with the long side a segment; without it four a step, one in the first."""
    segments = len(gram_segments(schedule, gram_dtype(dtype)))
    return short * short * (2 * segments * long + (4 * len(schedule) - 3 * segments) * short)


def _uses_gram(
    algorithm: str, rows: int, cols: int, schedule: Sequence[Coefficients], dtype: torch.dtype
) -> bool:
    check_algorithm(algorithm)
    if algorithm == "standard" or not rows or not cols:
        return False
    short, long = min(rows, cols), max(rows, cols)
    standard = newton_schulz_cost(rows, cols, schedule)
    return _gram_cost(short, long, schedule, dtype) < standard


def check_algorithm(algorithm: object) -> None:
    """Check that it is one of `ALGORITHMS`.

    Raises:
        ValueError: it is not.
    """
    if algorithm not in ALGORITHMS:
        raise ValueError(f"ns_algorithm: expected one of {ALGORITHMS}, got {algorithm!r}")
