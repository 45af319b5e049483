"""Granules against their definition, written out here. Pure integers."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from legality import is_legal

from sharding.planning.granule import Cells, Granule

MANY = settings(max_examples=max(200, settings.default.max_examples))
SPAN = 90  # offsets that are looked at


rules = st.one_of(
    st.tuples(st.integers(1, 12), st.none(), st.none()),
    st.tuples(st.integers(1, 8), st.integers(1, 30), st.none()),
    st.tuples(st.just(0), st.none(), st.lists(st.integers(1, 60), max_size=5).map(tuple)),
    st.tuples(st.integers(1, 12), st.none(), st.lists(st.integers(1, 60), max_size=3).map(tuple)),
)


@MANY
@given(rules)
def test_granule_allows_what_its_definition_allows(rule):
    granule = Granule(*rule)
    assert [granule.allows(x) for x in range(SPAN)] == [
        is_legal(x, Granule(*rule)) for x in range(SPAN)
    ]
    assert not granule.allows(-max(1, granule.numel))


@MANY
@given(rules, st.integers(0, SPAN), st.integers(1, 12))
def test_granule_largest_cut_equals_a_scan(rule, limit, align):
    legal = [x for x in range(0, limit + 1, align) if is_legal(x, Granule(*rule))]
    assert Granule(*rule).largest_cut(limit, align) == legal[-1]


@MANY
@given(rules, rules)
def test_granule_combination_allows_only_what_both_allow(one, other):
    both = {x for x in range(SPAN) if is_legal(x, Granule(*one)) and is_legal(x, Granule(*other))}
    try:
        combined = Granule(*one).combine(Granule(*other))
    except ValueError:
        assert 0 in (one[0], other[0])  # only listed cuts can have nothing in common
        assert both == {0}
        return
    allowed = {x for x in range(SPAN) if combined.allows(x)}
    assert allowed <= both
    if one[1] is None and other[1] is None:
        assert allowed == both
    assert combined == Granule(*other).combine(Granule(*one))


def test_granule_combination_keeps_a_restart_that_the_other_divides():
    experts = Granule(128 * 5760, restart=2880 * 5760)  # 2880 is no multiple of 128 rows
    combined = experts.combine(Granule(256))
    assert combined == experts
    assert combined.allows(2880 * 5760)
    assert not combined.allows(2944 * 5760)


def test_granule_combination_without_a_common_cut_raises():
    with pytest.raises(ValueError, match=r"cuts=\(3, 5\).*numel=2"):
        Granule(0, cuts=(3, 5)).combine(Granule(2))


def test_granules_with_equal_cuts_are_equal():
    assert Granule(4, restart=12) == Granule(4)
    assert Granule(20, restart=12) == Granule(12)
    assert Granule(0, cuts=(5, 3, 5)) == Granule(0, cuts=(3, 5))
    assert Granule(4, cuts=(8, 4)) == Granule(4)
    assert hash(Granule(4, restart=12)) == hash(Granule(4))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"numel": 0}, "numel=0 with cuts"),
        ({"numel": -3}, "numel=-3"),
        ({"numel": 0, "restart": 4, "cuts": (1,)}, "no restart"),
        ({"numel": 2, "restart": 0}, "restart=0"),
        ({"numel": 2, "cuts": (0, 3)}, r"\(0, 3\)"),
    ],
)
def test_granule_refuses_what_has_no_meaning(arguments, message):
    with pytest.raises(ValueError, match=message):
        Granule(**arguments)


@MANY
@given(rules, st.integers(0, 70), st.integers(1, 9), st.integers(1, 12), st.integers(0, 40))
def test_earliest_start_equals_a_scan(rule, numel, align, shard, end):
    tensor = Cells.measure(numel, Granule(*rule), align)
    assert (tensor.size - 1) * align < numel <= tensor.size * align

    def fits(start: int) -> bool:
        stop = start * align + numel
        boundaries = range(0, stop, shard * align)
        return all(
            is_legal(b - start * align, Granule(*rule)) for b in boundaries if b > start * align
        )

    # Starts repeat from shard to shard, so two shards past the end show every possibility.
    starts = [start for start in range(end, end + 3 * shard) if fits(start)]
    assert tensor.earliest_start(shard, end) == (starts[0] if starts else -1)


@MANY
@given(rules, st.integers(1, 70), st.integers(1, 9))
def test_uncut_runs_make_up_the_tensor_and_hold_no_cut(rule, numel, align):
    tensor = Cells.measure(numel, Granule(*rule), align)
    runs = tensor.uncut_runs()
    assert sum(length * count for length, count in runs.items()) == tensor.size
    cuts = [x // align for x in range(0, numel, align) if is_legal(x, Granule(*rule))]
    gaps = sorted(b - a for a, b in zip(cuts, [*cuts[1:], tensor.size], strict=True))
    longest = sorted(length for length, count in runs.items() for _ in range(count))[-len(gaps) :]
    assert all(ours <= gap for ours, gap in zip(longest[::-1], gaps[::-1], strict=False))
