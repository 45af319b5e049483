"""The updates of Shampoo and SOAP for one matrix in blocks: pure functions of gradient, states and
numbers, which write states in place.

Statistics are of gradients within +-1e15: their squares, and sums of those, stay within float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from vfsdp_optim.block_grid import BlockGrid, Region, due_blocks
from vfsdp_optim.matrix_roots import eigenbasis, inverse_root, next_eigenbasis

_LARGEST = 1e15
SIDES = ("left", "right")


@dataclass(frozen=True, slots=True)
class ShampooNumbers:
    """What a step of Shampoo is told. Factors count as A / (1 - beta2^step), sums if beta2 is 1.

    Attributes:
        step: number of this step, from 1.
        index: number of the matrix in the optimizer, by which refreshes are spread.
        betas: decay of the momentum, and of factors and grafting moment.
        eps: added to the root of the grafting moment; its square is added to factors, at least.
        start: first step with a root; before a block has one, its update is the grafted one.
        frequency: steps between two roots of a block.
        grafting: whose norm the update of a block gets: "adam", "sgd" or None.
        root: see `inverse_root`.
    """

    step: int
    index: int
    betas: tuple[float, float]
    eps: float
    start: int
    frequency: int
    grafting: str | None
    root: str


@dataclass(frozen=True, slots=True)
class SoapNumbers:
    """What a step of SOAP is told. The first step only estimates the eigenbases.

    Attributes:
        step: number of this step, from 1.
        index: number of the matrix in the optimizer, by which refreshes are spread.
        betas: decay of the momentum, and of the second moment in the eigenbasis.
        shampoo_beta: decay of the factors.
        eps: added to the root of the second moment.
        frequency: steps between two refreshes of the basis of a block.
        max_dim: a longer side has no factor, and the identity as its basis.
    """

    step: int
    index: int
    betas: tuple[float, float]
    shampoo_beta: float
    eps: float
    frequency: int
    max_dim: int


def shampoo_update(
    grid: BlockGrid, grad: Tensor, states: Mapping[str, Tensor], numbers: ShampooNumbers
) -> Tensor:
    """Return what is to be subtracted, times the learning rate, of a matrix.

    Args:
        grid: its blocks.
        grad: (rows, cols).
        states: "momentum" (rows, cols); "moment" alike with grafting="adam"; flat "left", "right",
            "left_root", "right_root"; "failures" (blocks,), the refreshes that failed in a row.
        numbers: the rest.
    """
    (beta1, beta2), step = numbers.betas, numbers.step
    grad = grad.clamp(-_LARGEST, _LARGEST)
    momentum = states["momentum"].lerp_(grad, 1 - beta1)
    mean = momentum / (1 - beta1**step)
    grafted = mean
    if numbers.grafting == "adam":
        moment = _averaged(states["moment"], grad * grad, beta2)
        grafted = mean / ((moment / _correction(beta2, step)).sqrt_().add_(numbers.eps))
    _add_to_factors(grid, grad, states, SIDES, beta2)
    _refresh_roots(grid, states, numbers)
    if step < numbers.start:
        return grafted
    update = torch.empty_like(mean)
    roots = [grid.factors(states[f"{side}_root"], side) for side in SIDES]
    for region, left, right in zip(grid.regions, *roots, strict=True):
        fallback = region.blocks(grafted)
        blocks = left.clone() @ region.blocks(mean).contiguous() @ right.clone()
        norms = _norms(blocks)
        if numbers.grafting is not None:
            blocks *= _norms(fallback) / norms.clamp(min=torch.finfo(norms.dtype).tiny)
        region.write(torch.where(norms > 0, blocks, fallback), update)
    return update


def soap_sides(rows: int, cols: int, max_dim: int) -> tuple[str, ...]:
    """Return the sides of a block that have factors."""
    return tuple(side for side, n in zip(SIDES, (rows, cols), strict=True) if n <= max_dim)


def soap_update(
    grid: BlockGrid, grad: Tensor, states: Mapping[str, Tensor], numbers: SoapNumbers
) -> Tensor:
    """Return what is to be subtracted, times the learning rate, of a matrix.

    Args:
        grid: its blocks; the first says which sides have factors.
        grad: (rows, cols).
        states: "momentum" (rows, cols) in the basis of the gradient; "moment" alike, in the
            eigenbasis; flat "left", "right", "left_basis", "right_basis" of the sides that have
            factors; "failures" (blocks,), the refreshes that failed in a row.
        numbers: the rest.
    """
    (beta1, beta2), t = numbers.betas, numbers.step - 1  # updates, which the first step is not
    grad = grad.clamp(-_LARGEST, _LARGEST)
    sides = tuple(side for side in SIDES if side in states)
    if t == 0:
        _add_to_factors(grid, grad, states, sides, numbers.shampoo_beta)
        for region, factors, bases in _bases(grid, states, sides):
            for side in sides:
                basis, found = eigenbasis(factors[side])
                identity = torch.eye(basis.size(-1), dtype=basis.dtype, device=basis.device)
                bases[side].copy_(torch.where(found[:, None, None], basis, identity))
                _count(states, region, slice(None), found)
        return torch.zeros_like(grad)
    momentum = states["momentum"].lerp_(grad, 1 - beta1)
    update = torch.empty_like(grad)
    for region, _, bases in _bases(grid, states, sides):
        left, right = (bases[side].clone() if side in bases else None for side in SIDES)
        projected = _into(region.blocks(grad), left, right)
        moment = region.blocks(states["moment"]).mul(beta2)
        moment.addcmul_(projected, projected, value=1 - beta2)
        region.write(moment, states["moment"])
        direction = _into(region.blocks(momentum), left, right).div_(moment.sqrt_() + numbers.eps)
        region.write(_out_of(direction, left, right), update)
    update *= (1 - beta2**t) ** 0.5 / (1 - beta1**t)
    _add_to_factors(grid, grad, states, sides, numbers.shampoo_beta)
    _refresh_bases(grid, states, sides, numbers)
    return update


def _correction(beta: float, step: int) -> float:
    return 1 - beta**step if beta < 1 else 1.0


def _averaged(state: Tensor, value: Tensor, beta: float) -> Tensor:
    return state.lerp_(value, 1 - beta) if beta < 1 else state.add_(value)


def _norms(blocks: Tensor) -> Tensor:
    return torch.linalg.vector_norm(blocks, dim=(-2, -1), keepdim=True)


def _add_to_factors(
    grid: BlockGrid, grad: Tensor, states: Mapping[str, Tensor], sides: tuple[str, ...], beta: float
) -> None:
    for side in sides:
        for region, factor in zip(grid.regions, grid.factors(states[side], side), strict=True):
            blocks = region.blocks(grad).contiguous()
            gram = blocks @ blocks.mT if side == "left" else blocks.mT @ blocks
            _averaged(factor, gram, beta)


def _count(
    states: Mapping[str, Tensor], region: Region, due: list[int] | slice, found: Tensor
) -> None:
    """Count a refresh that failed, and begin again after one that succeeded."""
    failures = states["failures"][region.first : region.first + region.count]
    failures[due] = torch.where(found, 0.0, failures[due] + 1)


def _refresh_roots(grid: BlockGrid, states: Mapping[str, Tensor], numbers: ShampooNumbers) -> None:
    """Compute the roots of the blocks whose turn it is; one that fails keeps its last."""
    correction = _correction(numbers.betas[1], numbers.step)
    kinds = [grid.factors(states[key], side) for side in SIDES for key in (side, f"{side}_root")]
    for region, left, left_root, right, right_root in zip(grid.regions, *kinds, strict=True):
        due = due_blocks(region, numbers.index, numbers.step, numbers.start, numbers.frequency)
        if numbers.grafting is None and numbers.step == numbers.start:
            due = list(range(region.count))  # there is no norm for an update without a root
        if not due:
            continue
        both = torch.ones(len(due), dtype=torch.bool, device=left.device)
        for factor, root in ((left, left_root), (right, right_root)):
            new, found = inverse_root(
                factor[due] / correction, 4, eps=numbers.eps**2, root=numbers.root
            )
            root[due] = torch.where(found[:, None, None], new, root[due])
            both &= found
        _count(states, region, due, both)


def _bases(
    grid: BlockGrid, states: Mapping[str, Tensor], sides: tuple[str, ...]
) -> list[tuple[Region, dict[str, Tensor], dict[str, Tensor]]]:
    """Return each region with its factors and its bases, by side."""
    factors = {side: tuple(grid.factors(states[side], side)) for side in sides}
    bases = {side: tuple(grid.factors(states[f"{side}_basis"], side)) for side in sides}
    return [
        (
            region,
            {side: factors[side][r] for side in sides},
            {side: bases[side][r] for side in sides},
        )
        for r, region in enumerate(grid.regions)
    ]


def _into(blocks: Tensor, left: Tensor | None, right: Tensor | None) -> Tensor:
    blocks = blocks.clone() if left is None else left.mT @ blocks.contiguous()
    return blocks if right is None else blocks @ right


def _out_of(blocks: Tensor, left: Tensor | None, right: Tensor | None) -> Tensor:
    blocks = blocks if left is None else left @ blocks
    return blocks if right is None else blocks @ right.mT


def _refresh_bases(
    grid: BlockGrid, states: Mapping[str, Tensor], sides: tuple[str, ...], numbers: SoapNumbers
) -> None:
    """Bring the bases whose turn it is nearer to the eigenvectors, and permute the moment alike."""
    for region, factors, bases in _bases(grid, states, sides):
        due = due_blocks(
            region, numbers.index, numbers.step - 1, numbers.frequency, numbers.frequency
        )
        if not due:
            continue
        moment = region.blocks(states["moment"]).clone()
        both = torch.ones(len(due), dtype=torch.bool, device=moment.device)
        for side in sides:
            old, own = bases[side][due], moment[due]
            new, order, found = next_eigenbasis(factors[side][due], old)
            order = order[:, :, None] if side == "left" else order[:, None, :]
            permuted = own.gather(-2 if side == "left" else -1, order.expand_as(own))
            keep = found[:, None, None]
            bases[side][due] = torch.where(keep, new, old)
            moment[due] = torch.where(keep, permuted, own)
            both &= found
        region.write(moment, states["moment"])
        _count(states, region, due, both)
