"""Heralds: short messages that say which collective follows, on a transport of sends and receives.

May touch: torch.distributed, one small message to and from each peer for each collective.

[Note: heralds]
gloo matches a message by its place among those of two ranks. Where ranks run modules in different
orders (an encoder that only some ranks have an input for) it filled one bucket with another's
weights, ended the process from a thread of its own ("op.preamble.length <= op.nbytes"), or waited
until the timeout. So every rank says first what it is about to do, and looks at what its peers said
before it waits for what they sent. Gathers travel under their bucket's tag, so that none is taken
for another's meanwhile. NCCL's groups have no room for that: there the proofs in reductions tell,
one step later; see [Note: proofs in reductions] in fsdp/proofs.py.
"""

from __future__ import annotations

import weakref

import torch
import torch.distributed as dist
from torch import Tensor

from sharding.transport.posting import Posted, post_gather

NBYTES = 128  # of a message; longer names are cut at their front


class Herald:
    """What this rank and its peers announced for one collective."""

    __slots__ = ("_heralds", "_own", "_posted", "_received")

    def __init__(self, heralds: Heralds, own: Tensor, received: Tensor, posted: Posted) -> None:
        self._heralds = heralds
        self._own = own
        self._received = received
        self._posted = posted

    @property
    def is_void(self) -> bool:
        """Whether ranks were found to differ before this was looked at."""
        return self._heralds.difference is not None

    def difference(self) -> str | None:
        """Wait for what the peers announced, and say what is something else; None where nothing is.

        Raises:
            RuntimeError: A peer is gone, or said nothing until the timeout.
        """
        if self._heralds.difference is None:
            self._posted.wait()
            if not torch.equal(self._received, self._own.expand_as(self._received)):
                self._heralds.difference = self._describe()
        return self._heralds.difference

    def _describe(self) -> str:
        other = next(r for r, row in enumerate(self._received) if not torch.equal(row, self._own))
        group = self._heralds.group
        low, high = (
            f"rank {dist.get_global_rank(group, rank)} is at the {_text(self._received[rank])}"
            for rank in sorted((dist.get_rank(group), other))
        )
        return (
            f"ranks run modules in different orders: {low}, {high}; every rank must run the same "
            f"modules in the same order. A module that only some ranks have an input for has to "
            f"run on all of them, on a dummy input that adds nothing to the loss"
        )


class Heralds:
    """The heralds of one group.

    Args:
        group: The ranks.
        tag: Of the messages; nothing else in the group has it.

    Attributes:
        difference: What ranks were found to do differently. Nothing in flight completes after it.
    """

    def __init__(self, group: dist.ProcessGroup, tag: int) -> None:
        self._group = weakref.ref(group)
        self._rank, self._world_size = dist.get_rank(group), dist.get_world_size(group)
        self._tag = tag
        self._messages: dict[str, Tensor] = {}
        self.difference: str | None = None

    @property
    def group(self) -> dist.ProcessGroup:
        """The ranks."""
        group = self._group()
        if group is None:
            raise RuntimeError("the process group of fully_shard was destroyed")
        return group

    def send(self, event: str) -> Herald:
        """Announce a collective, just before it is posted.

        Raises:
            RuntimeError: Ranks differed before, and no message can be matched any more.
        """
        if self.difference is not None:
            raise RuntimeError(self.difference)
        own = self._messages.get(event)
        if own is None:
            own = self._messages[event] = _message(event)
        received = own.repeat(self._world_size, 1)
        posted = post_gather([received], self.group, self._rank, self._tag)
        return Herald(self, own, received, posted)


def _message(event: str) -> Tensor:
    encoded = event.encode()[-NBYTES:].ljust(NBYTES, b"\0")
    return torch.frombuffer(bytearray(encoded), dtype=torch.uint8)


def _text(message: Tensor) -> str:
    return bytes(message.tolist()).rstrip(b"\0").decode(errors="replace")
