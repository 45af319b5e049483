"""What every reduction proves beside its average: that ranks gathered alike, and update alike.

May touch: the last columns of gradient slots, small tensors; communicates to name what differs.

[Note: proofs in reductions]
Two numbers below 256 ride at the end of each gradient slot: one follows from the order of all
gathers before this backward, the other from what optimizers were told in all steps before it
(learning rates, betas, momentum, decay, how often). Each is written as its 8 bits, and in 8 further
columns as the opposite of each bit. Where ranks agree, the columns that a rank left 0 are exactly 0
after the sum over ranks, in whatever dtype and order it is taken; where they do not, one of these
is positive on every rank. So all ranks find it, in the same reduction.

On the CPU the host reads this at once, before an optimizer sees a gradient. Elsewhere that would
wait for the device: what was found in a backward is copied to pinned memory at its end, and read
when the next forward or backward begins, one step later, where all ranks raise. Both run the same
code up to the reading (`Proofs.host_devices`).
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sharding.transport.agreement import check_same_on_all_ranks

_BITS = 8
NUMEL = 4 * _BITS  # of the columns in a slot
_LOG = "_update_log"  # on sharded parameters

Numbers = tuple[int, int]  # of gathers, of updates


class UpdateLog:
    """What optimizers were told in their steps on the parameters of a bucket, as a number.

    Attributes:
        number: Follows from all of it.
    """

    def __init__(self) -> None:
        self.number = 0
        self._updates = 0
        self._last: deque[str] = deque(maxlen=3)

    def record(self, text: str, encoded: bytes) -> None:
        """Note one step; `encoded` is `text` as bytes."""
        self.number = zlib.crc32(encoded, self.number + 1)
        self._updates += 1
        self._last.append(text)

    def describe(self) -> str:
        """Return the last steps, a line for each group of the optimizer."""
        first = self._updates - len(self._last) + 1
        return "\n".join(
            f"update {first + i} of this bucket, {line}"
            for i, text in enumerate(self._last)
            for line in text.splitlines()
        )


def attach_log(parameter: Tensor, log: UpdateLog) -> None:
    """Have `logs_of` find the log of a sharded parameter."""
    parameter.__dict__[_LOG] = log


def logs_of(parameters: Iterable[Tensor]) -> list[UpdateLog]:
    """Return the logs of the buckets that sharded parameters are in, each once."""
    found = (parameter.__dict__.get(_LOG) for parameter in parameters)
    return list(dict.fromkeys(log for log in found if log is not None))


def record_update(
    name: str, groups: Sequence[Mapping[str, Any]], logs: Sequence[UpdateLog]
) -> None:
    """Note in `logs` what an optimizer is told in a step: the numbers in its groups."""
    if not logs:
        return
    text = "\n".join(f"{name} group {g}: {_numbers_in(group)}" for g, group in enumerate(groups))
    encoded = text.encode()
    for log in logs:
        log.record(text, encoded)


_NUMBERS = (float, int, bool, type(None))


def _numbers_in(group: Mapping[str, Any]) -> str:
    found = []
    for key, value in group.items():
        if isinstance(value, Tensor) and value.device.type == "cpu" and value.numel() == 1:
            found.append(f"{key}={value.item()}")  # elsewhere reading one would wait
        elif type(value) in _NUMBERS:
            found.append(f"{key}={value}")
        elif type(value) in (tuple, list) and all(type(each) in _NUMBERS for each in value):
            found.append(f"{key}={tuple(value)}")
    return " ".join(found)


@lru_cache(maxsize=8)
def _patterns(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return (256, 16), each number's bits and their opposites; made once, for copying it would
    wait."""
    numbers = torch.arange(1 << _BITS, device="cpu").unsqueeze(1)
    bits = (numbers >> torch.arange(_BITS, device="cpu")) & 1
    return torch.cat((bits, 1 - bits), dim=1).to(device, dtype)


