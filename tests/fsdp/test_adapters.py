"""Adapters on a frozen base of other dtypes, and models of several dtypes, in one unit."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import vfsdp_optim
from ranks import assert_as_one_process, on_ranks, run_ranks
from sharding import MixedPrecisionPolicy, fully_shard
from sharding.fsdp.module_state import state_of
from small_models import full, full_gradients, set_gradients, weights_of
from vfsdp_optim import AdamW, Muon

OPTIMIZERS = ["adamw", "muon", "torch"]


class Adapted(nn.Module):
    """A frozen integer weight with bfloat16 scales and bias, and trainable factors A and B."""

    def __init__(self, dtype: torch.dtype, r: int) -> None:
        super().__init__()
        base = torch.randint(0, 100, (64, 64)).to(dtype)
        self.base = nn.Parameter(base, requires_grad=False)
        self.scales = nn.Parameter(torch.rand(64, 1).bfloat16() / 500, requires_grad=False)
        self.bias = nn.Parameter(torch.randn(64).bfloat16(), requires_grad=False)
        self.A = nn.Parameter(torch.randn(r, 64) / 8)
        self.B = nn.Parameter(torch.zeros(64, r))

    def forward(self, x: Tensor) -> Tensor:
        weight = (self.base.float() - 50) * self.scales.float()
        return x + F.linear(x, weight, self.bias.float()) + x @ self.A.T @ self.B.T


def build(dtype: torch.dtype, r: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Adapted(dtype, r), Adapted(dtype, r), nn.Linear(64, 5))


def optimizer_over_all(name: str, model: nn.Module) -> torch.optim.Optimizer:
    parameters = list(model.parameters())  # the frozen ones too
    if name == "torch":
        return torch.optim.AdamW([p for p in parameters if p.requires_grad], lr=0.02)
    if name == "adamw":
        return AdamW(parameters, lr=0.02, weight_decay=0.5)
    factors = [p for n, p in model.named_parameters() if n.endswith((".A", ".B"))]
    known = {id(p) for p in factors}
    rest = [p for p in parameters if id(p) not in known]
    return Muon([{"params": factors}, {"params": rest, "algorithm": "adamw", "lr": 0.02}], lr=0.05)


def train_adapters(
    name: str, dtype: torch.dtype, r: int
) -> tuple[list[float], dict[str, Tensor], set[str]]:
    """Losses, weights, and the names of what has optimizer state."""
    model = build(dtype, r)
    sharded = dist.is_initialized()
    if sharded:
        fully_shard(model[0])
        fully_shard(model[1])
        fully_shard(model)
    frozen = {n: full(p) for n, p in model.named_parameters() if not p.requires_grad}
    optimizer = optimizer_over_all(name, model)
    losses = []
    for step in range(4):
        x = torch.randn(6, 64, generator=torch.Generator().manual_seed(0))
        loss = model(x).square().mean()
        loss.backward()
        if step == 0:  # B is zero, so that the first gradient of A is
            assert not full(model[0].A.grad).any()
        nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    for n, p in model.named_parameters():
        if n in frozen:
            assert p.dtype == frozen[n].dtype
            assert torch.equal(full(p), frozen[n]), n
            assert p.grad is None
    with_state = {n for n, p in model.named_parameters() if p in optimizer.state}
    return losses, weights_of(model), with_state


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8], ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_adapters_train_on_a_frozen_integer_base_in_one_unit(name, dtype):
    """accelerate#3987, accelerate#3983, LlamaFactory#10157, LlamaFactory#10618, OneTrainer#1314.

    The base was cast, decayed or refused; factors with fewer rows than ranks had empty pieces.
    """
    r = 2
    expected, weights, with_state = train_adapters(name, dtype, r)
    trained = {f"{i}.{factor}" for i in (0, 1) for factor in "AB"} | {"2.weight", "2.bias"}
    assert with_state == trained
    assert expected[-1] < expected[0]
    for world_size in (2, 5):
        for losses, others, kept in run_ranks(train_adapters, world_size, name, dtype, r):
            assert losses == pytest.approx(expected, rel=1e-4)
            assert kept == trained
            for key, weight in others.items():
                assert weight.dtype == weights[key].dtype
                if weight.is_floating_point():
                    assert weight.isfinite().all()
                    torch.testing.assert_close(weight, weights[key], atol=5e-3, rtol=0)


@on_ranks(2)
def test_integers_cannot_be_made_trainable() -> None:
    """LlamaFactory#10157"""
    model = build(torch.uint8, 2)
    fully_shard(model)
    with pytest.raises(RuntimeError, match="floating point"):
        model[0].base.requires_grad_(True)
    complex_parameter = nn.Parameter(torch.ones(3, dtype=torch.complex64))
    with pytest.raises(
        ValueError, match=r"w: expected a real floating dtype, got torch\.complex64"
    ):
        AdamW([("w", complex_parameter)])


