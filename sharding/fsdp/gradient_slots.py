"""GradientSlots: this rank's addends to the gradients of the segments that are reduced together.

May touch: tensors, one reduction of a `Transport`. All segments of a bucket that have one dtype,
and are all trainable or all frozen, share one tensor and one reduction. Gradients are copied into
it anyway, so several segments cost no further copy and no further collective. See
[Note: buffer lifetimes] in buffer.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from torch import Tensor

from sharding.fsdp.buffer import DistributedBuffer, Workspace
from sharding.transport.collectives import PendingMean, Transport


class GradientSlots:
    """(W, T) addends, T the sum of the slots of the segments; memory only while it is borrowed."""

    def __init__(self, segments: Sequence[int], buffers: Sequence[DistributedBuffer]) -> None:
        """Lay out the slots of `segments`; `buffers` are those of all segments of the bucket."""
        self.segments = list(segments)
        self.buffers = [buffers[segment] for segment in segments]
        self.first_columns = [0, *accumulate(buffer.slot_numel for buffer in self.buffers)]
        self._flat: Tensor | None = None  # (W * T,)
        self._borrowed: list[Tensor] = []

    @property
    def nbytes(self) -> int:
        """Bytes of the slots of all ranks."""
        first = self.buffers[0]
        return first.plan.world_size * self.first_columns[-1] * first.reduce_dtype.itemsize

    def borrow(self, workspace: Workspace) -> None:
        """Give every segment its columns, the flags cleared; nothing when they have them."""
        if self._flat is not None:
            return
        world_size, width = self.buffers[0].plan.world_size, self.first_columns[-1]
        self._flat = self._borrow(workspace, world_size * width)
        slots = self._flat.view(world_size, width)
        for buffer, first in zip(self.buffers, self.first_columns, strict=False):
            buffer.take_grad_slots(slots[:, first : first + buffer.slot_numel])

    def _borrow(self, workspace: Workspace, numel: int) -> Tensor:
        tensor = workspace.borrow(numel, self.buffers[0].reduce_dtype, self.buffers[0].device)
        self._borrowed.append(tensor)
        return tensor[:numel]

    def reduce(self, transport: Transport, workspace: Workspace, event: str) -> PendingMean:
        """Start the one reduction; `event` names it."""
        if self._flat is None:
            raise RuntimeError("gradients are reduced before the gradient slots exist")
        numel = transport.reduce_workspace_numel(self.first_columns[-1])
        received = self._borrow(workspace, numel) if numel else None
        return transport.reduce_scatter_(self._flat, received, event)

    def release(self) -> list[Tensor]:
        """Hand over what was borrowed; a gradient that comes later borrows anew."""
        borrowed, self._borrowed = self._borrowed, []
        self._flat = None
        for buffer in self.buffers:
            buffer.grad_slots = None
        return borrowed
