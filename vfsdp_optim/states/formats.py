"""Where optimizer state lives: flat tensors of numbers or of codes, and what users see of them."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from typing import ClassVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from sharding.tensor.placement import RankRuns, placement_from_runs
from sharding.tensor.ragged_tensor import RaggedDTensor
from vfsdp_optim.parameters.param_shard import ParamShard
from vfsdp_optim.states.block_codec import BLOCK, DynamicMap, block_count, dynamic_map
from vfsdp_optim.states.scratch import Scratch

CODES, ABSMAX = ".codes", ".absmax"  # added to the key of a state


class State(ABC):
    """One state of a run of elements, as it lies in memory.

    Attributes:
        numel: elements; memory may round them up.
        packed: whether numbers are made of `parts` by `open`, and the reverse by `close`.
    """

    numel: int
    packed: ClassVar[bool]

    @abstractmethod
    def parts(self) -> dict[str, Tensor]:
        """Return the 1-D tensors that hold it, by what is added to the state's key."""

    @abstractmethod
    def zero(self) -> None:
        """Make it what it is before the first step."""

    @abstractmethod
    def narrow(self, start: int, stop: int) -> "State":
        """Return elements start:stop, in the same memory; `start` is a multiple of the unit."""

    @abstractmethod
    def split(self, numel: int) -> Sequence["State"]:
        """Return pieces of `numel` elements, a multiple of the unit, the last one perhaps of fewer,
        in the same memory."""

    @abstractmethod
    def open(self, scratch: Scratch, purpose: str) -> Tensor:
        """Return the numbers, 1-D: to be written to until `close`."""

    @abstractmethod
    def close(self, numbers: Tensor, gaps: Iterable[tuple[int, int]], scratch: Scratch) -> None:
        """Keep what was written to the result of `open`; `gaps` are ranges of padding."""

    @abstractmethod
    def read(self, start: int, stop: int, scratch: Scratch, purpose: str) -> Tensor:
        """Return numbers start:stop, 1-D, only to be read."""

    @abstractmethod
    def clear(self, start: int, stop: int) -> None:
        """Zero the padding start:stop."""


def parts_of(states: Mapping[str, State]) -> list[Tensor]:
    """Return the tensors that hold some states."""
    return [part for state in states.values() for part in state.parts().values()]


@dataclass(frozen=True, slots=True)
class StateFormat(ABC):
    """How one state of a run of parameters is kept in memory."""

    name: ClassVar[str]
    unit: ClassVar[int]  # elements that a cut must be a multiple of

    @abstractmethod
    def allocate(self, numel: int, device: torch.device) -> State:
        """Return the zero state of `numel` elements."""

    def nbytes(self, numel: int) -> int:
        """Return the bytes that the state of `numel` elements takes."""
        return _nbytes(self, numel)

    @abstractmethod
    def views(self, state: State, shard: ParamShard, fqn: str) -> dict[str, Tensor]:
        """Return the parts of the state of a parameter as users see them.

        Raises:
            NotImplementedError: for this layout there is no such view; the error names `fqn`.
        """


@lru_cache(maxsize=1 << 16)
def _nbytes(state_format: StateFormat, numel: int) -> int:
    parts = state_format.allocate(numel, torch.device("meta")).parts()
    return sum(part.nbytes for part in parts.values())


@dataclass(frozen=True, slots=True)
class PlainFormat(StateFormat):
    """One number an element, in one dtype: what torch's optimizers keep."""

    dtype: torch.dtype
    name: ClassVar[str] = "32bit"
    unit: ClassVar[int] = 1

    def allocate(self, numel: int, device: torch.device) -> "PlainState":
        """Return `numel` zeros."""
        return PlainState(torch.zeros(numel, dtype=self.dtype, device=device))

    def views(self, state: State, shard: ParamShard, fqn: str) -> dict[str, Tensor]:
        """Return the state laid out as the parameter is."""
        return {"": shard.view(state.parts()[""])}


class PlainState(State):
    """A tensor."""

    packed = False

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor  # (numel,)
        self.numel = tensor.numel()

    def parts(self) -> dict[str, Tensor]:
        """Return the tensor."""
        return {"": self.tensor}

    def zero(self) -> None:
        """Write zeros."""
        self.tensor.zero_()

    def narrow(self, start: int, stop: int) -> "PlainState":
        """Return a view."""
        return PlainState(self.tensor[start:stop])

    def split(self, numel: int) -> list["PlainState"]:
        """Return views."""
        return [PlainState(piece) for piece in self.tensor.split(numel)]

    def open(self, scratch: Scratch, purpose: str) -> Tensor:
        """Return the tensor itself."""
        return self.tensor

    def close(self, numbers: Tensor, gaps: Iterable[tuple[int, int]], scratch: Scratch) -> None:
        """Do nothing: it was written in place."""

    def read(self, start: int, stop: int, scratch: Scratch, purpose: str) -> Tensor:
        """Return a view."""
        return self.tensor[start:stop]

    def clear(self, start: int, stop: int) -> None:
        """Write zeros."""
        self.tensor[start:stop].zero_()


