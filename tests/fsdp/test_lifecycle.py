"""Ways to call a sharded model that training scripts use, against one process on the same batch."""

import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from ranks import RankError, run_ranks
from sharding import FSDPModule, fully_shard
from sharding.fsdp.bucket import ShardedState
from sharding.fsdp.module_state import state_of
from training import mesh_of

WIDTH = 18
STEPS = 5


class Layer(nn.Module):
    """A residual layer, with a second way to call it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, 25)
        self.outer = nn.Linear(25, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.outer(F.gelu(self.inner(x)))

    def other_way(self, x: Tensor) -> Tensor:
        return self(x) * 2


class Net(nn.Module):
    """Three layers and a head; `mode` says how forward uses them."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        self.mode = mode
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.head = nn.Linear(WIDTH, WIDTH)
        if mode == "tied_in_root":
            self.second_head = nn.Linear(WIDTH, WIDTH)
            self.second_head.weight = self.head.weight
        self.forwards = 0

    def forward(self, x: Tensor) -> Tensor:
        self.forwards += 1
        if self.mode == "raises_once" and self.forwards == 2:
            self.layers[0](x)
            raise ZeroDivisionError
        for i, layer in enumerate(self.layers):
            x = self.call(layer, i, x)
        if self.mode == "tied_in_root":
            x = self.second_head(F.relu(x))
        return self.head(x)

    def call(self, layer: nn.Module, i: int, x: Tensor) -> Tensor:
        if self.mode == "reentrant" or (self.mode == "reentrant_twice" and i != 1):
            return checkpoint(layer, x, use_reentrant=True)
        if self.mode == "reentrant_twice":
            return checkpoint(layer, checkpoint(layer, x, use_reentrant=True), use_reentrant=True)
        if self.mode == "twice" and i == 1:
            return layer(layer(x))
        if self.mode == "skips_layer" and i == 2 and self.forwards % 2:
            return x
        if self.mode == "other_method":
            return layer.other_way(x)
        if self.mode == "whole_checkpointed" and i == 0:
            rest = nn.Sequential(*self.layers)
            return checkpoint(rest, x, use_reentrant=False)
        return x if self.mode == "whole_checkpointed" else layer(x)


def shard_net(net: Net, **options: object) -> None:
    """Each layer a bucket (the last two one bucket in one mode), and the rest."""
    if net.mode == "list_of_modules":
        fully_shard(net.layers[0], **options)
        fully_shard([net.layers[1], net.layers[2]], **options)
    else:
        for layer in net.layers:
            fully_shard(layer, **options)
            register_fsdp_forward_method(layer, "other_way")
    fully_shard(net, **options)


def batches(world_size: int, rank: int) -> Iterator[Tensor]:
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        batch = torch.randn(6 * 4, WIDTH, generator=generator)
        yield batch.tensor_split(world_size)[rank]


def train(mode: str) -> tuple[list[float], dict[str, Tensor]]:
    """Trains in one process or on the default group's ranks; losses and full weights."""
    sharded = dist.is_initialized()
    world_size = dist.get_world_size() if sharded else 1
    torch.manual_seed(0)
    net = Net(mode)
    if sharded:
        shard_net(net, **({"mesh": mesh_of((2, 2))} if world_size == 4 else {}))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    losses = []
    for step, x in enumerate(batches(world_size, dist.get_rank() if sharded else 0)):
        loss = loss_of(net, x, step)
        if loss is None:
            continue
        if sharded:
            mean = loss.detach().clone()
            dist.all_reduce(mean, op=dist.ReduceOp.AVG)
            losses.append(mean.item())
            assert_all_sharded(net)
        else:
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    weights = {
        name: (p.full_tensor() if isinstance(p, DTensor) else p).detach()
        for name, p in net.named_parameters()
    }
    return losses, weights


