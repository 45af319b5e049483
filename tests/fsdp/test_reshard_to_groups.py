"""`reshard_after_forward=n`: groups of n ranks hold what was gathered until backward."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.checkpoint import checkpoint

from ranks import collectives, on_ranks
from sharding import fully_shard
from sharding.fsdp.module_state import state_of
from training import mesh_of

WIDTH = 12


class Layer(nn.Module):
    """Writes its weight in forward, as averages of code books do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.writes = False

    def forward(self, x: Tensor) -> Tensor:
        if self.writes:
            with torch.no_grad():
                self.outer.bias.mul_(0.9)
        return x + self.outer(torch.tanh(self.inner(x)))


class Net(nn.Module):
    """Three layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.checkpoints = False

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpoints else layer(x)
        return x


def sharded(reshard: object, **options: Any) -> Net:
    torch.manual_seed(0)
    net = Net()
    for layer in net.layers:
        fully_shard(layer, reshard_after_forward=reshard, **options)
    return fully_shard(net, reshard_after_forward=reshard, **options)


def trained(net: Net, how: str) -> list[Tensor]:
    """What is left after a few steps: the losses and the weights."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    net.checkpoints = how == "checkpoints"
    for layer in net.layers:
        layer.writes = how == "writes" and layer is not net.layers[1]
    found = []
    for step in range(4):
        x = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(step))
        if how == "forwards without backward":
            net(x)
            with torch.no_grad():
                net(x)
                for parameter in net.parameters():
                    parameter.mul_(0.99)
        if how == "kept between micro-batches":
            net.set_reshard_after_backward(step % 2 == 1)
        if how == "changes" and step == 2:
            net.set_reshard_after_forward(False)
        loss = (net(x) + net(x)).square().mean() if how == "twice" else net(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach())
    return found + [p.full_tensor() for p in net.parameters()]


WAYS = (
    "plain",
    "checkpoints",
    "writes",
    "forwards without backward",
    "kept between micro-batches",
    "changes",
    "twice",
)


def compared() -> None:
    for how in WAYS:
        expected = trained(sharded(True), how)
        for options in ({}, {"mesh": mesh_of((1, 4))}) if how == "plain" else ({},):
            found = trained(sharded(2, **options), how)
            for each, right in zip(found, expected, strict=True):
                assert torch.equal(each, right), (how, options)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    pairs = zip(
        trained(sharded(2, mp_policy=policy), "plain"),
        trained(sharded(True, mp_policy=policy), "plain"),
        strict=True,
    )
    assert all(torch.equal(a, b) for a, b in pairs)


def gathers() -> None:
    """Over gloo a gather is a send to each of the others."""
    sent = {}
    for reshard in (True, 2):
        net, x = sharded(reshard), torch.ones(2, WIDTH)
        net(x).sum().backward()
        output: list[Tensor] = []
        forward = collectives(lambda: output.append(net(x)))  # noqa: B023
        held = [state_of(layer).bucket._held for layer in net.layers]
        parts = [sum(part.numel() for part in each._parts) for each in held]
        backward = collectives(lambda: output[0].sum().backward())  # noqa: B023
        sent[reshard] = [sum("send" in name for name in names) for names in (forward, backward)]
        whole = [sum(b.unsharded.numel() for b in state_of(m).bucket.buffers) for m in net.layers]
        assert parts == [numel // 2 if reshard == 2 else 0 for numel in whole]
        assert not any(held)
    assert sent == {True: [9, 9], 2: [9, 3]}


def errors() -> None:
    """The texts of torch, whose users look for them; 1 and the number of ranks are a bool."""
    for given in (3, 0, -2, 8):
        text = (
            f"If passing reshard_after_forward as an int, it should be a factor of 4, not {given}"
        )
        with pytest.raises(ValueError, match=text):
            sharded(given)
    for given in (1.5, "2"):
        with pytest.raises(ValueError, match="should be a bool or an int representing the group"):
            sharded(given)
    with pytest.raises(ValueError, match="must be a bool, got 2"):
        sharded(True).set_reshard_after_forward(2)
    for given, same in ((1, False), (4, True), (2, 2), (False, False), (None, None)):
        found = state_of(sharded(given).layers[0]).reshard_after_forward
        assert (type(found), found) == (type(same), same)


@on_ranks(4)
def test_groups_that_hold_weights_train_as_if_they_were_resharded() -> None:
    """Backward reads what forward wrote, and gathers within the group alone."""
    compared()
    gathers()
    errors()
