"""Posting of messages over gloo, from a thread of their own.

May touch: torch.distributed, one thread of the process.

gloo copies what is sent into the socket within the call that posts it, and a call that posts any
message waits while another is being copied between the same two ranks. A rank would not compute
meanwhile: 5 % of a training step on 2 ranks. (Its all-to-all has a thread of its own, but no tag;
see [Note: heralds] in heralds.py for why gathers need one.) These calls release the GIL.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache

import torch.distributed as dist

Works = list[dist.Work | None]


class Posted:
    """Messages that the thread is to post, or has posted."""

    __slots__ = ("_works",)

    def __init__(self, works: Future[Works]) -> None:
        self._works = works

    def wait(self) -> None:
        """Return when all have arrived or left; raises what posting or waiting raised."""
        for work in self._works.result():
            if work is not None:
                work.wait()


def post(messages: Callable[[], Works]) -> Posted:
    """Have `messages` called, which posts them; those of one process in the order of these calls.

    Args:
        messages: Returns what is to be waited for. Whose memory is not to be touched until then.
    """
    return Posted(_thread().submit(messages))


@cache
def _thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix="gloo-posts")