def loss_of(net: Net, x: Tensor, step: int) -> Tensor | None:
    """Forward and backward in the net's mode; None when it raised on purpose."""
    mode = net.mode
    x = x.clone().requires_grad_(mode.startswith("reentrant"))
    if mode == "freezes":
        net.layers[1].inner.weight.requires_grad_(step not in (1, 2))
        net.head.requires_grad_(step != 3)
    if mode == "evaluates_between":
        with torch.no_grad():
            net(x)
        net(x)  # under autograd, but without a backward
        with torch.inference_mode():
            net(x)
    if mode == "two_backwards":
        y = net(x)
        y.square().mean().backward(retain_graph=True)
        y.mean().backward()
        return y.square().mean() + y.mean()
    if mode == "two_forwards":
        first, second = net(x).square().mean(), net(x * 2).square().mean()
        (first + second).backward()
        return first + second
    if mode == "raises_in_backward" and step == 1:
        return raise_in_backward(net, x)
    try:
        loss = net(x).square().mean()
    except ZeroDivisionError:
        return None
    loss.backward()
    return loss


def raise_in_backward(net: Net, x: Tensor) -> None:
    def fail(grad: Tensor) -> Tensor:
        raise ZeroDivisionError

    y = net(x)
    hidden = F.relu(y)
    hidden.register_hook(fail)
    with pytest.raises(ZeroDivisionError):
        hidden.sum().backward()


def assert_all_sharded(net: Net) -> None:
    for module in net.modules():
        state = state_of(module)
        if state is not None and state.bucket is not None:
            assert state.bucket.state is ShardedState.SHARDED


MODES = [
    "plain",
    "reentrant",
    "reentrant_twice",
    "whole_checkpointed",
    "twice",
    "skips_layer",
    "other_method",
    "freezes",
    "tied_in_root",
    "list_of_modules",
    "evaluates_between",
    "two_backwards",
    "two_forwards",
    "raises_once",
    "raises_in_backward",
]


@pytest.mark.parametrize("mode", MODES)
def test_losses_and_weights_equal_one_process(mode: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # inputs of reentrant checkpoints
        expected_losses, expected_weights = train(mode)
    for world_size in (2, 3, 4):  # 4: on a 2-D mesh
        for losses, weights in run_ranks(train, world_size, mode):
            assert losses == pytest.approx(expected_losses, abs=1e-5)
            assert weights.keys() == expected_weights.keys()
            for name, weight in weights.items():
                torch.testing.assert_close(
                    weight,
                    expected_weights[name],
                    atol=2e-4,  # AdamW turns rounding of tiny gradients into parts of lr
                    rtol=0,
                    msg=lambda text, name=name: f"{name}: {text}",
                )


def tie_across_calls() -> None:
    net = Net("plain")
    net.layers[1].inner.weight = net.layers[0].inner.weight
    fully_shard(net.layers[0])
    fully_shard(net.layers[1])


def test_tie_across_calls_names_both_and_the_cure() -> None:
    """pytorch#176076: a tied embedding in two groups; the last rank was never updated."""
    with pytest.raises(RankError, match=r"inner\.weight is tied to inner\.weight.*\[a, b\]") as e:
        run_ranks(tie_across_calls, 2)
    assert len(e.value.reports) == 2


def test_every_public_method_of_torch_is_defined_here() -> None:
    import torch.distributed.fsdp as torch_fsdp

    public = [name for name in vars(torch_fsdp.FSDPModule) if not name.startswith("_")]
    assert len(public) > 15
    missing = [name for name in public if name not in vars(FSDPModule)]
    assert not missing
    assert issubclass(FSDPModule, torch_fsdp.FSDPModule)


def compile_layers(build: Callable[[], Net]) -> list[float]:
    net = build()
    for layer in net.layers:
        layer.compile(backend="aot_eager")
    shard_net(net)
    losses = []
    for x in batches(dist.get_world_size(), dist.get_rank()):
        loss = net(x).square().mean()
        loss.backward()
        with torch.no_grad():
            for p in net.parameters():
                p.sub_(p.grad, alpha=0.01)
        net.zero_grad()
        losses.append(loss.item())
    return losses


def compiled_equals_eager() -> None:
    torch.manual_seed(0)
    compiled = compile_layers(lambda: Net("plain"))
    torch.manual_seed(0)
    net = Net("plain")
    shard_net(net)
    for x, expected in zip(batches(dist.get_world_size(), dist.get_rank()), compiled, strict=True):
        loss = net(x).square().mean()
        loss.backward()
        with torch.no_grad():
            for p in net.parameters():
                p.sub_(p.grad, alpha=0.01)
        net.zero_grad()
        assert abs(loss.item() - expected) < 1e-5


def test_compiled_layers_train_as_eager_ones() -> None:
    run_ranks(compiled_equals_eager, 2, timeout=120)
