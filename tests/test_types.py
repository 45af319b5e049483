"""Types as a user's type checker sees them; mypy checks the same script in `make types`."""

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.skipif(
    importlib.util.find_spec("pyright") is None or shutil.which("node") is None,
    reason="needs pyright, and node to run it",
)
def test_pyright_passes_on_a_users_script() -> None:
    command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert (found.returncode, found.stdout) == (0, "0 errors, 0 warnings, 0 informations\n")
