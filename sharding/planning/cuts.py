"""Which part of a range each rank holds. Pure integers; imports no torch.

Buffers, placements and tilings of rows all cut elements into consecutive pieces, one for each rank.
Most ranks hold equally many: pieces are told as runs of equal ones, few at any number of ranks.
"""

from collections.abc import Iterable
from itertools import groupby

PieceRuns = tuple[tuple[int, int], ...]  # (elements of a piece, consecutive ranks that have such)


def piece_runs(sizes: Iterable[int]) -> PieceRuns:
    """Return the runs of pieces of these sizes, by rank.

    Example:
        >>> piece_runs([4, 4, 1, 0, 0])
        ((4, 2), (1, 1), (0, 2))
    """
    return tuple((size, len(list(ranks))) for size, ranks in groupby(sizes))


def held_parts(runs: PieceRuns, start: int, stop: int) -> list[tuple[int, int, int]]:
    """Return (rank, start, stop) of what each rank holds of a range; no empty ones, by rank.

    Example:
        >>> held_parts(((4, 2), (1, 1), (0, 2)), 3, 9)
        [(0, 3, 4), (1, 4, 8), (2, 8, 9)]
    """
    parts = []
    begin = first_rank = 0
    for size, ranks in runs:
        end = begin + size * ranks
        low, high = max(start, begin), min(stop, end)
        if low < high:
            first, last = (low - begin) // size, (high - 1 - begin) // size
            for i in range(first, last + 1):
                piece = begin + i * size
                parts.append((first_rank + i, max(low, piece), min(high, piece + size)))
        if end >= stop:
            break
        begin, first_rank = end, first_rank + ranks
    return parts
