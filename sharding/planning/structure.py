"""What an optimizer declares about a parameter. Einops on meta tensors; never reads data.

A structure says, from the global shape alone, how a parameter may be cut (`granule`) and which
parts an update needs whole (`units`). Matrices are declared in einops' notation: the last two axes
on the right are the matrix, the axes before them count matrices. Whether a matrix is one contiguous
run of the flat parameter is read from the strides that the pattern gives a meta tensor.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import prod
from typing import Any, ClassVar, Literal, Protocol

import torch
from einops import EinopsError, rearrange

from sharding.planning.granule import Granule, Shape


@dataclass(frozen=True, slots=True)
class Unit:
    """A part of a flat parameter that an update needs whole.

    Attributes:
        start: First element in the flat parameter.
        numel: Elements; `batch * rows * cols`.
        batch: Matrices inside; more than 1 only when they are not contiguous runs.
        rows: Rows of each matrix.
        cols: Columns of each matrix.
    """

    start: int
    numel: int
    batch: int
    rows: int
    cols: int


class Structure:
    """Base of all structures: frozen, hashable, and its `repr` evaluates to an equal one.

    Attributes:
        has_units: Whether an update needs more than single elements or blocks of them.
    """

    __slots__ = ()
    has_units: ClassVar[bool] = False

    def granule(self, shape: Shape) -> Granule:
        """Return where a parameter of this shape may be cut while its units stay whole."""
        raise NotImplementedError

    def units(self, shape: Shape) -> tuple[Unit, ...]:
        """Return what an update needs whole, ascending by start; () when elements or blocks
        suffice."""
        raise NotImplementedError

    def matrices(self, unit_data: torch.Tensor, unit: Unit, shape: Shape) -> torch.Tensor:
        """Return the matrices of a unit.

        Args:
            unit_data: (unit.numel,), the unit's elements as they lie in the flat parameter.
            unit: One of `units(shape)`.
            shape: Global shape of the parameter.

        Returns:
            (unit.batch, unit.rows, unit.cols), contiguous; a view of `unit_data` where matrices
            are contiguous runs.
        """
        return unit_data.view(unit.batch, unit.rows, unit.cols)

    def flatten(self, matrices: torch.Tensor, unit: Unit, shape: Shape) -> torch.Tensor:
        """Return the inverse of `matrices`: (unit.batch, unit.rows, unit.cols) to (unit.numel,)."""
        return matrices.reshape(unit.numel)


@dataclass(frozen=True, slots=True)
class Elementwise(Structure):
    """Any cut will do (Adam and its kin).

    Example:
        >>> Elementwise().granule((4, 6)).numel
        1
    """

    def granule(self, shape: Shape) -> Granule:
        """Return the granule of which every element is a legal cut."""
        return Granule()

    def units(self, shape: Shape) -> tuple[Unit, ...]:
        """Return none."""
        return ()


@dataclass(frozen=True, slots=True)
class Blocks(Structure):
    """Runs of `numel` elements of the flat parameter stay together; the last may be shorter.

    Raises:
        ValueError: numel < 1.

    Example:
        >>> Blocks(256).granule((4096, 300)).numel
        256
    """

    numel: int

    def __post_init__(self) -> None:
        """Check the attribute."""
        if self.numel < 1:
            raise ValueError(f"Blocks expects numel >= 1, got {self.numel!r}.")

    def granule(self, shape: Shape) -> Granule:
        """Return cuts at multiples of the block."""
        return Granule(self.numel)

    def units(self, shape: Shape) -> tuple[Unit, ...]:
        """Return none: blocks restrict the cuts and nothing else."""
        return ()


@dataclass(frozen=True, slots=True)
class RowPanels(Structure):
    """Panels of `rows` rows of the parameter viewed as (shape[0], rest); the last may be shorter.

    With `batch_dims` the leading dims count matrices, and no panel goes from one to the next: a
    stack of experts (E, rows, cols) has `batch_dims=1`. A parameter without dimensions counts as
    (1, 1).

    Raises:
        ValueError: rows < 1 or batch_dims < 0; or a shape has no dim beside those of the batch.

    Example:
        >>> [(unit.start, unit.rows, unit.cols) for unit in RowPanels(2).units((3, 4, 5))]
        [(0, 2, 20), (40, 1, 20)]
        >>> stack = RowPanels(2, batch_dims=1)
        >>> [(unit.start, unit.rows, unit.cols) for unit in stack.units((2, 3, 5))]
        [(0, 2, 5), (10, 1, 5), (15, 2, 5), (25, 1, 5)]
        >>> stack.granule((2, 3, 5))
        Granule(numel=10, restart=15, cuts=None)
    """

    rows: int
    batch_dims: int = 0
    has_units: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Check the attributes."""
        if self.rows < 1:
            raise ValueError(f"RowPanels expects rows >= 1, got {self.rows!r}.")
        if self.batch_dims < 0:
            raise ValueError(f"RowPanels expects batch_dims >= 0, got {self.batch_dims!r}.")

    def granule(self, shape: Shape) -> Granule:
        """Return cuts between panels."""
        _, height, width = self._matrices(shape)
        if not self.batch_dims:
            return Granule(max(1, self.rows * width))
        return Granule(max(1, self.rows * width), restart=max(1, height * width))

    def units(self, shape: Shape) -> tuple[Unit, ...]:
        """Return one unit per panel."""
        count, height, width = self._matrices(shape)
        if width == 0:
            return ()
        return tuple(
            Unit((matrix * height + row) * width, rows * width, 1, rows, width)
            for matrix in range(count)
            for row in range(0, height, self.rows)
            for rows in (min(self.rows, height - row),)
        )

    def _matrices(self, shape: Shape) -> tuple[int, int, int]:
        """Return how many matrices, and their rows and columns."""
        batch, matrix = shape[: self.batch_dims], shape[self.batch_dims :]
        if self.batch_dims and not matrix:
            raise ValueError(
                f"{self!r} expects a parameter of more than {self.batch_dims} dims, got shape "
                f"{tuple(shape)}; give a smaller batch_dims."
            )
        return prod(batch), (matrix or (1,))[0], prod(matrix[1:])


