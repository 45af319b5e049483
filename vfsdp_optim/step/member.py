"""Parameters as a step sees them, with their state. Touches local tensors only."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from sharding.checkpoint.names import plain_names
from sharding.tensor.ragged_tensor import RaggedDTensor
from vfsdp_optim.parameters.param_shard import ParamShard
from vfsdp_optim.states.formats import State, StateFormat, parts_of
from vfsdp_optim.states.weights import Place, WeightRule, stream_of
from vfsdp_optim.step.nonfinite import Failure


@dataclass(slots=True, eq=False)
class Member:
    """One parameter as a step sees it.

    Attributes:
        shard: the parameter, and what this rank holds of it.
        fqn: its name, or its place in the groups.
        group: index of its group.
        number: index among all members.
        formats: state key -> how the state is kept.
        weights: how updates reach the parameter.
        numel: elements on this rank.
        pointer: address of those elements when the span was found.
        device: where they were then.
        first: where those elements start in the flattened parameter.
        step: number of the step it takes, where weights are rounded by chance.
        start: offset in the span.
        states: state key -> piece of the span's state.
        unit_states: key and number of a unit -> state of that unit, whole on its owner.
        unit_formats: the same keys -> how the state is kept.
        owners: by unit, the rank that has its states; () where units have none.
        nonnegative: keys of states that are never negative.
        views: keys of `Optimizer.state` -> what users see there of `states` and `unit_states`.
        failures: of units that this rank computes, for the next step to raise; one list for all
            members of a working set.
        count: 0-d, steps of the parameter so far; None where they are not counted.
    """

    shard: ParamShard
    fqn: str
    group: int
    number: int
    formats: dict[str, StateFormat]
    weights: WeightRule
    numel: int = 0
    pointer: int = 0
    device: torch.device | None = None
    first: int = 0
    step: float = 0.0
    start: int = 0
    states: dict[str, State] = field(default_factory=dict)
    unit_states: dict[str, State] = field(default_factory=dict)
    unit_formats: dict[str, StateFormat] = field(default_factory=dict)
    owners: tuple[int, ...] = ()
    nonnegative: frozenset[str] = frozenset()
    views: dict[str, Tensor] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)
    count: Tensor | None = None

    def __post_init__(self) -> None:
        """Note where the parameter lies."""
        self.numel, self.pointer = self.shard.tensor.numel(), self.shard.data_ptr()
        self.device = self.param.device
        self.first = self.shard.bounds[0] if self.shard.bounds else 0

    def place(self, start: int, stop: int, *, update: int, at: int = 0) -> Place:
        """Return which elements of the parameter its local elements start:stop are, for numbers
        that begin at position `at`; see [Note: random rounding]."""
        stream = stream_of(plain_names([self.fqn])[0], self.step, update)
        return Place(at, stop - start, stream, self.first + start)

    @property
    def param(self) -> Tensor:
        """What the user passed."""
        return self.shard.param

    def parts(self) -> dict[str, Tensor]:
        """Return the local memory of the states, 1-D, by the keys of `views`."""
        return {
            key + suffix: part
            for key, state in self.all_states.items()
            for suffix, part in state.parts().items()
        }

    @property
    def all_states(self) -> dict[str, State]:
        """States that are cut as the parameter is, and those of its units."""
        return {**self.states, **self.unit_states}

    @property
    def all_formats(self) -> dict[str, StateFormat]:
        """How each of `all_states` is kept."""
        return {**self.formats, **self.unit_formats}

    def load(self, pieces: Mapping[str, Tensor]) -> None:
        """Take over what `values` returned, by the keys of `views`; if empty, start anew."""
        if not pieces:
            for state in self.all_states.values():
                state.zero()
        parts = self.parts()
        for key, piece in pieces.items():
            parts[key].copy_(piece)

    def values(self, value: Any, key: str) -> Tensor:
        """Return the elements of a loaded state, one of `views`, that belong to this rank, 1-D.

        Raises:
            TypeError, ValueError, NotImplementedError: as `ParamShard.values`.
        """
        what = f"{self.fqn}.{key}"
        return ParamShard.of(self.views[key], what).values(value, what)

    def packed_keys(self) -> list[str]:
        """Return the keys of `views` whose tensors have a fixed dtype."""
        return [
            key + suffix
            for key, state in self.all_states.items()
            if state.packed
            for suffix in state.parts()
        ]

    def open(self) -> Tensor:
        """Return the local elements, 1-D in logical order; a copy where strides forbid a view."""
        return self.shard.tensor.reshape(-1)

    def close(self, flat: Tensor) -> None:
        """Store what `open` returned after it was written to."""
        local = self.shard.tensor
        if not local.is_contiguous():
            local.copy_(flat.view(local.shape))

    def kept(self) -> list[Tensor]:
        """Return copies of the local elements and of the states cut as they are, for `restore`."""
        return [tensor.clone() for tensor in (self.shard.tensor, *parts_of(self.states))]

    def restore(self, kept: Sequence[Tensor]) -> None:
        """Write back what `kept` returned."""
        held = (self.shard.tensor, *parts_of(self.states))
        for tensor, old in zip(held, kept, strict=True):
            tensor.copy_(old)


class MemberList:
    """Members of a working set, looked at all together: it is done in every step, and a few
    bytecodes for each are all that it may take."""

    def __init__(self, members: Sequence[Member]) -> None:
        self._members = members
        self._params = [member.param for member in members]
        self._sharded = [isinstance(param, DTensor) for param in self._params]
        self._placed = [_placed(param) for param in self._params]
        self._layouts = self._found_layouts()
        self._pointers = [member.pointer for member in members]
        # Without memory, empty or on meta, there is no address to tell.
        self._unplaced = [member.param for member in members if member.pointer == 0]
        self._devices = [member.device for member in members if member.pointer == 0]

    def moved(self) -> bool:
        """Return whether a parameter has other memory than when the spans were found."""
        return (
            [local.data_ptr() for local in self._locals()] != self._pointers
            or self._found_layouts() != self._layouts
            or [param.device for param in self._unplaced] != self._devices
        )

    def gradients(self) -> list[Tensor | None]:
        """Return the local elements of each gradient, contiguous and shaped as they are, or None.

        Raises:
            RuntimeError: a gradient is sparse.
            TypeError: one is not laid out as its parameter is.
        """
        grads = [param.grad for param in self._params]
        # The usual cases first.
        return [
            grad
            if grad is None
            or (
                placed is None
                and type(grad) is Tensor
                and grad.layout is torch.strided
                and grad.is_contiguous()
            )
            else grad._local_tensor
            if type(grad) is RaggedDTensor and grad._spec.placements == placed
            else member.shard.gradient(member.fqn)
            for grad, placed, member in zip(grads, self._placed, self._members, strict=True)
        ]

    def _locals(self) -> list[Any]:
        pairs: Iterable[tuple[Any, bool]] = zip(self._params, self._sharded, strict=True)
        return [param._local_tensor if sharded else param for param, sharded in pairs]

    def _found_layouts(self) -> list[tuple[int, ...]]:
        # Of tensors with a shape of their own, which `.data` can replace in the same memory.
        return [
            local.stride()
            for local, placed in zip(self._locals(), self._placed, strict=True)
            if not isinstance(placed, tuple)
        ]


def _placed(param: Tensor) -> object:
    """Return what a gradient's placements must be for its local tensor to be taken as it is."""
    if isinstance(param, RaggedDTensor):
        return param.placements
    return "asked" if isinstance(param, DTensor) else None
