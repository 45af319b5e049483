"""What a run looked like at each step: pieces of parameters and states, packed to travel.

Touches local tensors; communicates only to gather a tensor that is cut otherwise than into flat
ranges.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from sharding.tensor.ragged_tensor import RaggedDTensor

PARAM = ""  # the key of the parameter itself, beside those of its states
OPTION = "option "  # begins the key of a number in the group of a parameter


@dataclass(frozen=True, slots=True)
class Piece:
    """What one rank holds of one tensor at one moment.

    Attributes:
        moment: number of the observation, from 1.
        name: of the parameter; empty for what the optimizer keeps beside parameters.
        key: `PARAM`, the key of a state (with its place, in a list or dict), or `OPTION` and the
            name of an option of the group, at the first parameter of the group.
        shape: of the full tensor.
        start: where the piece starts in the flattened full tensor.
        values: (n,) the elements, on the CPU.
        layout: how the tensor is cut, as text; empty if it is whole.
        places: of a plain tensor beside a sharded parameter, which may be this rank's own part of
            a larger one: the full shapes that would make it that, and where it would start.
    """

    moment: int
    name: str
    key: str
    shape: tuple[int, ...]
    start: int
    values: Tensor
    layout: str = ""
    places: tuple[tuple[tuple[int, ...], int], ...] = ()

    @property
    def stop(self) -> int:
        """Where the piece ends in the flattened full tensor."""
        return self.start + self.values.numel()


@dataclass(frozen=True, slots=True)
class Padding:
    """Elements that belong to no tensor and are not zero, in the buffer of one key on one rank."""

    moment: int
    key: str
    after: str  # the parameter that they follow
    count: int
    value: float  # the first


@dataclass(slots=True)
class Record:
    """Everything one rank observed."""

    optimizer: str = ""
    pieces: list[Piece] = field(default_factory=list)
    padding: list[Padding] = field(default_factory=list)

    def __getstate__(self) -> tuple[Any, ...]:
        """Return the record with all values in one tensor: pickling each would cost 0.1 ms."""
        flat = [piece.values.view(torch.uint8) for piece in self.pieces]
        heads = [
            (p.moment, p.name, p.key, p.shape, p.start, p.layout, p.places, x.dtype, x.numel())
            for p in self.pieces
            for x in [p.values]
        ]
        return self.optimizer, heads, torch.cat(flat) if flat else None, self.padding

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        """Restore the pieces, as views of one tensor."""
        self.optimizer, heads, data, self.padding = state
        self.pieces = []
        offset = 0
        for moment, name, key, shape, start, layout, places, dtype, numel in heads:
            end = offset + numel * dtype.itemsize
            # Views of another dtype need aligned memory.
            values = data[offset:end].clone().view(dtype)
            self.pieces.append(Piece(moment, name, key, shape, start, values, layout, places))
            offset = end


@torch.no_grad()
def observe(
    record: Record, moment: int, params: dict[str, nn.Parameter], optimizer: torch.optim.Optimizer
) -> None:
    """Append the options, what this rank holds of all parameters and their states, and of their
    padding."""
    buffers: dict[str, list[tuple[str, RaggedDTensor]]] = {}
    for name, key, value in _options(params, optimizer):
        record.pieces.append(piece_of(moment, name, key, value, value))
    for name, key, value, param in held_tensors(params, optimizer):
        record.pieces.append(piece_of(moment, name, key, value, param))
        # Padding of codes is the code of zero.
        if isinstance(value, RaggedDTensor) and value.is_floating_point():
            buffers.setdefault(key, []).append((name, value))
    for key, held in buffers.items():
        record.padding.extend(_nonzero_padding(moment, key, held))


def held_tensors(
    params: dict[str, nn.Parameter], optimizer: torch.optim.Optimizer
) -> Iterator[tuple[str, str, Tensor, nn.Parameter]]:
    """Yield (name, key, value, parameter) of the tensors and numbers in states, of each parameter
    after its states, and at last of what `optimizer.state` has beside parameters."""
    known = {id(p) for group in optimizer.param_groups for p in group["params"]}
    states = optimizer.state  # a property that checks all parameters, with some optimizers
    for name, param in params.items():
        of_param = states[param] if id(param) in known and param in states else {}
        for key, value in of_param.items():
            for place, leaf in _leaves(key, value):
                yield name, place, leaf, param
        yield name, PARAM, param.detach(), param
    for key, value in states.items():
        if not isinstance(key, Tensor):
            for place, leaf in _leaves(key, value):
                yield "", place, leaf, leaf


def _options(
    params: dict[str, nn.Parameter], optimizer: torch.optim.Optimizer
) -> Iterator[tuple[str, str, Tensor]]:
    """Yield (name of the first parameter, key, value) of the numbers in each group; of groups of
    this package those that a checkpoint holds."""
    names = {id(param): name for name, param in params.items()}
    for group in optimizer.param_groups:
        first = next((names[id(p)] for p in group["params"] if id(p) in names), None)
        for key in group:
            if first is not None and key not in ("params", "param_names"):
                for place, leaf in _leaves(f"{OPTION}{key}", group[key]):
                    yield first, place, leaf


def _leaves(key: Any, value: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield (key, value as a tensor) of the tensors and numbers in a value, at any depth."""
    if isinstance(value, Tensor):
        yield str(key), value
    elif isinstance(value, bool):
        yield str(key), torch.tensor(value, device="cpu")
    elif isinstance(value, float):
        yield str(key), torch.tensor(value, dtype=torch.float64, device="cpu")
    elif isinstance(value, int):
        # Not a float, which has not the digits of a seed of 64 bits, with or without a sign.
        yield str(key), torch.tensor((value + 2**63) % 2**64 - 2**63, device="cpu")
    elif isinstance(value, dict | list | tuple):
        for place, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _leaves(f"{key}[{place!r}]", item)


