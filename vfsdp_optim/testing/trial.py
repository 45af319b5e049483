"""Runs phases of programs: on ranks with sharded parameters, on one process with full ones.

Touches the default process group, the parameters and the optimizer of the phase, and (for
checkpoints of torch.distributed) one directory.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from vfsdp_optim.testing.gradients import as_gradients, seeded
from vfsdp_optim.testing.programs import (
    AddGroup,
    Freeze,
    Instruction,
    Phase,
    Save,
    SetLr,
    Step,
    is_observed,
)
from vfsdp_optim.testing.records import PARAM, Record, observe, piece_of
from vfsdp_optim.testing.shardings import (
    GradientSetter,
    LayoutChoice,
    MakeOptimizer,
    cut_like,
    shard_model,
)

MakeModel = Callable[[], nn.Module]

SCHEDULED = ("lr", "weight_decay", "momentum", "betas")  # options that change while one trains


class Parameters(nn.Module):
    """A module that has parameters and no forward."""

    def __init__(self, params: dict[str, nn.Parameter]) -> None:
        super().__init__()
        for name, param in params.items():
            self.register_parameter(name, param)


@dataclass(frozen=True, slots=True)
class ParametersOf:
    """Makes a module with parameters of these shapes, called p0, p1, ..., the same everywhere."""

    shapes: tuple[tuple[int, ...], ...]
    dtype: str = "float32"

    def __call__(self) -> nn.Module:
        """Return the module."""
        dtype = getattr(torch, self.dtype)
        return Parameters(
            {
                f"p{i}": nn.Parameter(
                    torch.randn(shape, generator=seeded("initial", i, shape), device="cpu").to(
                        dtype
                    )
                )
                for i, shape in enumerate(self.shapes)
            }
        )


@dataclass(frozen=True, slots=True, eq=False)
class Whole:
    """The full tensor of a state that was sharded; loaded, it is sharded again."""

    tensor: Tensor


@dataclass(frozen=True, slots=True)
class Saved:
    """What a rank saved.

    Attributes:
        directory: of torch.distributed.checkpoint; empty for full tensors.
        params: full parameters by name.
        optimizer: `state_dict()`, with `Whole`s for sharded tensors.
    """

    directory: str = ""
    params: dict[str, Tensor] | None = None
    optimizer: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Subject:
    """What is tested.

    Attributes:
        make_model: returns a module with the same plain parameters in every process.
        make_optimizer: `(module) -> optimizer` of the parameters of a module.
        late: how many of the last parameters join the optimizer by `AddGroup` only.
    """

    make_model: MakeModel
    make_optimizer: MakeOptimizer
    late: int = 0


class Trial:
    """A model and its optimizer on this rank, on the way through a phase.

    Args:
        subject: what is tested.
        layout: how it is sharded over the default process group; None for full tensors.
        saved: where parameters and optimizer start from.
        path: instructions that were taken before that.
    """

    def __init__(
        self,
        subject: Subject,
        layout: LayoutChoice | None,
        *,
        saved: Saved | None = None,
        path: Sequence[Instruction] = (),
    ) -> None:
        self._subject = subject
        self.model = subject.make_model()
        if saved is not None and saved.params is not None:
            with torch.no_grad():
                for name, param in self.model.named_parameters():
                    param.copy_(saved.params[name])
        if layout is None:
            self.optimizer = subject.make_optimizer(self._first(self.model))
        else:
            self.optimizer = shard_model(
                self.model, layout, subject.make_optimizer, first=self._first
            )
        if not hasattr(self.optimizer, "step"):
            raise TypeError(
                f"make_optimizer: expected it to return an optimizer, got {self.optimizer!r}"
            )
        self.params = dict(self.model.named_parameters())
        self._gradients = GradientSetter(self.params)
        self._waiting = list(self.params)[len(self.params) - subject.late :]
        self.step = self.moment = 0
        for instruction in path:
            self._replay(instruction)
        if saved is not None:
            self._load(saved)

    def _first(self, model: nn.Module) -> nn.Module:
        """Return a module with the parameters that are in the optimizer from the start."""
        if not self._subject.late:
            return model
        params = dict(model.named_parameters())
        return Parameters(dict(list(params.items())[: len(params) - self._subject.late]))

    def do(self, instruction: Instruction, record: Record | None = None) -> None:
        """Carry out one instruction, and append what it led to to `record`."""
        if isinstance(instruction, Step):
            self._take(instruction)
        elif isinstance(instruction, SetLr):
            for group in self.optimizer.param_groups:
                if "lr" in group:
                    group["lr"] = group["lr"] * instruction.factor
        elif isinstance(instruction, Save):
            self.optimizer.state_dict()  # reading state may make it: so too where nothing is saved
        else:
            self._replay(instruction)
        if is_observed(instruction):
            self.moment += 1
            if record is not None:
                observe(record, self.moment, self.params, self.optimizer)

    def _replay(self, instruction: Instruction) -> None:
        """Do what a checkpoint does not restore."""
        self.moment += is_observed(instruction)
        if isinstance(instruction, Step):
            self.step += 1
        elif isinstance(instruction, Freeze):
            param = list(self.params.values())[instruction.param % len(self.params)]
            param.requires_grad_(not param.requires_grad)
        elif isinstance(instruction, AddGroup) and self._waiting:
            name = self._waiting.pop(0)
            self._add_group({name: self.params[name]})

    def _add_group(self, params: dict[str, nn.Parameter]) -> None:
        # The user's own function knows which groups a parameter belongs to.
        for group in self._subject.make_optimizer(Parameters(params)).param_groups:
            group = dict(group)
            names = group.pop("param_names", None)
            if names is not None:
                group["params"] = list(zip(names, group["params"], strict=True))
            self.optimizer.add_param_group(group)

    def _take(self, instruction: Step) -> None:
        self.step += 1
        gradients = as_gradients(instruction.gradients, instruction.seed)
        missing = {i % len(self.params) for i in instruction.missing} | {
            i for i, param in enumerate(self.params.values()) if not param.requires_grad
        }
        full = {
            name: None if i in missing else gradients(self.step, name, param.shape)
            for i, (name, param) in enumerate(self.params.items())
        }
        self._gradients.set({n: None if n in self._waiting else g for n, g in full.items()})
        self.optimizer.step()
        self.optimizer.zero_grad()

    def save(self, directory: str) -> Saved:
        """Save for other ranks: into `directory`, or as full tensors if it is empty."""
        if directory:
            weights, state = get_state_dict(self.model, self.optimizer)
            dcp.save({"model": weights, "optimizer": state}, checkpoint_id=directory)
            return Saved(directory)
        optimizer = self.optimizer.state_dict()
        params = {name: _full(param.detach()) for name, param in self.params.items()}
        state = pytree.tree_map_only(
            Tensor,
            lambda x: Whole(_full(x)) if isinstance(x, DTensor) else x.clone(),
            optimizer["state"],
        )
        return Saved("", params, {**optimizer, "state": state})

    def _load(self, saved: Saved) -> None:
        _spoil_options(self.optimizer)
        if saved.directory:
            weights, state = get_state_dict(self.model, self.optimizer)
            loaded = {"model": weights, "optimizer": state}
            dcp.load(loaded, checkpoint_id=saved.directory)
            set_state_dict(
                self.model, self.optimizer, model_state_dict=weights, optim_state_dict=state
            )
            return
        assert saved.optimizer is not None, "full tensors were saved"
        params = [p for group in self.optimizer.param_groups for p in group["params"]]
        indices = [i for group in saved.optimizer["param_groups"] for i in group["params"]]
        by_index = dict(zip(indices, params, strict=True))
        state = {
            index: self._cut(by_index.get(index), of_param)
            for index, of_param in saved.optimizer["state"].items()
        }
        self.optimizer.load_state_dict({**saved.optimizer, "state": state})

    def _cut(self, param: Tensor | None, saved: Any) -> Any:
        """Return the saved state of a parameter, cut as it is; what the optimizer keeps in another
        layout than the parameter's stays full, because it knows how it cuts that."""
        own = self.optimizer.state.get(param, {}) if param is not None else {}
        placed = getattr(param, "placements", None)
        others = {
            key
            for key, value in (own.items() if isinstance(own, dict) else ())
            if isinstance(value, DTensor) and value.placements != placed
        }
        if not isinstance(saved, dict):
            return pytree.tree_map_only(Whole, partial(_like, param), saved)
        return {
            key: pytree.tree_map_only(Whole, partial(_like, None if key in others else param), item)
            for key, item in saved.items()
        }


