"""The rank pool that all tests share, and the number of examples for tests that use it."""

from collections.abc import Callable
from typing import Any, TypeVar

from hypothesis import settings

from vfsdp_optim.testing.pool import RankError, RankPool, close, run_ranks

__all__ = ["RankError", "RankPool", "close", "distributed_examples", "run_ranks"]

Test = TypeVar("Test", bound=Callable[..., Any])


def distributed_examples(test: Test) -> Test:
    """Decorate a hypothesis test whose examples run on ranks: a quarter of the usual number.

    Draw in the test and send the drawn case to `run_ranks`; never use ``@given`` inside a rank.
    """
    return settings(max_examples=settings.default.max_examples // 4)(test)
