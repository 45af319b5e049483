"""Programs and strategies as data: what a load undoes, what is legal, what is drawn."""

from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sharding import RaggedShard
from vfsdp_optim.testing import gradient_streams, layouts, parameter_sets, step_programs
from vfsdp_optim.testing.gradients import KINDS, GradientStream
from vfsdp_optim.testing.programs import (
    AddGroup,
    Freeze,
    Load,
    Phase,
    Program,
    Save,
    SetLr,
    Step,
    moment_label,
    phases,
    unsharded_paths,
)

A, B, C, D = (Step(seed=seed) for seed in range(4))
SHAPES = ((2, 3), (4,))


def test_load_undoes_what_came_after_the_save():
    program = Program(SHAPES, 2, "ours", (A, Save(), B, Load(3, "ragged"), C, Load(1), D))
    first, second, third = phases(program)
    assert first == Phase(2, "ours", (), (A, Save(), B), saves=True)
    assert second == Phase(3, "ragged", (A, Save()), (C,), loads=True)
    assert third == Phase(1, "ours", (A, Save()), (D,), loads=True)
    assert unsharded_paths([first, second, third]) == [
        (A, Save(), B),
        (A, Save(), C),
        (A, Save(), D),
    ]


def test_later_save_replaces_an_earlier_one_and_a_load_without_save_does_nothing():
    program = Program(SHAPES, 2, "ours", (Load(3), A, Save(), Load(4), B, Save(), Load(1), C))
    first, second, third = phases(program)
    assert (first.world_size, second.world_size, third.world_size) == (2, 4, 1)
    assert second.path == (A, Save())
    assert second.saves
    assert third.path == (A, Save(), B, Save())
    # One unsharded run is enough: each path is the start of the last.
    assert unsharded_paths([first, second, third]) == [(A, Save(), B, Save(), C)]


def test_moments_are_steps_and_saves():
    path = (A, SetLr(0.5), Save(), Freeze(0), B, AddGroup(), Save())
    assert [moment_label(path, moment) for moment in (1, 2, 3, 4)] == [
        "step 1",
        "the save after step 1",
        "step 2",
        "the save after step 2",
    ]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(dict(late=2), "at least one of 2 parameters"), (dict(checkpoint="pickle"), "got 'pickle'")],
)
def test_program_that_makes_no_sense_is_refused(arguments, words):
    with pytest.raises(ValueError, match=words):
        Program(SHAPES, **arguments)


@given(shapes=parameter_sets(max_params=5, max_numel=900))
def test_parameter_sets_keep_their_limits(shapes):
    assert 1 <= len(shapes) <= 5
    assert all(1 <= prod(shape) <= 900 for shape in shapes)


@given(data=st.data(), shapes=parameter_sets(), world_size=st.integers(1, 5))
def test_layouts_are_legal_and_cut_every_element_once(data, shapes, world_size):
    placements = data.draw(layouts(shapes, world_size))
    for shape, placement in zip(shapes, placements, strict=True):
        placement.check_shape(shape)
        bounds = placement.all_bounds(prod(shape))
        assert len(bounds) == world_size
        assert [start for start, _ in bounds[1:]] == [stop for _, stop in bounds[:-1]]
        assert (bounds[0][0], bounds[-1][1]) == (0, prod(shape))


def test_strategies_reach_everything_that_they_promise():
    seen: set[object] = set()
    dims: set[int] = set()

    @given(program=step_programs(layouts=("ours", "ragged", "fsdp2"), checkpoints=("dcp",)))
    def look(program):
        seen.update(type(instruction) for instruction in program.instructions)
        seen.add(program.layout if isinstance(program.layout, str) else RaggedShard)
        seen.update(i.gradients for i in program.instructions if isinstance(i, Step))
        seen.add(program.world_size)
        dims.update(len(shape) for shape in program.shapes)
        assert not any(isinstance(i, Freeze) for i in program.instructions)
        assert any(isinstance(i, Step) for i in program.instructions)

    for _ in range(3):
        look()
    assert seen >= {Step, SetLr, AddGroup, Save, Load, "ours", "fsdp2", RaggedShard, 1, 2, 3, 4}
    assert len(seen & set(KINDS)) >= 5
    assert dims >= {1, 2, 3, 4}
    assert 0 not in dims  # torch's fully_shard takes none


@given(stream=gradient_streams(), shapes=parameter_sets(max_params=1))
def test_gradients_follow_from_kind_seed_step_and_name(stream, shapes):
    first = stream(3, "w", shapes[0])
    again = GradientStream(stream.kind, stream.seed)(3, "w", shapes[0])
    if first is None:
        assert again is None
        assert stream.kind == "missing"
        return
    assert first.shape == torch.Size(shapes[0])
    assert torch.equal(first.nan_to_num(), again.nan_to_num())
    assert (stream.kind == "zero") <= (not first.any())


def test_gradients_of_steps_parameters_and_seeds_differ():
    stream, other = GradientStream("random", 0), GradientStream("random", 1)
    drawn = [stream(1, "a", (9,)), stream(2, "a", (9,)), stream(1, "b", (9,)), other(1, "a", (9,))]
    assert len({tuple(x.tolist()) for x in drawn}) == 4


def test_kinds_of_gradients_are_what_they_say():
    def drawn(kind: str) -> list[torch.Tensor | None]:
        return [GradientStream(kind, seed)(1, "w", (50, 4)) for seed in range(40)]

    missing = [x is None for x in drawn("missing")]
    assert 5 < sum(missing) < 30
    rows = torch.stack([x.any(1).float().mean() for x in drawn("sparse")])
    assert 0.1 < rows.mean() < 0.4
    overflowing = [x for x in drawn("overflow") if not x.isfinite().all()]
    assert 8 < len(overflowing) < 32
    assert {int((~x.isfinite()).sum()) for x in overflowing} == {1}
    assert any(x.isnan().any() for x in overflowing)
    assert any(x.isinf().any() for x in overflowing)
    assert all(0 < x.abs().max() < 1e-28 for x in drawn("tiny"))
    assert all(x.abs().max() > 1e14 and x.isfinite().all() for x in drawn("huge"))
    assert len({float(x.sum()) for x in drawn("random")}) == 40