@dataclass(frozen=True, slots=True, init=False, repr=False)
class FullMatrix(Structure):
    """Whole matrices, where they lie said by an einops pattern.

    Args:
        pattern: "axes of the parameter -> axes that count matrices, rows, columns".
        row_splits: For a 2-D parameter of several matrices stacked by rows: the rows of each.
        axes: Sizes of the axes that the shape does not give.

    Raises:
        ValueError: The pattern cannot be read or is given with `row_splits`, or a size is not
            a positive integer.
        TypeError: The pattern is no text, or `row_splits` no tuple.

    Example:
        >>> FullMatrix("(q h d) n -> (q h) d n", q=3, h=2).units((24, 5))[1]
        Unit(start=20, numel=20, batch=1, rows=4, cols=5)
        >>> FullMatrix("o ... -> o (...)").units((8, 3, 5, 5))
        (Unit(start=0, numel=600, batch=1, rows=8, cols=75),)
        >>> FullMatrix("m (h d) -> h m d", h=2).units((3, 8))  # columns: no contiguous runs
        (Unit(start=0, numel=24, batch=2, rows=3, cols=4),)
        >>> str(FullMatrix(row_splits=(4, 1, 1)))
        'm n -> m n; row_splits=4,1,1'
    """

    pattern: str
    row_splits: Shape | None
    axes: tuple[tuple[str, int], ...]
    has_units: ClassVar[bool] = True

    def __init__(
        self, pattern: str | None = None, *, row_splits: Shape | None = None, **axes: int
    ) -> None:
        """See the class."""
        if not isinstance(pattern, str | None):
            raise TypeError(f"FullMatrix expects an einops pattern as text, got {pattern!r}.")
        left, right = _read_pattern(_IDENTITY if pattern is None else pattern)
        if row_splits is not None:
            if not isinstance(row_splits, tuple | list):
                raise TypeError(f"FullMatrix expects row_splits=(rows, ...), got {row_splits!r}.")
            row_splits = tuple(row_splits)
            if pattern not in (None, _IDENTITY) or axes:
                raise ValueError(
                    f"FullMatrix takes row_splits or a pattern, not both; got pattern={pattern!r}, "
                    f"row_splits={row_splits!r}, axes={axes!r}."
                )
            if not all(isinstance(rows, int) and rows >= 1 for rows in row_splits or (0,)):
                raise ValueError(f"FullMatrix expects row_splits >= 1 each, got {row_splits!r}.")
        for name, size in axes.items():
            if not isinstance(size, int) or size < 1:
                raise ValueError(f"FullMatrix expects axis sizes >= 1, got {name}={size!r}.")
        object.__setattr__(self, "pattern", f"{' '.join(left)} -> {' '.join(right)}")
        object.__setattr__(self, "row_splits", row_splits)
        object.__setattr__(self, "axes", tuple(sorted(axes.items())))

    def __str__(self) -> str:
        """Return a plain form for group keys and checkpoints, which `parse` reads."""
        if self.row_splits is not None:
            return f"{self.pattern}; row_splits={','.join(map(str, self.row_splits))}"
        sizes = " ".join(f"{name}={size}" for name, size in self.axes)
        return f"{self.pattern}; {sizes}" if sizes else self.pattern

    def __repr__(self) -> str:
        """Return the call that makes it."""
        arguments = [] if self.pattern == _IDENTITY else [f'"{self.pattern}"']
        if self.row_splits is not None:
            arguments.append(f"row_splits={self.row_splits!r}")
        arguments += [f"{name}={size}" for name, size in self.axes]
        return f"FullMatrix({', '.join(arguments)})"

    @classmethod
    def parse(cls, text: str) -> "FullMatrix":
        """Return the structure whose `str` is `text`.

        Raises:
            ValueError: `text` is no such form.

        Example:
            >>> FullMatrix.parse("(q h d) n -> (q h) d n; h=12 q=3")
            FullMatrix("(q h d) n -> (q h) d n", h=12, q=3)
        """
        pattern, _, sizes = text.partition(";")
        try:
            arguments = dict(size.split("=") for size in sizes.split())
            splits = arguments.pop("row_splits", None)
            axes = {name: int(size) for name, size in arguments.items()}
            rows = None if splits is None else tuple(int(rows) for rows in splits.split(","))
        except ValueError:
            raise ValueError(
                f"expected a matrix structure such as 'm n -> m n', "
                f"'(q h d) n -> (q h) d n; h=12 q=3' or 'm n -> m n; row_splits=8,4', got {text!r}."
            ) from None
        return cls(pattern, row_splits=rows, **axes)

    def granule(self, shape: Shape) -> Granule:
        """Return cuts between matrices that are contiguous runs, else none."""
        units = self.units(shape)
        if not units:
            return Granule()
        if len({unit.numel for unit in units}) == 1:
            return Granule(units[0].numel)
        return Granule(0, cuts=tuple(unit.start for unit in units[1:]))

    def units(self, shape: Shape) -> tuple[Unit, ...]:
        """Return one unit per matrix that is a contiguous run, else the whole parameter as one.

        Raises:
            ValueError: The pattern or the row splits do not fit the shape.
        """
        return _read(self, tuple(shape)).units

    def matrices(self, unit_data: torch.Tensor, unit: Unit, shape: Shape) -> torch.Tensor:
        """Return the matrices of a unit; a copy where they are no contiguous runs."""
        layout = _read(self, tuple(shape))
        if not layout.contiguous:
            unit_data = rearrange(unit_data.view(shape), self.pattern, **dict(self.axes))
        return unit_data.reshape(unit.batch, unit.rows, unit.cols).contiguous()

    def flatten(self, matrices: torch.Tensor, unit: Unit, shape: Shape) -> torch.Tensor:
        """Return the inverse of `matrices`: (unit.batch, unit.rows, unit.cols) to (unit.numel,)."""
        layout = _read(self, tuple(shape))
        if layout.contiguous:
            return matrices.reshape(unit.numel)
        matrices = rearrange(
            matrices.reshape(layout.matrix_shape), layout.inverse_pattern, **dict(layout.sizes)
        )
        return matrices.reshape(unit.numel)


