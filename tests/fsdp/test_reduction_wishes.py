"""Divide factors, sums in place of averages, and hooks on reduced gradients."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import sharding.transport.collectives as collectives_of_sharding
from ranks import RankError, on_ranks, run_ranks
from sharding import fully_shard
from sharding.fsdp.module_state import state_of
from training import mesh_of


class Net(nn.Module):
    """Two buckets; gradients are the inputs, so that they are known."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(300, 2, bias=False), nn.Linear(300, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).sum() + self.outer(x).sum()


def sharded(mesh: Any) -> Net:
    torch.manual_seed(0)
    net = Net()
    fully_shard(net.inner, mesh=mesh)
    return fully_shard(net, mesh=mesh)


def gradients(net: Net, batches: int = 1) -> list[Tensor]:
    """Of `batches` backwards, which add up."""
    for i in range(batches):
        net(torch.arange(300.0)[None] + 10 * dist.get_rank() + i).backward()
    found = [p.grad.full_tensor().clone() for p in (net.inner.weight, net.outer.weight)]
    net.zero_grad()
    return found


def check(mesh: Any) -> None:
    net, seen = sharded(mesh), []
    inner, outer = gradients(net, 2)
    for factor in (8.0, 1, 4):
        net.inner.set_gradient_divide_factor(factor)
        found, other = gradients(net, 2)
        torch.testing.assert_close(found, inner * (4 / factor))
        torch.testing.assert_close(other, outer)
    net.set_force_sum_reduction_for_comms(True)
    net.inner.set_force_sum_reduction_for_comms(True)
    for found, expected in zip(gradients(net, 2), (inner, outer), strict=True):
        torch.testing.assert_close(found, expected)

    def hook(reduced: Tensor) -> None:
        seen.append(reduced.clone())
        reduced.mul_(3)

    net.set_all_reduce_hook(hook)
    found, other = gradients(net, 2)
    torch.testing.assert_close((found, other), (inner, outer * 3))
    (buffer,) = state_of(net).bucket.buffers
    low, high = buffer.local_ranges[0]
    total = sum(each[low:high] for each in seen)
    torch.testing.assert_close(total * 3, other.view(-1)[slice(*net.outer.weight.bounds)])
    assert [each.shape for each in seen] == [buffer.shard.shape] * 2
    net.set_all_reduce_hook(None)
    torch.testing.assert_close(gradients(net, 2)[1], outer)


@on_ranks(4)
def test_factors_sums_and_hooks_act_on_the_gradients_of_their_bucket() -> None:
    """Also beside gradients that are there already, within and across replicas."""
    for mesh in (None, mesh_of((2, 2))):
        check(mesh)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(collectives_of_sharding, "PAIRWISE_MAX_RANKS", 0)
            check(mesh)
    for wrong in (0, -1, True, "2", float("nan")):
        with pytest.raises(ValueError, match="set_gradient_divide_factor: expected a positive nu"):
            sharded(None).set_gradient_divide_factor(wrong)


def another_factor() -> None:
    net = sharded(None)
    net.set_gradient_divide_factor(1.0 + dist.get_rank())
    gradients(net)


def test_another_factor_on_one_rank_raises_on_all() -> None:
    with pytest.raises(RankError, match=r"gradients divided by 2\.0") as error:
        run_ranks(another_factor, 2)
    assert len(error.value.reports) == 2


class Event:
    """Counts who waited for it."""

    waited = 0

    def wait(self) -> None:
        self.waited += 1


@on_ranks(2)
def test_the_next_forward_waits_for_the_event_after_the_optimizer():
    net, event, found = sharded(None), Event(), []
    net.set_post_optim_event(event)
    for _ in range(2):
        net(torch.ones(1, 300))
        found.append(event.waited)
    assert found == [1, 1]


@on_ranks(3)
def test_factor_of_one_gives_the_bits_of_the_sum_on_three_ranks() -> None:
    """Of one gradient and zeros: scaled by 3 and averaged, a third of its elements would differ."""
    net = sharded(None)
    x = torch.randn(1, 300, generator=torch.Generator().manual_seed(0))
    for module in (net, net.inner):
        module.set_gradient_divide_factor(1)
    (net(x) * (dist.get_rank() == 0)).backward()
    expected = x.expand(net.outer.weight.shape[0], -1)
    assert torch.equal(net.outer.weight.grad.full_tensor(), expected)
