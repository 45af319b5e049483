"""What is printed of the first steps: RMS of each group's updates, on any sharding."""

import re

import pytest
import torch
from torch import nn

from tests.support.ranks import run_ranks
from tests.support.small_models import VOCAB, build, shard
from vfsdp_optim import Muon, param_groups
from vfsdp_optim.update_rms import print_update_rms

MUON = dict(lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")


def _lines(is_sharded: bool) -> tuple[list[str], list[float]]:
    """Three steps of which two are printed; also what the weights moved by in the first."""
    model = build()
    if is_sharded:
        shard(model)
    optimizer = Muon(param_groups(model, adamw=dict(lr=3e-3)), **MUON)
    lines: list[str] = []
    print_update_rms(optimizer, steps=2, write=lines.append)
    moved: list[float] = []
    for _ in range(3):
        torch.manual_seed(1)
        model(torch.randint(VOCAB, (2, 5))).sum().backward()
        groups = optimizer.param_groups
        before = [[_full(p).clone() for p in group["params"]] for group in groups]
        optimizer.step()
        for group, old in zip(groups, before, strict=True):
            change = [(_full(p) - w).flatten() for p, w in zip(group["params"], old, strict=True)]
            moved.append(torch.cat(change).square().mean().sqrt().item())
    return lines, moved


def _full(param: torch.Tensor) -> torch.Tensor:
    param = param.detach()
    return param.full_tensor() if hasattr(param, "full_tensor") else param


def test_first_steps_print_what_the_whole_weights_of_each_group_move_by() -> None:
    lines, moved = _lines(is_sharded=False)
    groups = len(moved) // 3
    assert len(lines) == 2 * groups > 2
    assert _numbers(lines) == pytest.approx(moved[: 2 * groups], rel=6e-3)
    (on_ranks, of_whole), *others = run_ranks(_lines, 3, True)
    assert _numbers(on_ranks) == pytest.approx(of_whole[: 2 * groups], rel=6e-3)
    assert of_whole == pytest.approx(moved, rel=1e-3)
    assert not any(printed for printed, _ in others)


def _numbers(lines: list[str]) -> list[float]:
    pattern = r"step \d, group \d \((?:muon|adamw)\), .*: updates have RMS (\S+), \S+ of lr \S+"
    return [float(re.fullmatch(pattern, line)[1]) for line in lines]


def test_optimizers_of_torch_and_bad_numbers_of_steps() -> None:
    weight = nn.Parameter(torch.zeros(4))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    lines: list[str] = []
    stop = print_update_rms(optimizer, write=lines.append)
    weight.grad = torch.full((4,), 2.0)
    optimizer.step()
    stop()
    optimizer.step()
    assert lines == ["step 1, group 0: updates have RMS 1, 2 of lr 0.5"]
    with pytest.raises(ValueError, match=r"^steps: expected at least 1, got 0$"):
        print_update_rms(optimizer, steps=0)
