"""The assertions: a sharded optimizer is its unsharded self, bit by bit or within a tolerance.

Starts ranks; see pool.py. On the ranks runs what is in trial.py.
"""

import tempfile
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import nn

from vfsdp_optim.testing.differences import DifferenceError, Tolerance, first_difference, moves
from vfsdp_optim.testing.gradients import Gradients, as_gradients
from vfsdp_optim.testing.pool import RankError, run_ranks
from vfsdp_optim.testing.programs import (
    Instruction,
    Load,
    Phase,
    Program,
    Save,
    Step,
    moment_label,
    phases,
    unsharded_paths,
)
from vfsdp_optim.testing.records import Record
from vfsdp_optim.testing.reproduce import script
from vfsdp_optim.testing.shardings import LayoutChoice, MakeOptimizer, as_layouts, layout_text
from vfsdp_optim.testing.trial import (
    SCHEDULED,
    MakeModel,
    ParametersOf,
    Saved,
    Subject,
    run_sharded,
    run_unsharded,
)

Shapes = Sequence[Sequence[int]]


def assert_sharded_equals_unsharded(
    make_optimizer: MakeOptimizer,
    *,
    shapes: Shapes | None = None,
    model: nn.Module | MakeModel | None = None,
    world_sizes: Sequence[int] = (1, 2, 3, 4),
    layouts: LayoutChoice | Sequence[LayoutChoice] = "ours",
    steps: int = 5,
    gradients: str | Gradients = "random",
    exact: bool = True,
    atol: float | None = None,
    rtol: float | None = None,
    dtype: str | torch.dtype = "float32",
    seed: int = 0,
    timeout: float = 60.0,
) -> None:
    """Check an optimizer on shards against itself on full tensors, fed the same full gradients.

    Compared after every step: parameters, every tensor and number in `optimizer.state`, and that
    the padding of flat buffers is zero. The unsharded run is a process of its own with the same
    number of threads.

    Args:
        make_optimizer: `(module) -> optimizer`, called after the module is sharded; for example
            `lambda module: torch.optim.AdamW(module.parameters())`.
        shapes: of parameters, called p0, p1, ...; or else
        model: a module, or a function that returns one with the same weights in every process. Its
            forward is not called.
        world_sizes: numbers of ranks.
        layouts: "ours" and "ours_hsdp" (vfsdp_optim.fully_shard on 1-D and 2-D meshes),
            "negotiated" ("ours", shaped by what the optimizer declares), "ragged" (cut anywhere),
            "blocks" (cut between blocks of 256), "fsdp2" and "hsdp" (torch's fully_shard on 1-D
            and 2-D meshes), "replicated" (plain on every rank), "tp" (DTensors cut by rows and
            columns in turn), "tp_fsdp" and "ep" (by both on 2-D meshes), several of them, "any"
            ("ours", "ragged", "fsdp2" and "hsdp"), or one RaggedShard for each parameter.
        steps: optimizer steps.
        gradients: "random", "sparse", "zero", "missing", "tiny", "huge", "overflow", or
            `(step, name, shape) -> full gradient or None`, the same in every process.
        exact: bit by bit; else within `atol` and `rtol`.
        atol: of one element, absolute.
        rtol: of one element, relative to the unsharded value.
        dtype: of the parameters made for `shapes`.
        seed: of the gradients.
        timeout: seconds for the ranks of one run.

    Raises:
        DifferenceError: they differ (an AssertionError); it names the first step, parameter, state
            and index, both values, the rank that holds it and the layout there.
        NotImplementedError: the optimizer does not support a layout.
        ValueError: neither or both of `shapes` and `model`, an unknown layout or gradients, nothing
            to compare, or random gradients that move no parameter.
        RankError: a rank raised, died or hung.
    """
    __tracebackhide__ = True  # pytest then shows the report, and not this function
    tolerance = Tolerance.of(exact, atol, rtol)
    _refuse_nothing_to_do(world_sizes, steps)
    kinds = as_layouts(layouts)
    as_gradients(gradients)
    subject = Subject(_model_maker(shapes, model, dtype), make_optimizer)
    instructions = tuple(Step(gradients, seed) for _ in range(steps))
    unsharded = run_ranks(run_unsharded, 1, subject, instructions, timeout=timeout)[0]
    if gradients == "random" and not moves(unsharded, tolerance):
        raise ValueError(
            f"expected an optimizer that changes parameters, or one that never steps would equal "
            f"it; in {steps} unsharded steps {unsharded.optimizer} changed none by more than the "
            "tolerance"
        )
    for world_size in world_sizes:
        for layout in kinds:
            _refuse_scalars(layout, subject)
            phase = Phase(world_size, layout, (), instructions)
            report = _compare(subject, [phase], [unsharded], tolerance, timeout)
            if report:
                raise DifferenceError(report)


