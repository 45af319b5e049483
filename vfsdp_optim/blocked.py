"""What optimizers that precondition blocks of matrices share: how parameters are cut into panels
and blocks, which blocks are due in a step, and the element-wise part.

[Note: blocks computed together]
One call on a batch of blocks is faster than a call for each, on a device above all, and may have
other bits. So a batch is of one unit, of blocks of one shape side by side, a `Strip`, and of those
due in the step: what is computed together follows from shapes and the step alone, and not from who
owns what. Nothing here reads a number on the host; what failed is told by a flag.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

import torch
from torch import Tensor

from sharding.planning.structure import RowPanels, Structure
from sharding.planning.turns import Recurring
from vfsdp_optim.algorithm import (
    MatrixAlgorithm,
    UnitContext,
    check_at_least_zero,
    check_betas,
    check_is_matrix,
    check_matrices,
    read_matrices,
)
from vfsdp_optim.states.scratch import Scratch
from vfsdp_optim.step.runs import Run

BlockSize = int | tuple[int, int] | None
SIDES = ("left", "right")

# A block whose factors cannot be decomposed more often in a row ends the run.
_MOST_FAILURES = 3
_LARGEST_GRADIENT = 1e15
# Of n^3, what an eigendecomposition or a step of orthogonal iteration takes, in multiply-adds of
# products: it has fewer, which run more slowly (measured on CPUs: 7 to 50).
_DECOMPOSITION = 16


@dataclass(frozen=True, slots=True)
class Strip:
    """Blocks of one shape that lie side by side in a unit, and are computed together.

    Attributes:
        numbers: of the blocks among those of the unit, row by row.
        rows: of the unit.
        cols: of the unit, those of all blocks.
        band: number of the row of blocks.
        first: number of the column of blocks that the first one is in.
    """

    numbers: range
    rows: slice
    cols: slice
    band: int
    first: int

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of one block."""
        cols = (self.cols.stop - self.cols.start) // len(self.numbers)
        return self.rows.stop - self.rows.start, cols

    def of(self, matrix: Tensor) -> Tensor:
        """Return its blocks in a tensor of the unit's shape, (blocks, rows, cols), a view."""
        blocks = matrix[self.rows, self.cols].unflatten(1, (len(self.numbers), -1))
        return blocks.transpose(0, 1)

    def factors(self, state: Tensor, side: str) -> Tensor:
        """Return those of its blocks in a state of `factor_shapes`, (blocks, n, n), a view."""
        rows, cols = self.shape
        count = len(self.numbers)
        if side == "left":
            return state[self.first : self.first + count, self.rows, :rows]
        return state[self.band, self.cols, :cols].unflatten(0, (count, cols))

    def counts(self, state: Tensor) -> Tensor:
        """Return those of its blocks in a state of one number a block, (blocks,), a view."""
        return state[self.numbers.start : self.numbers.stop]


@lru_cache(maxsize=1024)
def strips(rows: int, cols: int, size: BlockSize) -> tuple[Strip, ...]:
    """Return the blocks of a (rows, cols) unit as torch.split cuts them, the last ones smaller."""
    return tuple(_strips(rows, cols, size))


def _strips(rows: int, cols: int, size: BlockSize) -> Iterator[Strip]:
    height, width = sides(rows, cols, size)
    whole, number = cols // width, 0
    for band, top in enumerate(range(0, rows, height)):
        down = slice(top, min(top + height, rows))
        for first, start, stop, count in (
            (0, 0, whole * width, whole),
            (whole, whole * width, cols, int(cols % width > 0)),
        ):
            if count:
                yield Strip(range(number, number + count), down, slice(start, stop), band, first)
                number += count


def sides(rows: int, cols: int, size: BlockSize) -> tuple[int, int]:
    """Return height and width of the blocks of a (rows, cols) matrix."""
    if size is None:
        return max(rows, 1), max(cols, 1)
    height, width = (size, size) if isinstance(size, int) else size
    return max(1, min(height, rows)), max(1, min(width, cols))


