"""Cuts a matrix into blocks of equal shape, and says which of them are refreshed in a step.

Pure integers and views; the cut is that of torch.split along rows and columns.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from einops import rearrange
from torch import Tensor

# 2^32 over the golden ratio: multiples of it, taken modulo 2^32, lie evenly, also every n-th alone,
# as the ranks have them.
_GOLDEN = 0x9E3779B1


@dataclass(frozen=True, slots=True)
class Region:
    """Blocks of one shape, which lie side by side.

    Attributes:
        first: number of its first block in the matrix.
        row, col: where it starts.
        down, across: blocks.
        rows, cols: of each block.
    """

    first: int
    row: int
    col: int
    down: int
    across: int
    rows: int
    cols: int

    @property
    def count(self) -> int:
        """Blocks."""
        return self.down * self.across

    def view(self, matrix: Tensor) -> Tensor:
        """Return the region of a matrix, (down, across, rows, cols), to read and to write."""
        part = matrix[self.row :, self.col :]
        part = part[: self.down * self.rows, : self.across * self.cols]
        part = part.unflatten(0, (self.down, self.rows)).unflatten(2, (self.across, self.cols))
        return part.transpose(1, 2)

    def blocks(self, matrix: Tensor) -> Tensor:
        """Return the blocks of a matrix, (count, rows, cols), as a copy or a view."""
        return rearrange(self.view(matrix), "d a r c -> (d a) r c")

    def write(self, blocks: Tensor, matrix: Tensor) -> None:
        """Put (count, rows, cols) where `blocks` takes them from."""
        self.view(matrix).copy_(rearrange(blocks, "(d a) r c -> d a r c", d=self.down))


@dataclass(frozen=True, slots=True)
class BlockGrid:
    """A matrix in blocks, by regions.

    Example:
        >>> grid = block_grid(5, 4, (2, 4))
        >>> [(region.count, region.rows, region.cols) for region in grid.regions]
        [(2, 2, 4), (1, 1, 4)]
        >>> grid.sides("left")
        9
    """

    regions: tuple[Region, ...]

    @property
    def count(self) -> int:
        """Blocks."""
        return sum(region.count for region in self.regions)

    def sides(self, side: str) -> int:
        """Return the elements of one factor of every block, of its rows ("left") or columns."""
        return sum(region.count * _size(region, side) ** 2 for region in self.regions)

    def factors(self, flat: Tensor, side: str) -> Iterator[Tensor]:
        """Yield views (count, n, n), a region at a time, of factors kept in one run."""
        start = 0
        for region in self.regions:
            n = _size(region, side)
            stop = start + region.count * n * n
            yield flat[start:stop].view(region.count, n, n)
            start = stop


def _size(region: Region, side: str) -> int:
    return region.rows if side == "left" else region.cols


def _cuts(size: int, block: int | None) -> list[tuple[int, int, int]]:
    """Return (start, blocks, size) of the whole blocks, and of the rest."""
    block = min(block or size, size)
    if not block:
        return []
    whole, rest = divmod(size, block)
    return [(0, whole, block), *([(whole * block, 1, rest)] if rest else [])]


@lru_cache(maxsize=4096)
def block_grid(rows: int, cols: int, block: tuple[int, int] | None) -> BlockGrid:
    """Return the blocks of a matrix, at most `block` in size; None leaves it whole."""
    height, width = block or (None, None)
    regions: list[Region] = []
    for row, down, r in _cuts(rows, height):
        for col, across, c in _cuts(cols, width):
            first = sum(region.count for region in regions)
            regions.append(Region(first, row, col, down, across, r, c))
    return BlockGrid(tuple(regions))


def due_blocks(region: Region, index: int, step: int, start: int, frequency: int) -> list[int]:
    """Return the blocks of a region that are refreshed in a step: each once in `frequency` steps.

    The first is the block's turn among the `frequency` steps from `start` on; so no step refreshes
    more than its share. A matrix of one block that is the optimizer's first has its turn in `start`
    itself.

    Args:
        region: the blocks.
        index: number of the matrix in the optimizer.
        step: number of the step, from 1.
        start: first step in which anything is refreshed.
        frequency: steps from one turn of a block to its next.

    Example:
        >>> region = block_grid(8, 8, (4, 4)).regions[0]
        >>> [due_blocks(region, 0, step, 2, 3) for step in range(1, 6)]
        [[], [0, 2], [1], [3], [0, 2]]
    """
    if step < start:
        return []
    turn = (step - start) % frequency
    number = index + region.first
    return [
        block
        for block in range(region.count)
        if (((number + block) * _GOLDEN) % 2**32) * frequency >> 32 == turn
    ]


def spread_blocks(size: object, where: str) -> tuple[int, int] | None:
    """Return (rows, cols) of blocks for what a group says: one number, two, or None for whole ones.

    Raises:
        ValueError: something else, or below 1.
    """
    pair = (size, size) if isinstance(size, int) else size
    if pair is None:
        return None
    if (
        not isinstance(pair, tuple | list)
        or len(pair) != 2
        or not all(isinstance(n, int) and not isinstance(n, bool) and n >= 1 for n in pair)
    ):
        raise ValueError(
            f"{where}: block_size: expected a whole number >= 1, (rows, cols) of them, or None for "
            f"whole matrices, got {size!r}"
        )
    return pair[0], pair[1]
