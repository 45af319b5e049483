"""DistributedBuffer: the flat memory of one segment of a bucket, and the views of it.

May touch: tensors. Communicates nothing and decides nothing: a `SegmentPlan` says where everything
lies, a `Bucket` says when.

[Note: buffer lifetimes]
A segment has up to four flat tensors:

    shard       (S,)        parameter dtype  lives as long as the bucket; the sharded parameters
                                             and the optimizer work on views of it
    shard_grad  (S + F,)    parameter dtype  as long as some sharded `.grad` exists: they are views
                                             of it, and nothing else keeps it
    unsharded   (W * S,)    compute dtype    storage exists between unshard and reshard
    grad slots  (W, S + F)  reduce dtype     columns of a tensor that `GradientSlots` borrows from
                                             the `Workspace` from the first gradient of a backward
                                             until its reduction has finished

F elements at the end of each gradient slot hold the seen-flags, 1 where this rank saw a gradient of
the parameter, and what proves that ranks agree ([Note: proofs in reductions] in proofs.py). They
travel and are averaged with the gradients, so that afterwards every rank can tell "zero" from "no
rank had one", without a collective of its own.

`unsharded` keeps one Storage for ever and only resizes it: tensors that autograd saved (a weight,
its transpose) alias that Storage, and find the values again after the next unshard.
Unsharded parameters are made from `.data` views, so that each has its own version counter and the
gather does not look like an in-place change to autograd.

Padding is zero in `shard` and `shard_grad` at rest. In the other two it is never read.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from sharding.fsdp.proofs import NUMEL, Numbers, columns
from sharding.planning.planner import SegmentPlan

FLAG_ALIGN = 16  # slots stay 16-byte aligned in every dtype


def slot_numel(plan: SegmentPlan) -> int:
    """S + F, the elements of a rank's gradient slot of a segment; see [Note: buffer lifetimes]."""
    return plan.shard_numel + -(-(len(plan.tensors) + NUMEL) // FLAG_ALIGN) * FLAG_ALIGN


@dataclass(frozen=True, slots=True)
class SlotPiece:
    """Where a run of a tensor's elements lies in the (W, slot) gradient buffer."""

    row: int  # first rank's slot
    rows: int  # how many slots it spans, `width` elements in each
    column: int
    width: int
    source: int  # first element in the flattened tensor


def slot_pieces(offset: int, numel: int, shard_numel: int) -> tuple[SlotPiece, ...]:
    """Cut [offset, offset + numel) at multiples of `shard_numel` into at most 3 rectangles.

    >>> slot_pieces(offset=6, numel=14, shard_numel=8)
    (SlotPiece(row=0, rows=1, column=6, width=2, source=0), SlotPiece(row=1, rows=1, column=0, \
width=8, source=2), SlotPiece(row=2, rows=1, column=0, width=4, source=10))
    """
    pieces = []
    row, column = divmod(offset, shard_numel)
    done = 0
    if column or numel < shard_numel:  # head
        width = min(numel, shard_numel - column)
        if width:
            pieces.append(SlotPiece(row, 1, column, width, 0))
        done, row = width, row + 1
    whole = (numel - done) // shard_numel
    if whole:
        pieces.append(SlotPiece(row, whole, 0, shard_numel, done))
        done, row = done + whole * shard_numel, row + whole
    if done < numel:
        pieces.append(SlotPiece(row, 1, 0, numel - done, done))
    return tuple(pieces)


class Workspace:
    """Flat scratch tensors that buckets borrow in turn, kept for the next borrower.

    The reductions of a backward need a few of them at a time, whatever the number of buckets. On a
    CPU they are kept between backwards too: fresh memory costs page faults, 3 % of a short step.
    Other devices have allocators that cache, and what they get back serves forward and optimizer.
    """

    # Two buckets that fill, two reductions in flight with one or two receive buffers each.
    MAX_KEPT = 8

    def __init__(self) -> None:
        self._free: list[Tensor] = []  # least recently used first

    def borrow(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a tensor of `numel` to `2 * numel` elements, uninitialised; see `give_back`."""
        fitting = [
            (tensor.numel(), i)
            for i, tensor in enumerate(self._free)
            if numel <= tensor.numel() <= 2 * numel
            and (tensor.dtype, tensor.device) == (dtype, device)
        ]
        if fitting:
            return self._free.pop(min(fitting)[1])
        return torch.empty(numel, dtype=dtype, device=device)

    @property
    def kept_bytes(self) -> int:
        """Bytes of what is not borrowed."""
        return sum(tensor.nbytes for tensor in self._free)

    def give_back(self, tensors: Sequence[Tensor]) -> None:
        """Make borrowed tensors available again, and drop those that nobody asked for long."""
        self._free.extend(tensors)
        del self._free[: max(0, len(self._free) - self.MAX_KEPT)]

    def release(self, device_type: str | None = None) -> None:
        """Free, at the end of a backward, what is not borrowed; of a CPU nothing.

        Args:
            device_type: In place of that of the tensors.
        """
        self._free = [t for t in self._free if (device_type or t.device.type) == "cpu"]


class DistributedBuffer:
    """The flat tensors of one segment. See [Note: buffer lifetimes]."""

    def __init__(
        self,
        plan: SegmentPlan,
        rank: int,
        *,
        dtype: torch.dtype,
        compute_dtype: torch.dtype,
        reduce_dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.plan = plan
        self.rank = rank
        self.dtype = dtype
        self.compute_dtype = compute_dtype
        self.reduce_dtype = reduce_dtype
        self.device = device
        count = len(plan.tensors)
        self.slot_numel = slot_numel(plan)
        self.shard = torch.zeros(plan.shard_numel, dtype=dtype, device=device)  # (S,)
        self.shard_grad: Tensor | None = None  # (S + F,), while a reduction is written
        self.last_reduction: object = None  # into new memory; what was made there is marked by it
        self.unsharded = torch.empty(
            plan.world_size * plan.shard_numel, dtype=compute_dtype, device=device
        )  # (W * S,)
        size = plan.shard_numel
        self._own_slot = self.unsharded[rank * size : (rank + 1) * size]
        self.free_unsharded()
        self.grad_slots: Tensor | None = None  # (W, S + F), columns of `GradientSlots`
        self._pieces = [
            slot_pieces(plan.offsets[i], plan.tensors[i].numel, plan.shard_numel)
            for i in range(count)
        ]
        self.local_ranges = [self._local_range(i) for i in range(count)]
        self._gaps = self._local_gaps()
        first = plan.shard_numel + count
        self._proof = slice(first, first + NUMEL)  # columns of a slot

    @staticmethod
    def for_policy(
        plan: SegmentPlan,
        rank: int,
        policy: MixedPrecisionPolicy,
        dtype: torch.dtype,
        device: torch.device,
    ) -> DistributedBuffer:
        """Return a buffer of parameters of `dtype`; reductions default to the compute dtype."""
        compute = (policy.param_dtype or dtype) if dtype.is_floating_point else dtype
        reduce = (policy.reduce_dtype or compute) if dtype.is_floating_point else dtype
        return DistributedBuffer(
            plan, rank, dtype=dtype, compute_dtype=compute, reduce_dtype=reduce, device=device
        )

    # -- parameters ---------------------------------------------------------------------------

    def _local_range(self, index: int) -> tuple[int, int]:
        """Return where tensor `index` lies in this rank's shard; (0, 0) if it has no element
        here."""
        size, offset = self.plan.shard_numel, self.plan.offsets[index]
        low = max(0, offset - self.rank * size)
        high = min(size, offset + self.plan.tensors[index].numel - self.rank * size)
        return (low, high) if low < high else (0, 0)

    def _local_gaps(self) -> list[tuple[int, int]]:
        """Return the padding of this rank's shard."""
        gaps, end = [], 0
        for low, high in sorted(r for r in self.local_ranges if r[0] < r[1]):
            if low > end:
                gaps.append((end, low))
            end = high
        if end < self.plan.shard_numel:
            gaps.append((end, self.plan.shard_numel))
        return gaps

    def local_view(self, index: int) -> Tensor:
        """Return (n_local,), this rank's elements of tensor `index` in the shard."""
        low, high = self.local_ranges[index]
        return self.shard[low:high]

    def local_grad_view(self, index: int) -> Tensor:
        """Return (n_local,), this rank's elements of the averaged gradient of tensor `index`."""
        low, high = self.local_ranges[index]
        return self.reduced()[low:high]

    def holds(self, index: int) -> bool:
        """Return whether this rank holds elements of tensor `index`."""
        low, high = self.local_ranges[index]
        return low < high

    def copy_from_full(self, index: int, full: Tensor) -> None:
        """Copy this rank's elements of a full tensor into the shard; none of a meta tensor."""
        low, high = self.local_ranges[index]
        if low < high and full.device.type != "meta":
            first = self.rank * self.plan.shard_numel + low - self.plan.offsets[index]
            self.shard[low:high].copy_(full.detach().reshape(-1)[first : first + high - low])

    @torch.no_grad()
    def copy_changed(self, index: int, full: Tensor) -> None:
        """Do as `copy_from_full`, but of a low-precision copy: elements that did not change
        stay."""
        if full.dtype == self.dtype:
            self.copy_from_full(index, full)
            return
        low, high = self.local_ranges[index]
        first = self.rank * self.plan.shard_numel + low - self.plan.offsets[index]
        new = full.detach().reshape(-1)[first : first + high - low]
        old = self.shard[low:high]
        old.copy_(torch.where(new == old.to(new.dtype), old, new.to(old.dtype)))

    def unsharded_parameter(self, index: int, form: Callable[[Tensor], Tensor]) -> nn.Parameter:
        """Return a parameter over the gathered buffer, which is `present`; `form` makes it of its
        flat elements."""
        offset, numel = self.plan.offsets[index], self.plan.tensors[index].numel
        view = form(self.unsharded[offset : offset + numel].data)
        return nn.Parameter(view, requires_grad=False)

    @contextmanager
    def present(self) -> Iterator[None]:
        """Have the storage of `unsharded` exist inside, which views of it need to be made."""
        freed = self.unsharded.untyped_storage().size() == 0
        if freed:
            self.allocate()
        yield
        if freed:
            self.free_unsharded()

    def allocate(self) -> Tensor:
        """Give `unsharded` its memory."""
        self.unsharded.untyped_storage().resize_(self.unsharded.nbytes)
        return self.unsharded

    def allocate_unsharded(self) -> Tensor:
        """Give `unsharded` its memory and write this rank's S elements, the only copy."""
        self.allocate()
        self._own_slot.copy_(self.shard)
        return self.unsharded

    def free_unsharded(self) -> None:
        """Free the memory of `unsharded`; the Storage object stays.

        Raises:
            RuntimeError: The memory is shared with numpy or another process; names the parameters.
        """
        storage = self.unsharded.untyped_storage()
        if not storage.resizable():
            raise RuntimeError(
                f"the gathered memory of {[tensor.fqn for tensor in self.plan.tensors]} cannot be "
                f"freed, as numpy() or share_memory_() shares it; share a copy, x.detach().clone()"
            )
        storage.resize_(0)

    # -- gradients ----------------------------------------------------------------------------

    def take_grad_slots(self, slots: Tensor) -> None:
        """Take (W, S + F) columns for this rank's addends, and clear the flags."""
        self.grad_slots = slots
        self.grad_slots[:, self.plan.shard_numel :].zero_()

    def write_grad(self, index: int, grad: Tensor, *, accumulate: bool) -> None:
        """Copy (or add) a full gradient, (numel,), into the slots, cast to the reduce dtype."""
        for target, source in self._slot_views(index, grad):
            if accumulate:
                target.add_(source)
            else:
                target.copy_(source)

    def complete_slots(self, seen: Collection[int], numbers: Numbers) -> None:
        """Write what gradients did not: zeros, seen-flags, proofs.

        Args:
            seen: Tensors that got a gradient; the others add zeros.
            numbers: Must be the same on all ranks; see [Note: proofs in reductions].
        """
        size, count = self.plan.shard_numel, len(self.plan.tensors)
        slots = self._slots()
        if len(seen) == count:  # the usual case, one write
            flags = columns(numbers, slots.dtype, slots.device, seen=count)
            slots[:, size : size + count + NUMEL].copy_(flags)
            return
        for index in range(count):
            if index in seen:
                slots[:, size + index].fill_(1)
                continue
            for target, _ in self._slot_views(index, None):
                target.zero_()
        slots[:, self._proof].copy_(columns(numbers, slots.dtype, slots.device))

    def proof(self) -> Tensor:
        """Return (NUMEL,), the proofs of all ranks after their sum."""
        return self.reduced()[self._proof]

    def _slots(self) -> Tensor:
        if self.grad_slots is None:
            raise RuntimeError("a gradient arrived before the gradient slots exist")
        return self.grad_slots

    def _slot_views(self, index: int, flat: Tensor | None) -> list[tuple[Tensor, Tensor]]:
        slots, pieces = self._slots(), self._pieces[index]
        strides, origin = (slots.stride(0), 1), slots.storage_offset()
        views = []
        for piece in pieces:
            shape, first = (piece.rows, piece.width), origin + piece.row * strides[0] + piece.column
            target = slots.as_strided(shape, strides, first)  # half the time of two slices
            source = target
            if flat is not None:
                whole = len(pieces) == 1
                part = flat if whole else flat.narrow(0, piece.source, shape[0] * shape[1])
                source = part.view(shape)
            views.append((target, source))
        return views

    def open_reduced(self, view: Tensor | None) -> None:
        """Find or make the memory of averaged gradients, which nothing keeps but views of it.

        Args:
            view: Of that of the last reduction; None for new memory.
        """
        if view is None:
            self.last_reduction = object()
            self.shard_grad = torch.empty(self.slot_numel, dtype=self.dtype, device=self.device)
        else:
            self.shard_grad = view.new_empty(0).set_(
                view.untyped_storage(), 0, (self.slot_numel,), (1,)
            )

    def close_reduced(self) -> None:
        """Leave it to the gradients that are views of it."""
        self.shard_grad = None

    def reduced(self) -> Tensor:
        """Return (S + F,), the averaged gradients of this rank and the averaged seen-flags."""
        if self.shard_grad is None:
            raise RuntimeError("averaged gradients are asked for before they have memory")
        return self.shard_grad

    def any_rank_saw(self, index: int) -> bool:
        """Return whether some rank had a gradient of tensor `index`; reads the device."""
        return bool(self.reduced()[self.plan.shard_numel + index] > 0)

    def clear_flag(self, index: int) -> None:
        """Forget that some rank once saw a gradient of tensor `index`."""
        self.reduced()[self.plan.shard_numel + index].zero_()

    def zero_grad_padding(self) -> None:
        """Restore the zeros between tensors after a reduction carried scratch values there."""
        grad = self.reduced()
        for low, high in self._gaps:
            grad[low:high].zero_()
