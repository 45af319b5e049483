"""Small messages of the ranks that save or load together, and their errors: all raise or none.

Communicates objects through the host, on a process group of its own where the default group cannot,
or is not to be waited for by what runs meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch.distributed as dist

from sharding.transport.backends import backend_of, device_types, world
from sharding.transport.waits import share_timeout, waiting_for

Mine = TypeVar("Mine")
Reply = TypeVar("Reply")

# What other ranks raise, too.
_KINDS = (
    FileNotFoundError, OSError, NotImplementedError, RuntimeError, TypeError, ValueError
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Raised:
    """What a rank raised, for the others."""

    rank: int
    kind: type[Exception]
    text: str


class Messages:
    """All ranks of the default process group, or this process alone where there is none.

    Args:
        apart: Whether a thread of its own waits for them, so that training may communicate.
    """

    def __init__(self, *, apart: bool = False) -> None:
        self._group = None
        if dist.is_available() and dist.is_initialized():
            default = world()
            on_host = "cpu" in device_types(default) and backend_of(default, "cpu") == "gloo"
            self._group = default if on_host and not apart else _own_group(default)
        self.rank = 0 if self._group is None else dist.get_rank(self._group)
        self.size = 1 if self._group is None else dist.get_world_size(self._group)

    def together(
        self, local: Callable[[], Mine], joint: Callable[[list[Mine]], list[Reply]], what: str
    ) -> Reply:
        """Return this rank's part of what rank 0 makes of what all ranks have.

        Args:
            local: Called on every rank.
            joint: Called on rank 0 with the results by rank; returns one for each.
            what: Names the work in errors.

        Raises:
            Exception: On the rank whose function raised, what it raised; on the others an error of
                the same type of Python's that says so.
        """
        mine: Mine | _Raised
        raised: BaseException | None = None
        try:
            mine = local()
        except BaseException as error:
            raised, mine = error, self._report(error)
        gathered = self._gather(mine, what)
        replies: list[Reply | _Raised] = []
        if gathered is not None:
            reports = [each for each in gathered if isinstance(each, _Raised)]
            if not reports:
                try:
                    replies = [*joint(cast(list[Mine], gathered))]
                except BaseException as error:
                    raised, reports = error, [self._report(error)]
            if reports:
                replies = [reports[0]] * self.size
        reply = self._scatter(replies, what)
        if raised is not None:
            raise raised
        if isinstance(reply, _Raised):
            raise reply.kind(f"rank {reply.rank} cannot {what}: {reply.text}")
        return reply

    def agree(self, local: Callable[[], Mine], what: str) -> Mine:
        """Return what a function returns here; raise on every rank what it raises on one.

        Raises:
            Exception: As `together`.
        """
        result: list[Mine] = []
        self.together(lambda: result.append(local()), lambda nothing: nothing, what)
        return result[0]

    def _report(self, error: BaseException) -> _Raised:
        kind = next((kind for kind in _KINDS if isinstance(error, kind)), RuntimeError)
        named = "" if type(error) is kind else f"{type(error).__name__}: "
        return _Raised(self.rank, kind, f"{named}{error}")

    def _gather(self, value: Mine, what: str) -> list[Mine] | None:
        """Return the values of all ranks, on rank 0."""
        if self._group is None:
            return [value]
        gathered: list[Any] | None = [None] * self.size if self.rank == 0 else None
        with waiting_for(f"the agreement of ranks to {what}", self._group):
            dist.gather_object(value, gathered, group=self._group, group_dst=0)
        return gathered

    def _scatter(self, values: list[Mine], what: str) -> Mine:
        """Return this rank's element of rank 0's list."""
        if self._group is None:
            return values[0]
        mine: list[Any] = [None]
        with waiting_for(f"the agreement of ranks to {what}", self._group):
            dist.scatter_object_list(
                mine, values if self.rank == 0 else None, group=self._group, group_src=0
            )
        return cast(Mine, mine[0])


_made: list[tuple[dist.ProcessGroup, dist.ProcessGroup]] = []  # default group, ours; one at most


def _own_group(default: dist.ProcessGroup) -> dist.ProcessGroup:
    """Return a group of all ranks over gloo that nothing else uses; the first call makes it."""
    if not _made or _made[0][0] is not default:
        ours = dist.new_group(backend="gloo", group_desc="checkpoints")
        share_timeout(cast(dist.ProcessGroup, ours), default)
        _made[:] = [(default, cast(dist.ProcessGroup, ours))]
    return _made[0][1]
