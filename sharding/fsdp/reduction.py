"""A bucket's reduction in flight, and its second step over the replicas of a 2-D mesh.

May touch: a `Transport` of the replicate axis, scratch memory.

[Note: two steps of a reduction]
On a 1-D mesh a reduction is one reduce-scatter. On a 2-D mesh (HSDP) it has a second step: this
rank's elements of `GradientSlots` (see [Note: buffer lifetimes] in buffer.py) are averaged over the
ranks that hold the same piece in other replicas. Seen-flags and the order of gathers are among
them, so that both cover all ranks. Sums are not rounded nor divided between the steps where they
are taken in rank order (over gloo): shard ranks are added first, then replicas in their order, in
fp32, and the total is divided once, by all ranks. Every replica ends with the same bits.

The second step is posted when the first step of the next bucket has been, so that it overlaps with
that and with the backward between them. Where `requires_all_reduce` is off, the sums of the first
step are kept instead, and added to those of the next reduction: the micro-batches of a step then
communicate within replicas only. They are not in `.grad` until a reduction covers all ranks: the
next backward with `requires_all_reduce`, whether it runs the module or not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from sharding.fsdp.buffer import Workspace
from sharding.fsdp.proofs import Numbers
from sharding.transport.axes import replicate_group
from sharding.transport.collectives import PendingMean, Transport, next_tag

MOST_IN_FLIGHT = 2
LARGE = 1 << 30  # bytes of slots beyond which one reduction in flight is long enough to hide


class Reducible(Protocol):
    """What reduces its gradients: a `Bucket`, or a count of what one would take."""

    @property
    def slot_bytes(self) -> int:
        """Bytes of its gradient slots, the same on all ranks."""
        ...

    def reduce_grads(self, order: int) -> None:
        """Start the reduction."""

    def average_replicas(self) -> None:
        """Go on to the second step, if there is one and it has not begun."""

    def wait_for_reduce(self) -> None:
        """Complete the reduction and give back what it borrowed."""


class ReductionsInFlight:
    """The reductions of a backward that are under way, oldest first.

    Few at a time: before one more starts, the oldest is waited for, and its memory lent again. Of
    the others the second step is posted then; see [Note: two steps of a reduction]. Of large ones
    there is one at a time, so that with the bucket that fills two have memory.
    """

    def __init__(self) -> None:
        self._buckets: list[Reducible] = []

    def start(self, bucket: Reducible, order: int) -> None:
        """Start the reduction of a bucket; `order` is what it writes into its slots."""
        large = any(each.slot_bytes > LARGE for each in (*self._buckets, bucket))
        while len(self._buckets) >= (1 if large else MOST_IN_FLIGHT):
            self._buckets.pop(0).wait_for_reduce()
        bucket.reduce_grads(order)
        for earlier in self._buckets:
            earlier.average_replicas()
        self._buckets.append(bucket)

    def finish(self) -> None:
        """Complete all of them."""
        for bucket in self._buckets:
            bucket.average_replicas()
        for bucket in self._buckets:
            bucket.wait_for_reduce()
        self._buckets.clear()

    def forget(self) -> None:
        """Drop what an exception left."""
        self._buckets.clear()


@dataclass(slots=True)
class Reduction:
    """A reduction in flight: a pending mean and borrowed memory for each of the bucket's
    `GradientSlots`, who saw a gradient.
    """

    means: list[PendingMean | None]  # None where no parameter is trainable
    borrowed: list[list[Tensor]]
    seen: set[int]
    numbers: list[Numbers]  # what this rank wrote into its slots, and into those of the kept sums
    is_first_step: bool  # whether replicas are still to be averaged

    def drop(self, workspace: Workspace, what: str) -> None:
        """Wait for the communication, forget what it brought and give its memory back."""
        for mean, borrowed in zip(self.means, self.borrowed, strict=True):
            if mean is not None:
                mean.drop(what)
            workspace.give_back(borrowed)


@dataclass(frozen=True, slots=True)
class _Kept:
    """The sums over this replica of reductions whose second step was put off."""

    sums: list[Tensor | None]  # (T,) of each `GradientSlots`
    seen: set[int]
    numbers: list[Numbers]


@dataclass(slots=True)
class ReductionWishes:
    """What a user asked of a bucket's reductions beside averages."""

    divide_factor: float | None = None  # of the sum over all ranks; None for their number
    hook: Callable[[Tensor], object] | None = None  # gets reduced gradients, and may write them

    def divide(self, mean: PendingMean) -> None:
        """Have the mean be the wanted fraction of the sum: one division, of the sum, so that 1
        gives the sum's bits on any number of ranks."""
        if self.divide_factor is not None:
            mean.divide_by(self.divide_factor)

    def show(self, mean: PendingMean, first: int, numel: int) -> None:
        """Call the hook with one segment's part of a mean."""
        if self.hook is not None:
            self.hook(mean.part(first, numel))


class Replicas:
    """The second step of a bucket's reductions. See [Note: two steps of a reduction].

    Args:
        group: The ranks that hold the same piece.
        device_type: Of the gradients.
        reductions: How many the bucket has in its first step.
    """

    def __init__(self, group: dist.ProcessGroup, device_type: str, reductions: int) -> None:
        self.requires_all_reduce = True
        self.transport = Transport(group, device_type)
        self.tags = [next_tag(group) for _ in range(reductions)]
        self._kept: _Kept | None = None

    @staticmethod
    def of_mesh(mesh: DeviceMesh, reductions: int) -> Replicas | None:
        """Return the replicas of a 2-D mesh, None on a 1-D one."""
        group = replicate_group(mesh)
        return None if group is None else Replicas(group, mesh.device_type, reductions)

    @property
    def keeps_sums(self) -> bool:
        """Whether the second step of an earlier reduction was put off."""
        return self._kept is not None

    def average(self, reduction: Reduction, workspace: Workspace, what: str) -> None:
        """Complete the first step of `reduction` and start the second, or keep the sums."""
        reduction.is_first_step = False
        totals = self._with_kept(
            [None if mean is None else mean.take_sum(what) for mean in reduction.means], reduction
        )
        reduction.means = [None] * len(totals)
        if not self.requires_all_reduce:
            sums = [None if total is None else _exact(total[0]) for total in totals]
            self._kept = _Kept(sums, reduction.seen, reduction.numbers)
            return
        for i, (total, tag) in enumerate(zip(totals, self.tags, strict=True)):
            if total is None:
                continue
            addend, divisor = total
            received = None
            if numel := self.transport.all_reduce_workspace_numel(addend.numel()):
                flat = workspace.borrow(numel, addend.dtype, addend.device)
                reduction.borrowed[i].append(flat)
                received = flat[:numel]
            reduction.means[i] = self.transport.all_reduce_(
                addend, received, tag, divisor, f"average of {what}"
            )

    def _with_kept(
        self, totals: Sequence[tuple[Tensor, float] | None], reduction: Reduction
    ) -> list[tuple[Tensor, float] | None]:
        """Return the sums of the first step, with what earlier reductions kept added."""
        kept, self._kept = self._kept, None
        if kept is None:
            return list(totals)
        reduction.seen |= kept.seen
        reduction.numbers += kept.numbers
        return [
            total if total is None or earlier is None else (earlier.add_(total[0]), total[1])
            for total, earlier in zip(totals, kept.sums, strict=True)
        ]

    def drop(self) -> None:
        """Forget what was kept."""
        self._kept = None


def _exact(total: Tensor) -> Tensor:
    """Return a copy of borrowed memory, of at least fp32."""
    return total.to(torch.promote_types(total.dtype, torch.float32), copy=True)
