"""Modules of unusual kinds, and unusual ways to call them, against one process on the same data."""

import traceback
import warnings
from functools import cache

import pytest
import torch
import torch.distributed as dist
from kinds_of_modules import KINDS
from lifecycle import WIDTH, Layer, train
from torch import Tensor, nn
from ways_to_call import WAYS

from ranks import on_ranks, run_ranks
from sharding import MixedPrecisionPolicy, fully_shard
from sharding.fsdp.bucket import ShardedState
from sharding.fsdp.module_state import state_of

CASES = {case.__name__: case for case in (*KINDS, *WAYS)}
SOME = ["SmallBuckets", "ThreeLevels", "SyncOfSome", "BackwardRaises"]
ON_TWO_REPLICAS = [  # what reduces gradients in other ways than one backward a step does
    "SyncOfSome", "KeepsGathered", "ChildrenByThemselves", "BackwardRaises", "WrittenInForward",
    "WholeCheckpointed", "EvaluatesBetween", "Penalty",
]  # fmt: skip
ON: dict[int, list[str]] = {1: SOME, 2: SOME, 3: [*CASES], 4: ON_TWO_REPLICAS}
Trained = tuple[list[float], dict[str, Tensor]]


@cache
def train_case(name: str) -> Trained:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # inputs of reentrant checkpoints
        return train(CASES[name]())


def train_cases(names: list[str]) -> dict[str, Trained | str]:
    """What each case came to, or its error."""
    found: dict[str, Trained | str] = {}
    for name in names:
        try:
            found[name] = train_case.__wrapped__(name)
        except Exception:
            found[name] = traceback.format_exc()
    return found


@cache
def trained_on(world_size: int) -> list[dict[str, Trained | str]]:
    return run_ranks(train_cases, world_size, ON[world_size], timeout=240)


@pytest.mark.parametrize(("name", "world_size"), [(n, w) for w in ON for n in ON[w]])
def test_lifecycle_equals_one_process(name, world_size):
    """On 4 ranks, over a mesh of two replicas."""
    expected = train_case(name)
    assert expected[0][0] != expected[0][-1]
    for found in trained_on(world_size):
        assert not isinstance(found[name], str), found[name]
        # fp32 sums in another order, carried through a few steps of SGD.
        torch.testing.assert_close(found[name], expected, atol=1e-5, rtol=1e-5)


class CountsGathers:
    """A bucket's transport, and how often it was asked to gather."""

    def __init__(self, module: nn.Module) -> None:
        self.bucket = state_of(module).bucket
        self.transport, self.bucket.transport = self.bucket.transport, self
        self.count = 0

    def __getattr__(self, name: str) -> object:
        return getattr(self.transport, name)

    def all_gather_(self, buffers: list[Tensor], tag: int, event: str) -> object:
        self.count += 1
        return self.transport.all_gather_(buffers, tag, event)

    def since(self) -> int:
        """How often since the last call of this."""
        count, self.count = self.count, 0
        return count


@on_ranks(2)
def test_bucket_of_a_list_and_what_was_unsharded_by_hand_is_gathered_once_a_pass() -> None:
    model = nn.Sequential(Layer(), Layer(), Layer(), Layer())
    fully_shard([model[0], model[2]], reshard_after_forward=True)
    fully_shard(model[1], reshard_after_forward=True)
    fully_shard(model)
    pair, one = CountsGathers(model[0]), CountsGathers(model[1])
    x = torch.ones(2, WIDTH)
    for _ in range(2):
        loss = model(x).sum()
        assert (pair.since(), one.since()) == (1, 1)
        loss.backward()
        assert (pair.since(), one.since()) == (1, 1)
    for handle in (model[0].unshard(async_op=True), model[1].unshard(async_op=True)):
        handle.wait()
    assert (pair.since(), one.since()) == (1, 1)
    loss = model(x).sum()
    assert (pair.since(), one.since()) == (0, 0)
    loss.backward()
    assert (pair.since(), one.since()) == (1, 1)
    model[1](x).sum().backward()
    assert one.since() == 2


def states_after_forward(name: str) -> list[ShardedState]:
    case = CASES[name]()
    model = case.build()
    case.shard(model)
    for _ in range(2):
        model(torch.ones(2, WIDTH))
    return [state_of(layer).bucket.state for layer in model]


