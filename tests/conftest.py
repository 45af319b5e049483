"""What all tests share: hypothesis profiles, one thread, seconds per directory."""

import os
from collections import defaultdict
from collections.abc import Iterable
from pathlib import PurePosixPath

import pytest
import torch
from hypothesis import HealthCheck, settings

import ranks

PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "ci")

# "ci" draws the same examples everywhere. Speed is not judged: machines are shared.
settings.register_profile(
    "ci",
    max_examples=20,
    derandomize=True,
    database=None,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("dev", settings.get_profile("ci"), max_examples=50, derandomize=False)
settings.register_profile("deep", settings.get_profile("dev"), max_examples=2000)
settings.load_profile(PROFILE)

# As on the ranks: sums of the unsharded run may depend on the number of threads.
torch.set_num_threads(1)


def pytest_sessionfinish() -> None:
    """End the ranks before pytest reports, so that a hang of theirs is seen here."""
    ranks.close()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print how long the tests of each directory took."""
    reports = [report for group in terminalreporter.stats.values() for report in group]
    for directory, seconds in sorted(seconds_by_directory(reports).items()):
        terminalreporter.write_line(f"{seconds:8.1f} s  {directory}")


def seconds_by_directory(reports: Iterable[object]) -> dict[str, float]:
    """Sum setup, call and teardown of the reports that carry a duration."""
    seconds: dict[str, float] = defaultdict(float)
    for report in reports:
        if isinstance(report, pytest.TestReport):
            path = PurePosixPath(report.nodeid.split("::")[0])
            seconds[str(path.parent)] += report.duration
    return dict(seconds)
