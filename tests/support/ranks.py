"""The rank pool that all tests share, examples for tests that use it, and what ranks call."""

from collections.abc import Callable
from typing import Any, TypeVar

from hypothesis import settings
from torch.profiler import ProfilerActivity, profile

from vfsdp_optim.testing.pool import RankError, RankPool, close, run_ranks

__all__ = ["RankError", "RankPool", "close", "collectives", "distributed_examples", "run_ranks"]

Test = TypeVar("Test", bound=Callable[..., Any])


def distributed_examples(test: Test) -> Test:
    """Decorate a hypothesis test whose examples run on ranks: a quarter of the usual number.

    Draw in the test and send the drawn case to `run_ranks`; never use ``@given`` inside a rank.
    """
    return settings(max_examples=settings.default.max_examples // 4)(test)


def collectives(function: Callable[[], Any]) -> list[str]:
    """Names of the process group's calls, in order. Sizes of uneven exchanges differ by rank."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        function()
    events = [e for e in profiler.events() if e.name.startswith("c10d::")]
    return [e.name for e in sorted(events, key=lambda e: e.time_range.start)]
