"""What the planner is measured against: exhaustive search, the published heuristic, other layouts.

Written plainly and on its own: of the planner only the types of its arguments are used. No torch.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import cache
from math import ceil, lcm, prod

from sharding.planning.granule import Granule
from sharding.planning.planner import TensorSpec

Sizes = Sequence[tuple[int, int]]  # (elements, elements between cuts) of each tensor


# -- exhaustive search -------------------------------------------------------------------------


def least_shard(tensors: Sizes, world_size: int) -> int:
    """The least S of any order and any offsets, by trying every S upward. Alignment 1.

    For an S, the least end of every subset of the tensors is computed from those of its subsets
    with one tensor less: a legal offset for the last tensor stays legal when the end before it is
    less, so an earlier end of the others is never worse.
    """
    shard = max(1, ceil(sum(n for n, _ in tensors) / world_size), max(min(t) for t in tensors))
    while not _fits_in_some_order(tensors, shard, world_size):
        shard += 1
    return shard


def _fits_in_some_order(tensors: Sizes, shard: int, world_size: int) -> bool:
    @cache
    def gap(tensor: tuple[int, int], end: int) -> int | None:
        """How far after `end`, counted within its shard, the tensor can start."""
        numel, granule = tensor
        for offset in range(end, end + shard):
            boundaries = range((offset // shard + 1) * shard, offset + numel, shard)
            if all((boundary - offset) % granule == 0 for boundary in boundaries):
                return offset - end
        return None

    ends: dict[frozenset[int], int] = {frozenset(): 0}
    for _ in tensors:
        longer: dict[frozenset[int], int] = {}
        for placed, end in ends.items():
            for i, tensor in enumerate(tensors):
                if i in placed or (wait := gap(tensor, end % shard)) is None:
                    continue
                stop = end + wait + tensor[0]
                key = placed | {i}
                if stop <= shard * world_size and stop < longer.get(key, stop + 1):
                    longer[key] = stop
        ends = longer
    return bool(ends)


# -- small instances ---------------------------------------------------------------------------


def like_a_language_model(rng: random.Random) -> list[tuple[int, int]]:
    """A few matrices of one width cut by rows, and vectors cut anywhere."""
    width = rng.choice([2, 3, 4, 5, 6, 8])
    rows = rng.choice([1, 1, 2, 3, 4])
    inner = rng.choice([2 * width, 3 * width, 4 * width, width + width // 2])
    shapes = [(width, width), (max(1, width // 2), width), (inner, width), (width, inner)]
    tensors = []
    for _ in range(rng.randint(2, 5)):
        height, row = rng.choice(shapes)
        tensors.append((height * row, min(height * row, rows * row)))
    return tensors + [(width, 1)] * rng.randint(1, 2)


def whole_matrices(rng: random.Random) -> list[tuple[int, int]]:
    """Tensors that may not be cut at all."""
    sizes = [rng.randint(1, 12) * rng.randint(1, 8) for _ in range(rng.randint(3, 7))]
    return [(numel, numel) for numel in sizes]


def arbitrary(rng: random.Random) -> list[tuple[int, int]]:
    """Any sizes, any granules."""
    sizes = [rng.randint(1, 60) for _ in range(rng.randint(3, 7))]
    return [(numel, min(numel, rng.randint(1, 24))) for numel in sizes]


FAMILIES: dict[str, Callable[[random.Random], list[tuple[int, int]]]] = {
    "like a language model": like_a_language_model,
    "whole matrices": whole_matrices,
    "arbitrary": arbitrary,
}
WORLD_SIZES = (2, 3, 4, 6, 8, 16)


def small_instance(family: str, seed: int) -> tuple[tuple[TensorSpec, ...], Sizes, int]:
    """Tensors of a family, and the number of ranks."""
    rng = random.Random(f"{family} {seed}")
    sizes = FAMILIES[family](rng)
    specs = tuple(TensorSpec(str(i), n, Granule(g)) for i, (n, g) in enumerate(sizes))
    return specs, sizes, rng.choice(WORLD_SIZES)


# -- the published heuristic -------------------------------------------------------------------


def published_shard(tensors: Sizes, world_size: int, step: int = 1) -> int:
    """S by three fixed orders, multiples of common multiples of granules, and bisection.

    The common multiples are those of the 1, 2, 3, ... largest tensors. With the mean load and the
    largest tensor, rounded up, every order fits.

    References: arXiv:2602.22437, which describes it in words; there is no public code.
    """
    by_granule = sorted(tensors, key=lambda t: (-t[1], -t[0]))
    by_size = sorted(tensors, key=lambda t: (-t[0], -t[1]))
    mean = ceil(sum(n for n, _ in tensors) / world_size)
    least = max(mean, *(g for _, g in tensors))
    always = step * ceil((mean + by_size[0][0]) / step)
    best, unit = always, step
    units = [unit]
    for _, granule in by_size:
        unit = lcm(unit, granule)
        if unit <= always:
            units.append(unit)
    for unit in sorted(set(units)):
        for order in (tensors, by_granule, by_size):
            low, high = ceil(least / unit), ceil(always / unit)
            while low < high:
                middle = (low + high) // 2
                if fits_in_order(order, middle * unit, world_size):
                    high = middle
                else:
                    low = middle + 1
            best = min(best, high * unit)
    return best


def fits_in_order(tensors: Sizes, shard: int, world_size: int) -> bool:
    """Whether the tensors fit when each is placed as early as it may be."""
    end = 0
    for numel, granule in tensors:
        start = _earliest_start(numel, granule, shard, end)
        if start is None:
            return False
        end = start + numel
    return end <= shard * world_size


def _earliest_start(numel: int, granule: int, shard: int, end: int) -> int | None:
    room = shard - end % shard
    if numel <= room:
        return end
    boundary, before = end + room, room // granule * granule
    if shard % granule == 0 or numel - before <= shard:
        return boundary - before
    # From the next boundary on: whole, or cut once.
    if numel <= shard:
        return boundary
    before = shard // granule * granule
    return boundary + shard - before if numel - before <= shard else None


# -- other layouts -----------------------------------------------------------------------------


def padded_by_fsdp2(shapes: Sequence[tuple[int, ...]], world_size: int) -> int:
    """Elements over all ranks when dim 0 of every parameter is padded to a multiple of the ranks.

    As torch's `fully_shard` allocates with `Shard(0)`.
    """
    return sum(
        world_size * ceil(shape[0] / world_size) * prod(shape[1:]) for shape in shapes if shape
    )


def padded_by_concatenation(numel: int, world_size: int, step: int) -> int:
    """Elements over all ranks when tensors are concatenated and cut anywhere; blocks are cut."""
    return world_size * step * ceil(numel / world_size / step)