def piece_of(moment: int, name: str, key: str, value: Tensor, param: Tensor) -> Piece:
    """Return what this rank holds of a parameter or state, copied to the CPU."""
    local, start, shape, layout = local_piece(value, param)
    values = local.detach().cpu().reshape(-1).clone()
    places: tuple[tuple[tuple[int, ...], int], ...] = ()
    if isinstance(param, DTensor) and not isinstance(value, DTensor) and value.dim():
        places, layout = _own_places(value, param)
    return Piece(moment, name, key, shape, start, values, layout, places)


def _own_places(
    value: Tensor, param: DTensor
) -> tuple[tuple[tuple[tuple[int, ...], int], ...], str]:
    """Return `Piece.places` and `Piece.layout` of a plain tensor beside a sharded parameter."""
    local, start, shape, layout = local_piece(param.detach(), param)
    places: list[tuple[tuple[int, ...], int]] = []
    if value.numel() == local.numel() and (value.shape == local.shape or value.dim() == 1):
        places += [(shape, start), ((prod(shape),), start)]
    if local.dim() > 1 and value.shape[0] == local.shape[0] < shape[0]:
        # Something for each row, such as the mean of its squares.
        first = start // prod(shape[1:]) if local.numel() else 0
        places.append(((shape[0], *value.shape[1:]), first * prod(value.shape[1:])))
    whole = "a plain tensor, not of the shape of this rank's piece and so taken for whole"
    return tuple(places), f"a plain tensor; its parameter is cut by {layout}" if places else whole


def local_piece(value: Tensor, param: Tensor) -> tuple[Tensor, int, tuple[int, ...], str]:
    """Return this rank's elements of a parameter or state, their start in the flattened full
    tensor, the full shape, and the layout as text."""
    if isinstance(value, RaggedDTensor):
        return value._local_tensor, value.bounds[0], tuple(value.shape), repr(value.placement)
    if isinstance(value, DTensor):
        shape, offsets = compute_local_shape_and_global_offset(
            value.shape, value.device_mesh, value.placements
        )
        layout = f"{value.placements!r} on mesh {tuple(value.device_mesh.shape)}"
        # Not by this rank's shape: full_tensor() is a collective.
        if all(getattr(placement, "dim", 0) == 0 for placement in value.placements):
            start = offsets[0] * prod(shape[1:]) if value.dim() else 0
            return value.to_local(), start, tuple(value.shape), layout
        return value.full_tensor(), 0, tuple(value.shape), layout
    return value, 0, tuple(value.shape), ""


def _nonzero_padding(
    moment: int, key: str, held: Iterable[tuple[str, RaggedDTensor]]
) -> Iterator[Padding]:
    storages: dict[int, list[tuple[int, int, str, Tensor]]] = {}
    for name, value in held:
        local = value._local_tensor.detach()
        place = (int(local.storage_offset()), local.numel(), name, local)
        storages.setdefault(local.untyped_storage().data_ptr(), []).append(place)
    for places in storages.values():
        local = places[0][3]
        numel = local.untyped_storage().nbytes() // local.element_size()
        flat = local.as_strided((numel,), (1,), 0)
        outside = flat != 0  # (numel,)
        for offset, length, *_ in places:
            outside[offset : offset + length] = False
        wrong = outside.nonzero()
        if len(wrong):
            first = int(wrong[0])
            before = [place for place in places if place[0] <= first]
            after = max(before)[2] if before else "the start"
            yield Padding(moment, key, after, len(wrong), flat[first].item())
