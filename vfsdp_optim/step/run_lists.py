"""Runs that are updated together, by operators on lists of tensors. Touches local tensors only.

Which tensors are in a list follows from where runs are, and is kept as long as they stay there; in
a step only the gradients are collected.

[Note: pieces of fused kernels]
On a CPU torch's fused optimizers update whole vectors of elements by one instruction sequence and
the rest of a tensor, its tail, by another with other roundings. Which elements are in the tail
follows from the length of the tensor. Pieces of a sharded tensor get the bits of the whole if they
start where a vector starts, and end where one ends or where the tensor ends; and so tensors without
a tail that lie side by side may be one piece. Vectors have at most 64 bytes; what lies between a
cut and the nearest multiple of `VECTOR` elements is updated in padded copies, at its distance from
there. On other devices all elements are treated alike.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from vfsdp_optim.states.formats import PlainState
from vfsdp_optim.states.weights import MASTER
from vfsdp_optim.step.group_runs import Cut, StepRuns
from vfsdp_optim.step.runs import piece_numel

# Elements whose multiples are ends of vectors, in every dtype.
VECTOR = 64
# Elements of a list on other devices, which bound working memory.
_DEVICE_LIST = 1 << 24
# Dtypes in which operators on lists have the bits of those on tensors; 16 bits have others, because
# factors are rounded too.
_LISTED = (torch.float32, torch.float64)

_Range = tuple[int, int]


def is_plain(cut: Cut) -> bool:
    """Return whether parameter and states are numbers of one dtype, updated in place."""
    first = cut.members[0]
    return not first.weights.draws and all(
        key != MASTER and state.tensor.dtype == first.param.dtype
        if isinstance(state, PlainState)
        else False
        for key, state in cut.states.items()
    )


@dataclass(frozen=True, slots=True)
class Pieces:
    """Which elements of a run an operator takes.

    Attributes:
        cut: the run.
        ranges: of elements in place.
        odd: (start, stop, place, length) of those that are copied to `place` of `length` zeros.
    """

    cut: Cut
    ranges: Sequence[_Range]
    odd: Sequence[tuple[int, int, int, int]] = ()

    @property
    def whole(self) -> bool:
        """Whether they are all of one parameter, which then keeps its shape."""
        cut = self.cut
        if len(cut.members) > 1 or list(self.ranges) != [(0, cut.numel)] or cut.param is None:
            return False
        return cut.param.shape == cut.members[0].shard.tensor.shape


class RunList:
    """Tensors of runs of one step, dtype and device, in lists as operators take them.

    Args:
        pieces: of the runs.
        keys: of the states that the operator takes.

    Attributes:
        cuts: the runs.
        params: one tensor a piece.
        states: state key -> the same.
    """

    def __init__(self, pieces: Sequence[Pieces], keys: Iterable[str]) -> None:
        self.cuts = [piece.cut for piece in pieces]
        self._dtype = self.cuts[0].members[0].param.dtype
        self._numbers = [piece.cut.members[0].number for piece in pieces if piece.whole]
        self._pieces = [piece for piece in pieces if not piece.whole]
        self._strided = [c for c in self.cuts if not c.members[0].shard.tensor.is_contiguous()]
        self._cast: bool | None = None
        self.params: list[Tensor] = []
        self.states: dict[str, list[Tensor]] = {key: [] for key in keys}
        for piece in sorted(pieces, key=lambda piece: not piece.whole):
            self._append(piece)
        # Of padded copies: what they are of, and where it is in them.
        self._originals: list[Tensor] = []
        self._copies: list[Tensor] = []
        self._odd_grads: list[Tensor] = []
        self._padded_grads: list[Tensor] = []
        for piece in self._pieces:
            self._append_padded(piece)

    def gradients(self, runs: StepRuns) -> list[Tensor]:
        """Return the gradients of the pieces in this step, in the dtype of the parameters."""
        found: list[Any] = [runs.grads[number] for number in self._numbers]
        odd = []
        for piece in self._pieces:
            flat = runs.gradient(piece.cut)
            found += [flat[start:stop] for start, stop in piece.ranges]
            odd += [flat[start:stop] for start, stop, _, _ in piece.odd]
        if odd:
            torch._foreach_copy_(self._odd_grads, odd)
        if self._cast is None:  # the runs are found again where gradients have another dtype
            self._cast = any(grad.dtype != self._dtype for grad in found)
        if self._cast:
            found = [grad.to(self._dtype) for grad in found]
        return [*found, *self._padded_grads]

    def open(self) -> None:
        """Bring padded copies up to date."""
        if self._copies:
            torch._foreach_copy_(self._copies, self._originals)

    def close(self) -> None:
        """Copy what was updated in copies to where it belongs."""
        if self._copies:
            torch._foreach_copy_(self._originals, self._copies)
        for cut in self._strided:
            assert cut.param is not None, "else it is not in a list"
            cut.members[0].close(cut.param)

    def _append(self, piece: Pieces) -> None:
        param = piece.cut.param
        assert param is not None, "else it cannot be updated in place"
        states = [piece.cut.states[key].parts()[""] for key in self.states]
        if piece.whole:
            self.params.append(param)
            for key, state in zip(self.states, states, strict=True):
                self.states[key].append(state.view(param.shape))
            return
        for start, stop in piece.ranges:
            self.params.append(param.view(-1)[start:stop])
            for key, state in zip(self.states, states, strict=True):
                self.states[key].append(state[start:stop])

    def _append_padded(self, piece: Pieces) -> None:
        param = piece.cut.param
        assert param is not None, "else it cannot be updated in place"
        held = [param.view(-1), *(piece.cut.states[key].parts()[""] for key in self.states)]
        for start, stop, place, length in piece.odd:
            grad, *copies = param.new_zeros(len(held) + 1, length).unbind()
            self._padded_grads.append(grad)
            self._odd_grads.append(grad[place : place + stop - start])
            self._originals += [tensor[start:stop] for tensor in held]
            self._copies += [copy[place : place + stop - start] for copy in copies]
            for pieces, copy in zip((self.params, *self.states.values()), copies, strict=True):
                pieces.append(copy)


@dataclass(frozen=True, slots=True)
class Division:
    """Which runs of a group are updated by lists.

    Attributes:
        lists: of those that are.
        alone: the others.
    """

    lists: Sequence[RunList]
    alone: Sequence[Cut]


def batches(runs: StepRuns, keys: Sequence[str]) -> Division:
    """Return short runs in lists of one step, dtype and device that fit a CPU's caches."""
    threads = torch.get_num_threads()
    kept = runs.kept.get(("batches", threads))
    if kept is None:
        kept = runs.kept["batches", threads] = _batches(runs, keys, threads)
    return kept


