"""RaggedShard against slices of a buffer, boxes against slices of an arange. No ranks."""

import copy
import math
import pickle

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard

from sharding.tensor.placement import RaggedShard, boxes


@st.composite
def shapes_and_ranges(draw: st.DrawFn) -> tuple[tuple[int, ...], int, int]:
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=4)))
    start, stop = sorted(draw(st.tuples(*[st.integers(0, math.prod(shape))] * 2)))
    return shape, start, stop


@given(shapes_and_ranges())
@example(((), 0, 1))
@example(((3, 4, 5), 1, 59))
def test_boxes_tile_the_range_in_order(case: tuple[tuple[int, ...], int, int]) -> None:
    shape, start, stop = case
    flat = torch.arange(math.prod(shape))
    tiles = boxes(start, stop, shape)
    pieces = []
    for box in tiles:
        slices = tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))
        piece = flat.view(shape)[slices].reshape(-1)
        assert piece[0] == box.flat_start
        assert piece.numel() == box.numel
        pieces.append(piece)
    covered = torch.cat(pieces) if pieces else flat[:0]
    assert covered.tolist() == list(range(start, stop))
    assert len(tiles) <= max(2 * len(shape) - 1, 1)


def test_boxes_of_whole_rows_are_one() -> None:
    assert [(box.offsets, box.sizes) for box in boxes(6, 18, (5, 2, 3))] == [((1, 0, 0), (2, 2, 3))]


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (3, 2), (0, 7)])
def test_boxes_reject_a_range_outside_of_the_tensor(start: int, stop: int) -> None:
    with pytest.raises(ValueError, match=rf"6 elements of shape \(2, 3\).*\({start}, {stop}\)"):
        boxes(start, stop, (2, 3))


