"""What one update rule supplies to the optimizer: defaults, checks, declared structure, arithmetic.

Touches the tensors it is handed; communicates nothing and knows nothing of how parameters are
sharded.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from difflib import get_close_matches
from functools import cache, lru_cache
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor

from sharding.planning.structure import Elementwise, FullMatrix, Structure, Unit
from sharding.planning.turns import Recurring

if TYPE_CHECKING:
    from vfsdp_optim.states.scratch import Scratch
    from vfsdp_optim.step.group_runs import StepRuns
    from vfsdp_optim.step.runs import Run

StatesName = Literal["32bit", "8bit"]
OnNonfinite = Literal["ignore", "skip", "raise"]

# Keys that torch, its schedulers and its checkpoints put into groups; no algorithm of ours reads
# them.
TORCH_KEYS = frozenset(
    """params param_names initial_lr max_lr min_lr swa_lr betas max_momentum base_momentum
    foreach fused capturable differentiable decoupled_weight_decay""".split()
)
# Of those, how torch runs its own update.
EXECUTION_KEYS = frozenset("foreach fused capturable differentiable".split())

SCHEDULE_KEYS = ("initial_lr", "max_lr", "min_lr", "swa_lr", "max_momentum", "base_momentum")

# Options of other update rules: as a label one would train otherwise than asked, in silence.
_OPTIONS = frozenset(
    """momentum dampening nesterov ns_coefficients ns_steps ns_algorithm adjust_lr_fn matrices
    use_muon amsgrad alpha centered rho lr_decay lambd t0 etas step_sizes momentum_decay
    initial_accumulator_value
    """.split()
)


@dataclass(frozen=True, slots=True)
class Precision:
    """What states and weights are kept in, where `states="8bit"` alone does not say enough.

    Given as `states=` of an optimizer or of a group; its fields become group keys.

    Args:
        states: "32bit", or "8bit": the states of matrices of at least 4096 elements as 8-bit codes
            with an fp32 scale for each 256, a quarter of the memory of fp32.
        keep_32bit: names of parameters whose states are not to be 8-bit; `param_groups` adds
            embeddings and output heads.
        unaligned: what to do where a shard starts inside a block of 256: "raise", or
            "local_blocks": count blocks from there, which is not bitwise the unsharded run.
        master_weights: update an fp32 copy of 16-bit parameters, the state `master`, and round it.
        stochastic_rounding: update bfloat16 parameters in fp32 and round up or down by chance, in
            proportion; the chance is the same at every world size.

    Example:
        >>> Precision("8bit", keep_32bit=["head.weight"]).keep_32bit
        ('head.weight',)
    """

    states: StatesName = "32bit"
    keep_32bit: Iterable[str] = ()
    unaligned: Literal["raise", "local_blocks"] = "raise"
    master_weights: bool = False
    stochastic_rounding: bool = False

    def __post_init__(self) -> None:
        """Read the names once; what is no collection of names is refused with its group."""
        if isinstance(self.keep_32bit, Iterable) and not isinstance(self.keep_32bit, str):
            object.__setattr__(self, "keep_32bit", tuple(self.keep_32bit))


class NamesToKeep(list[str]):
    """Names for `keep_32bit` that outlive the editing of groups: those that a group does not have
    are another's."""