class TwoDtypes(nn.Module):
    """float32 and bfloat16 parameters side by side, in a block and in the root."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(20, 33)
        self.second = nn.Linear(33, 20).to(torch.bfloat16)
        self.norm = nn.LayerNorm(20)

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.first(x.to(self.first.weight.dtype)))
        x = self.second(x.to(self.second.weight.dtype))
        return self.norm(x.to(self.norm.weight.dtype)).float()


def two_dtypes() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(TwoDtypes(), TwoDtypes())
    model.tail = nn.Parameter(torch.ones(20, dtype=torch.bfloat16))
    model.forward = lambda x: model[1](model[0](x)) * model.tail
    return model


def make(name: str, model: nn.Module) -> torch.optim.Optimizer:
    if name == "adamw":
        return AdamW(model.parameters(), lr=0.05, weight_decay=0.5)
    matrices = {n: "m n -> m n" for n, p in model.named_parameters() if p.dim() == 2}
    groups = vfsdp_optim.param_groups(model, matrices={**matrices, "tail": None})
    return Muon(groups, lr=0.05, weight_decay=0.5, ns_dtype=torch.float32)


def shard_two(model: nn.Sequential, policy: MixedPrecisionPolicy) -> None:
    for block in (model[0], model[1]):
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)


def step_two_dtypes(name: str, precise: bool) -> dict[str, Tensor]:
    """Three steps on given gradients; what a rank computes must not depend on the segments."""
    model = two_dtypes()
    if dist.is_initialized():
        policy = MixedPrecisionPolicy() if precise else MixedPrecisionPolicy(torch.bfloat16)
        shard_two(model, policy)
        buckets = [state_of(m).bucket for m in (model[0], model[1])]
        assert [len(bucket.buffers) for bucket in buckets] == [2, 2]
    dtypes = [p.dtype for p in model.parameters()]
    assert set(dtypes) == {torch.float32, torch.bfloat16}
    optimizer = make(name, model)
    for step in range(3):
        set_gradients(model.parameters(), full_gradients(model.parameters(), step))
        optimizer.step()
    for p in model.parameters():
        for key, value in optimizer.state[p].items():
            assert value.dtype == (torch.float32 if key == "step" else p.dtype)
            assert isinstance(value, DTensor) == (key != "step" and dist.is_initialized())
    return weights_of(model)


@pytest.mark.parametrize("precise", [True, False], ids=["no_policy", "bf16_policy"])
@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_segments_of_two_dtypes_step_as_one_process(name, precise):
    """accelerate#3983: mixed dtypes in one unit were refused or promoted."""
    assert_as_one_process(step_two_dtypes, (2, 3), name, precise, atol=0, rtol=0)


def train_two_dtypes(name: str, compute: torch.dtype | None) -> list[float]:
    model = two_dtypes()
    sharded = dist.is_initialized()
    if sharded:
        shard_two(model, MixedPrecisionPolicy(compute, torch.float32))
    optimizer = make(name, model)
    losses = []
    for _ in range(5):
        x = torch.randn(8, 20, generator=torch.Generator().manual_seed(1))
        loss = (model(x) - x.flip(0)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("compute", [None, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_model_of_two_dtypes_trains_with_and_without_a_policy(name, compute):
    """accelerate#3983"""
    expected = train_two_dtypes(name, None)
    assert expected[-1] < expected[0] - 0.1
    for losses in run_ranks(train_two_dtypes, 2, name, compute):
        # bfloat16 keeps 8 bits; the losses are of order 1 and differ by a few of its ulps.
        assert losses == pytest.approx(expected, abs=0.03)
