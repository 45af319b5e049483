"""Training programs as plain data: what happens to an optimizer, on how many ranks, laid out how.

Communicates nothing. Every instruction is legal everywhere (it does nothing where it
makes no sense), so that a program stays legal whatever is taken out of it: that is how it shrinks.

[Note: phases and paths]
`Load` goes back to the last `Save`, on other ranks. What happened between them is undone. So the
program is cut at its loads into phases, each run on ranks of its own, and the unsharded run of a
phase takes the path that leads there: the steps up to the save, then those after the load. The
unsharded run never loads anything, so an error of saving or loading cannot cancel out.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from vfsdp_optim.testing.gradients import Gradients
from vfsdp_optim.testing.shardings import LayoutChoice


@dataclass(frozen=True, slots=True)
class Step:
    """Set gradients, step, and compare with the unsharded run.

    Attributes:
        gradients: one of `gradients.KINDS`, or a callable.
        seed: of the kind.
        missing: indices of parameters whose gradient is None, beside those the kind leaves out.
    """

    gradients: str | Gradients = "random"
    seed: int = 0
    missing: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class SetLr:
    """Multiply the learning rate of every group that has one."""

    factor: float


@dataclass(frozen=True, slots=True)
class Freeze:
    """Let a parameter not require gradients any more; or again, if it does not."""

    param: int


@dataclass(frozen=True, slots=True)
class AddGroup:
    """Add the next late parameter to the optimizer, in a group of its own."""


@dataclass(frozen=True, slots=True)
class Save:
    """Save parameters and optimizer, and compare with the unsharded run."""


@dataclass(frozen=True, slots=True)
class Load:
    """Go back to the last `Save`, with new objects on other ranks."""

    world_size: int
    layout: LayoutChoice = "ours"


Instruction = Step | SetLr | Freeze | AddGroup | Save | Load


@dataclass(frozen=True, slots=True)
class Program:
    """What one example does.

    Attributes:
        shapes: of the parameters, which are called p0, p1, ...
        world_size: number of ranks until the first `Load`.
        layout: how they are sharded until the first `Load`.
        instructions: in order.
        late: how many of the last parameters join the optimizer by `AddGroup` only.
        dtype: of the parameters.
        checkpoint: "state_dict": full tensors through the optimizer's own methods. "dcp": through
            torch.distributed.checkpoint.
    """

    shapes: tuple[tuple[int, ...], ...]
    world_size: int = 2
    layout: LayoutChoice = "ours"
    instructions: tuple[Instruction, ...] = (Step(),)
    late: int = 0
    dtype: str = "float32"
    checkpoint: str = "state_dict"

    def __post_init__(self) -> None:
        """Check what drawn programs have by construction."""
        if not 0 <= self.late < max(len(self.shapes), 1):
            raise ValueError(
                f"late: expected at least one of {len(self.shapes)} parameters to be in the "
                f"optimizer from the start, got late={self.late!r}"
            )
        if self.checkpoint not in ("state_dict", "dcp"):
            raise ValueError(f"checkpoint: expected 'state_dict' or 'dcp', got {self.checkpoint!r}")


@dataclass(frozen=True, slots=True)
class Phase:
    """The part of a program between two loads.

    Attributes:
        world_size: number of ranks.
        layout: how parameters are sharded; None for the unsharded run.
        path: instructions that lead to the start, without what loads undid.
        instructions: what is done on these ranks.
        loads: whether it starts from what an earlier phase saved.
        saves: whether its last save is one that a later phase loads.
    """

    world_size: int
    layout: LayoutChoice | None
    path: tuple[Instruction, ...]
    instructions: tuple[Instruction, ...]
    loads: bool = False
    saves: bool = False

    @property
    def whole_path(self) -> tuple[Instruction, ...]:
        """What the unsharded run of this phase does."""
        return self.path + self.instructions


@dataclass(slots=True)
class _Draft:
    world_size: int
    layout: LayoutChoice
    path: tuple[Instruction, ...] = ()
    loads: bool = False
    saves: bool = False
    instructions: list[Instruction] = field(default_factory=list)


def phases(program: Program) -> list[Phase]:
    """Cut a program at its loads. See [Note: phases and paths]."""
    drafts = [_Draft(program.world_size, program.layout)]
    saved: tuple[Instruction, ...] | None = None
    source = drafts[0]
    for instruction in program.instructions:
        draft = drafts[-1]
        if isinstance(instruction, Load):
            if saved is not None:
                source.saves = True
                drafts.append(_Draft(instruction.world_size, instruction.layout, saved, loads=True))
            continue
        draft.instructions.append(instruction)
        if isinstance(instruction, Save):
            saved, source = draft.path + tuple(draft.instructions), draft
    return [
        Phase(d.world_size, d.layout, d.path, tuple(d.instructions), d.loads, d.saves)
        for d in drafts
    ]


def unsharded_paths(parts: Sequence[Phase]) -> list[tuple[Instruction, ...]]:
    """Return the paths that unsharded runs have to take: none that is the start of another."""
    paths = list(dict.fromkeys(part.whole_path for part in parts))
    return [
        path
        for path in paths
        if not any(other != path and other[: len(path)] == path for other in paths)
    ]


def is_observed(instruction: Instruction) -> bool:
    """Return whether everything is compared after an instruction.

    Saving is one: it may make state that was not there before, and loading gives it back.
    """
    return isinstance(instruction, Step | Save)


def moment_label(path: Sequence[Instruction], moment: int) -> str:
    """Return when the observation number `moment`, from 1, was made, as text."""
    observed = [i for i, instruction in enumerate(path) if is_observed(instruction)]
    until = path[: observed[moment - 1] + 1]
    steps = sum(isinstance(instruction, Step) for instruction in until)
    saved = "the save after " if isinstance(until[-1], Save) else ""
    return f"{saved}step {steps}"
