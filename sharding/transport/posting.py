"""Posting of messages over gloo, from a thread of their own.

May touch: torch.distributed, one thread of the process.

gloo copies what is sent into the socket within the call that posts it, and a call that posts any
message waits while another is being copied between the same two ranks. A rank would not compute
meanwhile: 5 % of a training step on 2 ranks. (Its all-to-all has a thread of its own, but no tag;
see [Note: heralds] in heralds.py for why gathers need one.) These calls release the GIL.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from functools import cache

import torch.distributed as dist
from torch import Tensor

from sharding.transport.waits import timeout_of

_Works = list[dist.Work | None]


class Posted:
    """Messages that the thread is to post, or has posted."""

    __slots__ = ("_timeout", "_works")

    def __init__(self, works: Future[_Works], timeout: timedelta) -> None:
        self._works = works
        # gloo's messages have the timeout that their group was made with, whatever it has now.
        self._timeout = timeout

    def wait(self) -> None:
        """Return when all have arrived or left; raises what posting or waiting raised."""
        for work in self._works.result():
            if work is not None:
                work.wait(self._timeout)


def post_gather(slots: Sequence[Tensor], group: dist.ProcessGroup, rank: int, tag: int) -> Posted:
    """Have this rank's row of every tensor sent to all others, and theirs received into theirs.

    What one process posts leaves in the order of these calls.

    Args:
        slots: (ranks of the group, n) each, of any n and dtype. Not to be touched until the wait.
        group: The ranks.
        rank: This one's, in the group.
        tag: Of all messages; those of several tensors are matched in their order.
    """
    timeout = timeout_of(group, slots[0].device) or dist.constants.default_pg_timeout
    return Posted(_thread().submit(_exchange, slots, group, rank, tag), timeout)


def _exchange(slots: Sequence[Tensor], group: dist.ProcessGroup, rank: int, tag: int) -> _Works:
    works: _Works = []
    world_size = len(slots[0])
    for distance in range(1, world_size):
        source, target = (rank - distance) % world_size, (rank + distance) % world_size
        for each in slots:
            works.append(dist.irecv(each[source], group=group, group_src=source, tag=tag))
            works.append(dist.isend(each[rank], group=group, group_dst=target, tag=tag))
    return works


@cache
def _thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix="gloo-posts")
