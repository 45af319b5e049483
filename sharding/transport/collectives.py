"""Collectives of one process group: gather, reduce, uneven exchange; in place where possible.

May touch: torch.distributed. Decides nothing: sizes and tags come from plans. Every call returns a
`Pending` whose `wait()` completes it, so that callers overlap communication with compute.

[Note: two transports]
Native (NCCL, and gloo above 16 ranks): the backend's own all-gather, reduce-scatter and all-reduce,
in place.
Pairwise (gloo up to 16 ranks): every pair of ranks exchanges slots straight from and into the flat
buffers, and sums are taken in rank order in fp32. Over TCP that is about three times faster than
gloo's all-gather and emulated reduce-scatter, and the sum of an element does not depend on where it
lies in the buffer. An all-reduce is a gather, and the sum on every rank. Reductions are one
all-to-all, which gloo runs on a thread of its own. Gathers are sends and receives (an all-to-all
would need the slot once for each peer), matched by a tag and posted by a thread: see posting.py.
Each is announced before: see [Note: heralds] in heralds.py.

The segments of a bucket are gathered by one call: natively coalesced into one launch, pairwise with
the messages of all segments in flight together. Their gradients share one buffer to begin with.

Both match collectives by the order of posting: see [Note: order of collectives] in root.py for how
it is kept, and how a difference is found.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from sharding.transport.backends import backend_of
from sharding.transport.heralds import Herald, Heralds
from sharding.transport.posting import post_gather
from sharding.transport.waits import failed_wait

PAIRWISE_MAX_RANKS = 16

# torch 2.13 renames the flat collectives and deprecates the old names; picked once, here.
all_gather_flat: Callable[..., dist.Work | None] = getattr(
    dist, "all_gather_single", None
) or getattr(dist, "all_gather_into_tensor")  # noqa: B009  (absent from later releases' stubs)
_reduce_scatter_flat: Callable[..., dist.Work | None] = getattr(
    dist, "reduce_scatter_single", None
) or getattr(dist, "reduce_scatter_tensor")  # noqa: B009


# Every rank creates the buckets of a group in the same order, so a count per group agrees.
_tags: weakref.WeakKeyDictionary[dist.ProcessGroup, Iterator[int]] = weakref.WeakKeyDictionary()


def next_tag(group: dist.ProcessGroup) -> int:
    """Return a tag that no earlier caller of this group has; see [Note: two transports]."""
    return next(_tags.setdefault(group, itertools.count(1)))


_heralds: weakref.WeakKeyDictionary[dist.ProcessGroup, Heralds] = weakref.WeakKeyDictionary()


def heralds_of(group: dist.ProcessGroup) -> Heralds:
    """Return the heralds that all transports of a group share."""
    if group not in _heralds:
        _heralds[group] = Heralds(group, next_tag(group))
    return _heralds[group]


def is_pairwise(backend: str, world_size: int) -> bool:
    """Return whether ranks exchange slots in pairs; see [Note: two transports]."""
    return backend == "gloo" and 1 < world_size <= PAIRWISE_MAX_RANKS


class Waitable(Protocol):
    """A handle of torch.distributed, or of several coalesced calls."""

    def wait(self) -> object:
        """Complete what it stands for."""


class Pending:
    """Communication in flight; keeps its tensors alive until `wait`.

    Args:
        works: The handles of what was posted.
        tensors: What it reads and writes.
        herald: What announced it, where anything did.
        group: The ranks, to look for those that are missing.
    """

    __slots__ = ("_group", "_herald", "_tensors", "_works")

    def __init__(
        self,
        works: Sequence[Waitable],
        tensors: Sequence[Tensor] = (),
        herald: Herald | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self._group = group
        self._works = works
        self._tensors = tensors
        self._herald = herald

    def wait(self, what: str) -> None:
        """Complete the communication: on CUDA for the current stream, else for the host.

        Raises:
            RuntimeError: It failed or timed out; says in `what`. Or peers announced another.
        """
        herald, self._herald = self._herald, None
        try:
            difference = None if herald is None else herald.difference()
            if difference is None:
                for work in self._works:
                    work.wait()
        except RuntimeError as error:
            raise failed_wait(what, self._group, error) from error
        finally:
            self._works = ()  # while their memory is there: what comes later finds no receiver
        if difference is not None:
            raise RuntimeError(difference)
        self._tensors = ()

    def drop(self, what: str) -> None:
        """Have the memory free for others: wait, but not where ranks have been found to differ."""
        if self._herald is not None and self._herald.is_void:
            self._works, self._herald = (), None
        self.wait(what)


class Transport:
    """The collectives of one group that a bucket needs.

    See [Note: two transports].

    Args:
        group: The ranks.
        device_type: Of the tensors that travel; the group's backend for it decides.
    """

    def __init__(self, group: dist.ProcessGroup, device_type: str) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        self.pairwise = is_pairwise(backend_of(group, device_type), self.world_size)
        self.heralds = heralds_of(group) if self.pairwise else None
        self.sums_only = False  # whether a native backend is asked for sums, not averages

    @property
    def _op(self) -> dist.ReduceOp.RedOpType:
        return dist.ReduceOp.SUM if self.sums_only else dist.ReduceOp.AVG

    @property
    def _left_to_divide(self) -> int:
        return self.world_size if self.sums_only else 1

    def _announced(self, event: str) -> Herald | None:
        return None if self.heralds is None else self.heralds.send(event)

    def all_gather_(self, buffers: Sequence[Tensor], tag: int, event: str) -> Pending:
        """Fill each of `buffers` from every rank's own slot of it, as one call.

        The buffers may differ in length and dtype. Native backends get them as one group; pairwise,
        their messages are posted together, each straight from and into its slots.

        Args:
            buffers: (world_size * S,) each; slot `rank` holds this rank's part already.
            tag: Tells concurrent calls apart; the same on all ranks.
            event: Names the call where ranks differ.
        """
        if self.world_size == 1 or not buffers:
            return Pending(())
        slots = [buffer.view(self.world_size, -1) for buffer in buffers]
        if not self.pairwise:
            works = self._native_all_gather(buffers, slots)
            return Pending(works, buffers, group=self.group)
        herald = self._announced(event)
        works = [post_gather(slots, self.group, self.rank, tag)]
        return Pending(works, buffers, herald, self.group)

    def _native_all_gather(
        self, buffers: Sequence[Tensor], slots: Sequence[Tensor]
    ) -> Sequence[Waitable]:
        """Return the backend's own all-gather; several buffers are one coalesced call."""
        if len(buffers) == 1:
            work = all_gather_flat(buffers[0], slots[0][self.rank], group=self.group, async_op=True)
            return _posted(work)
        with dist._coalescing_manager(group=self.group, async_ops=True) as coalesced:
            for buffer, each in zip(buffers, slots, strict=True):
                all_gather_flat(buffer, each[self.rank], group=self.group, async_op=True)
        return [coalesced]

    def _swap(self, output: Tensor, input: Tensor) -> list[dist.Work]:
        """Send `input` to the other of two ranks and receive `output`; nothing goes to itself."""
        splits = [0, 0]
        splits[1 - self.rank] = input.numel()
        work = all_to_all(output, input, splits, splits, self.group, async_op=True)
        return _posted(work)

    def reduce_workspace_numel(self, slot_numel: int) -> int:
        """Return elements of the receive buffer of `reduce_scatter_`; 0 where it works in place."""
        return slot_numel * self.world_size if self.pairwise else 0

    def reduce_scatter_(self, buffer: Tensor, workspace: Tensor | None, event: str) -> PendingMean:
        """Start the average over ranks of this rank's slot of `buffer`.

        Args:
            buffer: (world_size * slot,), this rank's addends for every rank's slot. Overwritten.
            workspace: (`reduce_workspace_numel(slot)`,) of the same dtype, or `None` if that is 0.
            event: Names the call where ranks differ.
        """
        slots = buffer.view(self.world_size, -1)
        if not self.pairwise:
            mine = slots[self.rank]
            if self.world_size == 1:
                return PendingMean(Pending(()), [mine], divisor=1)
            work = _reduce_scatter_flat(mine, buffer, op=self._op, group=self.group, async_op=True)
            pending = Pending(_posted(work), (buffer,), group=self.group)
            return PendingMean(pending, [mine], self._left_to_divide)
        if workspace is None:
            raise RuntimeError("a pairwise reduction needs its workspace, got None")
        herald = self._announced(event)
        received = list(workspace.view(self.world_size, -1).unbind(0))
        if self.world_size == 2:
            works = self._swap(received[1 - self.rank], slots[1 - self.rank])
            received[self.rank] = slots[self.rank]
        else:
            splits = [slots.shape[1]] * self.world_size
            work = all_to_all(workspace, buffer, splits, splits, self.group, async_op=True)
            works = _posted(work)
        pending = Pending(works, (buffer, workspace), herald, self.group)
        return PendingMean(pending, received, divisor=self.world_size)

    def all_reduce_workspace_numel(self, numel: int) -> int:
        """Return elements of the receive buffer of `all_reduce_`; 0 where it works in place."""
        return numel * self.world_size if self.pairwise else 0

    def all_reduce_(
        self, addend: Tensor, workspace: Tensor | None, tag: int, divisor: float, event: str
    ) -> PendingMean:
        """Start the average over ranks of `addend / divisor`; the same bits on every rank.

        Args:
            addend: (n,), this rank's. Overwritten.
            workspace: (`all_reduce_workspace_numel(n)`,) of the same dtype, or `None` if that is 0.
            tag: Tells concurrent calls apart; the same on all ranks.
            divisor: What an earlier sum left to be divided by; the division is done once.
            event: Names the call where ranks differ.
        """
        if self.world_size == 1:
            return PendingMean(Pending(()), [addend], divisor)
        if not self.pairwise:
            work = dist.all_reduce(addend, self._op, group=self.group, async_op=True)
            divisor *= self._left_to_divide
            pending = Pending(_posted(work), (addend,), group=self.group)
            return PendingMean(pending, [addend], divisor)
        if workspace is None:
            raise RuntimeError("a pairwise reduction needs its workspace, got None")
        slots = workspace.view(self.world_size, -1)
        slots[self.rank].copy_(addend)
        pending = self.all_gather_([workspace], tag, event)
        return PendingMean(pending, list(slots.unbind(0)), divisor * self.world_size)


