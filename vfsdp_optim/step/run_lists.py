"""Runs that are updated together, by operators on lists of tensors. Touches local tensors only.

[Note: pieces of fused kernels]
On a CPU torch's fused optimizers update whole vectors of elements by one instruction sequence and
the rest of a tensor, its tail, by another with other roundings. Which elements are in the tail
follows from the length of the tensor. Pieces of a sharded tensor get the bits of the whole if they
start where a vector starts, and end where one ends or where the tensor ends. Vectors have at most
64 bytes; what lies between a cut and the nearest multiple of `VECTOR` elements is updated in padded
copies, at its distance from there. On other devices all elements are treated alike.
"""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from vfsdp_optim.states.formats import PlainState
from vfsdp_optim.states.weights import MASTER
from vfsdp_optim.step.runs import Run, piece_numel

# Elements whose multiples are ends of vectors, in every dtype.
VECTOR = 64
# Elements of a list on other devices, which bound working memory.
_DEVICE_LIST = 1 << 24
# Dtypes in which operators on lists have the bits of those on tensors; 16 bits have others, because
# factors are rounded too.
_LISTED = (torch.float32, torch.float64)


def is_plain(run: Run) -> bool:
    """Return whether parameter and states are numbers of one dtype, updated in place."""
    dtype = run.param.dtype
    return not run.copied and all(
        key != MASTER and state.tensor.dtype == dtype if isinstance(state, PlainState) else False
        for key, state in run.states.items()
    )


def batches(runs: Iterable[Run]) -> Iterator[list[Run]]:
    """Yield runs in lists of one step, dtype and device that fit a CPU's caches; what cannot be in
    a list with others is in one alone.

    Args:
        runs: of one group, taken one by one.
    """
    waiting: dict[object, list[Run]] = {}
    numels: dict[object, int] = {}
    for run in runs:
        numel, device = run.grad.numel(), run.device
        limit = _DEVICE_LIST
        if device.type == "cpu":
            limit = piece_numel(1 << 62, "cpu", torch.get_num_threads(), copied=False)
        listed = run.param.dtype in _LISTED and run.skip is False and is_plain(run)
        if not listed or 2 * numel > limit:
            yield [run]
            continue
        key = run.step, device, run.param.dtype
        held = numels.get(key, 0)
        if held + numel > limit:
            yield waiting.pop(key)
            held = 0
        waiting.setdefault(key, []).append(run)
        numels[key] = held + numel
    yield from waiting.values()


class FusedPieces:
    """Pieces of runs of one step, dtype and device, to be given to a fused operator.

    See [Note: pieces of fused kernels].

    Args:
        keys: of the states that the operator takes.

    Attributes:
        params, grads: pieces, 1-D.
        states: state key -> pieces.
    """

    def __init__(self, keys: Iterable[str]) -> None:
        self.params: list[Tensor] = []
        self.grads: list[Tensor] = []
        self.states: dict[str, list[Tensor]] = {key: [] for key in keys}
        self._copies: list[tuple[list[Tensor], list[Tensor]]] = []
        self.runs: list[Run] = []

    def add(self, run: Run) -> None:
        """Take the pieces of the parameters of a run."""
        self.runs.append(run)
        flat = [run.param, run.grad.to(run.param.dtype)]
        flat += [run.states[key].parts()[""] for key in self.states]
        if len(run.members) == 1:
            pieces = [flat]
        else:
            pieces = _split(run, flat)
        on_cpu = run.device.type == "cpu"
        for member, piece in zip(run.members, pieces, strict=True):
            bounds = member.shard.bounds
            if not on_cpu or bounds is None:  # or pieces are no ranges, and have their own tails
                self._append(piece)
            else:
                self._cut(piece, *bounds, member.param.numel())

    def write_back(self) -> None:
        """Copy what was updated in padded copies to where it belongs."""
        for places, values in self._copies:
            for place, value in zip(places, values, strict=True):
                place.copy_(value)

    def _append(self, tensors: list[Tensor]) -> None:
        param, grad, *states = tensors
        self.params.append(param)
        self.grads.append(grad)
        for pieces, state in zip(self.states.values(), states, strict=True):
            pieces.append(state)

    def _cut(self, piece: list[Tensor], start: int, stop: int, numel: int) -> None:
        """Append elements start:stop of a parameter of `numel` elements."""
        first = -(-start // VECTOR) * VECTOR
        last = stop if stop == numel else stop // VECTOR * VECTOR
        if (first, last) == (start, stop):
            self._append(piece)
            return
        if last > first:
            self._append([tensor[first - start : last - start] for tensor in piece])
            ends = [(start, first), (last, stop)]
        else:
            ends = [(start, min(first, stop)), (min(first, stop), stop)]
        for a, b in ends:
            if b > a:
                self._append_padded([t[a - start : b - start] for t in piece], a, numel)

    def _append_padded(self, piece: list[Tensor], start: int, numel: int) -> None:
        """Append elements of one vector, from element `start` of a parameter on."""
        origin = start // VECTOR * VECTOR
        length = min(VECTOR, numel - origin)
        padded = piece[0].new_zeros(len(piece), length)
        copies = list(padded.unbind())
        places = [x[start - origin :][: piece[0].numel()] for x in copies]
        for place, tensor in zip(places, piece, strict=True):
            place.copy_(tensor)
        self._append(copies)
        # The gradient, the second, is read only.
        self._copies.append((piece[:1] + piece[2:], places[:1] + places[2:]))


def _split(run: Run, flat: list[Tensor]) -> list[list[Tensor]]:
    """Return the tensors of a run by member, without the padding between."""
    sizes, end = [], run.members[0].start
    for member in run.members:
        sizes += [member.start - end, member.numel]
        end = member.start + member.numel
    by_tensor = [tensor.split_with_sizes(sizes)[1::2] for tensor in flat]
    return [list(piece) for piece in zip(*by_tensor, strict=True)]
