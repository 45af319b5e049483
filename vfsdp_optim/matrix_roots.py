"""Roots and eigenbases of symmetric matrices, for optimizers that precondition. Pure math on plain
tensors, many matrices at a time.

Whether a method failed is a flag of each matrix, on its device: the host reads none. Only
`torch.linalg.eigh` itself waits, on a device, to raise its error; "newton" does not.
"""

import torch
from torch import Tensor

_NEWTON_STEPS = 40  # from a smallest eigenvalue of 1e-7 of the largest 24 are enough
_NEWTON_TOLERANCE = 1e-6


def floor_of(largest: Tensor, size: int, absolute: float | Tensor) -> Tensor:
    """Return what is added to eigenvalues: below n x eps of float32 x the largest, they are noise.

    Args:
        largest: the largest eigenvalue of each matrix, or a bound of it.
        size: n, of the (n, n) matrices.
        absolute: the least.
    """
    return (largest * (size * torch.finfo(torch.float32).eps)).clamp_min(absolute)


def inverse_roots(
    matrices: Tensor, order: int, epsilon: float, method: str = "eigh"
) -> tuple[Tensor, Tensor]:
    """Return the inverse `order`-th roots of positive semidefinite matrices, (b, n, n) float32.

    Eigenvalues are not below 0, and `floor_of` is added to them. "eigh" decomposes, and does it
    again in float64 where that fails; "newton" is the coupled iteration, which only multiplies.

    Returns:
        (b, n, n), and (b,) bool, whether they were found: not of a matrix that is zero or not
        finite, or of which no method succeeds.

    References:
        Anil et al. 2020, arXiv:2002.09018, section 3; Guo and Higham 2006, doi:10.1137/050643374.
    """
    usable = _every(matrices.isfinite()) & ~_every(matrices == 0)
    matrices = _symmetric(matrices, usable)
    roots = (_newton if method == "newton" else _by_eigh)(matrices, order, epsilon)
    return roots, usable & _every(roots.isfinite())


def eigenbases(matrices: Tensor) -> tuple[Tensor, Tensor]:
    """Return the eigenvectors of symmetric matrices, (b, n, n), as columns, by descending
    eigenvalue.

    Returns:
        (b, n, n), and (b,) bool, whether they were found: not where a matrix is not finite or the
        decomposition fails.
    """
    usable = _every(matrices.isfinite())
    bases = _eigh(_symmetric(matrices, usable))[1].flip(2)
    return bases, usable & _every(bases.isfinite())


def next_eigenbases(matrices: Tensor, bases: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return bases after one step of orthogonal iteration, and the order of their columns.

    Columns of a basis are sorted by descending estimate of their eigenvalues, and are then
    multiplied by the matrix and made orthonormal again.

    Returns:
        (b, n, n) the bases; (b, n) which column of the old one each continues; and (b,) bool,
        whether the results are finite.

    References:
        Vyas et al. 2024, arXiv:2409.11321, algorithm 4.
    """
    estimates = (bases * (matrices @ bases)).sum(dim=1)  # (b, n)
    order = estimates.argsort(dim=1, descending=True, stable=True)
    sorted_bases = bases.gather(2, order.unsqueeze(1).expand_as(bases))
    usable = _every(matrices.isfinite())
    result = torch.linalg.qr(_filled(matrices, usable) @ sorted_bases).Q
    return result, order, usable & _every(result.isfinite())


def _every(marks: Tensor) -> Tensor:
    """Return of each matrix whether all its elements are marked, (b,)."""
    return marks.flatten(1).all(dim=1)


def _filled(matrices: Tensor, usable: Tensor) -> Tensor:
    """Return the matrices, with the identity for those that would end a whole batch in an error."""
    identity = torch.eye(matrices.shape[-1], dtype=matrices.dtype, device=matrices.device)
    return torch.where(usable[:, None, None], matrices, identity)


def _symmetric(matrices: Tensor, usable: Tensor) -> Tensor:
    matrices = _filled(matrices, usable)
    return (matrices + matrices.mT) / 2


def _by_eigh(matrices: Tensor, order: int, epsilon: float) -> Tensor:
    values, vectors = _eigh(matrices)  # (b, n), (b, n, n)
    floor = floor_of(values[:, -1:], values.shape[1], epsilon)
    powers = (values.clamp_min(0) + floor).pow(-1 / order)
    return (vectors * powers.unsqueeze(1)) @ vectors.mT


def _eigh(matrices: Tensor) -> tuple[Tensor, Tensor]:
    """Return eigenvalues, ascending, and eigenvectors; NaN of those that cannot be decomposed.

    One of a batch that fails is an error of all; each is tried alone then, in float64 too.
    """
    try:
        values, vectors = torch.linalg.eigh(matrices)
        return values, vectors
    except torch.linalg.LinAlgError:
        alone = [_eigh_alone(matrix) for matrix in matrices]
        values, vectors = (torch.stack(parts) for parts in zip(*alone, strict=True))
        return values, vectors


def _eigh_alone(matrix: Tensor) -> tuple[Tensor, Tensor]:
    for dtype in (matrix.dtype, torch.float64):
        try:
            values, vectors = torch.linalg.eigh(matrix.to(dtype))
        except torch.linalg.LinAlgError:
            continue
        return values.to(matrix.dtype), vectors.to(matrix.dtype)
    return torch.full_like(matrix[0], torch.nan), torch.full_like(matrix, torch.nan)


def _newton(matrices: Tensor, order: int, epsilon: float) -> Tensor:
    """Return the roots, NaN of those that do not converge."""
    size = matrices.shape[-1]
    identity = torch.eye(size, dtype=matrices.dtype, device=matrices.device)
    # So that norms neither overflow nor vanish.
    largest = matrices.diagonal(dim1=1, dim2=2).amax(dim=1)[:, None, None]
    matrices = matrices / largest
    norms = torch.linalg.matrix_norm(matrices, keepdim=True)
    matrices = matrices + floor_of(norms, size, epsilon / largest) * identity
    scale = (1 + order) / (2 * torch.linalg.matrix_norm(matrices, keepdim=True))
    power, root = matrices * scale, identity * scale ** (1 / order)
    error = torch.full_like(scale, torch.inf)
    for _ in range(_NEWTON_STEPS):
        step = ((1 + 1 / order) * identity) - power / order
        # One that has converged waits for the others: it does not depend on them.
        going = error >= _NEWTON_TOLERANCE
        root = torch.where(going, root @ step, root)
        power = torch.where(going, torch.linalg.matrix_power(step, order) @ power, power)
        error = (power - identity).abs().amax(dim=(1, 2), keepdim=True)
        # What a device has to do, it does; there the host would wait to know.
        if error.device.type == "cpu" and not bool((error >= _NEWTON_TOLERANCE).any()):
            break
    return torch.where(error < 1e-2, root * largest ** (-1 / order), torch.nan)