class PendingMean:
    """A reduction in flight: the addends in rank order, and what their sum is divided by."""

    __slots__ = ("_addends", "_divisor", "_pending", "_total")

    def __init__(self, pending: Pending, addends: list[Tensor], divisor: float) -> None:
        self._pending = pending
        self._addends = addends
        self._divisor = divisor
        self._total: Tensor | None = None

    def wait(self, what: str) -> None:
        """Complete the communication and sum; `what` names the reduction in errors."""
        self._pending.wait(what)
        self._total, self._addends = self._sum_in_rank_order(), []

    def divide_by(self, divisor: float) -> None:
        """Be another fraction of the sum; of a transport that only sums."""
        self._divisor = divisor

    def part(self, first: int, numel: int) -> Tensor:
        """Return (numel,), a part of the mean, which `write_into` writes as the caller leaves
        it."""
        if self._total is None:
            raise RuntimeError("a mean is looked at before its reduction was waited for")
        if self._divisor != 1:
            self._total.div_(self._divisor)
            self._divisor = 1
        return self._total[first : first + numel]

    def write_into(self, out: Tensor, first: int, *, accumulate: bool) -> None:
        """Write (or add) a part of the mean to `out`, cast to its dtype.

        Args:
            out: (n,), any floating dtype.
            first: Where the n elements start in the slot.
            accumulate: Add to `out` instead of overwriting it.
        """
        if self._total is None:
            raise RuntimeError("a mean is written before its reduction was waited for")
        part = self._total[first : first + out.numel()]
        if accumulate:
            out.add_(part.div_(self._divisor) if self._divisor != 1 else part)
        elif self._divisor != 1:
            torch.div(part, self._divisor, out=out)
        else:
            out.copy_(part)

    def take_sum(self, what: str) -> tuple[Tensor, float]:
        """Return the sum in rank order, of at least fp32 where ranks were added, and its
        divisor."""
        self._pending.wait(what)
        total, self._addends = self._sum_in_rank_order(), []
        return total, self._divisor

    def drop(self, what: str) -> None:
        """Wait for the communication, and forget what it brought."""
        self._pending.drop(what)
        self._addends = []

    def _sum_in_rank_order(self) -> Tensor:
        """Sum in place into the first addend; low precision is summed in fp32."""
        first, *rest = self._addends
        total = first if first.dtype.itemsize >= 4 or not rest else first.float()
        for addend in rest:
            total.add_(addend)
        return total


def _posted(work: dist.Work | None) -> list[dist.Work]:
    """Return the handles to wait for; torch returns `None` for a rank outside of the group."""
    return [] if work is None else [work]


def all_to_all(
    output: Tensor,
    input: Tensor,
    output_splits: Sequence[int],
    input_splits: Sequence[int],
    group: dist.ProcessGroup,
    *,
    async_op: bool = False,
) -> dist.Work | None:
    """Uneven all-to-all of flat tensors of one dtype; splits may be 0.

    Args:
        output: (sum(output_splits),), filled by rank in rank order.
        input: (sum(input_splits),), in the order of the receiving ranks.
        output_splits: Elements that come from each rank.
        input_splits: Elements that go to each rank.
        group: The process group.
        async_op: Return the `Work` at once instead of waiting.
    """
    return dist.all_to_all_single(
        output, input, list(output_splits), list(input_splits), group=group, async_op=async_op
    )
