"""RaggedShard: how a flattened tensor is cut over ranks, and the boxes that a flat range covers.

Pure integers; of torch it touches only the `Placement` base class.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from math import prod
from typing import overload

from torch.distributed.tensor.placement_types import Placement

from sharding.planning.cuts import PieceRuns

RankRuns = tuple[tuple[int, int], ...]  # (units, number of consecutive ranks that hold so many)

# Longer lists of local_units are shown by their runs.
_REPR_RANKS = 8


class RaggedShard(Placement):
    """The tensor, flattened over `dims`, is cut into one contiguous piece per rank.

    Rank r holds the `local_units[r]` units that follow those of rank r - 1; 0 is allowed anywhere.
    A unit is `unit_numel` consecutive elements; the last unit of the tensor may be shorter. The
    name and the first two fields are those of veScale's placement; there the size of a unit is
    derived from the shape, here it is stored, so that units need not divide the tensor.

    Counts are held as runs of equal ones: a tensor in a flat buffer has at most five, whatever the
    number of ranks, so hash, equality and pickle take constant time and space at 16,384 ranks.
    Immutable.

    Args:
        dims: The leading dims of the tensor that are flattened, `(0, ..., k - 1)`. With fewer than
            all, units are whole slices of the other dims.
        local_units: Units held by each rank, by rank of the mesh dimension.
        unit_numel: Elements of one unit.

    Raises:
        ValueError: `dims` are not the leading dims, a count is negative, there is no rank, or
            `unit_numel` is not positive.

    References: https://github.com/volcengine/veScale (docs/texts/raggedshard.md)
    """

    _dims: tuple[int, ...]
    _runs: RankRuns
    _unit_numel: int
    _hash: int

    def __init__(
        self, dims: Iterable[int], local_units: Iterable[int], unit_numel: int = 1
    ) -> None:
        """Check and encode the counts."""
        # The C++ base crashes the process on first use when its own __init__ was skipped.
        super().__init__()
        dims = tuple(dims)
        if dims != tuple(range(len(dims))):
            raise ValueError(f"expected dims to be the leading ones, (0, 1, ...), got {dims!r}")
        runs = tuple((int(units), sum(1 for _ in ranks)) for units, ranks in groupby(local_units))
        self._set(dims, runs, unit_numel)

    @classmethod
    @lru_cache(maxsize=1 << 14)  # of equal layers, equal parameters share one
    def from_range(
        cls,
        ndim: int,
        numel: int,
        offset: int,
        shard_numel: int,
        world_size: int,
        unit_numel: int = 1,
    ) -> RaggedShard:
        """Return the placement of a tensor in a flat buffer that is cut every `shard_numel`
        elements.

        Args:
            ndim: Dims of the tensor; all are flattened.
            numel: Elements of the tensor.
            offset: Where the tensor starts in the buffer of `world_size * shard_numel` elements.
            shard_numel: Elements of the buffer that each rank holds.
            world_size: Number of ranks.
            unit_numel: Elements of one unit; every cut of the tensor must lie between two units.

        Raises:
            ValueError: The tensor does not lie in the buffer, or a cut falls inside a unit.
        """
        end = offset + numel
        if min(numel, offset, shard_numel) < 0 or end > world_size * shard_numel:
            raise ValueError(
                f"expected a tensor inside a buffer of world_size={world_size!r} * "
                f"shard_numel={shard_numel!r} elements, got offset={offset!r} and numel={numel!r}"
            )
        if unit_numel < 1:
            raise ValueError(f"expected a positive unit_numel, got {unit_numel!r}")
        if numel == 0:
            return cls._from_runs(tuple(range(ndim)), ((0, world_size),), unit_numel)
        first, last = offset // shard_numel, (end - 1) // shard_numel
        head = min((first + 1) * shard_numel, end) - offset
        tail = end - last * shard_numel if last > first else 0
        cuts_are_legal = head % unit_numel == 0 or last == first
        if not cuts_are_legal or (last - first > 1 and shard_numel % unit_numel):
            raise ValueError(
                f"expected cuts between units of unit_numel={unit_numel!r} elements, got a tensor "
                f"at offset={offset!r} of a buffer cut every shard_numel={shard_numel!r} elements; "
                "plan with a granule that is a multiple of the unit, or state a smaller unit"
            )
        runs = (
            (0, first),
            (-(-head // unit_numel), 1),
            (shard_numel // unit_numel, max(last - first - 1, 0)),
            (-(-tail // unit_numel), min(last - first, 1)),
            (0, world_size - last - 1),
        )
        return cls._from_runs(tuple(range(ndim)), runs, unit_numel)

    @classmethod
    def _from_runs(cls, dims: tuple[int, ...], runs: RankRuns, unit_numel: int) -> RaggedShard:
        self = cls.__new__(cls)
        Placement.__init__(self)
        self._set(dims, runs, unit_numel)
        return self

    def _set(self, dims: tuple[int, ...], runs: RankRuns, unit_numel: int) -> None:
        merged: list[tuple[int, int]] = []
        for units, ranks in runs:
            if units < 0:
                raise ValueError(f"expected local_units of 0 or more, got {units!r}")
            if ranks and merged and merged[-1][0] == units:
                merged[-1] = (units, merged[-1][1] + ranks)
            elif ranks:
                merged.append((units, ranks))
        if not merged:
            raise ValueError("expected local_units of at least one rank, got none")
        if sorted(dims) != list(range(len(dims))):
            raise ValueError(f"expected dims to be the leading ones, in any order, got {dims!r}")
        if unit_numel < 1:
            raise ValueError(f"expected a positive unit_numel, got {unit_numel!r}")
        self._dims, self._runs, self._unit_numel = dims, tuple(merged), unit_numel
        self._hash = hash((RaggedShard, dims, self._runs, unit_numel))

    @property
    def dims(self) -> tuple[int, ...]:
        """The leading dims that are flattened and cut, the slowest first; of a transposed view in
        another order."""
        return self._dims

    @property
    def is_row_major(self) -> bool:
        """Whether the tensor is flattened in the order of its dims: not so a transposed view."""
        return self._dims == tuple(range(len(self._dims)))

    @property
    def unit_numel(self) -> int:
        """Elements of one unit."""
        return self._unit_numel

    @property
    def local_units(self) -> tuple[int, ...]:
        """Units of every rank; derived, and as long as there are ranks."""
        return tuple(units for units, ranks in self._runs for _ in range(ranks))

    @property
    def piece_runs(self) -> PieceRuns:
        """(elements of a piece, consecutive ranks that have such); the last piece of a tensor ends
        with it."""
        return tuple((units * self._unit_numel, ranks) for units, ranks in self._runs)

    @property
    def world_size(self) -> int:
        """Number of ranks that the tensor is cut over."""
        return sum(ranks for _, ranks in self._runs)

    def check_shape(self, shape: Sequence[int]) -> None:
        """Check that this placement describes a tensor of `shape`.

        Raises:
            ValueError: The units of all ranks do not add up to the tensor, there are more dims than
                the tensor has, or a unit ends inside a slice of the dims that are not flattened.
        """
        numel = prod(shape)
        units = sum(units * ranks for units, ranks in self._runs)
        if units != -(-numel // self._unit_numel):
            raise ValueError(
                f"expected units for the {numel} elements of shape {tuple(shape)!r}, "
                f"got {units} units of {self._unit_numel} elements in {self!r}"
            )
        slice_numel = prod(shape[len(self._dims) :])
        if len(self._dims) > len(shape) or (numel and self._unit_numel % slice_numel):
            raise ValueError(
                f"expected dims of shape {tuple(shape)!r} and units of whole slices of the other "
                f"dims ({slice_numel} elements), got {self!r}"
            )

    def flattening(self, ndim: int) -> RaggedShard:
        """Return the same cuts of the same elements for a tensor of `ndim` dims, all flattened."""
        return RaggedShard._from_runs(tuple(range(ndim)), self._runs, self._unit_numel)

    def permuted(self, order: Sequence[int]) -> RaggedShard:
        """Return the same cuts of the same elements for `tensor.permute(order)`."""
        dims = self._dims if not self.is_row_major else tuple(range(len(order)))
        new_place = {old: new for new, old in enumerate(order)}
        moved = tuple(new_place[dim] for dim in dims)
        return RaggedShard._from_runs(moved, self._runs, self._unit_numel)

    def bounds(self, rank: int, numel: int) -> tuple[int, int]:
        """Return the flat element range `(start, stop)` that `rank` holds of a tensor of `numel`
        elements.

        Raises:
            IndexError: There is no such rank.
        """
        before = 0
        first_rank = 0
        for units, ranks in self._runs:
            if first_rank <= rank < first_rank + ranks:
                start = (before + (rank - first_rank) * units) * self._unit_numel
                return min(start, numel), min(start + units * self._unit_numel, numel)
            before += units * ranks
            first_rank += ranks
        raise IndexError(f"expected a rank below {first_rank}, got {rank!r}")

    def all_bounds(self, numel: int) -> list[tuple[int, int]]:
        """Return the flat element range of every rank; they tile `[0, numel)` in rank order."""
        bounds = []
        start = 0
        for units in self.local_units:
            stop = min(start + units * self._unit_numel, numel)
            bounds.append((start, stop))
            start = stop
        return bounds

    def ranges(self, numel: int) -> RankRanges:
        """Return the same as `all_bounds`, worked out when it is looked at: small at any world
        size."""
        return RankRanges(self, numel)

    def runs_of_blocks(self, numel: int, block: int) -> RankRuns | None:
        """Return how many blocks each rank holds of a tensor of `numel` elements, as (blocks,
        ranks).

        Blocks of `block` elements are counted from the first element; the last may be shorter. None
        where a cut falls inside a block.
        """
        runs: list[tuple[int, int]] = []
        start = 0
        for units, ranks in self._runs:
            length = units * self._unit_numel
            stop = start + length * ranks
            if length == 0 or (length % block == 0 and stop <= numel):
                runs.append((length // block, ranks))
            elif length % block == 0 or (ranks == 1 and stop >= numel):
                last = start + length * (ranks - 1)
                runs += [(length // block, ranks - 1), (-(-(numel - last) // block), 1)]
            else:
                return None
            start = min(stop, numel)
        return tuple(runs)

    def __eq__(self, other: object) -> bool:
        """Return whether dims, units on every rank and the size of a unit are the same."""
        if self is other:
            return True
        if not isinstance(other, RaggedShard):
            return False
        return (
            self._hash == other._hash
            and self._runs == other._runs
            and self._dims == other._dims
            and self._unit_numel == other._unit_numel
        )

    def __hash__(self) -> int:
        """Return the hash, computed once."""
        return self._hash

    def __repr__(self) -> str:
        """Return a Python expression for this placement, short at any number of ranks."""
        if self.world_size <= _REPR_RANKS:
            units = repr(self.local_units)
        else:
            units = " + ".join(
                f"({units},)" + (f" * {ranks}" if ranks > 1 else "") for units, ranks in self._runs
            )
        return f"RaggedShard(dims={self._dims}, local_units={units}, unit_numel={self._unit_numel})"

    def __format__(self, spec: str) -> str:
        """Return what the errors of torch's DTensor show, which know no such placement: with the
        cure."""
        return (
            f"{self!r} (which only a RaggedDTensor is cut by: write a full tensor with "
            f"parameter.copy_(full), make a sharded one with torch.empty_like(parameter)"
            f".copy_(full), load a full state with load_full_state_dict(model, state=...))"
        )

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle the runs; the C++ base cannot be pickled by itself."""
        return placement_from_runs, (self._dims, self._runs, self._unit_numel)