@dataclass(frozen=True, slots=True)
class BlockFormat(StateFormat):
    """8-bit codes in blocks of 256 elements with fp32 scales; see block_codec.py.

    A parameter has its own blocks, from its first element on; the last one may be in part padding.
    """

    signed: bool
    name: ClassVar[str] = "8bit"
    unit: ClassVar[int] = BLOCK

    def allocate(self, numel: int, device: torch.device) -> "BlockState":
        """Return zero codes and zero scales."""
        blocks = block_count(numel)
        codes = torch.empty(blocks * BLOCK, dtype=torch.uint8, device=device)
        absmax = torch.empty(blocks, dtype=torch.float32, device=device)
        state = BlockState(codes, absmax, self.signed, numel)
        state.zero()
        return state

    def views(self, state: State, shard: ParamShard, fqn: str) -> dict[str, Tensor]:
        """Return codes, laid out as the parameter is, and scales (blocks,), cut where it is."""
        parts = state.parts()
        scales = _cut(parts[ABSMAX], block_runs(shard, fqn), shard, fqn)
        return {CODES: shard.view(parts[CODES]), ABSMAX: scales}


class BlockState(State):
    """Codes and scales.

    Args:
        codes: (256 n,) uint8; those of padding are always the map's code of zero.
        absmax: (n,) float32.
        signed: which map the codes are of.
        numel: elements that count.
    """

    packed = True

    def __init__(self, codes: Tensor, absmax: Tensor, signed: bool, numel: int) -> None:
        self.codes, self.absmax, self.signed, self.numel = codes, absmax, signed, numel

    @property
    def map(self) -> DynamicMap:
        """The map that the codes are of."""
        return dynamic_map(self.signed, self.codes.device)

    def parts(self) -> dict[str, Tensor]:
        """Return codes, without those of padding at the end, and scales."""
        return {CODES: self.codes[: self.numel], ABSMAX: self.absmax}

    def zero(self) -> None:
        """Write the code of zero, padding included, and scales of zero."""
        self.codes.fill_(self.map.zero)
        self.absmax.zero_()

    def narrow(self, start: int, stop: int) -> "BlockState":
        """Return whole blocks, the last one perhaps in part."""
        first, last = start // BLOCK, block_count(stop)
        codes = self.codes[first * BLOCK : last * BLOCK]
        return BlockState(codes, self.absmax[first:last], self.signed, stop - start)

    def split(self, numel: int) -> list["BlockState"]:
        """Return whole blocks, the last one perhaps in part."""
        pieces = zip(self.codes.split(numel), self.absmax.split(numel // BLOCK), strict=True)
        return [
            BlockState(codes, absmax, self.signed, min(numel, self.numel - i * numel))
            for i, (codes, absmax) in enumerate(pieces)
        ]

    def open(self, scratch: Scratch, purpose: str) -> Tensor:
        """Decode into working memory."""
        numbers = scratch.take(self.codes.numel(), torch.float32, self.codes.device, purpose)
        self.map.decode(self.codes, self.absmax, numbers, scratch)
        return numbers if len(numbers) == self.numel else numbers[: self.numel]

    def close(self, numbers: Tensor, gaps: Iterable[tuple[int, int]], scratch: Scratch) -> None:
        """Encode. `numbers`, which is overwritten, is what `open` returned or as long."""
        held = self.codes.numel()
        if held > self.numel:
            numbers = numbers.as_strided((held,), (1,), numbers.storage_offset())
            gaps = (*gaps, (self.numel, held))
        # Smallest codes stand for more than 0: padding would keep what is left of old scales.
        for start, stop in gaps:
            numbers[start:stop].zero_()
        self.map.encode(numbers, self.codes, self.absmax, scratch)

    def read(self, start: int, stop: int, scratch: Scratch, purpose: str) -> Tensor:
        """Decode the blocks that hold the elements."""
        first = start // BLOCK * BLOCK
        return self.narrow(first, stop).open(scratch, purpose)[start - first :]

    def clear(self, start: int, stop: int) -> None:
        """Do nothing: `close` has done it."""


def block_runs(shard: ParamShard, fqn: str) -> RankRuns:
    """Return how many blocks each shard of a parameter has, as (blocks, number of shards).

    Raises:
        NotImplementedError: shards are no ranges of the parameter.
    """
    all_bounds, _ = shard.check_has_ranges(fqn)
    if isinstance(shard.param, RaggedDTensor):
        whole = shard.param.placement.runs_of_blocks(shard.param.numel(), BLOCK)
        if whole is not None:
            return whole
    counts = (block_count(stop - start) for start, stop in all_bounds)
    return tuple((count, sum(1 for _ in alike)) for count, alike in groupby(counts))


def _cut(scales: Tensor, runs: RankRuns, shard: ParamShard, fqn: str) -> Tensor:
    """Return this rank's scales, one for each block, as the piece of a tensor cut as `shard`."""
    param = shard.param
    if not isinstance(param, DTensor):
        return scales
    mesh, placements = param.device_mesh, param.placements
    cut = [
        axis
        for axis, placement in enumerate(placements)
        if not placement.is_replicate() and mesh.size(axis) > 1
    ]
    if not isinstance(param, RaggedDTensor) and not cut:
        return DTensor.from_local(scales, mesh, [Replicate()] * mesh.ndim)
    if not isinstance(param, RaggedDTensor) and (cut != [mesh.ndim - 1] or mesh.ndim > 2):
        raise NotImplementedError(
            f"{fqn}: 8-bit states of a parameter with placements {placements} on {mesh!r} are not "
            "supported; shard with vfsdp_optim.fully_shard, or name it in keep_32bit"
        )
    shape = torch.Size((sum(count * shards for count, shards in runs),))
    return RaggedDTensor.from_local(scales, mesh, placement_from_runs((0,), runs, 1), shape)
