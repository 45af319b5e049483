"""A pytest plugin: the fixture `rank_pool`. Imports neither torch nor hypothesis until it is used.

Installed as the top-level package `pytest_vfsdp`: importing anything below `vfsdp_optim` would
import torch into every pytest session of the environment.
"""

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from vfsdp_optim.testing.pool import RankPool

__all__ = ["rank_pool"]


@pytest.fixture(scope="session")
def rank_pool() -> Iterator["RankPool"]:
    """Yield ranks for the tests of this session; see `vfsdp_optim.testing.RankPool`."""
    from vfsdp_optim.testing.pool import RankPool

    with RankPool() as pool:
        yield pool


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish() -> None:
    """End the ranks of `run_ranks` and of the assertions before pytest reports."""
    pool = sys.modules.get("vfsdp_optim.testing.pool")
    if pool is not None:
        pool.close()
