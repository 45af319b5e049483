"""Waits that ended without their peers: what was waited for, and which ranks do not wait too.

May touch: the store of the default process group, once a wait has failed; never before.

[Note: who is missing]
A backend says that a message did not come, not why: a peer may be stopped, gone, in other code, or
itself be waiting for a third. So every rank whose wait fails leaves its name in the store, and for
a second looks for those of its peers: look first at the one that left none, unless it just waits
for another. A thread asks, since a store whose process is stopped never answers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from threading import Thread
from time import monotonic
from typing import Any

import torch
import torch.distributed as dist

_GRACE = 1.0  # seconds for the waits of peers to fail, too
_PATIENCE = 3.0  # seconds to wait for the store
_MOST_RANKS = 64  # of a group that is asked for
_FAILED = "sharding/failed-wait"


class WaitFailed(RuntimeError):
    """A collective of this project did not complete."""


@contextmanager
def waiting_for(what: str, group: dist.ProcessGroup) -> Iterator[None]:
    """Name in the error what a collective of `group` was for, and the ranks that do not wait.

    Args:
        what: Such as "the gather of bucket 'blocks.0'".
        group: The ranks that take part.

    Raises:
        WaitFailed: The backend raised, or timed out.
    """
    try:
        yield
    except WaitFailed:
        raise
    except RuntimeError as error:
        raise failed_wait(what, group, error) from error


def failed_wait(what: str, group: dist.ProcessGroup | None, error: RuntimeError) -> WaitFailed:
    """Return the error of a wait that ended with the backend's own."""
    missing = None if group is None else _missing_ranks(dist.get_process_group_ranks(group))
    return WaitFailed(f"{what} did not complete{_told(missing)}: {error}")


def _told(missing: list[int] | None) -> str:
    if missing is None:
        return ""
    if not missing:
        return "; all ranks wait for one another, so look for what they do in different orders"
    ranks = f"rank {missing[0]}" if len(missing) == 1 else f"ranks {', '.join(map(str, missing))}"
    return f"; {ranks} did not say so too: stopped, gone, in other code or still waiting"


def _missing_ranks(ranks: list[int]) -> list[int] | None:
    """Return the ranks whose own waits have not failed: of `ranks`, or if all of theirs have, of
    the others that these may wait for. None if nobody knows."""
    if len(ranks) > _MOST_RANKS:
        return None
    found: list[list[int]] = []
    asking = Thread(target=_ask, args=(ranks, dist.get_rank(), found), daemon=True)
    asking.start()
    asking.join(_PATIENCE)
    return found[0] if found else None


def _ask(ranks: list[int], own: int, found: list[list[int]]) -> None:
    try:
        # Its own connection: a store that does not answer holds no other caller up.
        store: Any = dist.distributed_c10d._get_default_store()
        store = store.clone()
        store.set(f"{_FAILED}/{own}", "")
        if not _waits(store, own, monotonic() + _GRACE):
            return  # the store went down with its process
        missing: list[int] = []
        others = [rank for rank in range(dist.get_world_size()) if rank not in ranks]
        for each in (ranks, others[:_MOST_RANKS]):
            end = monotonic() + _GRACE
            missing = missing or [rank for rank in each if not _waits(store, rank, end)]
        found.append(missing)
    except (RuntimeError, ValueError, NotImplementedError):
        return


def _waits(store: Any, rank: int, end: float) -> bool:
    try:
        patience = max(end - monotonic(), 0.01)
        store.wait([f"{_FAILED}/{rank}"], timedelta(seconds=patience))
    except RuntimeError:  # each kind of store has an error of its own
        return False
    return True


def timeout_of(group: dist.ProcessGroup, device: torch.device) -> timedelta | None:
    """Return how long a group waits for its peers; None where the backend does not say."""
    return getattr(getattr(group._get_backend(device), "options", None), "_timeout", None)


def share_timeout(group: dist.ProcessGroup, whole: dist.ProcessGroup) -> None:
    """Give a group of a mesh the timeout that the user gave all ranks.

    Those that `init_device_mesh` makes have torch's own of 30 minutes (10 over NCCL), however soon
    the user wants to know that a rank has stopped. One that was set otherwise stays.
    """
    for device in group._device_types:
        given, has = timeout_of(whole, device), timeout_of(group, device)
        defaults = (dist.constants.default_pg_timeout, dist.constants.default_pg_nccl_timeout)
        if given is not None and has is not None and has in defaults and has != given:
            group._get_backend(device)._set_default_timeout(given)