def test_weights_are_freed_after_forward_unless_the_output_hides_tensors() -> None:
    sharded, unsharded = ShardedState.SHARDED, ShardedState.UNSHARDED
    assert run_ranks(states_after_forward, 2, "Dataclasses")[0] == [sharded, sharded, unsharded]
    assert run_ranks(states_after_forward, 2, "Objects")[0] == [unsharded] * 3


def fail(grad: Tensor) -> None:
    raise ZeroDivisionError


@on_ranks(2)
def test_gradients_of_a_backward_that_raised_do_not_arrive_after_zero_grad():
    model = nn.Sequential(*(Layer() for _ in range(4)))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    hidden: list[Tensor] = []
    model[0].register_forward_hook(lambda module, args, y: hidden.append(y))
    x = torch.ones(2, WIDTH)
    y = model(x)
    hidden[0].register_hook(fail)
    with pytest.raises(ZeroDivisionError):
        y.sum().backward()
    model.zero_grad()
    with torch.no_grad():
        model(x)
    buckets = [state_of(layer).bucket for layer in model]
    gradients, states = [p.grad for p in model.parameters()], [bucket.state for bucket in buckets]
    assert gradients == [None] * len(gradients)
    assert set(states) == {ShardedState.SHARDED}


@on_ranks(1, 3)
def test_bf16_gradients_are_accumulated_and_averaged_in_fp32():
    """Rounded once, at the end: sums of bfloat16 would lose the small addends."""
    torch.manual_seed(0)
    model = nn.Linear(WIDTH, 30, bias=False, dtype=torch.bfloat16)
    weight = model.weight.detach().clone()
    fully_shard(model, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))
    total, rank, world_size = torch.zeros(30, WIDTH), dist.get_rank(), dist.get_world_size()
    for i in range(3):
        model.set_requires_gradient_sync(i == 2)
        for r in range(world_size):
            generator = torch.Generator().manual_seed(10 * i + r)
            x = torch.randn(5, WIDTH, generator=generator).bfloat16()
            p = weight.clone().requires_grad_()
            nn.functional.linear(x, p).square().mean().backward()
            total += p.grad.float()
            if r == rank:
                model(x).square().mean().backward()
    gradient = model.weight.grad
    assert gradient.dtype == torch.bfloat16
    expected, gradient = (total / world_size).bfloat16(), gradient.full_tensor()
    # fp32 sums in another order, then rounded: one step of bfloat16 apart at most.
    torch.testing.assert_close(gradient, expected, atol=1e-6, rtol=2**-7)


def mixed_policy() -> tuple[list[torch.dtype], list[torch.dtype], list[torch.dtype]]:
    """Dtypes in forward, at rest, and of gradients, of parameters of four dtypes."""
    seen: list[torch.dtype] = []

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3).bfloat16())
            self.c = nn.Parameter(torch.ones(3, dtype=torch.float64))
            self.codes = nn.Parameter(torch.ones(3, dtype=torch.int32), requires_grad=False)

        def forward(self, x: Tensor) -> Tensor:
            seen.extend(p.dtype for p in (self.a, self.b, self.c, self.codes))
            return ((self.a + self.b) * self.c * self.codes * x).sum()

    model = Mixed()
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32
    )
    fully_shard(model, mp_policy=policy)
    loss = model(torch.ones(3))
    assert loss.dtype == torch.float32
    loss.backward()
    parameters = list(model.parameters())
    for p in parameters[:3]:
        assert p.grad.full_tensor().tolist() == [2.0 if p is parameters[2] else 1.0] * 3
    return seen, [p.dtype for p in parameters], [p.grad.dtype for p in parameters[:3]]


def test_dtypes_of_one_bucket_are_cast_for_compute_and_kept_at_rest() -> None:
    """pytorch#156784: bf16 and fp32 parameters in one module were an assertion error."""
    own = [torch.float32, torch.bfloat16, torch.float64, torch.int32]
    for in_forward, at_rest, gradients in run_ranks(mixed_policy, 2):
        assert in_forward == [torch.bfloat16] * 3 + [torch.int32]
        assert at_rest == own
        assert gradients == own[:3]


@on_ranks(2)
def test_marks_that_scripts_put_on_parameters_stay():
    model = nn.Linear(WIDTH, WIDTH)
    model.bias.no_weight_decay = True
    fully_shard(model)
    assert model.bias.no_weight_decay
    assert not hasattr(model.weight, "no_weight_decay")
