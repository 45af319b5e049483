"""The runs of a group in a step, found again only when the gradients lie otherwise than before.

Touches local tensors only.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from torch import Tensor

from vfsdp_optim.states.formats import State
from vfsdp_optim.step.member import Member
from vfsdp_optim.step.nonfinite import Skip
from vfsdp_optim.step.runs import Run, Span


@dataclass(frozen=True, slots=True, eq=False)
class Cut:
    """Members of a span that are one run, as long as their gradients lie as they do.

    Attributes:
        members: the parameters in it.
        numel: elements, with the padding between.
        param: those elements where they can be written in place: of one parameter in its own shape,
            of several 1-D. None where strides forbid it, and `Member.open` returns a copy.
        states: of those elements.
        gaps: (start, stop) of the padding between the parameters.
    """

    members: Sequence[Member]
    numel: int
    param: Tensor | None
    states: dict[str, State]
    gaps: tuple[tuple[int, int], ...]


@dataclass(slots=True)
class StepRuns(Iterable[Run]):
    """The runs of a group in one step, to be taken one by one, or many together as lists.

    Attributes:
        cuts: where they are.
        grads: of all members of the optimizer, by number, as `MemberList.gradients` returns them.
        steps: number of the step each member takes, by number.
        skip: of every run.
        kept: for what algorithms derive from `cuts` alone; emptied when those are found again.
    """

    group: int
    cuts: Sequence[Cut]
    grads: Sequence[Tensor | None]
    steps: Sequence[float]
    skip: Skip
    kept: dict[Any, Any]

    def __iter__(self) -> Iterator[Run]:
        """Yield all runs."""
        return map(self.run, self.cuts)

    def run(self, cut: Cut) -> Run:
        """Return one run."""
        first, step = cut.members[0], self.step_of(cut)
        if first.weights.draws:
            for member in cut.members:
                member.step = step
        param = first.open() if cut.param is None else cut.param.view(-1)
        grad = self.gradient(cut)
        return Run(self.group, cut.members, param, grad, cut.states, cut.gaps, step, self.skip)

    def step_of(self, cut: Cut) -> float:
        """Return the number of the step that a run takes, from 1; 0 where it does not count."""
        return self.steps[cut.members[0].number]

    def gradient(self, cut: Cut) -> Tensor:
        """Return the gradient of a run, 1-D."""
        return _gradient(cut, self.grads)


class GroupRuns:
    """The spans of a group, and where their runs were in the last step.

    See [Note: spans and runs] in runs.py.
    """

    def __init__(self, spans: Sequence[Span]) -> None:
        self.group = spans[0].group
        self._spans = spans
        self._numbers = [member.number for span in spans for member in span.members]
        ends = [0]
        for span in spans:
            ends.append(ends[-1] + len(span.members))
        self._places = list(pairwise(ends))  # of the members of each span among all
        self._several = [place for place in self._places if place[1] - place[0] > 1]
        self._key: object = None
        self._cuts: list[Cut] = []
        self._kept: dict[Any, Any] = {}

    def of_step(
        self, grads: Sequence[Tensor | None], steps: Sequence[float], skip: Skip = False
    ) -> StepRuns:
        """Return the runs of this step.

        Args:
            grads: of all members of the optimizer, by number.
            steps: number of the step each member takes, by number.
            skip: of every run.
        """
        self._update_cuts(grads, steps)
        return StepRuns(self.group, self._cuts, grads, steps, skip, self._kept)

    def gradients(self, grads: Sequence[Tensor | None], steps: Sequence[float]) -> Iterator[Tensor]:
        """Yield the gradients of the runs; arguments as of `of_step`."""
        self._update_cuts(grads, steps)
        return (_gradient(cut, grads) for cut in self._cuts)

    def _update_cuts(self, grads: Sequence[Tensor | None], steps: Sequence[float]) -> None:
        """Find the runs again only if gradients appeared, vanished or moved against each other."""
        # Few bytecodes a parameter: this is done for all of them in every step.
        mine = [grads[number] for number in self._numbers]
        origin = steps[self._numbers[0]]
        ahead = [steps[number] - origin for number in self._numbers]
        dtypes = [None if grad is None else grad.dtype for grad in mine]
        key = ahead, dtypes, [_distances(mine[a:b]) for a, b in self._several]
        if key == self._key and all(
            len(cut.members) == 1 or _reaches(grads[cut.members[0].number], cut.numel)
            for cut in self._cuts
        ):
            return
        self._kept.clear()
        self._key = key
        self._cuts = [
            cut
            for span, (a, b) in zip(self._spans, self._places, strict=True)
            for cut in _cuts_of(span, mine[a:b], ahead[a:b])
        ]


def group_runs(spans: Iterable[Span]) -> list[GroupRuns]:
    """Return the spans by group."""
    by_group: dict[int, list[Span]] = {}
    for span in spans:
        by_group.setdefault(span.group, []).append(span)
    return [GroupRuns(spans) for spans in by_group.values()]


def _gradient(cut: Cut, grads: Sequence[Tensor | None]) -> Tensor:
    grad = grads[cut.members[0].number]
    assert grad is not None, "else there is no such run"
    if len(cut.members) == 1:
        return grad.view(-1)
    return grad.as_strided((cut.numel,), (1,), grad.storage_offset())


def _distances(grads: Sequence[Tensor | None]) -> list[int | None]:
    """Return how far gradients lie from the first that is there, in bytes."""
    pointers = [None if grad is None else grad.data_ptr() for grad in grads]
    origin = next((pointer for pointer in pointers if pointer is not None), 0)
    return [None if pointer is None else pointer - origin for pointer in pointers]


def _cuts_of(span: Span, grads: Sequence[Tensor | None], ahead: Sequence[float]) -> Iterator[Cut]:
    """Yield the longest runs of members of a span; `grads` and steps `ahead` are theirs."""
    members, first = span.members, 0
    distances = _distances(grads)
    while first < len(members):
        last, grad, start = first + 1, grads[first], members[first].start
        while grad is not None and last < len(members):
            other, member = grads[last], members[last]
            distance = (member.start - start) * grad.element_size()
            if (
                other is None
                or (other.dtype, ahead[last]) != (grad.dtype, ahead[first])
                or (distances[last] or 0) - (distances[first] or 0) != distance
                or not _reaches(grad, member.start + member.numel - start)
            ):
                break
            last += 1
        stop = members[last - 1].start + members[last - 1].numel
        if grad is not None and stop > start:
            yield _cut(span, members[first:last], start, stop)
        first = last


def _cut(span: Span, members: Sequence[Member], start: int, stop: int) -> Cut:
    gaps = tuple(
        (a.start + a.numel - start, b.start - start)
        for a, b in pairwise(members)
        if b.start > a.start + a.numel
    )
    local = members[0].shard.tensor
    param = local if local.is_contiguous() else None
    if len(members) > 1:
        param = local.as_strided((stop - start,), (1,), local.storage_offset())
    states = {key: flat.narrow(start, stop) for key, flat in span.states.items()}
    return Cut(members, stop - start, param, states, gaps)


def _reaches(grad: Tensor | None, numel: int) -> bool:
    """Return whether `numel` elements from the start of `grad` lie in its storage: equal distances
    of addresses alone could be two allocations side by side."""
    if grad is None:
        return False
    available = grad.untyped_storage().nbytes() // grad.element_size() - grad.storage_offset()
    return grad.is_contiguous() and numel <= available