def blocks_in(rows: int, cols: int, size: BlockSize) -> int:
    """Return how many blocks a (rows, cols) unit has."""
    height, width = sides(rows, cols, size)
    return -(-rows // height) * -(-cols // width)


def factor_shapes(
    rows: int, cols: int, size: BlockSize
) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """Return the shapes of the tensors that hold the left and the right factors of a unit: a left
    one has the rows of its block, in its column of blocks; a right one its columns, in its row."""
    height, width = sides(rows, cols, size)
    return (-(-cols // width), rows, height), (-(-rows // height), cols, width)


def average_products(states: Mapping[str, Tensor], strip: Strip, grad: Tensor, beta: float) -> None:
    """Add the products of the gradients of blocks, (blocks, rows, cols), with themselves to those
    of their factors that there are."""
    for side, x in zip(SIDES, (grad, grad.mT), strict=True):
        if side in states:
            factors = strip.factors(states[side], side)
            factors.baddbmm_(x, x.mT, beta=beta, alpha=weight_of(beta))


def weight_of(beta: float) -> float:
    """Return what is added of a new value to an average, or, with a decay of 1, to a sum."""
    return 1 - beta if beta < 1 else 1.0


def correction_of(beta: float, step: int) -> float:
    """Return what an average that started at zero is divided by after `step` steps; a sum, by 1."""
    return 1 - beta**step if beta < 1 else 1.0


def due_blocks(
    group: dict[str, Any], context: UnitContext, strip: Strip, step: int
) -> tuple[int, ...]:
    """Return which blocks of a strip are decomposed in a step, the number of one since the start:
    blocks take turns, so that no step is much longer than others."""
    turn = step % group["precondition_frequency"]
    return tuple(i for i, number in enumerate(strip.numbers) if context.turns[number] == turn)


def picked(tensors: Tensor, places: Sequence[int]) -> Tensor:
    """Return some of stacked tensors, without the host telling a device which."""
    if len(places) == len(tensors):
        return tensors
    return torch.stack([tensors[i] for i in places])


def keep_found(
    tensors: Tensor, places: Sequence[int], values: Tensor, found: Tensor, skip: bool | Tensor
) -> None:
    """Write `values`, which `picked` would return, where they were `found`, (places,) bool, in a
    step that is not to be left out."""
    found = counting(found, skip)
    for i, value, there in zip(places, values, found, strict=True):
        tensors[i].copy_(torch.where(there, value, tensors[i]))


def counting(marks: Tensor, skip: bool | Tensor) -> Tensor:
    """Return marks, none where a step is to be left out."""
    return marks & ~skip.to(marks.device) if isinstance(skip, Tensor) else marks


def count_failures(
    context: UnitContext, strip: Strip, places: Sequence[int], failed: Tensor, what: str, cure: str
) -> None:
    """Count how often in a row `what` of blocks failed, (places,) bool; too often is the end of
    the run."""
    failures = strip.counts(context.states["failures"])
    counts = torch.where(failed, picked(failures, places) + 1, 0)
    keep_found(failures, places, counts, torch.ones_like(failed), context.skip)
    ended = counting(counts > _MOST_FAILURES, context.skip)
    for i, happened in zip(places, ended, strict=True):
        text = f"the {what} of block {strip.numbers[i]} failed more than {_MOST_FAILURES} times in"
        context.fail(f"{text} a row; {cure}", happened)


class BlockedAlgorithm(MatrixAlgorithm):
    """An update rule that preconditions blocks of matrices, with decoupled weight decay.

    The gradient travels to the owner of a row panel, the update back; all states are there.

    Attributes:
        sums: whether the second of `betas` may be 1, which makes sums of averages.
    """

    sums: ClassVar[bool] = False

    def check_group(self, group: dict[str, Any], where: str) -> None:
        """Check ranges and the size of blocks."""
        check_at_least_zero(group, where, ("lr", "eps", "weight_decay"))
        check_betas(group, where, sums=self.sums)
        size = group["block_size"]
        if isinstance(size, list):
            size = group["block_size"] = tuple(size)
        numbers = size if isinstance(size, tuple) else (size,)
        if size is not None and not (all(map(is_count, numbers)) and len(numbers) in (1, 2)):
            raise ValueError(
                f"{where}: block_size: expected a number of rows and columns >= 1, (rows, columns),"
                f" or None for whole matrices, got {size!r}"
            )
        if not is_count(group["precondition_frequency"]):
            raise ValueError(
                f"{where}: precondition_frequency: expected a number of steps >= 1, got "
                f"{group['precondition_frequency']!r}; 1 decomposes every factor in every step"
            )
        check_matrices(group, where)

    def check_param(self, group: dict[str, Any], shape: torch.Size, fqn: str) -> None:
        """Refuse what is no matrix, unless the group says where its matrices are."""
        does, call = f"{self.name} preconditions", f"param_groups(model, algorithm={self.name!r})"
        check_is_matrix(group, shape, fqn, does, call)
        super().check_param(group, shape, fqn)

    def counts_steps(self, group: dict[str, Any]) -> bool:
        """Return True: averages are corrected for their start at zero."""
        return True

    def structure(self, group: dict[str, Any], shape: torch.Size) -> Structure:
        """Return panels of rows as high as a block; whole matrices where those are no runs of
        rows, or are not cut into blocks."""
        return _structure(group["matrices"], group["block_size"])

    def update_run(self, group: dict[str, Any], run: Run, scratch: Scratch) -> None:
        """Decay the parameters, but not in a step that changes nothing else."""
        if self.decays(run):
            super().update_run(group, run, scratch)

    def decays(self, run: Run) -> bool:
        """Return whether weights decay in this step."""
        return True

    def write_input(
        self, group: dict[str, Any], grad: Tensor, states: dict[str, Tensor], out: Tensor
    ) -> None:
        """Write the gradient, bounded: the square of one larger would make factors infinite."""
        out.copy_(grad).clamp_(-_LARGEST_GRADIENT, _LARGEST_GRADIENT)

    def factored(self, group: dict[str, Any], rows: int, cols: int) -> tuple[str, ...]:
        """Return the sides of the blocks of a matrix that have factors."""
        return SIDES

    def cost(self, group: dict[str, Any], rows: int, cols: int) -> int:
        """Return the multiply-adds of a mean step: products with factors, and their decomposition
        once in `precondition_frequency` steps."""
        present = self.factored(group, rows, cols)
        products = 0
        for strip in strips(rows, cols, group["block_size"]):
            lengths = _lengths(strip, present)
            products += len(strip.numbers) * 3 * strip.shape[0] * strip.shape[1] * sum(lengths)
        recurring = self.recurring(group, rows, cols)
        return products + sum(recurring.works) // recurring.period

    def recurring(self, group: dict[str, Any], rows: int, cols: int) -> Recurring:
        """Return the decompositions of each block."""
        size, present = group["block_size"], self.factored(group, rows, cols)
        return _decompositions(rows, cols, size, present, group["precondition_frequency"])


@lru_cache(maxsize=1024)
def _decompositions(
    rows: int, cols: int, size: BlockSize, present: tuple[str, ...], frequency: int
) -> Recurring:
    works: list[int] = []
    for strip in strips(rows, cols, size):
        cubes = sum(length**3 for length in _lengths(strip, present))
        works += [_DECOMPOSITION * cubes] * len(strip.numbers)
    return Recurring(frequency, tuple(works))


def _lengths(strip: Strip, present: Sequence[str]) -> list[int]:
    """Return rows and columns of a block, where there is a factor of them."""
    return [length for side, length in zip(SIDES, strip.shape, strict=True) if side in present]


@lru_cache(maxsize=256)
def _structure(matrices: str | None, block_size: BlockSize) -> Structure:
    if block_size is not None:
        rows = block_size if isinstance(block_size, int) else block_size[0]
        if matrices in (None, "o ... -> o (...)"):
            return RowPanels(rows)
        before, _, after = matrices.partition("->")
        axes = after.split()  # no sizes or row_splits behind them
        if before.split() == axes and all(map(str.isidentifier, axes)):
            return RowPanels(rows, batch_dims=len(axes) - 2)
    return read_matrices(matrices)


def is_count(value: object) -> bool:
    """Return whether a value is an integer from 1 on."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


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
