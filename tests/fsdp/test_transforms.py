"""torch.func and forward-mode AD over the inputs of sharded modules are those of one process.

pytorch#182732: `torch.func.jvp` of a model (as MeanFlow trains) works with FSDP2, and raised here.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
import torch.distributed as dist
from torch import Tensor, nn

from ranks import assert_as_one_process
from sharding import RaggedDTensor, fully_shard

# By torch itself, when it loads the decompositions of forward-mode AD.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")


class Net(nn.Module):
    """A smooth function with second derivatives in its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.frozen = nn.Linear(3, 7), nn.Linear(7, 7).requires_grad_(False)
        self.head = nn.Linear(7, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.sin(self.frozen(torch.tanh(self.block(x)))))


def energy(net: Net) -> Callable[[Tensor], Tensor]:
    return lambda x: net(x).square().sum()


def dual(net: Net, x: Tensor, v: Tensor) -> list[Tensor]:
    with forward_ad.dual_level():
        out = forward_ad.unpack_dual(net(forward_ad.make_dual(x.requires_grad_(), v)))
        return [out.primal, out.tangent]


def before_a_forward(net: Net, x: Tensor, v: Tensor) -> list[Tensor]:
    """The weights are resharded by a later forward, and gathered for the graph of the first."""
    out = torch.func.jvp(net, (x,), (v,))[0]
    return [out, net(x).detach()]


def meanflow(net: Net, x: Tensor, v: Tensor) -> list[Tensor]:
    out, tangent = torch.func.jvp(net, (x,), (v,))
    return [out - tangent.detach(), net(v)]


WAYS: dict[str, Callable[[Net, Tensor, Tensor], Any]] = {
    "jvp": lambda net, x, v: torch.func.jvp(net, (x,), (v,)),
    "meanflow": meanflow,
    "before a forward": before_a_forward,
    "vjp": lambda net, x, v: torch.func.vjp(net, x)[1](v[:, :2])[0],
    "grad": lambda net, x, v: torch.func.grad(energy(net))(x),
    "grad and value": lambda net, x, v: torch.func.grad_and_value(energy(net))(x),
    "vmap": lambda net, x, v: torch.func.vmap(net)(x),
    "gradients per sample": lambda net, x, v: torch.func.vmap(torch.func.grad(energy(net)))(x),
    "jacrev": lambda net, x, v: torch.func.jacrev(net)(x),
    "jacfwd": lambda net, x, v: torch.func.jacfwd(net)(x),
    "hessian": lambda net, x, v: torch.func.hessian(energy(net))(x),
    "dual": dual,
    "functional jacobian": lambda net, x, v: torch.autograd.functional.jacobian(
        net, x, create_graph=True
    ),
    "functional hvp": lambda net, x, v: torch.autograd.functional.hvp(
        energy(net), x, v, create_graph=True
    ),
}


def train(way: str, reshard: bool | None) -> list[Any]:
    """What a transform gives with and without autograd around it, and weights trained on it."""
    torch.manual_seed(0)
    net, sharded = Net(), dist.is_initialized()
    if sharded:
        for part in (net.block, net.frozen, net):
            fully_shard(part, reshard_after_forward=reshard)
    optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.1)
    x, v = torch.randn(2, 4, 3, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        results = [WAYS[way](net, x.clone(), v)] if not way.startswith("functional") else []
    for _ in range(2):
        out = WAYS[way](net, x.clone(), v)
        parts = [out] if isinstance(out, Tensor) else list(out)
        results.append([part.detach() for part in parts])
        sum(part.square().mean() for part in parts).backward()
        if sharded:
            assert all(isinstance(p, RaggedDTensor) for p in net.parameters()), "still gathered"
        optimizer.step()
        optimizer.zero_grad()
    params = [p.full_tensor() if isinstance(p, RaggedDTensor) else p for p in net.parameters()]
    return [*results, [p.detach() for p in params]]


def train_in_all_ways(reshard: bool | None) -> dict[str, Any]:
    found = {}
    for way in WAYS:
        try:
            found[way] = train(way, reshard)
        except Exception as error:
            raise AssertionError(way) from error
    return found


@pytest.mark.parametrize("reshard", [None, True])
def test_transforms_of_a_sharded_model_are_those_of_one_process(reshard: bool | None) -> None:
    assert_as_one_process(train_in_all_ways, [2], reshard, rtol=1e-5, atol=1e-6)
