"""Planted faults: each is reported on every rank that lives, and none hangs."""

import os
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ranks import RankError, run_ranks
from sharding import fully_shard
from small_models import Parallel
from vfsdp_optim import Muon, QKHeads, param_groups


class Two(nn.Module):
    """Two layers; the width between them is part of the plan."""

    def __init__(self, width: int = 20) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(20, width), nn.Linear(width, 20)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


def plan_of_one_rank_differs() -> None:
    model = Two(width=20 if dist.get_rank() != 1 else 24)
    fully_shard(model)
    model(torch.ones(2, 20))


def weights_of_one_rank_differ() -> None:
    torch.manual_seed(0)
    model = Two()
    with torch.no_grad():
        model.second.bias[3] += 1e-6 * (dist.get_rank() == 1)
    fully_shard(model)
    model(torch.ones(2, 20))


def order_of_one_rank_differs() -> None:
    torch.manual_seed(0)
    model = Parallel(backwards=dist.get_rank() == 1)
    fully_shard(model.a)
    fully_shard(model.b)
    fully_shard(model)
    model(torch.ones(2, 20)).sum().backward()


def heads_of_one_rank_differ() -> None:
    torch.manual_seed(0)
    optimizer = Muon(param_groups(fully_shard(Two())))
    heads = QKHeads("first.weight", heads=2, head_dim=2 + dist.get_rank())
    optimizer.qk_clip({heads: torch.zeros(2)})


def in_debug_mode(function_name: str) -> None:
    """Runs a function of this file with the checks on."""
    os.environ["VFSDP_DEBUG"] = "1"
    try:
        globals()[function_name]()
    finally:
        del os.environ["VFSDP_DEBUG"]


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (weights_of_one_rank_differ, ["second.bias", "ranks 0 and 1"]),
        (order_of_one_rank_differs, ["order of collectives", "'a'", "'b'"]),
        (heads_of_one_rank_differ, ["order of collectives", "head_dim=2", "head_dim=3"]),
    ],
)
def test_debug_mode_reports_it_on_every_rank(fault: Callable[[], None], words: list[str]) -> None:
    """Megatron-LM#2218: collectives in the order of a set, another on each rank, hung at times."""
    with pytest.raises(RankError) as error:
        run_ranks(in_debug_mode, 3, fault.__name__, timeout=30)
    assert len(error.value.reports) == 3
    for report in error.value.reports.values():
        assert report.startswith("raised RuntimeError")
        assert all(word in report for word in words), report


def test_ranks_that_swap_equal_buckets_raise_before_a_gradient_is_seen() -> None:
    """Collectives match by order: two ranks that gather equal layers in other orders swap them."""
    with pytest.raises(RankError) as error:
        run_ranks(order_of_one_rank_differs, 2, timeout=30)
    assert len(error.value.reports) == 2
    for report in error.value.reports.values():
        assert "in different orders" in report
        assert "VFSDP_DEBUG=1" in report


def test_plan_that_differs_on_one_rank_is_named_on_every_rank() -> None:
    with pytest.raises(RankError) as error:
        run_ranks(plan_of_one_rank_differs, 3, timeout=30)
    assert len(error.value.reports) == 3
    for report in error.value.reports.values():
        assert "the sharding plan differs between ranks 0 and 1" in report
        assert "first.weight" in report


def equal_ranks_in_debug_mode() -> float:
    os.environ["VFSDP_DEBUG"] = "1"
    try:
        torch.manual_seed(0)
        model = Parallel(backwards=False)
        fully_shard(model.a)
        fully_shard(model.b)
        fully_shard(model)
        for _ in range(2):
            model(torch.ones(2, 20)).sum().backward()
        return model.a.weight.grad.to_local().sum().item()
    finally:
        del os.environ["VFSDP_DEBUG"]


def test_debug_mode_is_silent_when_ranks_agree() -> None:
    assert len(run_ranks(equal_ranks_in_debug_mode, 2)) == 2


def one_rank_dies() -> None:
    torch.manual_seed(0)
    model = Two()
    fully_shard(model)
    for step in range(3):
        if step == 2 and dist.get_rank() == 1:
            os._exit(3)
        model(torch.ones(2, 20)).sum().backward()


def test_peers_of_a_dead_rank_say_which_collective_failed() -> None:
    with pytest.raises(RankError) as error:
        run_ranks(one_rank_dies, 3, timeout=30)
    assert "died with exit code 3" in error.value.reports[1]
    peers = [error.value.reports[rank] for rank in (0, 2)]
    assert any("of bucket '' did not complete" in report for report in peers), peers