@given(
    unit=st.integers(1, 4),
    units_before=st.integers(0, 30),
    numel=st.integers(0, 60),
    shard_units=st.integers(1, 9),
    spare_ranks=st.integers(0, 3),
)
@example(unit=1, units_before=0, numel=0, shard_units=1, spare_ranks=0)
@example(unit=4, units_before=3, numel=1, shard_units=2, spare_ranks=3)
def test_from_range_is_the_part_of_the_tensor_in_each_shard_of_the_buffer(
    unit: int, units_before: int, numel: int, shard_units: int, spare_ranks: int
) -> None:
    offset, shard_numel = units_before * unit, shard_units * unit
    world_size = -(-(offset + numel) // shard_numel) + spare_ranks or 1
    placement = RaggedShard.from_range(2, numel, offset, shard_numel, world_size, unit)

    buffer = torch.full((world_size * shard_numel,), -1)
    buffer[offset : offset + numel] = torch.arange(numel)
    for rank, shard in enumerate(buffer.view(world_size, shard_numel)):
        start, stop = placement.bounds(rank, numel)
        assert shard[shard >= 0].tolist() == list(range(start, stop))

    every = placement.all_bounds(numel)
    assert list(placement.ranges(numel)) == every
    assert every == [placement.bounds(rank, numel) for rank in range(world_size)]
    sizes = [stop - start for start, stop in every]
    assert sum(sizes) == numel
    # The run-length form is canonical: it does not depend on how the counts were given.
    same = RaggedShard((0, 1), [-(-size // unit) for size in sizes], unit)
    assert placement == same
    assert hash(placement) == hash(same)
    assert placement.local_units == same.local_units
    assert placement.world_size == world_size
    assert eval(repr(placement)) == placement
    loaded = pickle.loads(pickle.dumps(placement))
    assert loaded == copy.deepcopy(placement) == placement
    assert not loaded.is_shard()  # its C++ base is initialised
    placement.check_shape((numel, 1))


def test_last_unit_may_be_shorter_and_ranks_may_be_empty_anywhere() -> None:
    placement = RaggedShard((0,), (0, 2, 0, 1, 0), unit_numel=4)
    assert placement.all_bounds(10) == [(0, 0), (0, 8), (8, 8), (8, 10), (10, 10)]
    ranges = placement.ranges(10)
    assert (len(ranges), ranges[-2], ranges[1:3]) == (5, (8, 10), [(0, 8), (8, 8)])
    with pytest.raises(IndexError):
        ranges[5]


@given(
    units=st.lists(st.integers(0, 4), min_size=1, max_size=6),
    unit=st.sampled_from([1, 2, 3, 4, 6, 8]),
    missing=st.integers(0, 7),
    block=st.sampled_from([1, 2, 4, 8]),
)
@example(units=[2, 0, 0], unit=4, missing=1, block=4)  # empty ranks after a short unit
@example(units=[0, 3, 3], unit=2, missing=0, block=4)
def test_runs_of_blocks_are_the_blocks_of_each_rank(units, unit, missing, block):
    numel = max(sum(units) * unit - min(missing, unit - 1), 0)
    placement = RaggedShard((0,), units, unit)
    bounds = placement.all_bounds(numel)
    runs = placement.runs_of_blocks(numel, block)
    if any(start % block and stop > start for start, stop in bounds):
        assert runs is None
    else:
        counts = [
            -(-stop // block) - start // block if stop > start else 0 for start, stop in bounds
        ]
        assert runs is not None
        assert [count for count, ranks in runs for _ in range(ranks)] == counts


def test_placement_has_constant_size_at_16384_ranks() -> None:
    def bytes_at(world_size: int) -> int:
        numel = world_size * 512 - 700
        placement = RaggedShard.from_range(2, numel, 600, 512, world_size)
        assert placement.bounds(world_size - 1, numel) == (numel - 412, numel)
        assert len(repr(placement)) < 150
        assert eval(repr(placement)) == placement
        return len(pickle.dumps(placement))

    assert bytes_at(16384) <= bytes_at(16) + 8


def test_placement_is_like_torchs_own_but_equal_to_none() -> None:
    # A Placement whose C++ base was not initialised ends the process here.
    placement = RaggedShard((0,), (3, 4))
    assert not placement.is_shard()
    assert not placement.is_shard(0)
    assert not placement.is_replicate()
    assert not placement.is_partial()
    assert placement not in (Shard(0), Replicate(), None, "RaggedShard")
    assert placement != RaggedShard((0,), (4, 3))
    assert placement != RaggedShard((0,), (3, 4), unit_numel=2)
    assert placement != RaggedShard((0, 1), (3, 4))
    assert len({placement, RaggedShard((0,), (3, 4)), Shard(0)}) == 2


@pytest.mark.parametrize(
    ("arguments", "value"),
    [
        (((1,), (2, 2)), r"dims.*\(1,\)"),
        (((0, 2), (2, 2)), r"dims.*\(0, 2\)"),
        (((0,), (2, -1)), "local_units.*-1"),
        (((0,), ()), "at least one rank"),
        (((0,), (2, 2), 0), "unit_numel.*0"),
    ],
)
def test_placement_rejects_what_no_tensor_can_be_cut_by(arguments: tuple, value: str) -> None:
    with pytest.raises(ValueError, match=value):
        RaggedShard(*arguments)


@pytest.mark.parametrize(
    ("numel", "offset", "shard_numel", "unit_numel"),
    [(10, 2, 8, 4), (30, 4, 10, 6), (12, 6, 5, 1), (4, -1, 8, 1), (4, 0, 8, 0)],
)
def test_from_range_rejects_cuts_inside_of_units_and_tensors_outside_of_the_buffer(
    numel: int, offset: int, shard_numel: int, unit_numel: int
) -> None:
    with pytest.raises(ValueError, match=rf"{offset}|{unit_numel}"):
        RaggedShard.from_range(1, numel, offset, shard_numel, 3, unit_numel)


@pytest.mark.parametrize(
    ("placement", "shape"),
    [
        (RaggedShard((0, 1), (3, 2)), (2, 3)),  # a unit too few
        (RaggedShard((0, 1), (2, 0), unit_numel=4), (2, 2)),  # one too many
        (RaggedShard((0, 1, 2), (3, 3)), (2, 3)),  # more dims than the tensor has
        (RaggedShard((0,), (3, 1), unit_numel=2), (2, 4)),  # units of half a row
    ],
)
def test_check_shape_rejects_a_placement_of_another_tensor(placement, shape):
    with pytest.raises(ValueError, match="RaggedShard"):
        placement.check_shape(shape)


def test_bounds_reject_a_rank_that_does_not_exist() -> None:
    with pytest.raises(IndexError, match="below 2, got 2"):
        RaggedShard((0,), (1, 1)).bounds(2, 2)
