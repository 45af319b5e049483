"""The planner against exhaustive search and an independent validator. Pure integers."""

import random
from itertools import pairwise, permutations
from math import prod

import pytest
from effort import calls_of
from hypothesis import given, settings
from hypothesis import strategies as st
from legality import draw_tensors, lies_legally

from sharding.planning import planner
from sharding.planning.granule import Granule
from sharding.planning.planner import ALIGN, TensorSpec, lower_bound, place, plan_segment

MANY = settings(max_examples=max(150, settings.default.max_examples))


def least_end(
    tensors: tuple[TensorSpec, ...], shard: int, world_size: int, align: int
) -> int | None:
    """Where the last of the tensors ends at best in this order: follows every legal offset."""
    ends = {0}
    for tensor in tensors:
        ends = {
            offset + tensor.numel
            for end in ends
            for offset in range(-(-end // align) * align, shard * world_size + 1, align)
            if lies_legally(tensor, offset, shard, world_size)
        }
    return min(ends, default=None)


def least_shard(tensors: tuple[TensorSpec, ...], world_size: int, align: int) -> int:
    """The optimum over all orders."""
    shard = align
    while all(
        least_end(order, shard, world_size, align) is None for order in permutations(tensors)
    ):
        shard += align
    return shard


@MANY
@given(st.integers(0, 2**32), st.sampled_from([1, 2, 3, 5, 6, 64, 1000, 1024, 16384]))
def test_plan_covers_every_tensor_once_and_cuts_no_granule(seed, world_size):
    tensors = draw_tensors(seed, most=12, largest=5000)
    plan = plan_segment(tensors, world_size, align=8)
    shard, owner = plan.shard_numel, {}
    assert shard in range(8, shard + 1, 8)
    assert sorted(plan.order) == list(range(len(tensors)))
    for i, tensor in enumerate(tensors):
        assert plan.offsets[i] % 8 == 0
        assert lies_legally(tensor, plan.offsets[i], shard, world_size)
        seen = 0
        for rank, start, stop in plan.ranges(i):
            assert start == seen < stop
            position = plan.offsets[i] + start
            assert rank * shard <= position < position + stop - start <= (rank + 1) * shard
            owner.update(dict.fromkeys(range(position, position + stop - start), i))
            seen = stop
        assert seen == tensor.numel
    assert len(owner) == plan.numel == sum(tensor.numel for tensor in tensors)
    assert plan.padding == world_size * shard - len(owner)
    positions = [plan.offsets[i] for i in plan.order]
    assert positions == sorted(positions)
    assert lower_bound(tensors, world_size, align=8) == plan.lower_bound <= shard


@MANY
@given(st.integers(0, 2**32), st.integers(1, 6), st.integers(1, 4), st.integers(1, 20))
def test_placement_in_a_given_order_equals_exhaustive_search(seed, world_size, align, cells):
    tensors = draw_tensors(seed, most=5)
    shard = cells * align
    offsets = place(tensors, shard, world_size, align=align)
    best = least_end(tensors, shard, world_size, align)
    if offsets is None:
        assert best is None
        return
    assert best == (offsets[-1] + tensors[-1].numel if tensors else 0)
    assert all(offset % align == 0 for offset in offsets)
    assert all(map(lies_legally, tensors, offsets, [shard] * 5, [world_size] * 5))
    ends = [offset + t.numel for offset, t in zip(offsets, tensors, strict=True)]
    assert all(end <= start for end, start in zip(ends, offsets[1:], strict=False))


@MANY
@given(st.integers(0, 2**32), st.integers(1, 6), st.integers(1, 4))
def test_lower_bound_is_never_above_the_optimum(seed, world_size, align):
    tensors = draw_tensors(seed, most=3)
    optimum = least_shard(tensors, world_size, align)
    assert lower_bound(tensors, world_size, align=align) <= optimum
    assert optimum <= plan_segment(tensors, world_size, align=align).shard_numel


def test_lower_bound_counts_blocks_that_share_a_rank():
    # 4 ranks, 5 blocks of 3 cells: some rank holds two, though the mean is below 4 cells.
    tensors = [TensorSpec(str(i), 3 * ALIGN, Granule(3 * ALIGN)) for i in range(5)]
    assert lower_bound(tensors, 4) == 6 * ALIGN
    # A tensor longer than 2 * S needs S to be a multiple of its block.
    long = [TensorSpec("long", 35 * ALIGN, Granule(5 * ALIGN)), TensorSpec("rest", ALIGN)]
    assert lower_bound(long, 4) == 10 * ALIGN
    # 21 cells in blocks of 8: S = 9 would need two cuts 9 apart, S = 13 one cut (8 + 13).
    free = [TensorSpec("free", 21 * ALIGN, Granule(8 * ALIGN)), TensorSpec("rest", 6 * ALIGN)]
    assert lower_bound(free, 3) == 13 * ALIGN
    assert plan_segment(tuple(free), 3).optimal


@pytest.mark.parametrize(
    ("tensors", "world_size", "shard"),
    [
        # Feasible S are not one range: with 12 all fits, with 13 it does not.
        ([(7, 7), (20, 2), (7, 7), (7, 7)], 4, 12),
        ([(18, 8), (18, 8), (3, 4), (3, 4), (3, 4)], 4, 13),
        # A tensor cut in steps of 6 between whole ones; only an order made for S = 39 fits.
        ([(14, 8), (21, 5), (14, 8), (14, 8), (14, 8)], 2, 39),
        ([(6, 8), (21, 6), (22, 6), (21, 6)], 3, 24),
        # S is a common multiple of blocks, or whole tensors and a block.
        ([(22041, 7168), (18026, 4096)], 2, 21504),
        ([(7803, 2880), (2135, 2135), (2135, 2135), (2135, 2135)], 2, 7150),
    ],
)
def test_plan_finds_the_least_shard_of_hard_buckets(tensors, world_size, shard):
    specs = tuple(TensorSpec("t", n, Granule(g)) for n, g in tensors)
    assert plan_segment(specs, world_size, align=1).shard_numel == shard
    if shard < 100 and len(specs) < 5:
        assert least_shard(specs, world_size, 1) == shard


def test_plan_of_a_thousand_tensors_on_a_thousand_ranks_is_little_work():
    rng = random.Random(0)
    for kinds in (5, 1000):  # experts, and the worst case: no two tensors alike
        pool = [(rng.randint(1, 5_000_000), rng.randint(1, 70_000)) for _ in range(kinds)]
        tensors = tuple(
            TensorSpec(str(i), n, Granule(g), str(i % 3))
            for i, (n, g) in enumerate(rng.choice(pool) for _ in range(1000))
        )
        for world_size in (64, 1000, 1024):
            plan, calls = calls_of(lambda w=world_size, t=tensors: plan_segment(t, w))
            assert calls < 4_000_000, (kinds, world_size)
            assert plan.shard_numel < 2 * plan.lower_bound


def test_plan_depends_on_the_signature_and_not_on_names():
    def layer(name: str, keys: str) -> tuple[TensorSpec, ...]:
        shapes = [((64, 48), 1000), ((48,), 1), ((48, 200), 300)]
        return tuple(
            TensorSpec(f"{name}.{i}", prod(shape), Granule(g), keys[i])
            for i, (shape, g) in enumerate(shapes)
        )

    first = plan_segment(layer("layers.0", "aba"), 5)
    misses = planner._solve.cache_info().misses
    second = plan_segment(layer("layers.1", "xyx"), 5)
    assert planner._solve.cache_info().misses == misses
    assert second.tensors[0].fqn == "layers.1.0"
    assert (first.shard_numel, first.offsets) == (second.shard_numel, second.offsets)
    plan_segment(layer("layers.2", "aab"), 5)
    assert planner._solve.cache_info().misses == misses + 1


@given(st.integers(0, 2**32), st.sampled_from([1, 2, 3, 8]))
def test_tensors_of_one_group_key_lie_side_by_side_where_it_is_free(seed, world_size):
    rng = random.Random(seed)
    tensors = tuple(
        TensorSpec(str(i), rng.randint(1, 9999), Granule(ALIGN), rng.choice("abc"))
        for i in range(9)
    )
    plan = plan_segment(tensors, world_size)
    keys = [tensors[i].group_key for i in plan.order]
    assert sum(a != b for a, b in pairwise(keys)) == len(set(keys)) - 1
    assert plan.optimal  # blocks of one cell fill the shards, whatever the order


def test_group_keys_never_cost_padding():
    # Whole tensors of 3, 1, 2 and 2 cells fill two ranks only as {3, 1}, {2, 2}.
    sizes, keys = (3, 2, 1, 2), "abbb"
    tensors = tuple(
        TensorSpec(str(i), n * ALIGN, Granule(n * ALIGN), key)
        for i, (n, key) in enumerate(zip(sizes, keys, strict=True))
    )
    assert plan_segment(tensors, 2).shard_numel == 4 * ALIGN


def test_ranges_of_a_part_of_a_tensor_name_its_holders():
    plan = plan_segment((TensorSpec("w", 3 * ALIGN), TensorSpec("v", ALIGN)), 4)
    assert plan.ranges(0, 200, 600) == ((0, 200, 256), (1, 256, 512), (2, 512, 600))
    assert plan.ranges(0, 256, 512) == ((1, 256, 512),)
    assert plan.ranges(0, 300, 300) == ()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda t: plan_segment(t, 0), "world_size must be >= 1, got 0"),
        (lambda t: plan_segment((TensorSpec("head.w", -1),), 2), "head.w: numel .* got -1"),
        (lambda t: plan_segment(t, 2, align=0), "align must be >= 1, got 0"),
        (lambda t: plan_segment(t, 2, align=4, shard_align=0), "multiple of align=4, got 0"),
        (lambda t: plan_segment(t, 2, align=4, shard_align=10), "multiple of align=4, got 10"),
        (lambda t: place(t, 300, 2), "multiple of align=256, got 300"),
        (lambda t: lower_bound(t, -1), "got -1"),
    ],
)
def test_planner_refuses_arguments_out_of_range(call, message):
    with pytest.raises(ValueError, match=message):
        call((TensorSpec("w", 10),))
