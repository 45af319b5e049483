"""Inverse roots and eigenbases of symmetric matrices, in batches. Pure math on plain tensors.

What is returned for a matrix depends on that matrix and on how many share its batch, and on nothing
else: not on its scale, nor on how it lies in memory.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Small eigenvalues grow by (1 + 1/p)^p, 2.4 for p = 4, an iteration: from 1e-7 / sqrt(n) to 1,
# and a few more to converge.
_NEWTON_ITERATIONS = 32
_SQUARINGS = 4
_ROOTS = ("eigh", "newton")


def check_root(root: object, where: str) -> None:
    """Raise ValueError for what is no way to compute a root."""
    if root not in _ROOTS:
        raise ValueError(f"{where}: root: expected one of {list(_ROOTS)}, got {root!r}")


def inverse_root(
    matrices: Tensor, power: int, *, eps: float = 0.0, root: str = "eigh"
) -> tuple[Tensor, Tensor]:
    """Return (A + e I)^(-1 / power) of symmetric, positive semidefinite A, and which succeeded.

    e is the larger of `eps` and n * 1.2e-7 times the largest eigenvalue: below that, eigenvalues of
    a sum in fp32 are noise, and results would depend on the order of the summation. A matrix of
    zeros has no scale: its root is zero.

    Args:
        matrices: (b, n, n), symmetrized here; keeps its values.
        power: a positive number, 4 for two-sided Shampoo.
        eps: smallest e.
        root: "eigh", tried again in fp64 where it fails, or "newton": coupled Newton, products of
            matrices alone.

    Returns:
        (b, n, n), undefined where it did not succeed, and (b,) bool.
    """
    scaled, scale = _without_scale(matrices)
    least = (eps / scale.to(torch.float64).clamp(min=1e-300)).clamp(max=1).to(scaled.dtype)
    with_root = _by_newton if root == "newton" else _by_eigh
    result, found = with_root(scaled, power, least)
    found &= result.isfinite().all(-1).all(-1) & scale.isfinite()
    unscale = torch.where(scale > 0, scale.to(torch.float64) ** (-1 / power), 0.0)
    return result * unscale.to(result.dtype)[:, None, None], found


def eigenbasis(matrices: Tensor) -> tuple[Tensor, Tensor]:
    """Return eigenvectors by falling eigenvalue, (b, n, n) with one a column, and which succeeded.

    Of a matrix of zeros, the identity.
    """
    _, vectors, found = _eigh(_without_scale(matrices)[0])
    return vectors.flip(-1), found & matrices.isfinite().all(-1).all(-1)


def next_eigenbasis(matrices: Tensor, basis: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return a basis nearer to the eigenvectors: one power iteration and a QR decomposition.

    Columns are first sorted by the eigenvalues that they estimate, falling: what is kept by column
    must be permuted alike.

    Args:
        matrices: (b, n, n), symmetric.
        basis: (b, n, n), orthonormal columns.

    Returns:
        The basis, (b, n) the number of the old column in each place, and (b,) which succeeded.
        A matrix of zeros keeps its basis.
    """
    scaled, scale = _without_scale(matrices)
    product = scaled @ basis
    estimates = (basis * product).sum(-2)  # (b, n), the diagonal of Q^T A Q
    order = estimates.argsort(dim=-1, descending=True, stable=True)
    columns = order[:, None, :].expand_as(product)
    new = torch.linalg.qr(product.gather(-1, columns)).Q
    found = new.isfinite().all(-1).all(-1) & scale.isfinite()
    unchanged = torch.arange(order.size(-1), device=order.device).expand_as(order)
    is_zero = (scale == 0)[:, None]
    new = torch.where(is_zero[..., None], basis, new)
    return new, torch.where(is_zero, unchanged, order), found


def _without_scale(matrices: Tensor) -> tuple[Tensor, Tensor]:
    """Return symmetric matrices whose largest diagonal element is 1, the identity for zeros, and
    by what they were divided."""
    scale = matrices.diagonal(dim1=-2, dim2=-1).amax(-1).clamp(min=0)  # (b,)
    divisor = torch.where(scale > 0, scale, 1.0)[:, None, None]
    scaled = matrices / divisor
    scaled = (scaled + scaled.mT) / 2
    identity = torch.eye(matrices.size(-1), dtype=matrices.dtype, device=matrices.device)
    return torch.where((scale > 0)[:, None, None], scaled, identity), scale


def _eigh(matrices: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return eigenvalues, eigenvectors, and which succeeded in the dtype given or in fp64."""
    found = torch.ones(matrices.size(0), dtype=torch.bool, device=matrices.device)
    for wide in (matrices, matrices.to(torch.float64, copy=True)):
        try:
            values, vectors = torch.linalg.eigh(wide)
        except torch.linalg.LinAlgError:
            continue
        return values.to(matrices.dtype), vectors.to(matrices.dtype), found
    if matrices.size(0) == 1:
        return matrices.diagonal(dim1=-2, dim2=-1), matrices, ~found
    apart = [_eigh(matrix) for matrix in matrices.split(1)]  # one must not fail for the others
    values, vectors, found = (torch.cat(parts) for parts in zip(*apart, strict=True))
    return values, vectors, found


def _relative_eps(n: int, dtype: torch.dtype) -> float:
    return n * torch.finfo(torch.float32 if dtype != torch.float64 else dtype).eps


def _by_eigh(matrices: Tensor, power: int, least: Tensor) -> tuple[Tensor, Tensor]:
    values, vectors, found = _eigh(matrices)
    relative = _relative_eps(matrices.size(-1), matrices.dtype) * values[:, -1]
    ridge = torch.maximum(least, relative)[:, None]
    powers = (values.clamp(min=0) + ridge) ** (-1 / power)
    return (vectors * powers[:, None, :]) @ vectors.mT, found


def _by_newton(matrices: Tensor, power: int, least: Tensor) -> tuple[Tensor, Tensor]:
    """Return the root by Newton's iteration for M and X with M = X^power A, towards M = I."""
    n = matrices.size(-1)
    identity = torch.eye(n, dtype=matrices.dtype, device=matrices.device)
    # The sum of the absolutes of a row is at least the largest eigenvalue, at most sqrt(n) times.
    bound = matrices.abs().sum(-1).amax(-1)
    high = matrices / bound[:, None, None]
    for _ in range(_SQUARINGS):
        high = high @ high
    traces = high.diagonal(dim1=-2, dim2=-1).sum(-1).clamp(min=0)
    largest = bound * traces ** (1 / 2**_SQUARINGS)  # of the eigenvalues, at most 1.6 times
    ridge = torch.maximum(least, _relative_eps(n, matrices.dtype) * largest)
    ridged = matrices + ridge[:, None, None] * identity
    z = ((1 + power) / (2 * (bound + ridge)))[:, None, None]
    m, x = ridged * z, identity * z ** (1 / power)
    for _ in range(_NEWTON_ITERATIONS):
        t = ((1 + power) * identity - m) / power
        x = x @ t
        m = torch.linalg.matrix_power(t, power) @ m
        m = (m + m.mT) / 2
    error = (m - identity).abs().amax(-1).amax(-1)
    return (x + x.mT) / 2, error < 0.1
