"""Boxes of a tensor cut along several dims, against tensors of indices cut by torch."""

from math import prod

import torch
from hypothesis import given
from hypothesis import strategies as st

from sharding.planning.boxes import boxes_of, parts_by_shard, places_of_parts

Cuts = list[tuple[int, int, int]]


def cut_by_torch(whole: torch.Tensor, cuts: Cuts) -> list[torch.Tensor]:
    """Return every shard, row by row of the axes; a strided axis cuts after those behind it."""
    order = [i for i, cut in enumerate(cuts) if cut[2] == 1]
    order += [i for i, cut in enumerate(cuts) if cut[2] != 1]
    pieces = {(): whole}
    for i in order:
        dim, size, _ = cuts[i]
        pieces = {
            (*done, (i, k)): chunk
            for done, piece in pieces.items()
            for k, chunk in enumerate(chunks_of(piece, dim, size))
        }
    by_coordinate = {tuple(k for _, k in sorted(done)): piece for done, piece in pieces.items()}
    return [piece for _, piece in sorted(by_coordinate.items())]


def chunks_of(tensor: torch.Tensor, dim: int, count: int) -> list[torch.Tensor]:
    chunks = list(tensor.chunk(count, dim))
    empty = tensor.narrow(dim, 0, 0)
    return chunks + [empty] * (count - len(chunks))


@st.composite
def cut_tensors(draw: st.DrawFn) -> tuple[tuple[int, ...], Cuts]:
    shape = tuple(draw(st.lists(st.integers(1, 7), min_size=1, max_size=3)))
    dims = st.integers(0, len(shape) - 1)
    cuts = draw(st.lists(st.tuples(dims, st.integers(2, 3), st.just(1)), min_size=1, max_size=3))
    return shape, cuts


@given(cut_tensors())
def test_boxes_are_what_torch_cuts_and_their_parts_make_every_run(
    case: tuple[tuple[int, ...], Cuts],
) -> None:
    shape, cuts = case
    whole = torch.arange(prod(shape)).view(shape)
    boxes = boxes_of(shape, tuple(cuts))
    assert boxes is not None
    shards = cut_by_torch(whole, cuts)
    for number, shard in enumerate(shards):
        indices = tuple(slice(*indices) for indices in boxes.box(number))
        assert whole[indices].equal(shard)
    for dim in range(len(shape)):  # all runs of one and of two indices, and the whole
        behind = prod(shape[dim + 1 :])
        for count in {1, min(2, shape[dim]), shape[dim]}:
            for first in range(prod(shape[:dim])):
                for index in range(shape[dim] - count + 1):
                    start = (first * shape[dim] + index) * behind
                    assert run_of_parts(boxes, shards, start, count * behind) == list(
                        range(start, start + count * behind)
                    )


def run_of_parts(boxes, shards: list[torch.Tensor], start: int, numel: int) -> list[int]:
    """Put a run together as an owner does, from what follows each other on the wire."""
    parts = parts_by_shard(boxes, start, numel)
    assert [part.shard for part in parts] == sorted({part.shard for part in parts})
    flat = [shards[p.shard].reshape(-1)[p.start : p.start + p.numel] for p in parts]
    run = torch.full(boxes.run_shape(start, numel), -1)
    places, begin = places_of_parts(boxes, start, numel), 0
    for piece in flat:
        run[places[begin]] = piece.view(run[places[begin]].shape)
        begin += piece.numel()
    assert begin == numel
    return run.view(-1).tolist()


def test_strided_shards_divide_what_later_axes_left() -> None:
    """torch's fully_shard over tensor parallelism: its axis comes first and cuts last."""
    boxes = boxes_of((12, 2), ((0, 3, 2), (0, 2, 1)))
    assert boxes is not None
    assert [boxes.box(shard)[0] for shard in range(6)] == [
        (0, 2), (6, 8), (2, 4), (8, 10), (4, 6), (10, 12),
    ]  # fmt: skip
    assert boxes_of((13, 2), ((0, 3, 2), (0, 2, 1))) is None  # its pieces are no ranges
    assert boxes_of((12, 2), ((0, 3, 4), (0, 2, 1))) is None  # of other axes than these


def test_run_that_starts_inside_of_an_index_is_none() -> None:
    boxes = boxes_of((4, 6), ((0, 2, 1), (1, 3, 1)))
    assert boxes is not None
    assert boxes.find(6, 12) == ((), (1, 3))
    assert boxes.find(14, 2) == ((2,), (2, 4))
    assert boxes.find(5, 6) is None
