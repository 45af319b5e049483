"""Modules of unusual kinds, and unusual ways to call them, against one process on the same batch.

The models are in `kinds_of_modules.py`, the calls in `ways_to_call.py`.
"""

from functools import cache

import pytest
import torch
from kinds_of_modules import KINDS
from lifecycle import train
from torch import Tensor
from ways_to_call import WAYS

from ranks import run_ranks

CASES = {case.__name__: case for case in (*KINDS, *WAYS)}


def train_case(name: str) -> tuple[list[float], dict[str, Tensor]]:
    return train(CASES[name]())


@cache
def one_process(name: str) -> tuple[list[float], dict[str, Tensor]]:
    return train_case(name)


def assert_trains_as_one_process(name: str, world_size: int) -> None:
    expected_losses, expected_weights = one_process(name)
    assert expected_losses[0] != expected_losses[-1]
    for losses, weights in run_ranks(train_case, world_size, name):
        # fp32 sums in another order, carried through a few steps of SGD.
        assert losses == pytest.approx(expected_losses, abs=1e-5, rel=1e-6)
        assert weights.keys() == expected_weights.keys()
        for key, weight in weights.items():
            torch.testing.assert_close(weight, expected_weights[key], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("name", CASES)
def test_lifecycle_equals_one_process(name: str, world_size: int) -> None:
    assert_trains_as_one_process(name, world_size)


@pytest.mark.parametrize("world_size", [1, 5])
@pytest.mark.parametrize("name", ["SmallBuckets", "ThreeLevels", "SyncOfSome", "BackwardRaises"])
def test_lifecycle_equals_one_process_on_one_and_on_five_ranks(name: str, world_size: int) -> None:
    assert_trains_as_one_process(name, world_size)
