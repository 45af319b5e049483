"""Roots and eigenbases of symmetric matrices, for optimizers that precondition. Pure math on plain
tensors; the host reads a result where a method has to know whether it failed."""

from collections.abc import Callable

import torch
from torch import Tensor

_NEWTON_STEPS = 60
_NEWTON_TOLERANCE = 1e-6


def floor_of(largest: Tensor, size: int, absolute: float) -> Tensor:
    """Return what is added to eigenvalues: below n x eps of float32 x the largest, they are noise.

    Args:
        largest: 0-d, the largest eigenvalue or a bound of it.
        size: n, of the (n, n) matrix.
        absolute: the least.
    """
    return (largest * (size * torch.finfo(torch.float32).eps)).clamp_min(absolute)


def inverse_root(matrix: Tensor, order: int, epsilon: float, method: str = "eigh") -> Tensor | None:
    """Return the inverse `order`-th root of a positive semidefinite matrix, (n, n) float32.

    Eigenvalues are not below 0, and `floor_of` is added to them. "eigh" decomposes, and does it
    again in float64 where that fails; "newton" is the coupled iteration, which only multiplies.

    Returns:
        None where the matrix is zero or not finite, or where no method succeeds.

    References:
        Anil et al. 2020, arXiv:2002.09018, section 3; Guo and Higham 2006, doi:10.1137/050643374.
    """
    if not bool(matrix.any()) or not bool(matrix.isfinite().all()):
        return None
    matrix = (matrix + matrix.T) / 2
    if method == "newton":
        root = _newton(matrix, order, epsilon)
    else:
        root = _retried(lambda x: _by_eigh(x, order, epsilon), matrix)
    return root if root is not None and bool(root.isfinite().all()) else None


def eigenbasis(matrix: Tensor) -> Tensor | None:
    """Return the eigenvectors of a symmetric matrix as columns, by descending eigenvalue; None
    where it is not finite or the decomposition fails."""
    if not bool(matrix.isfinite().all()):
        return None
    return _retried(lambda x: torch.linalg.eigh(x).eigenvectors.flip(1), (matrix + matrix.T) / 2)


def next_eigenbasis(matrix: Tensor, basis: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return a basis after one step of orthogonal iteration, and the order of its columns.

    Columns of `basis` are sorted by descending estimate of their eigenvalues, and are then
    multiplied by the matrix and made orthonormal again.

    Returns:
        (n, n) the basis, and (n,) which column of the old one each continues; None where the
        result is not finite.

    References:
        Vyas et al. 2024, arXiv:2409.11321, algorithm 4.
    """
    estimates = (basis * (matrix @ basis)).sum(dim=0)
    order = estimates.argsort(descending=True, stable=True)
    result = torch.linalg.qr(matrix @ basis[:, order]).Q
    return (result, order) if bool(result.isfinite().all()) else None


def _by_eigh(matrix: Tensor, order: int, epsilon: float) -> Tensor:
    values, vectors = torch.linalg.eigh(matrix)
    floor = floor_of(values[-1], len(values), epsilon)
    powers = (values.clamp_min(0) + floor).pow(-1 / order)
    return (vectors * powers) @ vectors.T


def _retried(method: Callable[[Tensor], Tensor], matrix: Tensor) -> Tensor | None:
    """Return the result in float32, or else in float64; None where both fail."""
    for dtype in (matrix.dtype, torch.float64):
        try:
            result = method(matrix.to(dtype))
        except torch.linalg.LinAlgError:
            continue
        if bool(result.isfinite().all()):
            return result.to(matrix.dtype)
    return None


def _newton(matrix: Tensor, order: int, epsilon: float) -> Tensor | None:
    identity = torch.eye(len(matrix), dtype=matrix.dtype, device=matrix.device)
    largest = matrix.diagonal().amax()  # so that norms neither overflow nor vanish
    matrix, epsilon = matrix / largest, epsilon / float(largest)
    matrix = matrix + floor_of(matrix.norm(), len(matrix), epsilon) * identity
    scale = (1 + order) / (2 * matrix.norm())
    power, root = matrix * scale, identity * scale ** (1 / order)
    for _ in range(_NEWTON_STEPS):
        step = ((1 + 1 / order) * identity) - power / order
        root = root @ step
        power = torch.linalg.matrix_power(step, order) @ power
        error = (power - identity).abs().amax()
        if bool(error < _NEWTON_TOLERANCE):
            break
    return root * largest ** (-1 / order) if bool(error < 1e-2) else None  # NaN is not
