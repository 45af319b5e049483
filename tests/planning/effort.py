"""How much work something is: calls, which are the same on every machine and however busy it is."""

import cProfile
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")


def calls_of(work: Callable[[], Result]) -> tuple[Result, int]:
    """Return what `work` returns, and how many functions were called for it, builtin ones too."""
    profile = cProfile.Profile()
    result = profile.runcall(work)
    return result, sum(entry.callcount for entry in profile.getstats())