_IDENTITY = "m n -> m n"
_AXIS = re.compile(r"\([\w\s.]*\)|\.\.\.|\w+")
_CURE = (
    'Say which axes are the matrix, such as FullMatrix("o ... -> o (...)") for a convolution, '
    'FullMatrix("e m n -> e m n") for a stack of experts, or treat the parameter element-wise.'
)


def _read_pattern(pattern: str) -> tuple[list[str], list[str]]:
    """Return the axes of both sides; einops checks the rest when the pattern is applied to a
    shape."""
    left, arrow, right = pattern.partition("->")
    if not arrow or _AXIS.sub("", f"{left} {right}").strip():
        raise ValueError(f"expected an einops pattern 'axes -> batch rows cols', got {pattern!r}.")
    axes, matrix_axes = (
        [
            f"({' '.join(_names([axis]))})" if axis[0] == "(" else axis
            for axis in _AXIS.findall(side)
        ]
        for side in (left, right)
    )
    if len(matrix_axes) < 2:
        raise ValueError(f"the right side of {pattern!r} must end in rows and columns. {_CURE}")
    return axes, matrix_axes


def _names(axes: list[str]) -> list[str]:
    """Return the names in axes: q and h for "(q h)", none for "1"."""
    return [name for axis in axes for name in axis.strip("()").split() if name != "1"]


@dataclass(frozen=True, slots=True)
class _Reading:
    """What a structure means for one shape.

    Attributes:
        contiguous: Whether every matrix is one run of the flat parameter.
        units: See `FullMatrix.units`.
        matrix_shape: What the pattern makes of the parameter's shape.
        inverse_pattern: Einops pattern from `matrix_shape` back to the parameter.
        sizes: Sizes of all axes in `inverse_pattern`.
    """

    contiguous: bool
    units: tuple[Unit, ...]
    matrix_shape: Shape = ()
    inverse_pattern: str = ""
    sizes: tuple[tuple[str, int], ...] = ()


