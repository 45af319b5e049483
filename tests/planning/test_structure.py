"""Structures: which elements make a matrix, checked by reading element numbers."""

import copy
import pickle
import re
from math import prod

import pytest
import torch
from einops import rearrange
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from sharding.planning.granule import Granule
from sharding.planning.structure import Blocks, Demand, Elementwise, FullMatrix, RowPanels, Unit

MANY = settings(max_examples=max(60, settings.default.max_examples))

# Pattern, and the axes it needs; sizes are drawn. What is contiguous is found by element numbers.
PATTERNS = [
    ("m n -> m n", "m n", ""),
    ("m n -> n m", "m n", ""),
    ("e m n -> e m n", "e m n", ""),
    ("e m n -> e n m", "e m n", ""),
    ("a e m n -> (e a) m n", "a e m n", ""),
    ("m e n -> e m n", "m e n", ""),
    ("o i h w -> o (i h w)", "o i h w", ""),
    ("o ... -> o (...)", "o i h w", ""),
    ("o ... -> o (...)", "o i", ""),
    ("... m n -> (...) m n", "a b m n", ""),
    ("... m n -> ... m n", "a b m n", ""),
    ("o i h w -> (h w) o i", "o i h w", ""),
    ("(q h d) n -> (q h) d n", "q*h*d n", "qh"),
    ("(q h d) n -> h (q d) n", "q*h*d n", "qh"),
    ("(q h d) n -> q (h d) n", "q*h*d n", "qd"),
    ("m (h d) -> h m d", "m h*d", "h"),
    ("m (h d) -> (h m) d", "m h*d", "h"),
    ("n -> 1 n", "n", ""),
    ("n -> n 1", "n", ""),
    ("m 1 n -> m n", "m 1 n", ""),
]


@st.composite
def cases(draw) -> tuple[FullMatrix, tuple[int, ...]]:
    pattern, axes, given_axes = draw(st.sampled_from(PATTERNS))
    sizes = {name: draw(st.integers(1, 4)) for name in "abdehimnoqw"} | {"1": 1}
    shape = tuple(prod(sizes[name] for name in axis.split("*")) for axis in axes.split())
    return FullMatrix(pattern, **{name: sizes[name] for name in given_axes}), shape


@MANY
@given(cases())
def test_units_hold_exactly_the_matrices_of_the_pattern(case):
    structure, shape = case
    flat = torch.arange(prod(shape))
    whole = rearrange(flat.view(shape), structure.pattern, **dict(structure.axes))
    expected = whole.reshape(-1, *whole.shape[-2:])  # (batch, rows, cols)
    units = structure.units(shape)
    found = torch.cat(
        [
            structure.matrices(flat[u.start : u.start + u.numel], u, shape).view(-1, u.rows, u.cols)
            for u in units
        ]
    )
    first_elements = expected[:, 0, 0].argsort() if len(units) > 1 else torch.arange(len(expected))
    assert torch.equal(found, expected[first_elements])
    assert all(u.numel == u.batch * u.rows * u.cols for u in units)
    stops = [0, *(u.start + u.numel for u in units)]
    assert [u.start for u in units] == stops[:-1]
    assert stops[-1] == prod(shape)
    # A matrix is its own unit, and a view, exactly when it is a contiguous run.
    if all(torch.equal(m.flatten(), torch.arange(m.numel()) + m[0, 0]) for m in expected):
        assert [u.batch for u in units] == [1] * len(expected)
        assert structure.granule(shape) == Granule(expected[0].numel())
    else:
        assert units == (Unit(0, prod(shape), *expected.shape),)
        assert structure.granule(shape) == Granule(prod(shape))


@MANY
@given(cases())
def test_flatten_undoes_matrices(case):
    structure, shape = case
    flat = torch.arange(prod(shape))
    for unit in structure.units(shape):
        part = flat[unit.start : unit.start + unit.numel]
        matrices = structure.matrices(part, unit, shape)
        assert matrices.shape == (unit.batch, unit.rows, unit.cols)
        assert matrices.is_contiguous()
        assert structure.pattern != "e m n -> e m n" or matrices.data_ptr() == part.data_ptr()
        assert torch.equal(structure.flatten(matrices, unit, shape), part)


