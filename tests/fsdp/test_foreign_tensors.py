"""Tensors that stand in place of a module's parameters for a while are used, and not taken over."""

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import stateless

from ranks import on_ranks
from sharding import MixedPrecisionPolicy, fully_shard
from sharding.fsdp.module_state import state_of
from small_models import full, weights_of

Result = dict[str, Tensor | None]


class Net(nn.Module):
    """A block of its own bucket, and a head and an untied twin in the root's."""

    def __init__(self, *, nested: bool = False) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 6))
        self.head = nn.Linear(6, 6)
        self.nested = nested

    def forward(self, x: Tensor) -> Tensor:
        x = self.block(x)
        if self.nested:  # on a child with a bucket of its own, and on one of this bucket
            x = functional_call(self.block, {"0.bias": torch.ones(9)}, x) + self.block(x)
            x = x + functional_call(self.head, {"bias": torch.full((6,), 3.0)}, x)
        return self.head(x)


def build(sharded: bool, *, nested: bool = False, dtype: torch.dtype | None = None) -> Net:
    torch.manual_seed(0)
    net = Net(nested=nested)
    if sharded:
        policy = MixedPrecisionPolicy(param_dtype=dtype)
        fully_shard(net.block, mp_policy=policy)
        fully_shard(net, mp_policy=policy)
    return net


def others(net: nn.Module, *names: str, seed: int = 1, grad: bool = False) -> dict[str, Tensor]:
    """Full tensors for the named parameters, or for all."""
    shapes = {name: p.shape for name, p in net.named_parameters()}
    draw = torch.Generator().manual_seed(seed)
    drawn = {n: torch.randn(s, generator=draw, requires_grad=grad) for n, s in shapes.items()}
    return {name: drawn[name] for name in names or drawn}


def gradients(net: nn.Module, x: Tensor) -> Result:
    given = others(net, grad=True)
    functional_call(net, given, (x,)).square().mean().backward()
    return {name: tensor.grad for name, tensor in given.items()}


def gradients_of_some(net: nn.Module, x: Tensor) -> Result:
    given = others(net, "0.weight" if "0.weight" in dict(net.named_parameters()) else "head.bias")
    given = {name: nn.Parameter(tensor) for name, tensor in given.items()}
    loss = functional_call(net, given, (x,)).square().mean()
    return dict(zip(given, torch.autograd.grad(loss, list(given.values())), strict=True))


def twice_in_one_graph(net: nn.Module, x: Tensor) -> Result:
    """A step of MAML: weights made of gradients of the first call."""
    given = others(net, grad=True)
    loss = functional_call(net, given, (x,)).square().mean()
    inner = torch.autograd.grad(loss, list(given.values()), create_graph=True)
    moved = {n: p - 0.1 * g for (n, p), g in zip(given.items(), inner, strict=True)}
    outer = functional_call(net, moved, (x,)).square().mean()
    return dict(zip(given, torch.autograd.grad(outer, list(given.values())), strict=True))


def inside_the_swap(net: nn.Module, x: Tensor) -> Result:
    """Backward runs before the weights are put back."""
    given = others(net, "head.weight", grad=True)
    with stateless._reparametrize_module(net, given):
        net(x).square().mean().backward()
    return {"head.weight": given["head.weight"].grad}


def sharded_copies(net: nn.Module, x: Tensor) -> Result:
    given = {name: p.detach() * 2 for name, p in net.named_parameters()}
    kept = dict(given)
    result = {"y": functional_call(net, given, (x,))}
    assert all(given[name] is kept[name] for name in kept)
    return result


def own_parameters(net: nn.Module, x: Tensor) -> Result:
    return {"y": functional_call(net, dict(net.named_parameters()), (x,))}


def options(net: nn.Module, x: Tensor) -> Result:
    given = others(net)
    strict = functional_call(net, given, (x,), strict=True, tie_weights=False)
    with pytest.raises(RuntimeError, match="Missing key"):
        functional_call(net, {"head.bias": given["head.bias"]}, (x,), strict=True)
    legacy = stateless.functional_call(net, others(net, "head.bias"), (x,))
    return {"strict": strict, "legacy": legacy}


def on_a_child(net: nn.Module, x: Tensor) -> Result:
    return {"y": functional_call(net.block, others(net.block, "2.weight"), x)}


def doubles(net: nn.Module, x: Tensor) -> Result:
    given = {name: tensor.double() for name, tensor in others(net).items()}
    return {"y": functional_call(net, given, (x.double(),))}


