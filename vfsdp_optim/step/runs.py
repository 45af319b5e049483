"""The long runs of memory that element-wise work is done on, with their state. Touches local
tensors only.

[Note: spans and runs]
A span is a maximal sequence of parameters of one group whose pieces on this rank lie next to each
other in one storage, as in the flat buffers of `sharding`: each starts where the one before ends,
rounded up to the alignment. The gaps are padding, which is zero in parameters and gradients, so
that element-wise updates may run over it. The state of a span is one flat tensor per state key, cut
the same way. A plain tensor is a span of its own; empty pieces of one kind are one, which no step
looks at. In a step a span is one run when every parameter in it has a gradient, the gradients lie
like the parameters, and all took the same number of steps; else it is cut into the longest runs for
which that holds.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sharding.planning.planner import ALIGN
from vfsdp_optim.states.formats import State, parts_of
from vfsdp_optim.states.scratch import Scratch
from vfsdp_optim.states.weights import MASTER, Place
from vfsdp_optim.step.member import Member
from vfsdp_optim.step.nonfinite import Skip, undo

# Elements per thread that stay in a core's cache together with their gradient and states.
_CHUNK = 1 << 19
# The same where states are decoded first: in the cache that cores share, with working memory of 20
# bytes an element. In half of it the calls, of which there are 40 a chunk, cost a tenth more.
_COPIED_CHUNK = 1 << 18
# The same on other devices: some working memory, long kernels.
_DEVICE_CHUNK = 1 << 22
# The same where nothing is decoded: working memory of 64 MiB a tensor, however long the shard is.
_LONG_CHUNK = 1 << 24


@dataclass(frozen=True, slots=True)
class Run:
    """Elements that get one element-wise update: 1-D tensors of equal length.

    Attributes:
        group: index of the group.
        members: the parameters in it.
        param: written to.
        grad: read only.
        states: state key -> written to.
        gaps: (start, stop) of the padding between the parameters.
        step: number of this step, from 1; 0 where the algorithm does not count.
        skip: where it is a tensor that is set, updates are undone; see [Note: skipped steps].
    """

    group: int
    members: Sequence[Member]
    param: Tensor
    grad: Tensor
    states: dict[str, State]
    gaps: tuple[tuple[int, int], ...]
    step: float
    skip: Skip = False

    @property
    def device(self) -> torch.device:
        """Where it is updated; a plan follows the update of a device on tensors without memory."""
        return self.members[0].device or self.grad.device

    @property
    def copied(self) -> bool:
        """Whether states or weights are worked on as fp32 copies."""
        return self.members[0].weights.draws or any(s.packed for s in self.states.values())

    def chunks(self, scratch: Scratch) -> Iterator[tuple[Tensor, Tensor, dict[str, Tensor]]]:
        """Yield (weights, grad, states) in pieces that fit a CPU's caches; elsewhere longer ones.

        Weights are the parameter, or fp32 numbers in its place; states that are kept as codes are
        numbers. What is written to a piece, in place, is kept when the next is asked for; where
        `skip` is set it is undone then.
        """
        rule, undone = self.members[0].weights, isinstance(self.skip, Tensor)
        packed = [key for key, state in self.states.items() if state.packed]
        for start, stop, param, grad, states in self._pieces(undone):
            written = [param, *parts_of(states)] if undone else []
            kept = [tensor.clone() for tensor in written]
            numbers = {key: state.open(scratch, key) for key, state in states.items()}
            weights = rule.open(param, numbers.get(MASTER), scratch)
            yield weights, grad, numbers
            gaps = self._gaps_in(start, stop) if packed and self.gaps else ()
            for a, b in gaps:  # in a block with a NaN all numbers are
                weights[a:b].zero_()
            for key in packed:
                states[key].close(numbers[key], gaps, scratch)
            rule.close(param, weights, self._places(start, stop) if rule.draws else (), scratch)
            for old, new in zip(kept, written, strict=True):
                undo(self.skip, old, new)

    def _pieces(self, kept: bool) -> Iterator[tuple[int, int, Tensor, Tensor, dict[str, State]]]:
        """Yield (start, stop, param, grad, states) of what is worked on at a time."""
        numel = self.grad.numel()
        threads = torch.get_num_threads()
        size = piece_numel(numel, self.device.type, threads, copied=self.copied, kept=kept)
        if size >= numel:
            if numel:
                yield 0, numel, self.param, self.grad, self.states
            return
        states = [state.split(size) for state in self.states.values()]
        tensors = zip(self.param.split(size), self.grad.split(size), *states, strict=True)
        for i, (param, grad, *parts) in enumerate(tensors):
            stop = min((i + 1) * size, numel)
            yield i * size, stop, param, grad, dict(zip(self.states, parts, strict=True))

    def _gaps_in(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Return the padding in elements start:stop, counted from `start`."""
        return [
            (max(a, start) - start, min(b, stop) - start)
            for a, b in self.gaps
            if a < stop and b > start
        ]

    def _places(self, start: int, stop: int) -> list[Place]:
        """Return which elements of which parameters start:stop are."""
        origin = self.members[0].start
        places = []
        for member in self.members:
            begin = member.start - origin
            a, b = max(begin, start), min(begin + member.numel, stop)
            if a < b:
                places.append(member.place(a - begin, b - begin, update=0, at=a - start))
        return places

    def clear_gaps(self) -> None:
        """Zero the padding of parameters and states again, after an update that wrote it."""
        for start, stop in self.gaps:
            self.param[start:stop].zero_()
            for state in self.states.values():
                state.clear(start, stop)

    def store(self) -> None:
        """Write back the parameter where `param` is a copy of it."""
        if len(self.members) == 1:
            self.members[0].close(self.param)