@lru_cache(maxsize=4096)
def _read(structure: FullMatrix, shape: Shape) -> _Reading:
    matrix_shape = _matrix_shape(structure, shape)
    if structure.row_splits is not None:
        return _Reading(True, _row_ranges(structure, structure.row_splits, shape))
    axes, _ = _read_pattern(structure.pattern)
    hidden = [f"hidden{i}" for i in range(len(shape) - len(axes) + 1)]  # what "..." stands for
    axes, (*batch, rows, cols) = _read_pattern(structure.pattern.replace("...", " ".join(hidden)))
    names = _names([*batch, rows, cols])
    apart = rearrange(
        torch.empty(shape, device="meta"),
        f"{' '.join(axes)} -> {' '.join(names)}",
        **dict(structure.axes),
    )
    sizes = dict(zip(names, apart.shape, strict=True))
    strides = dict(zip(names, apart.stride(), strict=True))
    height, width = matrix_shape[-2:]
    if prod(shape) == 0:
        units: tuple[Unit, ...] = ()
        contiguous = True
    elif contiguous := _is_run(_names([rows, cols]), sizes, strides):
        counted = _names(batch)
        starts = sorted(
            sum(index * strides[name] for index, name in zip(indices, counted, strict=True))
            for indices in product(*(range(sizes[name]) for name in counted))
        )
        units = tuple(Unit(start, height * width, 1, height, width) for start in starts)
    else:
        units = (Unit(0, prod(shape), prod(matrix_shape[:-2]), height, width),)
    inverse = f"{' '.join([*batch, rows, cols])} -> {' '.join(axes)}"
    return _Reading(contiguous, units, matrix_shape, inverse, tuple(sizes.items()))


def _matrix_shape(structure: FullMatrix, shape: Shape) -> Shape:
    """Return what the pattern makes of `shape`, or an error that says why it cannot."""
    try:
        matrices = rearrange(
            torch.empty(shape, device="meta"), structure.pattern, **dict(structure.axes)
        )
    except EinopsError as error:
        reason = str(error).splitlines()[-1].strip()
    else:
        if matrices.dim() >= 2:
            return tuple(matrices.shape)
        reason = f"The pattern leaves {matrices.dim()} axes, a matrix needs 2."
    raise ValueError(
        f"{structure!r} cannot find the matrices of a parameter.\n"
        f" Pattern: {structure.pattern!r}. Input shape: {shape}. Axes: {dict(structure.axes)}.\n"
        f" {reason}\n {_CURE}"
    )


def _row_ranges(structure: FullMatrix, row_splits: Shape, shape: Shape) -> tuple[Unit, ...]:
    if sum(row_splits) != shape[0]:
        raise ValueError(
            f"{structure!r} splits {sum(row_splits)} rows, but the parameter of shape {shape} has "
            f"{shape[0]}. Give row_splits that add up to {shape[0]}."
        )
    width = shape[1]
    starts = (sum(row_splits[:i]) * width for i in range(len(row_splits)))
    return tuple(
        Unit(start, rows * width, 1, rows, width)
        for start, rows in zip(starts, row_splits, strict=True)
        if width
    )


def _is_run(names: list[str], sizes: dict[str, int], strides: dict[str, int]) -> bool:
    """Return whether these axes, outermost first, walk over consecutive elements."""
    expected = 1
    for name in reversed(names):
        if sizes[name] != 1 and strides[name] != expected:
            return False
        expected *= sizes[name]
    return True


@dataclass(frozen=True, slots=True)
class Demand:
    """A structure that someone needs of a parameter.

    Attributes:
        structure: What.
        when: "stored": the layout at rest must satisfy it. "step": only while an update is
            computed, by lying whole on a rank or by travelling to an owner.
        by: Who asks, for tables and errors.

    Raises:
        ValueError: `when` is neither.
    """

    structure: Structure
    when: Literal["stored", "step"]
    by: str

    def __post_init__(self) -> None:
        """Check the attributes."""
        if self.when not in ("stored", "step"):
            raise ValueError(f"Demand expects when='stored' or 'step', got {self.when!r}.")


class DeclaresStructure(Protocol):
    """All that the sharding knows of an optimizer."""

    param_groups: list[dict[str, Any]]

    def group_of(self, param: torch.Tensor) -> int | None:
        """Return the number of the group that has this very parameter; None if none has."""
        ...

    def demands(self, param: torch.Tensor) -> tuple[Demand, ...]:
        """Return what the optimizer needs of one of its parameters."""
        ...

    def rebind(self, sharded: Mapping[torch.Tensor, torch.Tensor]) -> None:
        """Put sharded parameters in the place of those they were made from, in all groups."""
        ...
