"""examples/from_fsdp2: few lines change, and the losses are those of FSDP2, resumed ones too."""

from difflib import unified_diff
from pathlib import Path

import pytest

from examples.from_fsdp2 import after, before
from ranks import run_ranks


def losses_of_both(folder: str) -> dict[str, list[float]]:
    """Both from the start, and both from what the old script saved after 6 steps."""
    return {
        "before": before.train(folder, steps=6),
        "after": after.train(steps=6),
        "before, resumed": before.train(folder, steps=6),
        "after, resumed": after.train(folder, steps=6),
    }


def test_converted_script_trains_as_before_also_from_its_old_checkpoint(tmp_path: Path) -> None:
    for losses in run_ranks(losses_of_both, 2, str(tmp_path / "step")):
        # FSDP2 and ours sum gradients and squares in other orders: last bits of fp32.
        for end in ("", ", resumed"):
            assert losses["after" + end] == pytest.approx(losses["before" + end], rel=1e-4)
        assert losses["after, resumed"][0] < losses["after"][-1] < losses["after"][0]


def test_conversion_changes_few_lines() -> None:
    texts = [Path(module.__file__).read_text().splitlines()[1:] for module in (before, after)]
    changed = [line for line in unified_diff(*texts, n=0) if line[0] == "+"]
    assert 1 < len(changed) - 1 <= 10  # one is of the heading
