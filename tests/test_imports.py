"""What `import vfsdp_optim` says where it cannot work, and what it does without."""

import os
import subprocess
import sys
from pathlib import Path

_ROOT = Path(__file__).parents[1]


def _python(code: str, folder: Path) -> str:
    """What a process writes to stderr at last; modules of the folder come first."""
    path = os.pathsep.join([str(folder), str(_ROOT)])
    command = [sys.executable, "-c", code]
    found = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": path}, cwd=folder, capture_output=True, text=True
    )
    return found.stderr.strip().rpartition("\n")[2]


def test_module_of_the_user_that_hides_ours_is_named(tmp_path: Path) -> None:
    theirs = tmp_path / "sharding.py"
    theirs.write_text("def shard(x): return x\n")
    assert _python("import vfsdp_optim", tmp_path) == (
        f"ImportError: vfsdp_optim: expected its own package `sharding`, got {theirs}, which hides "
        "it; rename that module, or start Python where it is not the first on sys.path"
    )
    theirs.write_text("import of_theirs\n")
    missing = "ModuleNotFoundError: No module named 'of_theirs'"
    assert _python("import vfsdp_optim", tmp_path) == missing


def test_bitsandbytes_is_not_imported_with_the_package(tmp_path: Path) -> None:
    code = "import vfsdp_optim, sys; sys.exit(str('bitsandbytes' in sys.modules))"
    assert _python(code, tmp_path) == "False"