def _batches(runs: StepRuns, keys: Sequence[str], threads: int) -> Division:
    waiting: dict[object, list[Cut]] = {}
    numels: dict[object, int] = {}
    full: list[list[Cut]] = []
    for cut in runs.cuts:
        key = _kind(cut, runs)
        limit = _DEVICE_LIST
        if cut.members[0].param.device.type == "cpu":
            limit = piece_numel(1 << 62, "cpu", threads, copied=False)
        listed = cut.members[0].param.dtype in _LISTED and cut.param is not None and is_plain(cut)
        if not listed or 2 * cut.numel > limit:
            full.append([cut])
            continue
        if numels.get(key, 0) + cut.numel > limit:
            full.append(waiting.pop(key))
            numels[key] = 0
        waiting.setdefault(key, []).append(cut)
        numels[key] = numels.get(key, 0) + cut.numel
    full += waiting.values()
    together = [[Pieces(c, [(0, c.numel)]) for c in cuts] for cuts in full if len(cuts) > 1]
    alone = [cuts[0] for cuts in full if len(cuts) == 1]
    return Division([RunList(pieces, keys) for pieces in together], alone)


def _kind(cut: Cut, runs: StepRuns) -> object:
    """Return what runs of a list have in common."""
    first = cut.members[0]
    return runs.steps[first.number], first.param.device, first.param.dtype


def fused_lists(runs: StepRuns, keys: Sequence[str]) -> Division:
    """Return runs in lists for a fused operator, as far as it can do them."""
    if "fused" not in runs.kept:
        plain = {id(cut) for cut in runs.cuts if is_plain(cut)}
        in_place = [c for c in runs.cuts if id(c) in plain and c.param is not None]
        lists = _fused_lists(in_place, runs, keys)
        runs.kept["fused"] = Division(lists, [c for c in runs.cuts if id(c) not in plain])
        runs.kept["strided"] = [c for c in runs.cuts if id(c) in plain and c.param is None]
    division, strided = runs.kept["fused"], runs.kept["strided"]
    if not strided:
        return division
    opened = [replace(cut, param=cut.members[0].open()) for cut in strided]
    return Division([*division.lists, *_fused_lists(opened, runs, keys)], division.alone)


def _fused_lists(cuts: Iterable[Cut], runs: StepRuns, keys: Sequence[str]) -> list[RunList]:
    alike: dict[object, list[Pieces]] = {}
    for cut in cuts:
        alike.setdefault(_kind(cut, runs), []).append(_fused_pieces(cut))
    return [RunList(pieces, keys) for pieces in alike.values()]


def _fused_pieces(cut: Cut) -> Pieces:
    """Return the pieces that have the bits of whole parameters.

    See [Note: pieces of fused kernels].
    """
    ranges: list[_Range] = []
    odd: list[tuple[int, int, int, int]] = []
    joins = False  # whether what follows may be one piece with the last range
    for member in cut.members:
        at = member.start - cut.members[0].start
        bounds, numel = member.shard.bounds, member.param.numel()
        if bounds is None or cut.members[0].param.device.type != "cpu":
            bounds, numel = (0, member.numel), member.numel  # with tails of their own, or none
        start, stop = bounds
        first = -(-start // VECTOR) * VECTOR
        last = stop if stop == numel else stop // VECTOR * VECTOR
        if last > first:
            piece = at + first - start, at + last - start
            if joins and ranges[-1][1] == piece[0]:
                piece = ranges.pop()[0], piece[1]
            ranges.append(piece)
            joins = last % VECTOR == 0
        middle = min(max(first, last), stop)
        for a, b in ((start, min(first, stop)), (middle, stop)):
            if b > a:
                origin = a // VECTOR * VECTOR
                places = a - origin, min(VECTOR, numel - origin)
                odd.append((at + a - start, at + b - start, *places))
    return Pieces(cut, ranges, odd)
