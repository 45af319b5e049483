"""Run a script of examples/ on the ranks of the pool, as torchrun does in processes of its own."""

import contextlib
import io
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist

from ranks import run_ranks

EXAMPLES = Path(__file__).parents[2] / "examples"


def on_rank(script: str, arguments: list[str], prepare: Callable[..., None]) -> tuple[object, str]:
    """The script's exit code and what it printed. The rank's group is the one that it joins."""
    printed = io.StringIO()
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as stack:
        for name in ("RANK", "LOCAL_RANK"):
            patch.setenv(name, rank)
        for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
            patch.setenv(name, size)
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        patch.setattr(sys, "argv", [script, *arguments])
        patch.syspath_prepend(str(EXAMPLES))
        patch.setattr(dist, "is_torchelastic_launched", lambda: True)
        patch.setattr(dist, "init_process_group", lambda backend: None)
        patch.setattr(dist, "destroy_process_group", lambda: None)
        prepare(patch)
        for redirect in (contextlib.redirect_stdout, contextlib.redirect_stderr):
            stack.enter_context(redirect(printed))
        try:
            runpy.run_path(str(EXAMPLES / script), run_name="__main__")
        except SystemExit as end:
            return end.code, printed.getvalue()
    return 0, printed.getvalue()


def run_script(
    script: str, ranks: int, *arguments: object, prepare: Callable[..., None] = lambda patch: None
) -> tuple[object, str]:
    """Rank 0's exit code and output; `prepare` may patch what the script imports."""
    return run_ranks(on_rank, ranks, script, list(map(str, arguments)), prepare, timeout=240)[0]
