"""When a unit does what it does not do in each step. Pure integers; imports no torch.

[Note: turns]
Work that is due once in a number of steps, such as the decomposition of a factor, is done by parts
in turn, so that no step is much longer than others. A turn may not depend on who computes the unit:
it is the same at every number of ranks, after a load too. So it follows from the number of the unit
among those with the same work alone. Ranks own runs of units, or every so many-th of them;
multiples of the golden ratio fill a period evenly along all of these, where numbers modulo the
period would put every tenth unit into one step (Knuth, The Art of Computer Programming, volume 3,
6.4, theorem S). The parts of one unit are evenly apart, and kinds of units start half a multiple
apart: what each has too much in some steps does not meet. `plan_owners` does the rest: of ranks
with equal work, it chooses the one that has least to do in the same steps.
"""

from dataclasses import dataclass
from functools import lru_cache

_PERIOD = 1 << 32  # of which a place is a number
_HALF_GOLDEN = 1327217885  # half of 2^32 over the golden ratio


@dataclass(frozen=True, slots=True)
class Recurring:
    """Work that the parts of a matrix do in turn.

    Attributes:
        period: steps from one turn of a part to its next.
        works: of each part in its turn, in multiply-adds.
    """

    period: int
    works: tuple[int, ...]


class Ordinals:
    """Numbers matrices that do work in turn, in their order."""

    def __init__(self) -> None:
        self._next: dict[Recurring, int] = {}

    def take(self, recurring: Recurring | None, matrices: int) -> int:
        """Return the number of the first of some matrices; from one to the next it grows by 2."""
        if recurring is None:
            return 0
        first = self._next.setdefault(recurring, len(self._next))
        self._next[recurring] = first + 2 * matrices
        return first


@lru_cache(maxsize=1 << 16)
def turns_of(ordinal: int, parts: int, period: int) -> tuple[int, ...]:
    """Return in which step of a period each part of a matrix is due.

    Args:
        ordinal: number of the matrix, of `Ordinals`.
        parts: of the matrix.
        period: in steps.

    Example:
        >>> turns_of(0, 4, 10), turns_of(2, 4, 10), turns_of(4, 4, 10)
        ((0, 2, 5, 7), (1, 4, 6, 9), (0, 3, 5, 8))
        >>> [turns_of(20 * matrix, 1, 10)[0] for matrix in range(10)]
        [0, 1, 3, 5, 7, 9, 0, 2, 4, 6]
    """
    place = ordinal * _HALF_GOLDEN % _PERIOD
    return tuple(period * (place + part * _PERIOD) // (parts * _PERIOD) for part in range(parts))


def due_work(
    recurring: Recurring | None, ordinal: int, matrices: int
) -> tuple[int, tuple[tuple[int, int], ...]]:
    """Return the period of some matrices, and (step of it, work that is due then)."""
    if recurring is None:
        return 1, ()
    works: dict[int, int] = {}
    for each in range(ordinal, ordinal + 2 * matrices, 2):
        turns = turns_of(each, len(recurring.works), recurring.period)
        for turn, work in zip(turns, recurring.works, strict=True):
            works[turn] = works.get(turn, 0) + work
    return recurring.period, tuple(sorted(works.items()))