@lru_cache(maxsize=64)
def columns(numbers: Numbers, dtype: torch.dtype, device: torch.device, seen: int = 0) -> Tensor:
    """Return what a rank writes: (seen + NUMEL,), 0 or 1, the first `seen` all 1."""
    patterns = _patterns(dtype, device)
    ones = torch.ones(seen, dtype=dtype, device=device)
    return torch.cat([ones, *(patterns[number] for number in numbers)])


def _left_zero(several: Sequence[Numbers], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return 1 in the columns that a rank left 0 in all of several reductions."""
    top = (1 << _BITS) - 1
    rows = [columns((top - a, top - b), dtype, device) for a, b in several]
    return rows[0] if len(rows) == 1 else torch.stack(rows).prod(0)


@dataclass(frozen=True, slots=True)
class _Found:
    """What a reduction proved: the sums in columns that this rank left 0, and whose they are."""

    sums: Tensor  # (NUMEL,), all 0 where ranks agree
    what: str
    groups: Sequence[dist.ProcessGroup]
    log: UpdateLog


class Proofs:
    """The proofs of the buckets of one root. See [Note: proofs in reductions].

    Attributes:
        gathers: A number that follows from the order in which this rank gathered buckets so far.
        host_devices: Device types whose sums the host reads at once.
    """

    def __init__(self) -> None:
        self.gathers = 0
        self.host_devices = frozenset({"cpu"})
        self._found: list[_Found] = []  # in this backward
        self._unread: tuple[Tensor, torch.Event | None, list[_Found]] | None = None

    def record_gather(self, tag: int) -> None:
        """Note that the bucket of this tag was gathered."""
        self.gathers = (self.gathers * 31 + tag) % 251

    def check(
        self,
        sums: Tensor,
        numbers: Sequence[Numbers],
        what: str,
        groups: Sequence[dist.ProcessGroup],
        log: UpdateLog,
    ) -> None:
        """Read what a reduction proved, or keep it to be read a step later.

        Args:
            sums: (NUMEL,), the columns after the sum over ranks.
            numbers: What this rank wrote into each of the reductions that were summed.
            what: Names the reduction.
            groups: Of the ranks that took part.
            log: Of the bucket.

        Raises:
            RuntimeError: Ranks differ, on all of them.
        """
        left_zero = _left_zero(numbers, sums.dtype, sums.device)
        if sums.device.type not in self.host_devices:
            self._found.append(_Found(sums * left_zero, what, groups, log))
        elif torch.dot(sums, left_zero):
            _raise_for(_Found(sums * left_zero, what, groups, log))

    def send(self) -> None:
        """Start the way of what this backward found to the host."""
        found, self._found = self._found, []
        if not found:
            return
        self.settle()
        sums = torch.stack([each.sums.float() for each in found])
        event = None
        if sums.device.type != "cpu":
            host = sums.to("cpu", non_blocking=True)  # pinned
            event = torch.accelerator.current_stream(sums.device).record_event()
        else:
            host = sums
        self._unread = host, event, found

    def settle(self) -> None:
        """Read what the last backward found, where the host has not read it yet.

        Raises:
            RuntimeError: Ranks differed in it, on all of them.
        """
        if self._unread is None:
            return
        host, event, found = self._unread
        self._unread = None
        if event is not None:
            event.synchronize()  # of a step ago: passed long since
        if host.any():
            first = int(host.any(1).nonzero()[0])
            _raise_for(replace(found[first], sums=host[first]))


def _raise_for(found: _Found) -> None:
    """Name what differs. Only updates are compared by a collective: ranks are at the same place."""
    if found.sums[: 2 * _BITS].any():
        raise RuntimeError(
            f"ranks gathered buckets in different orders before {found.what}, so they computed "
            f"with each other's parameters; every rank must run the same modules in the same "
            f"order (VFSDP_DEBUG=1 names the first difference)"
        )
    check_same_on_all_ranks(found.log.describe(), found.groups, "what steered the last updates")
    raise RuntimeError(
        f"ranks updated their parameters in different ways some steps before {found.what}; every "
        f"rank must call optimizer.step() as often, with the same learning rates and options"
    )