@dataclass(frozen=True, slots=True)
class RankRanges(Sequence[tuple[int, int]]):
    """The flat element range `(start, stop)` of every rank, by rank; they tile `[0, numel)`.

    Attributes:
        placement: Of the tensor.
        numel: Elements of the tensor.
    """

    placement: RaggedShard
    numel: int

    def __len__(self) -> int:
        """Return the number of ranks."""
        return self.placement.world_size

    @overload
    def __getitem__(self, rank: int) -> tuple[int, int]: ...
    @overload
    def __getitem__(self, rank: slice) -> list[tuple[int, int]]: ...
    def __getitem__(self, rank: int | slice) -> tuple[int, int] | list[tuple[int, int]]:
        """Return the range of a rank, or of some."""
        if isinstance(rank, slice):
            return [self[i] for i in range(*rank.indices(len(self)))]
        return self.placement.bounds(rank + len(self) if rank < 0 else rank, self.numel)


def placement_from_runs(dims: tuple[int, ...], runs: RankRuns, unit_numel: int) -> RaggedShard:
    """Return what a pickled RaggedShard is made by; a function, so that `weights_only` may call
    it."""
    return RaggedShard._from_runs(dims, runs, unit_numel)


@dataclass(frozen=True, slots=True)
class Box:
    """A hyper-rectangle of a tensor whose elements are contiguous in its flattened form.

    Attributes:
        offsets: Index of the first element, per dim.
        sizes: Extent, per dim.
        flat_start: Position of the first element in the flattened tensor.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    flat_start: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.sizes)


def boxes(start: int, stop: int, shape: Sequence[int]) -> list[Box]:
    """Tile the flat range `[start, stop)` of a row-major tensor with hyper-rectangles.

    At most `2 * ndim - 1` boxes, in flat order: a partial slice at each end of every dim but the
    last, and one run of whole slices between them. A 0-D tensor has one box without dims; an empty
    range has none.

    Raises:
        ValueError: The range does not lie in the tensor.

    Example:
        >>> [(box.offsets, box.sizes) for box in boxes(1, 6, (3, 2))]
        [((0, 1), (1, 1)), ((1, 0), (2, 2))]
    """
    if not 0 <= start <= stop <= prod(shape):
        raise ValueError(
            f"expected a range inside the {prod(shape)} elements of shape {tuple(shape)!r}, "
            f"got {(start, stop)!r}"
        )
    return list(_tile(start, stop, tuple(shape), (), start))


def _tile(
    start: int, stop: int, shape: tuple[int, ...], prefix: tuple[int, ...], flat_start: int
) -> Iterator[Box]:
    """Tile `[start, stop)` of the slice at index `prefix`; `flat_start` is where `start` lies."""
    if start == stop:
        return
    ones = (1,) * len(prefix)
    if not shape:
        yield Box(prefix, ones, flat_start)
        return
    inner = shape[1:]
    slice_numel = prod(inner)
    first, last = -(-start // slice_numel), stop // slice_numel  # whole slices [first, last)
    if first > last:
        base = last * slice_numel
        yield from _tile(start - base, stop - base, inner, (*prefix, last), flat_start)
        return
    head = first * slice_numel - start
    if head:
        yield from _tile(slice_numel - head, slice_numel, inner, (*prefix, first - 1), flat_start)
    if first < last:
        offsets = (*prefix, first, *(0 for _ in inner))
        yield Box(offsets, (*ones, last - first, *inner), flat_start + head)
    tail = stop - last * slice_numel
    yield from _tile(0, tail, inner, (*prefix, last), flat_start + stop - start - tail)