CASES: list[Callable[[nn.Module, Tensor], Result]] = [
    gradients,
    gradients_of_some,
    twice_in_one_graph,
    inside_the_swap,
    sharded_copies,
    own_parameters,
    options,
    on_a_child,
    doubles,
]
WITHOUT_GRAPH = (sharded_copies, own_parameters, options, on_a_child, doubles)


def train(net: nn.Module, x: Tensor) -> None:
    """Half of an iteration: the root and the last block stay gathered, for their backward."""
    net(x).square().mean().backward()


def compared(case: Callable[[nn.Module, Tensor], Result], *, before: str, nested: bool) -> None:
    """One case on the sharded net and on a plain one: same results, weights as they were."""
    rank = torch.distributed.get_rank()
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(rank))
    results = []
    for sharded in (False, True):
        net = build(sharded, nested=nested)
        weights = weights_of(net)
        if before == "gathered":
            net(x)  # under autograd, so that the root keeps its weights for a backward
        elif before == "kept" and sharded:
            net.set_reshard_after_forward(False)
            net.unshard()
        with torch.no_grad() if case in WITHOUT_GRAPH and before != "kept" else nullcontext():
            results.append({key: full(value) for key, value in case(net, x).items()})
        after = weights_of(net)
        for name, weight in weights.items():
            assert torch.equal(after[name], weight), (case.__name__, before, name)
        held = [p for module in net.modules() for p in module.parameters(recurse=False)]
        assert not any(p.numel() and p.detach().isnan().any() for p in held)
        results[-1]["again"] = net(x).detach()
        net.zero_grad()
        train(net, x)
        for name, p in net.named_parameters():
            gradient = full(p.grad)
            if not sharded:
                torch.distributed.all_reduce(gradient)
                gradient /= torch.distributed.get_world_size()
            results[-1]["grad " + name] = gradient
    plain, ours = results
    assert plain.keys() == ours.keys()
    for key, value in plain.items():
        torch.testing.assert_close(
            ours[key], value, msg=lambda m, k=key: f"{case} {before} {k} {m}"
        )


@on_ranks(2)
def test_functional_call_uses_the_tensors_it_is_given_and_leaves_the_weights() -> None:
    """torchebm#244: the live weights were overwritten for good, or the process crashed."""
    for case in CASES:
        for before in ("sharded", "gathered", "kept"):
            compared(case, before=before, nested=False)
    for case in (gradients, sharded_copies):
        compared(case, before="gathered", nested=True)


@on_ranks(2)
def test_foreign_tensors_follow_the_dtype_policy_and_keep_no_memory() -> None:
    net = build(True, dtype=torch.bfloat16)
    given = others(net, grad=True)
    y = functional_call(net, given, (torch.ones(4, 6),))
    assert y.dtype == torch.bfloat16
    y.float().sum().backward()
    plain = build(False)
    other = others(net, grad=True)
    cast = {name: tensor.bfloat16() for name, tensor in other.items()}
    functional_call(plain.bfloat16(), cast, (torch.ones(4, 6).bfloat16(),)).float().sum().backward()
    for name, tensor in given.items():
        assert torch.equal(tensor.grad, other[name].grad), name
    memory = state_of(net).bucket.buffers[0].unsharded.untyped_storage().size()
    net.zero_grad()
    assert memory == 0


@on_ranks(2)
def test_what_cannot_be_used_is_refused_by_name() -> None:
    net, x = build(True), torch.ones(4, 6)
    shards = {name: p.detach().clone().requires_grad_() for name, p in net.named_parameters()}
    with pytest.raises(NotImplementedError) as error:
        functional_call(net, shards, (x,))
    assert str(error.value) == (
        "head.weight of 'root' was replaced, as functional_call does, by a sharded tensor that "
        "requires grad, whose gradient no reduction averages; pass its full_tensor(), which gets "
        "this rank's gradient, or detach() it"
    )
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    train(net, x)
    kept = net.head.bias
    net.head._parameters["bias"] = nn.Parameter(torch.ones(6))
    with pytest.raises(RuntimeError, match=r"head\.bias of 'root' is not what its module holds"):
        optimizer.step()
    net.head._parameters["bias"] = kept
    optimizer.step()
    del net.head.bias
    with pytest.raises(RuntimeError, match=r"head\.bias was deleted .* before fully_shard"):
        net(x)