def spread(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options with the fields of a `Precision` in `states` as keys; others count first."""
    precision = options.get("states")
    if not isinstance(precision, Precision):
        return dict(options)
    own = {key: value for key, value in options.items() if key != "states"}
    return {**{f.name: getattr(precision, f.name) for f in fields(precision)}, **own}


# Group keys of every algorithm about what states and weights are kept in: see precision.py.
PRECISION: dict[str, Any] = {**spread({"states": Precision()}), "states_format": None}
# Arguments of constructors that concern the optimizer as a whole.
_NOT_IN_GROUPS = frozenset(
    "self __class__ params max_exchange_bytes on_nonfinite process_group".split()
)
# Those that a checkpoint must agree with, unless it is converted.
PRECISION_KEYS = ("states", "states_format", "master_weights", "stochastic_rounding")


class Algorithm(ABC):
    """An update rule. One object serves all groups that name it.

    A subclass gives `name`, its hyper-parameters (to `__init__`), `state_keys` and `update_run`;
    all else has a default. One that updates whole matrices or panels is a `MatrixAlgorithm`.

    Args:
        defaults: what a group takes where it says nothing: every group key that there is.

    Attributes:
        name: value of the group key `algorithm`.
        structural_keys: group keys that a loaded checkpoint must agree with.
        nonnegative: keys of states that are never negative.
        as_torch: values of group keys that checkpoints do not hold, because torch.optim does not
            know the key and does what this value says.
        defaults: what a group takes where it says nothing.

    Example:
        >>> class SignSGD(Algorithm):
        ...     name = "sign_sgd"
        ...     def __init__(self, **options):
        ...         super().__init__(**{"lr": 1e-3, **options})
        ...     def state_keys(self, group):
        ...         return ()
        ...     def update_run(self, group, run, scratch):
        ...         for param, grad, _ in run.chunks(scratch):
        ...             param.add_(grad.sign(), alpha=-float(group["lr"]))
        >>> SignSGD(lr=0.1).defaults["lr"]
        0.1
    """

    name: ClassVar[str]
    structural_keys: ClassVar[tuple[str, ...]] = ()
    nonnegative: ClassVar[frozenset[str]] = frozenset()
    as_torch: ClassVar[Mapping[str, Any]] = {key: PRECISION[key] for key in PRECISION_KEYS}

    def __init__(self, **defaults: Any) -> None:
        given = {**PRECISION, **spread(defaults)}
        self.defaults = {key: plain_value(value) for key, value in given.items()}
        kept = self.defaults["keep_32bit"]
        if isinstance(kept, Iterable) and not isinstance(kept, str):  # refused with the group
            self.defaults["keep_32bit"] = tuple(kept)

    def complete(self, group: dict[str, Any], where: str) -> None:
        """Fill in what a group does not say, and check what it says.

        Other keys are labels, such as `name` or `lr_scale`, which are kept as torch keeps them.

        Raises:
            ValueError: an option that this algorithm does not have, or a value out of range.
            NotImplementedError: a valid request that is not supported.
        """
        labels = set(group.keys()) - set(self.defaults) - TORCH_KEYS - {"algorithm"}
        unknown = sorted(
            key for key in labels if key in _OPTIONS or _is_misspelt(key, self.defaults)
        )
        if unknown:
            raise ValueError(
                f"{where}: algorithm {self.name!r} has no {', '.join(map(repr, unknown))}; "
                f"it has {sorted(self.defaults)}"
            )
        for key, value in self.defaults.items():
            group[key] = plain_value(group.get(key, value))
        self.check_group(group, where)

    def check_group(self, group: dict[str, Any], where: str) -> None:
        """Check the values of a complete group; errors start with `where`."""
        numbers = ("lr", "weight_decay", "momentum", "eps")
        check_at_least_zero(group, where, tuple(key for key in numbers if key in group))

    def check_param(self, group: dict[str, Any], shape: torch.Size, fqn: str) -> None:
        """Check that a parameter of this logical shape can be treated; errors name `fqn`."""
        try:
            self.structure(group, shape).units(tuple(shape))
        except ValueError as error:
            raise ValueError(f"{fqn}: {error}") from None

    def counts_steps(self, group: dict[str, Any]) -> bool:
        """Return whether the state has `step`; rounding by chance draws by it."""
        return bool(group["stochastic_rounding"])

    @abstractmethod
    def state_keys(self, group: dict[str, Any]) -> tuple[str, ...]:
        """Return the states that are cut as the parameter is."""

    def structure(self, group: dict[str, Any], shape: torch.Size) -> Structure:
        """Return what must lie whole on a rank while the update of a parameter is computed."""
        return Elementwise()

    @abstractmethod
    def update_run(self, group: dict[str, Any], run: Run, scratch: Scratch) -> None:
        """Do the element-wise part of the step on a run, in place.

        A run is many parameters of one group, one after the other, cut anywhere: a result may
        depend on nothing but the element at hand. `run.chunks(scratch)` yields (param, grad,
        states), 1-D each; `run.step` is the number of this step where steps are counted. In place
        of new tensors, `scratch.take(numel, dtype, device)` lends memory until the next chunk.
        """

    def update_runs(self, group: dict[str, Any], runs: StepRuns, scratch: Scratch) -> None:
        """Do it on all runs of a group, taken one by one, and store each."""
        for run in runs:
            self.update_run(group, run, scratch)
            run.store()


@dataclass(frozen=True, slots=True)
class UnitState:
    """One state that a unit has on its owner, fp32 and zero before the first step.

    Attributes:
        shape: of one matrix or panel; at least one dim.
        compressible: whether it is kept as 8-bit codes where the states of its parameter are.
        nonnegative: whether its numbers are never negative.
        guarded: whether `matrix_update` itself leaves it as it was where `context.skip` is set. Of
            others a copy is kept in each step of which only a device knows whether it counts.
    """

    shape: tuple[int, ...]
    compressible: bool = False
    nonnegative: bool = False
    guarded: bool = False


@dataclass(frozen=True, slots=True)
class UnitContext:
    """What `matrix_update` may know beside its input.

    Attributes:
        index: number of the matrix among all of the optimizer, the same at every world size.
        step: number of this step of the parameter, from 1; 0 where steps are not counted.
        states: those of `unit_states`, fp32, to be written to in place.
        turns: in which step of a period, from 0, each part of `MatrixAlgorithm.recurring` is due,
            the same at every world size; () where there is none.
        fail: takes what went wrong for good, as text, and a 0-d bool tensor if only the device
            knows whether it did; the next step raises it on all ranks, or the one after it where
            the host does not wait for the device.
        skip: a 0-d bool tensor of the device, whether the step is to leave all states as they were;
            False where the host knows that it counts.
    """

    index: int
    step: int
    states: Mapping[str, Tensor]
    turns: tuple[int, ...]
    fail: Callable[..., None]
    skip: bool | Tensor = False


class MatrixAlgorithm(Algorithm):
    """An update rule with a second part that needs whole matrices.

    `structure` declares the units: whole matrices (`FullMatrix`) or panels of rows (`RowPanels`).
    Between the parts stands one tensor per parameter, the input of the matrix part, and one comes
    back: the update, which is added to the parameter with a factor. Both travel in `wire_dtype`.
    `unit_states` declares what a unit keeps where it is computed: there is one copy of it, on its
    owner, and it never travels in a step. Unless a subclass says otherwise, that is all that is
    kept, the input is the gradient, the factor is -lr, and the element-wise part is a decoupled
    weight decay.
    """

    def state_keys(self, group: dict[str, Any]) -> tuple[str, ...]:
        """Return nothing: states are those of units."""
        return ()

    def update_run(self, group: dict[str, Any], run: Run, scratch: Scratch) -> None:
        """Decay the parameters."""
        decay = 1 - float(group["lr"]) * group.get("weight_decay", 0.0)
        if decay != 1:
            for param, _, _ in run.chunks(scratch):
                param.mul_(decay)

    def unit_states(self, group: dict[str, Any], unit: Unit) -> Mapping[str, UnitState]:
        """Return the states of one matrix of a unit, by key; the keys are one set per group."""
        return {}

    def wire_dtype(self, group: dict[str, Any], device: torch.device) -> torch.dtype:
        """Return the dtype in which inputs and updates of the matrix part are exchanged."""
        return torch.float32

    def write_input(
        self, group: dict[str, Any], grad: Tensor, states: dict[str, Tensor], out: Tensor
    ) -> None:
        """Write the input of the matrix part for some elements, all 1-D; `out` has wire dtype."""
        out.copy_(grad)

    @abstractmethod
    def matrix_update(
        self, group: dict[str, Any], matrix: Tensor, context: UnitContext, scratch: Scratch
    ) -> Tensor:
        """Return the update (m, n) for the input (m, n) of one matrix; it may lie in `scratch`."""

    def factor(self, group: dict[str, Any], rows: int, cols: int) -> float:
        """Return the factor an update is added with, from the logical shape of its matrix."""
        return -float(group["lr"])

    def scale(self, group: dict[str, Any], rows: int, cols: int) -> float:
        """Return what the learning rate of a matrix is multiplied by, for tables."""
        return 1.0

    @abstractmethod
    def cost(self, group: dict[str, Any], rows: int, cols: int) -> int:
        """Return the multiply-adds of `matrix_update` in a mean step."""

    def recurring(self, group: dict[str, Any], rows: int, cols: int) -> Recurring | None:
        """Return what of them parts of the matrix do in turn, by `UnitContext.turns`; None if each
        step does the same."""
        return None


def hyper_parameters(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return those arguments of an optimizer's constructor, its `locals()`, that are group keys."""
    return {key: value for key, value in arguments.items() if key not in _NOT_IN_GROUPS}


@cache
def _constructor(optimizer: type) -> dict[str, Any]:
    parameters = inspect.signature(optimizer).parameters.values()
    return {p.name: p.default for p in parameters if p.default is not inspect.Parameter.empty}


def constructor_defaults(optimizer: type) -> dict[str, Any]:
    """Return the defaults of the constructor that are group keys: written there, and there only."""
    return hyper_parameters(_constructor(optimizer))


def chosen_algorithm(choice: object, known: dict[str, Algorithm], where: str) -> Algorithm:
    """Return the algorithm that a group names, or that it brings, which is known from here on.

    Raises:
        ValueError: none is called so, or another one is.
    """
    if isinstance(choice, Algorithm):
        found = known.setdefault(choice.name, choice)
        if (type(found), found.defaults) != (type(choice), choice.defaults):
            raise ValueError(
                f"{where}: algorithm: there is another {choice.name!r} already; name it, "
                f"algorithm={choice.name!r}, and say in the group what differs"
            )
        return found
    if not isinstance(choice, str) or choice not in known:
        raise ValueError(
            f"{where}: algorithm: expected one of {sorted(known)} or an Algorithm object, got "
            f"{choice!r}; the optimizer of that name brings it, and takes groups of others beside"
        )
    return known[choice]


def plain_value(value: Any) -> Any:
    """Return numbers, and tuples of them, for what configuration libraries give: NumPy's scalars
    and arrays, fractions, sequences that are no lists. Everything else is returned as it is."""
    if value is None or isinstance(value, str | bytes | bool | Tensor):
        return value
    if type(value) in (int, float):  # np.float64 is a float too
        return value
    if isinstance(value, tuple | list):
        items = [plain_value(item) for item in value]
        same = all(a is b for a, b in zip(items, value, strict=True))
        return value if same else tuple(items)
    if callable(getattr(value, "tolist", None)) and hasattr(value, "dtype"):  # NumPy's
        return plain_value(value.tolist()) if value.ndim == 0 else tuple(map(plain_value, value))
    if isinstance(value, Real):
        return int(value) if isinstance(value, Integral) else float(value)
    return tuple(map(plain_value, value)) if isinstance(value, Sequence) else value


def _is_misspelt(key: object, known: Iterable[str]) -> bool:
    return not isinstance(key, str) or bool(get_close_matches(key, known, n=1, cutoff=0.85))


def check_at_least_zero(group: Mapping[str, Any], where: str, keys: tuple[str, ...]) -> None:
    """Raise ValueError for a negative number, or a tensor of more than one element, in `keys`."""
    for key in keys:
        value = group[key]
        if isinstance(value, Tensor) and value.numel() != 1:
            raise ValueError(
                f"{where}: {key}: a tensor must have 1 element, got {tuple(value.shape)}"
            )
        if not isinstance(value, int | float | Tensor) or not float(value) >= 0.0:
            raise ValueError(f"{where}: {key}: expected a number >= 0, got {value!r}")


def check_switches(group: dict[str, Any], where: str, keys: tuple[str, ...]) -> None:
    """Raise ValueError for what is neither True nor False in `keys`."""
    for key in keys:
        if not isinstance(group[key], bool | int) or group[key] not in (0, 1):
            raise ValueError(f"{where}: {key}: expected True or False, got {group[key]!r}")


def check_betas(group: Mapping[str, Any], where: str, *, sums: bool = False) -> None:
    """Raise ValueError for `betas` that are not two numbers from 0 to below 1; the second may be 1
    where that makes `sums` of averages."""
    betas = group["betas"]
    numbers = isinstance(betas, tuple | list) and all(
        isinstance(beta, int | float | Tensor) for beta in betas
    )
    if numbers and len(betas) == 2:
        first, second = map(float, betas)
        if 0.0 <= first < 1.0 and (0.0 <= second < 1.0 or (sums and second == 1.0)):
            return
    sum_too = ", the second also 1, for sums" if sums else ""
    raise ValueError(f"{where}: betas: expected two numbers in [0, 1){sum_too}, got {betas!r}")


def check_schedule(group: Mapping[str, Any], where: str) -> None:
    """Raise ValueError for a value that torch's schedulers keep in a group and cannot use."""
    check_at_least_zero(group, where, tuple(key for key in SCHEDULE_KEYS if key in group))
    if "betas" in group:
        check_betas(group, where, sums=True)  # an algorithm that has them checks its own


@lru_cache(maxsize=256)
def read_matrices(matrices: str | None) -> FullMatrix:
    """Return what the group key `matrices` says."""
    return FullMatrix() if matrices is None else FullMatrix.parse(matrices)


def check_matrices(group: dict[str, Any], where: str) -> None:
    """Raise ValueError for a pattern in `matrices` that cannot be read; keep it in plain form."""
    if group["matrices"] is not None:
        try:
            group["matrices"] = str(read_matrices(str(group["matrices"])))
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None


def check_is_matrix(
    group: Mapping[str, Any], shape: Sequence[int], fqn: str, does: str, call: str
) -> None:
    """Raise ValueError for what is no matrix in a group that does not say where its matrices are,
    and for a pattern in `matrices` that does not find any in it.

    Args:
        group: complete.
        shape: global, of the parameter.
        fqn: its name.
        does: who does what with matrices, such as "Muon updates".
        call: of vfsdp_optim that makes groups of a model.
    """
    if group["matrices"] is None and len(shape) != 2:
        raise ValueError(
            f"{fqn}: {does} matrices, and got shape {tuple(shape)} in a group without `matrices`; "
            f"build the groups with vfsdp_optim.{call}, or put the parameter into a group with "
            'algorithm="adamw", or with a pattern such as matrices="e m n -> e m n"'
        )
    try:
        read_matrices(group["matrices"]).units(tuple(shape))
    except ValueError as error:
        raise ValueError(f"{fqn}: {error}") from None


def check_state_dtype(group: dict[str, Any], where: str) -> None:
    """Raise ValueError for a `state_dtype` that is neither None nor a floating dtype."""
    dtype = group["state_dtype"]
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ValueError(f"{where}: state_dtype: expected a floating dtype or None, got {dtype!r}")