@pytest.mark.parametrize("splits", [(4, 1, 1), (2, 2, 2), (6,)])
def test_row_splits_cut_a_fused_weight_into_unequal_matrices(splits):
    structure, flat = FullMatrix(row_splits=splits), torch.arange(30)
    units = structure.units((6, 5))
    parts = [structure.matrices(flat[u.start : u.start + u.numel], u, (6, 5))[0] for u in units]
    assert all(map(torch.equal, parts, flat.view(6, 5).split(splits)))
    granule = structure.granule((6, 5))
    starts = {sum(splits[:i]) * 5 for i in range(len(splits))}
    assert {x for x in range(30) if granule.allows(x)} == starts


def test_row_panels_view_a_parameter_by_its_first_axis():
    assert RowPanels(3).units((7, 2, 2)) == (
        Unit(0, 12, 1, 3, 4),
        Unit(12, 12, 1, 3, 4),
        Unit(24, 4, 1, 1, 4),
    )
    assert RowPanels(3).granule((7, 2, 2)) == Granule(12)
    assert RowPanels(3).units((5,)) == (Unit(0, 3, 1, 3, 1), Unit(3, 2, 1, 2, 1))
    assert RowPanels(3).units(()) == (Unit(0, 1, 1, 1, 1),)


def test_row_panels_of_a_batch_begin_anew_in_every_matrix():
    stack = RowPanels(128, batch_dims=1)
    units = stack.units((3, 2880, 2))  # 22.5 panels of each matrix
    assert len(units) == 3 * 23
    assert [unit.rows for unit in units[20:25]] == [128, 128, 64, 128, 128]
    assert [unit.start for unit in units] == [
        (e * 2880 + row) * 2 for e in range(3) for row in range(0, 2880, 128)
    ]
    granule = stack.granule((3, 2880, 2))
    assert granule == Granule(256, restart=5760)
    starts = {unit.start for unit in units}
    assert {x for x in range(3 * 5760) if granule.allows(x)} == starts
    assert RowPanels(3, batch_dims=2).units((2, 2, 4)) == tuple(
        Unit(4 * m + row, rows, 1, rows, 1) for m in range(4) for row, rows in ((0, 3), (3, 1))
    )
    assert RowPanels(4, batch_dims=1).granule((5, 8, 3)) == Granule(12)  # panels fill the matrices
    assert RowPanels(2, batch_dims=1).units((0, 4, 3)) == ()
    with pytest.raises(ValueError, match=r"more than 2 dims, got shape \(3, 4\); .*batch_dims"):
        RowPanels(2, batch_dims=2).units((3, 4))
    with pytest.raises(ValueError, match="batch_dims >= 0, got -1"):
        RowPanels(2, batch_dims=-1)


def test_elementwise_and_blocks_have_no_units():
    assert (Elementwise().granule((3, 4)), Elementwise().units((3, 4))) == (Granule(1), ())
    assert (Blocks(256).granule((3, 4)), Blocks(256).units((3, 4))) == (Granule(256), ())


@pytest.mark.parametrize("shape", [(0, 4), (4, 0)])
def test_parameter_without_elements_has_no_units(shape):
    for structure in (FullMatrix(), FullMatrix("(h d) n -> h d n", h=2), RowPanels(2)):
        assert structure.units(shape) == ()
        assert structure.granule(shape).allows(0)


STRUCTURES = [
    Elementwise(),
    Blocks(64),
    RowPanels(128),
    FullMatrix(),
    FullMatrix("e m n -> e m n"),
    FullMatrix("o ... -> o (...)"),
    FullMatrix("(q h d) n -> (q h) d n", q=3, h=12),
    FullMatrix("n -> 1 n"),
    FullMatrix(row_splits=(4096, 1024, 1024)),
    FullMatrix(row_splits=(7,)),
]


@pytest.mark.parametrize("structure", STRUCTURES, ids=repr)
def test_structure_survives_repr_copy_and_pickle(structure):
    for again in (
        eval(repr(structure)),
        copy.deepcopy(structure),
        pickle.loads(pickle.dumps(structure)),
    ):
        assert again == structure
        assert hash(again) == hash(structure)
    assert sum(structure == other for other in STRUCTURES) == 1


