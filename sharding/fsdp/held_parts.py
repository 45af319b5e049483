"""HeldParts: what a few ranks hold of a bucket between forward and backward.

May touch: a `Transport` of those ranks, the memory of buffers. For `reshard_after_forward=n`: the
ranks of a group of n consecutive ones keep a part of the gathered buffers each, so that backward
gathers within the group (inside a machine, say) and not over all ranks. What backward computes with
is what forward computed with, what forward wrote into weights included.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from sharding.fsdp.buffer import DistributedBuffer
from sharding.transport.axes import part_of_shard_group
from sharding.transport.collectives import Pending, Transport


class HeldParts:
    """The parts of one bucket's gathered buffers that this rank holds; nothing to begin with.

    Args:
        mesh: Of the bucket.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self._mesh = mesh
        self._transports: dict[int, Transport] = {}
        self._ranks = 0
        self._parts: list[Tensor] = []

    def __bool__(self) -> bool:
        """Return whether anything is held."""
        return bool(self._parts)

    def keep(self, buffers: Sequence[DistributedBuffer], ranks: int) -> None:
        """Copy this rank's parts out of what is gathered. The first time a collective of `ranks`.

        Args:
            buffers: Of the bucket, gathered.
            ranks: The size of a group, a factor of the number of shards.
        """
        if ranks not in self._transports:
            group = part_of_shard_group(self._mesh, ranks)
            self._transports[ranks] = Transport(group, self._mesh.device_type)
        self._ranks = ranks
        own = self._transports[ranks].rank
        self._parts = [buffer.unsharded.view(ranks, -1)[own].clone() for buffer in buffers]

    def gather(self, buffers: Sequence[DistributedBuffer], tag: int, event: str) -> Pending:
        """Start to fill the buffers from the parts of the group, which are held no more."""
        transport = self._transports[self._ranks]
        for buffer, part in zip(buffers, self._parts, strict=True):
            buffer.allocate().view(self._ranks, -1)[transport.rank].copy_(part)
        self.drop()
        return transport.all_gather_([buffer.unsharded for buffer in buffers], tag, event)

    def drop(self) -> None:
        """Hold nothing."""
        self._parts = []
