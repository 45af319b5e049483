"""A tensor cut along several dims: which shards hold a run of it, and where. Pure integers.

[Note: boxes]
Axes of a mesh that cut along different dims leave a box of the tensor on every shard: a range of
indices in each dim. What travels whole (a matrix, a stack of them) is a run of the flattened tensor
that spans some indices of one dim and all of those behind it. A shard's part of such a run is a box
too, and, because all that the shard has of the dims behind belongs to it, consecutive among the
shard's own elements. So a part is read and written in place by its shard, and only who puts a whole
run together has to place rows: `BoxPart.box` says where.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import prod

Range = tuple[int, int]
AxisCut = tuple[int, int, int]  # (dim, shards, pieces that later axes cut before; 1 is usual)


@dataclass(frozen=True, slots=True)
class BoxPart:
    """What one shard holds of a run.

    Attributes:
        shard: its number.
        start: where the part begins among the shard's elements.
        numel: elements of it, consecutive there.
        box: by dim of the run (see `Boxes.run_shape`), the indices that it has.
    """

    shard: int
    start: int
    numel: int
    box: tuple[Range, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Boxes:
    """How the shards of a tensor cut it; see [Note: boxes]. Made by `boxes_of`, which shares them.

    Attributes:
        shape: of the tensor.
        ranges: by dim, what each combination of the axes that cut it has, as (shard, start, stop):
            the numbers of a box, one of each dim, add up to that of its shard.
    """

    shape: tuple[int, ...]
    ranges: tuple[tuple[tuple[int, int, int], ...], ...]

    def box(self, shard: int) -> tuple[Range, ...]:
        """Return the indices that a shard has, by dim."""
        for combination in product(*self.ranges):
            if sum(number for number, *_ in combination) == shard:
                return tuple((start, stop) for _, start, stop in combination)
        raise ValueError(f"expected a shard of {len(list(product(*self.ranges)))}, got {shard}")

    def find(self, start: int, numel: int) -> tuple[tuple[int, ...], Range] | None:
        """Return (indices of the dims before, indices of the dim) of a run; None if it starts or
        ends inside of an index."""
        for dim in range(len(self.shape)):
            behind = prod(self.shape[dim + 1 :])
            if behind and start % behind == 0 and numel % behind == 0:
                index, first = divmod(start // behind, self.shape[dim])
                last = first + numel // behind
                if last <= self.shape[dim]:
                    before = []
                    for size in reversed(self.shape[:dim]):
                        index, i = divmod(index, size)
                        before.append(i)
                    return tuple(reversed(before)), (first, last)
        return None

    def run_shape(self, start: int, numel: int) -> tuple[int, ...]:
        """Return the shape of a run: how many indices of its dim, and the dims behind.

        Raises:
            ValueError: the run starts or ends inside of an index.
        """
        before, (first, last) = self._found(start, numel)
        return (last - first, *self.shape[len(before) + 1 :])

    def _found(self, start: int, numel: int) -> tuple[tuple[int, ...], Range]:
        found = self.find(start, numel)
        if found is None:
            raise ValueError(f"elements {start} to {start + numel} of {self.shape} are no box")
        return found

    def parts(self, start: int, numel: int) -> Iterator[BoxPart]:
        """Yield what shards hold of a run, in no order; no empty parts."""
        before, (first, last) = self._found(start, numel)
        dim = len(before)
        choices: list[list[tuple[int, int, int]]] = []
        for i, of_dim in enumerate(self.ranges):
            low, high = (before[i], before[i] + 1) if i < dim else (0, self.shape[i])
            if i == dim:
                low, high = first, last
            choices.append([r for r in of_dim if max(low, r[1]) < min(high, r[2])])
        for combination in product(*choices):
            local = [stop - begin for _, begin, stop in combination]
            begin, end = max(first, combination[dim][1]), min(last, combination[dim][2])
            behind = prod(local[dim + 1 :])
            place = (begin - combination[dim][1]) * behind
            for i in range(dim):
                place += (before[i] - combination[i][1]) * prod(local[i + 1 :])
            rest = tuple((r[1], r[2]) for r in combination[dim + 1 :])
            shard = sum(r[0] for r in combination)
            box = ((begin - first, end - first), *rest)
            yield BoxPart(shard, place, (end - begin) * behind, box)


@lru_cache(maxsize=1 << 14)
def parts_by_shard(boxes: Boxes, start: int, numel: int) -> tuple[BoxPart, ...]:
    """Return what shards hold of a run, ascending; equal tensors share it."""
    return tuple(sorted(boxes.parts(start, numel), key=lambda part: part.shard))


@lru_cache(maxsize=1 << 14)
def places_of_parts(boxes: Boxes, start: int, numel: int) -> dict[int, tuple[slice, ...]]:
    """Return where the parts of a run belong that follow each other, shards ascending: elements
    before a part -> its indices in the run."""
    places, begin = {}, 0
    for part in parts_by_shard(boxes, start, numel):
        places[begin] = tuple(slice(*indices) for indices in part.box)
        begin += part.numel
    return places


@lru_cache(maxsize=1024)
def boxes_of(shape: tuple[int, ...], cuts: tuple[AxisCut, ...]) -> Boxes | None:
    """Return how axes cut a tensor, as torch.chunk does, shards numbered row by row of the axes.

    Args:
        shape: of the tensor.
        cuts: by axis in the order of the mesh. An axis whose pieces were cut before by later ones
            (torch's strided shards) divides what those left.

    Returns:
        None where a strided shard is no range: sizes that do not divide evenly, or a count of
        pieces that is not that of the later axes of its dim.

    Example:
        >>> boxes_of((4, 6), ((0, 2, 1), (1, 3, 1))).box(5)
        ((2, 4), (4, 6))
    """
    sizes = [size for _, size, _ in cuts]
    strides = [prod(sizes[i + 1 :]) for i in range(len(cuts))]
    ranges = []
    for dim, length in enumerate(shape):
        axes = [i for i, (cut_dim, *_) in enumerate(cuts) if cut_dim == dim]
        strided = [i for i in axes if cuts[i][2] != 1]
        for i in strided:
            before = prod(sizes[j] for j in axes if j > i and j not in strided)
            if before != cuts[i][2] or length % prod(sizes[j] for j in axes):
                return None
        pieces = [(0, 0, length)]
        for i in [*(j for j in axes if j not in strided), *strided]:
            pieces = [
                (number + k * strides[i], *piece)
                for number, start, stop in pieces
                for k, piece in enumerate(chunk_ranges(start, stop, sizes[i]))
            ]
        ranges.append(tuple(pieces))
    return Boxes(tuple(shape), tuple(ranges))


def chunk_ranges(start: int, stop: int, count: int) -> list[Range]:
    """Return `count` ranges as torch.chunk cuts rows: the last ones short or empty.

    Example:
        >>> chunk_ranges(0, 5, 4)
        [(0, 2), (2, 4), (4, 5), (5, 5)]
    """
    size = -(-(stop - start) // count)
    cuts = [min(start + i * size, stop) for i in range(count + 1)]
    return [(cuts[i], cuts[i + 1]) for i in range(count)]
