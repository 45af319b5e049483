"""The first difference between a sharded run and the unsharded one, as text to read.

Pure comparison of records; touches no process group and no device.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from math import prod

import torch
from torch import Tensor

from vfsdp_optim.testing.records import OPTION, PARAM, Padding, Piece, Record

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class DifferenceError(AssertionError):
    """A sharded run is not the unsharded one; the message is the report."""


@dataclass(frozen=True, slots=True)
class Tolerance:
    """How far numbers may differ: by ``atol + rtol * |unsharded|``; not at all, by default."""

    atol: float = 0.0
    rtol: float = 0.0

    @classmethod
    def of(cls, exact: bool, atol: float | None, rtol: float | None) -> "Tolerance":
        """Return the tolerance that a user asked for.

        Raises:
            ValueError: exact with a tolerance, or inexact without both numbers.
        """
        given = (atol is not None) + (rtol is not None)
        if given != (0 if exact else 2):
            raise ValueError(
                f"expected exact=True alone, or exact=False with both atol and rtol, got "
                f"{exact=}, {atol=}, {rtol=}"
            )
        return cls(atol or 0.0, rtol or 0.0)

    @property
    def exact(self) -> bool:
        """Whether every bit counts."""
        return self.atol == self.rtol == 0.0

    def wrong(self, actual: Tensor, expected: Tensor) -> Tensor:
        """Return which elements differ, as bools; one NaN is as good as another."""
        if self.exact:
            if not actual.dtype.is_floating_point:
                return actual != expected
            bits = _BITS[actual.element_size()]
            differ = actual.view(bits) != expected.view(bits)
            return differ & ~(actual.isnan() & expected.isnan())
        return ~torch.isclose(
            actual.double(), expected.double(), atol=self.atol, rtol=self.rtol, equal_nan=True
        )


@dataclass(frozen=True, slots=True)
class Difference:
    """Where a sharded run first leaves the unsharded one; prints as a report.

    Attributes:
        when: the moment, as text.
        name: of the parameter; empty for a state of none.
        key: as in `records.Piece`.
        what: the lines that say how it differs.
    """

    when: str
    name: str
    key: str
    what: tuple[str, ...]

    def __str__(self) -> str:
        """Return the report."""
        head = f"first difference: {self.when}, {self._owner}, {self._place}"
        return "\n".join([head, *(f"  {line}" for line in self.what)])

    @property
    def _owner(self) -> str:
        return f"parameter {self.name!r}" if self.name else "beside all parameters"

    @property
    def _place(self) -> str:
        if self.key == PARAM:
            return "the parameter itself"
        if self.key.startswith(OPTION):
            return f"option {self.key.removeprefix(OPTION)!r} of its group"
        return f"state {self.key!r}"


def moves(record: Record, tolerance: Tolerance) -> bool:
    """Return whether an unsharded run, which begins at moment 0, moves a parameter by more than a
    tolerance: else a run that does nothing equals it."""
    params = [piece for piece in record.pieces if piece.key == PARAM]
    start = {piece.name: piece.values for piece in params if piece.moment == 0}
    return any(bool(tolerance.wrong(p.values, start[p.name]).any()) for p in params)


def first_difference(
    sharded: Sequence[Record],
    unsharded: Record,
    tolerance: Tolerance,
    label: Callable[[int], str] = "step {}".format,
) -> Difference | None:
    """Return the first difference: by moment, then by parameter, its states before itself.

    Args:
        sharded: by rank. Moments of the unsharded run that no rank observed are not compared.
        unsharded: of the run on full tensors.
        tolerance: what counts as a difference.
        label: returns a moment as text.
    """
    pieces: dict[tuple[int, str, str], list[tuple[int, Piece]]] = {}
    for rank, record in enumerate(sharded):
        for piece in record.pieces:
            pieces.setdefault((piece.moment, piece.name, piece.key), []).append((rank, piece))
    padding: dict[int, tuple[int, Padding]] = {}
    for rank, record in enumerate(sharded):
        for found in record.padding:
            padding.setdefault(found.moment, (rank, found))
    full = {(piece.moment, piece.name, piece.key): piece for piece in unsharded.pieces}
    # A loaded torch.optim.Optimizer has options that a new one lacks.
    pieces = {
        place: held
        for place, held in pieces.items()
        if place in full or not place[2].startswith(OPTION)
    }
    names = list(dict.fromkeys(name for _, name, _ in (*full, *pieces)))
    keys: dict[tuple[int, str], dict[str, None]] = {}  # a dict keeps their order
    for moment, name, key in (*full, *pieces):
        keys.setdefault((moment, name), {})[key] = None
    for moment in sorted({moment for moment, _, _ in pieces}):
        wrong: list[Difference] = []
        for name in names:
            for key in sorted(keys.get((moment, name), ()), key=lambda k: k == PARAM):
                place = moment, name, key
                what = _compare(pieces.get(place, []), full.get(place), len(sharded), tolerance)
                if what:
                    wrong.append(Difference(label(moment), name, key, tuple(what)))
        if wrong:
            first = wrong[0]
            return replace(first, what=(*first.what, *_others(wrong[1:])))
        if moment in padding:
            rank, found = padding[moment]
            lines = tuple(_padding(rank, found))
            return Difference(label(moment), found.after, found.key, lines)
    return None


def _padding(rank: int, padding: Padding) -> list[str]:
    return [
        "all tensors are equal, but the padding of the buffer is not zero:",
        f"{padding.count} elements of rank {rank} after {padding.after!r}, the first is "
        f"{padding.value!r}",
        "whole-buffer norms and finite-checks read it; zero it after an update that writes it",
    ]


def _others(wrong: Sequence[Difference]) -> list[str]:
    if not wrong:
        return ["nothing else differs then"]
    shown = [
        f"{name!r} ({', '.join(d.key or 'param' for d in of_name)})"
        for name, of_name in groupby(wrong, key=lambda d: d.name)
    ]
    more = f" and {len(shown) - 6} more parameters" if len(shown) > 6 else ""
    return [f"also different then: {', '.join(shown[:6])}{more}"]


def _compare(
    held: list[tuple[int, Piece]], full: Piece | None, world_size: int, tolerance: Tolerance
) -> list[str]:
    """Return what is wrong with one tensor at one moment; [] if nothing is."""
    if full is None:
        ranks = _ranks([rank for rank, _ in held])
        return [f"it exists on {ranks} and not in the unsharded run"]
    if len(held) < world_size:
        missing = sorted(set(range(world_size)) - {rank for rank, _ in held})
        return [f"it exists in the unsharded run and not on {_ranks(missing)}"]
    held = [(rank, _placed(piece, full)) for rank, piece in held]
    covered = 0
    for _, piece in sorted(held, key=lambda item: item[1].start):
        if piece.start > covered:
            break
        covered = max(covered, piece.stop)
    if covered < full.values.numel() and all(piece.shape == full.shape for _, piece in held):
        return [f"no rank holds element {covered} of {full.values.numel()}"]
    return compare_pieces(held, full, tolerance)


def compare_pieces(
    held: Sequence[tuple[int, Piece]], full: Piece, tolerance: Tolerance
) -> list[str]:
    """Return how the pieces of some ranks differ from the full tensor; [] if they do not."""
    held = [(rank, _placed(piece, full)) for rank, piece in held]
    for rank, piece in held:
        if piece.values.dtype != full.values.dtype or piece.shape != full.shape:
            return [
                f"sharded    {_kind(piece)} on rank {rank}{_cut(piece)}",
                f"unsharded  {_kind(full)}",
            ]
    wrong = []
    for rank, piece in held:
        expected = full.values[piece.start : piece.stop]
        differs = tolerance.wrong(piece.values, expected)
        if differs.any():
            wrong.append((rank, piece, differs))
    return _describe(wrong, full) if wrong else []


def _placed(piece: Piece, full: Piece) -> Piece:
    """Return a plain tensor as the part of the full one that it is, where the shapes say so."""
    if piece.shape == full.shape:
        return piece
    start = dict(piece.places).get(full.shape)
    return piece if start is None else replace(piece, shape=full.shape, start=start)


def _describe(wrong: list[tuple[int, Piece, Tensor]], full: Piece) -> list[str]:
    rank, piece, differs = min(wrong, key=lambda item: item[1].start + int(item[2].nonzero()[0]))
    first = int(differs.nonzero()[0])
    flat = piece.start + first
    actual, expected = piece.values[first], full.values[flat]
    lines = [
        f"index      {_index(flat, full.shape)} of shape {full.shape}, element {flat}",
        f"sharded    {_value(actual)}",
        f"unsharded  {_value(expected)}",
        f"held by    rank {rank}: elements {piece.start} to {piece.stop}{_cut(piece)}",
    ]
    places = torch.zeros(full.values.numel(), dtype=torch.bool, device="cpu")
    gaps, scale, ulps = 0.0, 0.0, 0
    for _, other, of_rank in wrong:
        places[other.start : other.stop] |= of_rank
        a, b = other.values[of_rank], full.values[other.start : other.stop][of_rank]
        gap = (a.double() - b.double()).abs().nan_to_num(float("inf"))
        gaps = max(gaps, float(gap.max()))
        scale = max(scale, float(b.double().abs().nan_to_num(0.0).max()))
        ulps = max(ulps, _ulps(a, b))
    ranks = _ranks(sorted({rank for rank, *_ in wrong}))
    size = f"by at most {gaps:.3g}" + (f" at values up to {scale:.3g}" if scale else "")
    unit = "unit" if ulps == 1 else "units"
    rounding = f", {ulps} {unit} in the last place" if 0 < ulps < 10**6 else ""
    lines.append(
        f"in all     {int(places.sum())} of {places.numel()} elements differ, on {ranks}, "
        f"{size}{rounding}"
    )
    return lines


def _kind(piece: Piece) -> str:
    return f"{str(piece.values.dtype).removeprefix('torch.')} of shape {piece.shape}"


def _cut(piece: Piece) -> str:
    return f" of {piece.layout}" if piece.layout else ", whole"


def _ranks(ranks: Sequence[int]) -> str:
    text = ", ".join(map(str, ranks))
    return f"rank {text}" if len(ranks) == 1 else f"ranks {text}"


def _index(flat: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    strides = [prod(shape[dim + 1 :]) for dim in range(len(shape))]
    return tuple(flat // stride % size for stride, size in zip(strides, shape, strict=True))


def values_of(a: Tensor, b: Tensor) -> tuple[str, str]:
    """Return two numbers with all their digits and their bits."""
    return _value(a), _value(b)


def _value(x: Tensor) -> str:
    if not x.dtype.is_floating_point:
        return repr(x.item())
    mask = (1 << 8 * x.element_size()) - 1
    bits = int(x.view(_BITS[x.element_size()])) & mask
    digits = {1: 3, 2: 5, 4: 9, 8: 17}[x.element_size()]
    return f"{x.item():.{digits}g} (0x{bits:0{2 * x.element_size()}x})"


def _ulps(a: Tensor, b: Tensor) -> int:
    """Return the largest distance in representable numbers; 0 where that has no meaning."""
    if not a.dtype.is_floating_point or not bool((a.isfinite() & b.isfinite()).all()):
        return 0
    bits = _BITS[a.element_size()]
    x, y = a.view(bits).long(), b.view(bits).long()
    # Negative numbers are ordered the other way round by their bits.
    low = torch.iinfo(bits).min
    x, y = torch.where(x < 0, low - x, x), torch.where(y < 0, low - y, y)
    return int((x - y).abs().max())