def _spoil_options(optimizer: torch.optim.Optimizer) -> None:
    """Change what a new optimizer was built with: an option that a load does not bring back is seen
    then. By a factor that no program draws for `SetLr`."""
    for group in optimizer.param_groups:
        for key in SCHEDULED:
            if key in group:
                group[key] = pytree.tree_map_only(
                    (float, int, Tensor), lambda x: x * 0.75, group[key]
                )


def _full(value: Tensor) -> Tensor:
    # Where one rank has all of a DTensor, full_tensor() is no copy.
    return (value.full_tensor() if isinstance(value, DTensor) else value).clone()


def _like(param: Tensor | None, whole: Whole) -> Tensor:
    # States of other shapes stay full: the optimizer knows how it cuts them.
    full = whole.tensor
    return cut_like(full, param) if param is not None and full.shape == param.shape else full


def run_sharded(
    subject: Subject, phase: Phase, saved: Saved | None, directory: str
) -> tuple[Record, Saved | None]:
    """Run a phase on every rank of the default process group.

    Args:
        subject: what is tested.
        phase: with a layout.
        saved: what the phase starts from.
        directory: where to save; empty for full tensors.
    """
    record = Record()
    trial = Trial(subject, phase.layout, saved=saved, path=phase.path)
    record.optimizer = type(trial.optimizer).__name__
    if saved is not None:
        observe(record, trial.moment, trial.params, trial.optimizer)
    saves = [i for i, step in enumerate(phase.instructions) if isinstance(step, Save)]
    result = None
    for i, instruction in enumerate(phase.instructions):
        trial.do(instruction, record)
        if phase.saves and i == saves[-1]:
            result = trial.save(directory)
    if result is not None and not result.directory and torch.distributed.get_rank():
        result = None  # the same on every rank: one is enough
    return record, result


def run_unsharded(subject: Subject, path: Sequence[Instruction]) -> Record:
    """Take a path with full tensors, in this process alone; moment 0 is before the path."""
    record = Record()
    trial = Trial(subject, None)
    record.optimizer = type(trial.optimizer).__name__
    for name, param in trial.params.items():
        record.pieces.append(piece_of(0, name, PARAM, param.detach(), param))
    for instruction in path:
        trial.do(instruction, record)
    return record