def assert_resume_is_exact(
    make_optimizer: MakeOptimizer,
    *,
    shapes: Shapes | None = None,
    model: nn.Module | MakeModel | None = None,
    saved_on: int = 2,
    resumed_on: int = 3,
    layouts: LayoutChoice | Sequence[LayoutChoice] = "ours",
    steps: int = 3,
    gradients: str | Gradients = "random",
    checkpoint: str = "dcp",
    dtype: str | torch.dtype = "float32",
    seed: int = 0,
    timeout: float = 60.0,
) -> None:
    """Check that a run saved on some ranks and resumed on others goes on bit by bit.

    Args:
        make_optimizer: see `assert_sharded_equals_unsharded`, as for the other arguments.
        shapes: of parameters; or else
        model: a module, or a function that returns one.
        saved_on: ranks of the first `steps` steps.
        resumed_on: ranks of as many steps after them.
        layouts: on both; checked one by one.
        steps: before the save, and again after it.
        gradients: the same full gradients as the run that is not interrupted.
        checkpoint: "dcp": torch.distributed.checkpoint. "state_dict": full tensors through
            `optimizer.state_dict()` and `load_state_dict()`.
        dtype: of the parameters made for `shapes`.
        seed: of the gradients.
        timeout: seconds for the ranks of one run.

    Raises:
        DifferenceError: the resumed run is not the uninterrupted one; see
            `assert_sharded_equals_unsharded`, as for the other errors.
    """
    __tracebackhide__ = True  # pytest then shows the report, and not this function
    _refuse_nothing_to_do((saved_on, resumed_on), steps)
    as_gradients(gradients)
    subject = Subject(_model_maker(shapes, model, dtype), make_optimizer)
    taken = tuple(Step(gradients, seed) for _ in range(steps))
    for layout in as_layouts(layouts):
        _refuse_scalars(layout, subject)
        instructions: tuple[Instruction, ...] = (
            *taken, Save(), Load(resumed_on, layout), *taken,
        )  # fmt: skip
        # The subject has the parameters: no shapes.
        program = Program((), saved_on, layout, instructions, checkpoint=checkpoint)
        report = find_difference(subject, program, timeout=timeout)
        if report:
            raise DifferenceError(report)


def assert_program_is_exact(
    make_optimizer: MakeOptimizer, program: Program, *, timeout: float = 60.0
) -> None:
    """Check a drawn program (see `step_programs`) against its unsharded run, bit by bit.

    Args:
        make_optimizer: `(module) -> optimizer`.
        program: what to do.
        timeout: seconds for the ranks of one phase.

    Raises:
        DifferenceError: they differ; the message ends with a script that shows it again.
        RankError: a rank raised, died or hung; the script is a note of it.
        NotImplementedError: the optimizer does not support the layout.
    """
    __tracebackhide__ = True  # pytest then shows the report, and not this function
    subject = Subject(ParametersOf(program.shapes, program.dtype), make_optimizer, program.late)
    try:
        report = find_difference(subject, program, timeout=timeout)
    except RankError as error:
        error.add_note(_reproduction(make_optimizer, program, str(error)))
        raise
    if report:
        raise DifferenceError(f"{report}\n\n{_reproduction(make_optimizer, program, report)}")


def _reproduction(make_optimizer: MakeOptimizer, program: Program, report: str) -> str:
    first_line = report.partition("\n")[0]
    return f"this script shows it again:\n\n{script(make_optimizer, program, first_line)}"


