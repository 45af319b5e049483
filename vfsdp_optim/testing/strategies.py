"""Hypothesis strategies: parameter sets, layouts, gradients, and whole training programs.

Pure data: nothing here starts a rank or makes a tensor. Draw in the test and hand what was drawn to
an assertion; a program runs as it is on all ranks. hypothesis is imported when a strategy is asked
for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Any

from sharding.planning.granule import Shape
from sharding.planning.planner import ALIGN
from sharding.tensor.placement import RaggedShard
from vfsdp_optim.testing.gradients import KINDS, GradientStream
from vfsdp_optim.testing.programs import (
    AddGroup,
    Freeze,
    Instruction,
    Load,
    Program,
    Save,
    SetLr,
    Step,
)
from vfsdp_optim.testing.shardings import LAYOUTS, LayoutChoice

if TYPE_CHECKING:
    from hypothesis.strategies import DrawFn, SearchStrategy


def parameter_sets(
    *, max_params: int = 4, max_numel: int = 1500, scalars: bool = True
) -> SearchStrategy[tuple[Shape, ...]]:
    """Return a strategy for the shapes of a model's parameters.

    Vectors, square, tall and wide matrices, fewer rows than ranks, experts, convolutions, 0-D;
    sizes that nothing divides. Shrinks to few small ones.

    Args:
        max_params: parameters in a set, at most.
        max_numel: elements of a parameter, at most; from 257 on `fully_shard` cuts some.
        scalars: whether 0-D ones are among them, which torch's fully_shard does not take.
    """
    st = _hypothesis()
    side = int(max_numel**0.5)
    families = [
        st.tuples(_size(max_numel)),
        st.tuples(_size(side), _size(side)),
        _size(side).map(lambda n: (n, n)),
        st.tuples(_size(max_numel // 8), _size(8)),
        st.tuples(_size(8), _size(max_numel // 8)),
        st.tuples(_size(2), _size(max_numel // 2)),
        st.tuples(_size(4), _size(8), _size(8)),
        st.tuples(_size(6), _size(4), _size(3), _size(3)),
        *([st.just(())] if scalars else []),
    ]
    shape = st.one_of(*families)

    # As many as drawn, not a list: those are mostly short.
    @st.composite
    def sets(draw: DrawFn) -> tuple[Shape, ...]:
        return tuple(draw(shape) for _ in range(draw(st.integers(1, max_params))))

    return sets()


def layouts(
    shapes: Sequence[Shape], world_size: int, *, units: Sequence[int] = ()
) -> SearchStrategy[tuple[RaggedShard, ...]]:
    """Return a strategy for legal RaggedShards, one for each shape.

    Cut anywhere, not only where the planner would: in the middle of rows, some ranks with
    nothing, in units of one element, of some, or of whole rows, or of `units` where they are
    given. Shrinks to everything on the last rank.
    """
    st = _hypothesis()
    return st.tuples(*(_placement(tuple(shape), world_size, units) for shape in shapes))


def gradient_streams(kinds: Sequence[str] = KINDS) -> SearchStrategy[GradientStream]:
    """Return a strategy for gradients, to pass as `gradients=`."""
    st = _hypothesis()
    return st.builds(GradientStream, st.sampled_from(list(kinds)), st.integers(0, 99))


def step_programs(
    *,
    world_sizes: Sequence[int] = (2, 1, 3, 4),
    layouts: Sequence[str] = ("ragged", "ours"),
    shapes: SearchStrategy[tuple[Shape, ...]] | None = None,
    kinds: Sequence[str] = KINDS,
    dtypes: Sequence[str] = ("float32",),
    checkpoints: Sequence[str] = ("state_dict",),
    max_steps: int = 6,
) -> SearchStrategy[Program]:
    """Return a strategy for programs, to pass to `assert_program_is_exact`.

    A program steps, leaves gradients out, changes the learning rate, freezes parameters, adds
    groups, saves, loads on another number of ranks in another layout, and overflows, but not before
    a save: loads refuse what is not finite. Shrinks to few instructions on few small parameters.

    Args:
        world_sizes: numbers of ranks, the first is what programs shrink to.
        layouts: names; "ragged" and "blocks" draw RaggedShards and come twice as often.
        shapes: of the parameters; by default `parameter_sets()`, without 0-D ones where a layout
            is torch's.
        kinds: of gradients.
        dtypes: of the parameters.
        checkpoints: "state_dict", "dcp". Programs with "dcp" freeze nothing, because
            torch.distributed.checkpoint does not keep the state of frozen parameters.
        max_steps: in one program.
    """
    st = _hypothesis()
    unknown = sorted(set(layouts) - set(LAYOUTS))
    if unknown:
        raise ValueError(f"layouts: expected some of {sorted(LAYOUTS)}, got {unknown}")
    if shapes is None:
        shapes = parameter_sets(scalars=not {"fsdp2", "hsdp"} & set(layouts))

    @st.composite
    def programs(draw: DrawFn) -> Program:
        drawn = draw(shapes)
        place = _places(drawn, world_sizes, layouts)
        world_size, layout = draw(place)
        a_round = _rounds(len(drawn), kinds, place)
        rounds = [draw(a_round) for _ in range(draw(st.integers(1, max_steps)))]
        checkpoint = draw(st.sampled_from(list(checkpoints)))
        # torch.distributed.checkpoint loses the state of frozen parameters.
        left_out = Freeze if checkpoint == "dcp" else ()
        instructions = [x for of_round in rounds for x in of_round if not isinstance(x, left_out)]
        dtype = draw(st.sampled_from(list(dtypes)))
        instructions = _finite_where_saved(instructions, dtype)
        adds = sum(isinstance(instruction, AddGroup) for instruction in instructions)
        return Program(
            shapes=drawn,
            world_size=world_size,
            layout=layout,
            instructions=tuple(instructions),
            late=min(adds, len(drawn) - 1),
            dtype=dtype,
            checkpoint=checkpoint,
        )

    return programs()


def _hypothesis() -> Any:
    try:
        from hypothesis import strategies
    except ImportError as error:
        raise ImportError(
            "the strategies need hypothesis: pip install 'vfsdp-optim[testing]'"
        ) from error
    return strategies


def _size(largest: int) -> SearchStrategy[int]:
    return _hypothesis().integers(1, max(largest, 1))


def _placement(
    shape: Shape, world_size: int, allowed: Sequence[int]
) -> SearchStrategy[RaggedShard]:
    st = _hypothesis()
    numel = prod(shape)
    row = prod(shape[1:])

    @st.composite
    def placement(draw: DrawFn) -> RaggedShard:
        unit = draw(st.sampled_from(list(allowed) or sorted({1, max(row, 1), 3})))
        units = -(-numel // unit)
        size = st.integers(0, units)
        cuts = sorted(draw(size) for _ in range(world_size - 1))
        held = [b - a for a, b in zip([0, *cuts], [*cuts, units], strict=True)]
        return RaggedShard(range(len(shape)), held, unit)

    return placement()


def _places(
    shapes: tuple[Shape, ...], world_sizes: Sequence[int], names: Sequence[str]
) -> SearchStrategy[tuple[int, LayoutChoice]]:
    """Return a strategy for a number of ranks and a layout on them."""
    st = _hypothesis()

    def of(world_size: int) -> SearchStrategy[tuple[int, LayoutChoice]]:
        drawn = {"ragged": (), "blocks": (ALIGN,)}
        choices: list[SearchStrategy[LayoutChoice]] = [st.just(n) for n in names if n not in drawn]
        for name in drawn.keys() & set(names):
            choices += [layouts(shapes, world_size, units=drawn[name]) for _ in range(2)]
        return st.tuples(st.just(world_size), st.one_of(*choices))

    return st.sampled_from(list(world_sizes)).flatmap(of)


def _finite_where_saved(instructions: list[Any], dtype: str) -> list[Any]:
    """Return the instructions with gradients before the last save that leave states finite."""
    saves = [i for i, instruction in enumerate(instructions) if isinstance(instruction, Save)]
    infinite = ("huge", "overflow") if dtype == "float16" else ("overflow",)
    return [
        replace(each, gradients="random")
        if saves and i < saves[-1] and isinstance(each, Step) and each.gradients in infinite
        else each
        for i, each in enumerate(instructions)
    ]


def _steps(params: int, kinds: Sequence[str]) -> SearchStrategy[Step]:
    st = _hypothesis()
    missing = st.sets(st.integers(0, params - 1), max_size=2).map(lambda s: tuple(sorted(s)))
    return st.builds(Step, st.sampled_from(list(kinds)), st.integers(0, 99), missing)


def _rounds(
    params: int, kinds: Sequence[str], place: SearchStrategy[tuple[int, LayoutChoice]]
) -> SearchStrategy[tuple[Instruction, ...]]:
    """Return a strategy for what happens before a step, each with a chance of its own, and the
    step."""
    st = _hypothesis()
    step = _steps(params, kinds)
    chance = st.integers(0, 3)

    @st.composite
    def rounds(draw: DrawFn) -> tuple[Instruction, ...]:
        before: list[Instruction] = []
        if draw(chance) == 3:
            before.append(AddGroup())
        if draw(chance) == 3:
            before.append(Freeze(draw(st.integers(0, params - 1))))
        if draw(chance) == 3:
            before.append(SetLr(draw(st.sampled_from([0.5, 2.0, 0.0]))))
        if draw(chance) == 3:
            before.append(Save())
        if draw(chance) == 3:
            before += [*([Save()] if draw(st.booleans()) else []), Load(*draw(place))]
        return *before, draw(step)

    return rounds()
