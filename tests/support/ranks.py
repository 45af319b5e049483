"""The rank pool that all tests share, examples for tests that use it, and what ranks call."""

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed as dist
from hypothesis import settings
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile

from sharding.transport.collectives import Transport
from vfsdp_optim.testing.pool import RankError, RankPool, close, run_ranks

__all__ = [
    "RankError",
    "RankPool",
    "assert_as_one_process",
    "close",
    "collectives",
    "distributed_examples",
    "on_ranks",
    "run_ranks",
    "unannounced",
]

Test = TypeVar("Test", bound=Callable[..., Any])


def distributed_examples(test: Test) -> Test:
    """Decorate a hypothesis test whose examples run on ranks: a quarter of the usual number.

    Draw in the test and send the drawn case to `run_ranks`; never use ``@given`` inside a rank.
    """
    return settings(max_examples=settings.default.max_examples // 4)(test)


def on_ranks(*world_sizes: int) -> Callable[[Test], Test]:
    """Decorate a test that every rank runs as it stands, in groups of each of these sizes."""

    def decorate(test: Test) -> Test:
        @functools.wraps(test)
        def run(**arguments: Any) -> Any:
            if dist.is_initialized():  # on a rank, which finds this function by the test's name
                return test(**arguments)
            for world_size in world_sizes:
                run_ranks(functools.partial(run, **arguments), world_size)
            return None

        return run

    return decorate


def assert_as_one_process(
    function: Callable[..., Any], world_sizes: Iterable[int], *args: Any, **close: Any
) -> None:
    """Assert that ranks return what this process does: tensors and numbers, however nested."""
    expected = function(*args)
    for world_size in world_sizes:
        for found in run_ranks(function, world_size, *args):
            torch.testing.assert_close(found, expected, **close)


@contextmanager
def unannounced() -> Iterator[None]:
    """No heralds, as on a device."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Transport, "_announced", lambda *_: None)
        yield


def collectives(function: Callable[[], Any]) -> list[str]:
    """Names of the process group's calls, without what announces them: first those in whose order
    ranks must agree, then the messages with a tag. Sizes of uneven exchanges differ by rank."""
    threads = _ExperimentalConfig(profile_all_threads=True)  # sends have one of their own
    cpu = [ProfilerActivity.CPU]
    with unannounced(), profile(activities=cpu, experimental_config=threads) as profiler:
        function()
    events = [e for e in profiler.events() if e.name.startswith("c10d::")]
    tagged = ("c10d::send", "c10d::recv_")
    return [e.name for e in sorted(events, key=lambda e: (e.name in tagged, e.time_range.start))]
