"""The page on checkpoints: its code runs as it stands, from the start and after a stop."""

import re
from pathlib import Path
from typing import Any

import torch

from ranks import run_ranks
from small_models import build, full_gradients, make_optimizer, set_gradients, shard, weights_of

PAGE = (Path(__file__).parents[2] / "docs" / "checkpoints.md").read_text()
(CODE,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def run_page(folder: Path, steps: int) -> tuple[dict[str, Any], list[int], float]:
    model = shard(build())
    optimizer = make_optimizer("adamw", model)
    positions = []

    def train_one_step(position: int) -> None:
        positions.append(position)
        set_gradients(model.parameters(), full_gradients(model.parameters(), position))
        optimizer.step()
        scheduler.step()
        torch.rand(())

    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    exec(CODE, {**locals(), "torch": torch})
    return weights_of(model), positions, torch.rand(()).item()


def test_page_starts_and_goes_on_bitwise(tmp_path: Path) -> None:
    straight = run_ranks(run_page, 2, tmp_path / "straight", 4)
    run_ranks(run_page, 2, tmp_path / "stopped", 2)
    for one, other in zip(straight, run_ranks(run_page, 2, tmp_path / "stopped", 4), strict=True):
        assert (one[1], other[1]) == ([0, 1, 2, 3], [2, 3])
        assert all(torch.equal(one[0][name], other[0][name]) for name in one[0])
        assert one[2] == other[2]
