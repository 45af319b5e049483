"""Frozen parameters in a group, as under adapters: no rule about updates or states is asked about
what has none, whatever it is kept in; what is unfrozen is judged then (accelerate#3874,
composer#2355)."""

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from ranks import run_ranks
from sharding import fully_shard
from small_models import full_gradients, weights_of
from torch_layouts import cut_like
from vfsdp_optim import AdamW, Muon, Precision

ROUNDED = {"states": Precision(stochastic_rounding=True)}
CASES = (  # the base, the adapters, options
    (torch.float32, torch.float32, {"states": "8bit"}),
    (torch.float16, torch.bfloat16, ROUNDED),
    (torch.float8_e4m3fn, torch.bfloat16, ROUNDED),
    (torch.bfloat16, torch.bfloat16, {"states": Precision("8bit", stochastic_rounding=True)}),
    (torch.float8_e4m3fn, torch.bfloat16, {"states": Precision(master_weights=True)}),
    (torch.complex64, torch.float32, {}),
    (torch.int8, torch.float32, {"states": "8bit"}),
)


def adapted(base: torch.dtype, adapters: torch.dtype) -> nn.Module:
    """A frozen matrix whose shards start inside blocks of 256, a vector, and trained factors."""
    torch.manual_seed(0)
    module = nn.Module()
    module.base = nn.Parameter(torch.randn(90, 100).to(base), requires_grad=False)
    module.scale = nn.Parameter(torch.randn(90).to(base), requires_grad=False)
    module.a = nn.Parameter(torch.randn(6, 1024).to(adapters))
    module.b = nn.Parameter(torch.zeros(90, 6).to(adapters))
    return module


def train(cls: type, module: nn.Module, options: dict) -> dict[str, Tensor]:
    """Return the weights after two steps of an optimizer over all parameters."""
    names = dict(module.named_parameters())
    trained = {name for name, p in names.items() if p.requires_grad}
    optimizer = cls(names.items(), lr=0.05, **options)
    assert {name for name, p in names.items() if p in optimizer.state} == trained
    for step in range(2):
        trainable = [names[name] for name in sorted(trained)]
        for p, gradient in zip(trainable, full_gradients(trainable, step), strict=True):
            p.grad = cut_like(gradient.to(p.dtype), p)
        optimizer.step()
    return {name: weight for name, weight in weights_of(module).items() if name in trained}


def train_sharded(shard, cases) -> list[dict[str, Tensor]]:
    """Return the weights of every case on this rank's mesh."""
    mesh = init_device_mesh("cpu", (2,))
    results = []
    for base, adapters, options in cases:
        module = adapted(base, adapters)
        shard(module, mesh=mesh)
        results.append(train(AdamW, module, options))
    return results


@pytest.mark.parametrize("cls", [AdamW, Muon])
@pytest.mark.parametrize(("base", "adapters", "options"), CASES, ids=str)
def test_base_of_any_dtype_and_shape_stays_beside_its_adapters(cls, base, adapters, options):
    module = adapted(base, adapters)
    before = weights_of(module)["base"]
    after = train(cls, module, options)
    assert not torch.equal(after["b"], torch.zeros_like(after["b"]))
    assert torch.equal(module.base.view(torch.uint8), before.view(torch.uint8))


@pytest.mark.parametrize("shard", [fully_shard, torch_fully_shard], ids=["ours", "torch"])
def test_sharded_base_is_not_judged_either(shard):
    # FSDP2 takes one dtype a call; its rows of 100 start inside blocks.
    cases = [c for c in CASES if c[0] == c[1] or (shard is fully_shard and not c[0].is_complex)]
    expected = [train(AdamW, adapted(base, dtype), options) for base, dtype, options in cases]
    for results in run_ranks(train_sharded, 2, shard, cases):
        for actual, wanted in zip(results, expected, strict=True):
            assert actual.keys() == wanted.keys()
            assert all(torch.equal(actual[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize(
    ("cls", "options", "name", "fault"),
    [
        (Muon, {}, "scale", r"scale: Muon updates matrices, and got shape \(90,\)"),
        (AdamW, ROUNDED, "base", r"base: stochastic_rounding=True rounds to bfloat16, got .*16"),
    ],
)
def test_parameter_is_judged_when_it_is_unfrozen(cls, options, name, fault):
    module = adapted(torch.float16, torch.bfloat16)
    optimizer = cls(module.named_parameters(), **options)
    before = weights_of(module)
    getattr(module, name).requires_grad_()
    module.b.grad = torch.ones_like(module.b)
    for look in (optimizer.step, optimizer.plan):
        with pytest.raises(ValueError, match=fault):
            look()
    assert all(torch.equal(weight, before[n]) for n, weight in weights_of(module).items())
    getattr(module, name).requires_grad_(False)
    optimizer.step()


def demand_frozen_matrices(rank_count: int) -> None:
    """Shard for an optimizer that holds a frozen convolution; it demands nothing of a step."""
    model = nn.Sequential(nn.Conv2d(4, 4, 3, bias=False), nn.Linear(4, 4, bias=False))
    model[0].requires_grad_(False)
    optimizer = Muon(model.parameters())
    fully_shard(model, mesh=init_device_mesh("cpu", (rank_count,)), optimizer=optimizer)
    assert [len(optimizer.demands(p)) for p in model.parameters()] == [1, 2]


def test_frozen_parameter_demands_no_layout_for_its_step():
    run_ranks(demand_frozen_matrices, 2, 2)