def find_difference(
    subject: Subject,
    program: Program,
    *,
    tolerance: Tolerance = Tolerance(),  # noqa: B008  (frozen)
    timeout: float = 60.0,
) -> str:
    """Run a program on ranks and on full tensors; return the report, empty if they are equal.

    Raises:
        NotImplementedError: the optimizer does not support a layout.
        RankError: a rank raised, died or hung.
    """
    __tracebackhide__ = True  # pytest then shows the report, and not this function
    parts = phases(program)
    records = {}
    for path in unsharded_paths(parts):
        records[path] = run_ranks(run_unsharded, 1, subject, path, timeout=timeout)[0]
    unsharded = [
        next(
            record for path, record in records.items() if path[: len(p.whole_path)] == p.whole_path
        )
        for p in parts
    ]
    if program.checkpoint == "dcp" and any(part.saves for part in parts):
        with tempfile.TemporaryDirectory(prefix="checkpoint-") as directory:
            return _compare(subject, parts, unsharded, tolerance, timeout, Path(directory))
    return _compare(subject, parts, unsharded, tolerance, timeout)


def _compare(
    subject: Subject,
    parts: Sequence[Phase],
    unsharded: Sequence[Record],
    tolerance: Tolerance,
    timeout: float,
    directory: Path | None = None,
) -> str:
    """Run phases on ranks, one after the other; return the report on the first difference."""
    __tracebackhide__ = True  # pytest then shows the report, and not this function
    saved: Saved | None = None
    for number, (part, expected) in enumerate(zip(parts, unsharded, strict=True)):
        to = "" if directory is None else str(directory / str(number))
        start = saved if part.loads else None
        try:
            results = run_ranks(
                run_sharded, part.world_size, subject, part, start, to, timeout=timeout
            )
        except RankError as error:
            _raise_if_unsupported(error, part, expected.optimizer)
            error.add_note(f"this was {_what_ran(expected.optimizer, part)}")
            raise
        records = [record for record, _ in results]
        label = partial(moment_label, part.whole_path)
        difference = first_difference(records, expected, tolerance, label)
        if difference is not None:
            lines = [
                f"{_what_ran(expected.optimizer, part)} is not the unsharded optimizer",
                str(difference),
            ]
            if part.loads:
                lines.append(
                    "  the ranks had loaded what others saved, into optimizers built with 0.75 of "
                    f"{', '.join(SCHEDULED)}"
                )
            return "\n".join(lines)
        if part.saves:
            saved = results[0][1]
    return ""


def _what_ran(optimizer: str, part: Phase) -> str:
    ranks = f"{part.world_size} rank{'s' if part.world_size > 1 else ''}"
    return f"{optimizer} on {ranks} in layout {layout_text(part.layout or '')}"


def _raise_if_unsupported(error: RankError, part: Phase, optimizer: str) -> None:
    __tracebackhide__ = True
    head = "raised NotImplementedError"
    first = next((text for text in error.reports.values() if text.startswith(head)), None)
    if first is not None:
        raise NotImplementedError(
            f"{optimizer} does not run in layout {layout_text(part.layout or '')}: "
            f"{first.splitlines()[0].removeprefix(head + ': ')}; pass layouts= with those that it "
            "supports"
        ) from error


def _refuse_nothing_to_do(world_sizes: Sequence[int], steps: int) -> None:
    if isinstance(world_sizes, int) or not world_sizes or min(world_sizes) < 1:
        raise ValueError(f"world_sizes: expected some positive numbers, got {world_sizes!r}")
    if steps < 1:
        raise ValueError(f"steps: expected at least 1, got {steps!r}")


def _model_maker(
    shapes: Shapes | None,
    model: nn.Module | Callable[[], nn.Module] | None,
    dtype: str | torch.dtype,
) -> MakeModel:
    if (shapes is None) == (model is None):
        raise ValueError(f"expected either shapes or model, got {shapes=!r} and {model=!r}")
    if shapes is not None:
        if not shapes or any(isinstance(shape, int) for shape in shapes):
            raise ValueError(f"shapes: expected one for each parameter, got {shapes!r}")
        name = str(dtype).removeprefix("torch.")
        return ParametersOf(tuple(tuple(shape) for shape in shapes), name)
    if isinstance(model, nn.Module):
        return _Copies(model)
    assert model is not None, "checked above"
    return model


@dataclass(frozen=True, slots=True, eq=False)
class _Copies:
    """Returns copies of a module."""

    module: nn.Module

    def __call__(self) -> nn.Module:
        return deepcopy(self.module)


def _refuse_scalars(layout: LayoutChoice, subject: Subject) -> None:
    if layout in ("fsdp2", "hsdp") and isinstance(subject.make_model, ParametersOf):
        if () in subject.make_model.shapes:
            raise ValueError(
                f"layouts: torch's fully_shard ({layout!r}) takes no 0-D parameters, and shapes "
                "has (); use (1,), or layouts='ours'"
            )
