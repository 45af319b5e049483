"""What optimizers that precondition blocks of matrices share: how parameters are cut into panels
and blocks, which blocks are due in a step, and the element-wise part."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from sharding.planning.structure import FullMatrix, RowPanels, Structure
from vfsdp_optim.algorithm import (
    MatrixAlgorithm,
    UnitContext,
    check_at_least_zero,
    check_betas,
    check_is_matrix,
)
from vfsdp_optim.states.scratch import Scratch
from vfsdp_optim.step.runs import Run

BlockSize = int | tuple[int, int] | None
SIDES = ("left", "right")

# A block whose factors cannot be decomposed more often in a row ends the run.
_MOST_FAILURES = 3
_LARGEST_GRADIENT = 1e15


@dataclass(frozen=True, slots=True)
class BlockPlace:
    """One block of a unit.

    Attributes:
        number: among those of the unit, row by row.
        rows: of the unit.
        cols: of the unit.
        left: place of its left factor in (columns of blocks, rows, height of a block).
        right: place of its right factor in (rows of blocks, cols, width of a block).
    """

    number: int
    rows: slice
    cols: slice
    left: tuple[int, slice, slice]
    right: tuple[int, slice, slice]


@lru_cache(maxsize=1024)
def block_places(rows: int, cols: int, size: BlockSize) -> tuple[BlockPlace, ...]:
    """Return the blocks of a (rows, cols) unit as torch.split cuts them, the last ones smaller."""
    return tuple(_blocks(rows, cols, size))


def _blocks(rows: int, cols: int, size: BlockSize) -> Iterator[BlockPlace]:
    height, width = sides(rows, cols, size)
    number = 0
    for i, top in enumerate(range(0, rows, height)):
        for j, start in enumerate(range(0, cols, width)):
            down = slice(top, min(top + height, rows))
            across = slice(start, min(start + width, cols))
            left = j, down, slice(0, down.stop - down.start)
            right = i, across, slice(0, across.stop - across.start)
            yield BlockPlace(number, down, across, left, right)
            number += 1


def sides(rows: int, cols: int, size: BlockSize) -> tuple[int, int]:
    """Return height and width of the blocks of a (rows, cols) matrix."""
    if size is None:
        return max(rows, 1), max(cols, 1)
    height, width = (size, size) if isinstance(size, int) else size
    return max(1, min(height, rows)), max(1, min(width, cols))


def factor_shapes(
    rows: int, cols: int, size: BlockSize
) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """Return the shapes of the tensors that hold the left and the right factors of a unit; see
    `BlockPlace`."""
    height, width = sides(rows, cols, size)
    return (-(-cols // width), rows, height), (-(-rows // height), cols, width)


def part_of(context: UnitContext, key: str, block: BlockPlace) -> Tensor:
    """Return a block's part of a state of factors, whose key begins with the side."""
    return context.states[key][block.left if key.startswith("left") else block.right]


def average_products(context: UnitContext, block: BlockPlace, grad: Tensor, beta: float) -> None:
    """Add the products of a block's gradient with itself to those of its factors that there are."""
    for side, x in zip(SIDES, (grad, grad.T), strict=True):
        if side in context.states:
            part_of(context, side, block).mul_(beta).add_(x @ x.T, alpha=1 - beta)


def has_turn(group: dict[str, Any], context: UnitContext, block: BlockPlace, step: int) -> bool:
    """Return whether a block is decomposed in a step, the number of one since the start: blocks
    take turns, so that no step is much longer than others."""
    return (step - context.index - block.number) % group["precondition_frequency"] == 0


def count_failure(
    context: UnitContext, block: BlockPlace, *, failed: bool, what: str, cure: str
) -> None:
    """Count how often in a row `what` of a block failed; too often is the end of the run."""
    failures, number = context.states["failures"], block.number
    failures[number] = failures[number] + 1 if failed else 0
    if failed and failures[number] > _MOST_FAILURES:
        context.fail(
            f"the {what} of block {number} failed {int(failures[number])} times in a row; {cure}"
        )