@pytest.mark.parametrize("structure", STRUCTURES[3:], ids=repr)
def test_matrix_structure_survives_its_string_form(structure):
    again = FullMatrix.parse(str(structure))
    assert again == structure
    assert str(again) == str(structure)


def test_matrix_structure_ignores_spaces_and_the_order_of_keywords():
    one = FullMatrix("(q h d) n -> (q h) d n", q=3, h=12)
    other = FullMatrix(" ( q  h d ) n->(q h)  d n", h=12, q=3)
    assert one == other
    assert str(one) == "(q h d) n -> (q h) d n; h=12 q=3" == str(other)
    assert FullMatrix("m n -> m n") == FullMatrix()


@pytest.mark.parametrize(
    ("make", "facts"),
    [
        (lambda: FullMatrix("m n"), ["'m n'", "pattern"]),
        (lambda: FullMatrix("m n -> (m n)"), ["'m n -> (m n)'", "rows and columns"]),
        (lambda: FullMatrix("((h d) n -> h d n"), ["((h d) n"]),
        (lambda: FullMatrix("m n -> n m", row_splits=(3, 4)), ["n m", "(3, 4)"]),
        (lambda: FullMatrix(row_splits=(3, 0)), ["(3, 0)"]),
        (lambda: FullMatrix("(h d) n -> h d n", h=0), ["h=0"]),
        (lambda: FullMatrix.parse("m n -> m n; h"), ["'m n -> m n; h'"]),
        (lambda: FullMatrix.parse("muon"), ["'muon'"]),
        (lambda: Blocks(0), ["numel >= 1", "0"]),
        (lambda: RowPanels(-2), ["rows >= 1", "-2"]),
        (lambda: Demand(Blocks(4), "never", "me"), ["'never'"]),
    ],
)
def test_structure_refuses_what_it_cannot_mean(make, facts):
    with pytest.raises(ValueError, match=re.escape(facts[0])) as caught:
        make()
    assert all(fact in str(caught.value) for fact in facts), str(caught.value)


@pytest.mark.parametrize(
    ("structure", "shape", "facts"),
    [
        (FullMatrix(), (64, 3, 7, 7), ["m n -> m n", "(64, 3, 7, 7)", "o ... -> o (...)"]),
        (FullMatrix(), (64,), ["(64,)", "expected 2 dim"]),
        (FullMatrix(), (), ["()", "m n -> m n"]),
        (FullMatrix("(q h d) n -> (q h) d n", q=3, h=12), (100, 8), ["(100, 8)", "'h': 12"]),
        (FullMatrix("m n -> m k"), (4, 6), ["m n -> m k", "(4, 6)"]),
        (FullMatrix("m (h d) -> h m d"), (4, 6), ["m (h d) -> h m d", "(4, 6)"]),
        (FullMatrix("e m n -> e m n"), (4, 6), ["e m n -> e m n", "(4, 6)"]),
        (FullMatrix(row_splits=(3, 2)), (6, 4), ["(3, 2)", "(6, 4)", "5 rows"]),
        (FullMatrix(row_splits=(3, 2)), (5, 4, 1), ["(5, 4, 1)"]),
    ],
)
def test_matrix_structure_that_does_not_fit_a_shape_says_why(structure, shape, facts):
    with pytest.raises(ValueError, match=re.escape(facts[0])) as caught:
        structure.units(shape)
    assert all(fact in str(caught.value) for fact in facts), str(caught.value)


def test_structures_read_no_data():
    # Megatron-LM#6799: a layout decided on meta or fake parameters must not look at their storage.
    shape = (7, 12)
    expected = FullMatrix("m (h d) -> h m d", h=3).units(shape)
    with FakeTensorMode(), torch.device("meta"):
        parameter = torch.nn.Parameter(torch.empty(shape))
        assert FullMatrix("m (h d) -> h m d", h=3).units(parameter.shape) == expected
        # A structure that no other test has looked at, so nothing is cached.
        assert FullMatrix("m (fresh d) -> fresh m d", fresh=3).units(parameter.shape) == expected