def pieces(
    numel: int, device: torch.device, *, copied: bool, kept: bool = False
) -> Iterator[tuple[int, int]]:
    """Yield the ranges in which to work on `numel` elements.

    They fit a CPU's caches; elsewhere they are long, and bound working memory.

    Args:
        numel: elements.
        device: where they are.
        copied: whether states or weights are worked on as fp32 copies.
        kept: whether old values are.
    """
    threads = torch.get_num_threads()
    size = piece_numel(numel, device.type, threads, copied=copied, kept=kept)
    for start in range(0, numel, max(size, 1)):
        yield start, min(start + size, numel)


def piece_numel(
    numel: int, device_type: str, threads: int, *, copied: bool, kept: bool = False
) -> int:
    """Return the elements of each of `pieces` but the last, on a number of threads of a CPU."""
    if device_type == "cpu":
        size = (_COPIED_CHUNK if copied else _CHUNK) * threads
    elif copied:
        size = _DEVICE_CHUNK
    else:
        size = _LONG_CHUNK
    if numel <= size:
        return numel
    size = -(-numel // -(-numel // size))  # all alike: a call on a short rest costs as much
    return -(-size // ALIGN) * ALIGN  # whole blocks


class Span:
    """Parameters that lie together, and their flat state. See [Note: spans and runs]."""

    def __init__(self, members: list[Member]) -> None:
        self.members = members
        self.group = members[0].group
        self.numel = members[-1].start + members[-1].numel
        device = members[0].param.device
        self.states = {
            key: state_format.allocate(self.numel, device)
            for key, state_format in members[0].formats.items()
        }
        for member in members:
            stop = member.start + member.numel
            member.states = {k: s.narrow(member.start, stop) for k, s in self.states.items()}
            member.views = {
                key + suffix: view
                for key, state in member.states.items()
                for suffix, view in member.formats[key]
                .views(state, member.shard, member.fqn)
                .items()
            }


def find_spans(members: Sequence[Member]) -> list[Span]:
    """Sort members into spans and allocate their state. See [Note: spans and runs]."""
    alone = [[m] for m in members if m.numel and not _can_join(m)]
    empty: dict[object, list[Member]] = {}  # nothing to update: their states are made together
    for member in members:
        if not member.numel:
            kinds = tuple(member.formats.items())
            empty.setdefault((member.group, member.device, kinds), []).append(member)
    packed = sorted(
        (m for m in members if _can_join(m)),
        key=lambda m: (m.group, str(m.param.device), m.pointer),
    )
    chains: list[list[Member]] = [*alone, *empty.values()]
    open_chain = False
    for member in packed:
        if open_chain and _follows(chains[-1], member):
            chains[-1].append(member)
        else:
            chains.append([member])
            open_chain = True
    return [Span(chain) for chain in chains]


def _can_join(member: Member) -> bool:
    return member.shard.in_flat_buffer and member.numel > 0 and member.pointer != 0


def _follows(chain: list[Member], member: Member) -> bool:
    """Return whether `member` continues `chain`; if so, set its start in the span."""
    last = chain[-1]
    a, b = last.shard.tensor, member.shard.tensor
    end = a.storage_offset() + a.numel()
    alike = (
        last.group == member.group
        and a.dtype == b.dtype
        and last.formats == member.formats
        and a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
    )
    start = last.start + int(b.storage_offset() - a.storage_offset())
    if not alike or b.storage_offset() not in (end, -(-end // ALIGN) * ALIGN):
        return False
    if any(start % state_format.unit for state_format in member.formats.values()):
        return False
    member.start = start
    return True