class BlockedAlgorithm(MatrixAlgorithm):
    """An update rule that preconditions blocks of matrices, with decoupled weight decay.

    The gradient travels to the owner of a row panel, the update back; all states are there.
    """

    def check_group(self, group: dict[str, Any], where: str) -> None:
        """Check ranges and the size of blocks."""
        check_at_least_zero(group, where, ("lr", "eps", "weight_decay"))
        check_betas(group, where)
        size = group["block_size"]
        if isinstance(size, list):
            size = group["block_size"] = tuple(size)
        numbers = size if isinstance(size, tuple) else (size,)
        whole = all(isinstance(n, int) and not isinstance(n, bool) and n >= 1 for n in numbers)
        if size is not None and not (whole and len(numbers) in (1, 2)):
            raise ValueError(
                f"{where}: block_size: expected a number of rows and columns >= 1, (rows, columns),"
                f" or None for whole matrices, got {size!r}"
            )
        frequency = group["precondition_frequency"]
        if not isinstance(frequency, int) or frequency < 1:
            raise ValueError(
                f"{where}: precondition_frequency: expected a number of steps >= 1, got "
                f"{frequency!r}"
            )
        if group["matrices"] is not None:
            try:
                group["matrices"] = str(FullMatrix.parse(str(group["matrices"])))
            except ValueError as error:
                raise ValueError(f"{where}: {error}") from None

    def check_param(self, group: dict[str, Any], shape: torch.Size, fqn: str) -> None:
        """Refuse what is no matrix, unless the group says where its matrices are."""
        does, call = f"{self.name} preconditions", f"param_groups(model, algorithm={self.name!r})"
        check_is_matrix(group, shape, fqn, does, call)
        super().check_param(group, shape, fqn)

    def counts_steps(self, group: dict[str, Any]) -> bool:
        """Return True: averages are corrected for their start at zero."""
        return True

    def state_keys(self, group: dict[str, Any]) -> tuple[str, ...]:
        """Return nothing: every state is a unit's."""
        return ()

    def structure(self, group: dict[str, Any], shape: torch.Size) -> Structure:
        """Return panels of rows as high as a block; whole matrices where those are no runs of
        rows, or are not cut into blocks."""
        return _structure(group["matrices"], group["block_size"])

    def update_run(self, group: dict[str, Any], run: Run, scratch: Scratch) -> None:
        """Decay the parameters."""
        decay = 1 - float(group["lr"]) * group["weight_decay"]
        if decay != 1 and self.decays(run):
            for param, _, _ in run.chunks(scratch):
                param.mul_(decay)

    def decays(self, run: Run) -> bool:
        """Return whether weights decay in this step."""
        return True

    def write_input(
        self, group: dict[str, Any], grad: Tensor, states: dict[str, Tensor], out: Tensor
    ) -> None:
        """Write the gradient, bounded: the square of one larger would make factors infinite."""
        out.copy_(grad).clamp_(-_LARGEST_GRADIENT, _LARGEST_GRADIENT)

    def factor(self, group: dict[str, Any], rows: int, cols: int) -> float:
        """Return the negative learning rate."""
        return -float(group["lr"])

    def cost(self, group: dict[str, Any], rows: int, cols: int) -> int:
        """Return the multiply-adds of a mean step: products with factors, and their decomposition
        once in `precondition_frequency` steps."""
        work = 0
        for block in block_places(rows, cols, group["block_size"]):
            r, c = block.rows.stop - block.rows.start, block.cols.stop - block.cols.start
            work += (r**3 + c**3) // group["precondition_frequency"] + 3 * r * c * (r + c)
        return work


@lru_cache(maxsize=256)
def _structure(matrices: str | None, block_size: BlockSize) -> Structure:
    if block_size is not None:
        rows = block_size if isinstance(block_size, int) else block_size[0]
        if matrices in (None, "o ... -> o (...)"):
            return RowPanels(rows)
        before, _, after = matrices.partition("->")
        axes = after.split(";")[0].split()
        if before.split() == axes and len(axes) > 2 and "..." not in axes:
            return RowPanels(rows, batch_dims=len(axes) - 2)
    return FullMatrix() if matrices is None else FullMatrix.parse(matrices)


def refuse_ignore(on_nonfinite: str) -> None:
    """Refuse updates by gradients that are not finite.

    Raises:
        ValueError: the choice is "ignore".
    """
    if on_nonfinite == "ignore":
        raise ValueError(
            'on_nonfinite="ignore" would leave infinities and NaN in the factors for good; pass '
            '"raise", or "skip" to leave such steps out'
        )
