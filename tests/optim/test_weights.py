"""Parameters of 16 bits updated in fp32: through a master copy, or rounded by chance."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from ranks import run_ranks
from sharding.tensor.placement import RaggedShard
from sharding.tensor.ragged_tensor import distribute_ragged
from vfsdp_optim import AdamW, Muon, Precision
from vfsdp_optim.states.scratch import Scratch
from vfsdp_optim.states.weights import Place, RandomRounding, random_bits, stream_of

BF16 = torch.bfloat16
CHOICES = pytest.mark.parametrize("choice", ["master_weights", "stochastic_rounding"])
MAKERS = {"adamw": AdamW, "muon": Muon}


def train(kind: str, param: nn.Parameter, steps: int, **options: Any) -> torch.optim.Optimizer:
    """Train one parameter with zero gradients."""
    optimizer = MAKERS[kind]([("w", param)], **options)
    for _ in range(steps):
        param.grad = torch.zeros_like(param)
        optimizer.step()
    return optimizer


@pytest.mark.parametrize("kind", MAKERS)
def test_decay_of_bfloat16_ones_is_not_rounded_away(kind):
    """OneTrainer#996, ao#2296: (1 - lr wd)^500 = 0.951 stays 1 in bfloat16."""
    options, ones = dict(lr=1e-3, weight_decay=0.1), torch.ones(32, 64, dtype=BF16)
    plain, copied, drawn = (nn.Parameter(ones.clone()) for _ in range(3))
    train(kind, plain, 500, **options)
    assert torch.equal(plain.detach(), ones)
    with_copy = train(kind, copied, 500, states=Precision(master_weights=True), **options)
    by_chance = train(kind, drawn, 500, states=Precision(stochastic_rounding=True), **options)
    expected, half_gap = (1 - 1e-4) ** 500, 2**-9  # of bfloat16 there
    assert float(copied.detach().float().mean()) == pytest.approx(expected, abs=half_gap)
    # The mean of many roundings by chance is better.
    assert float(drawn.detach().float().mean()) == pytest.approx(expected, abs=half_gap / 4)
    master = with_copy.state[copied]["master"]
    assert master.dtype == torch.float32
    torch.testing.assert_close(master, torch.full_like(master, expected), atol=3e-5, rtol=0)
    assert torch.equal(copied.detach(), master.to(BF16))
    # ao#2296: the moments are not bfloat16 unnoticed.
    states = [*with_copy.state[copied].values(), *by_chance.state[drawn].values()]
    assert {value.dtype for value in states} == {torch.float32}


def test_8bit_states_and_master_weights_of_bfloat16_are_near_fp32():
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(64, 96, generator=generator).to(BF16)
    params = [nn.Parameter(start.clone()), nn.Parameter(start.float())]
    options = dict(lr=1e-3, weight_decay=0.1)
    narrow = AdamW([params[0]], states=Precision("8bit", master_weights=True), **options)
    exact = AdamW([params[1]], **options)
    for _ in range(50):
        grad = (torch.randn(64, 96, generator=generator) + 0.5).to(BF16)
        params[0].grad, params[1].grad = grad, grad.float()
        narrow.step()
        exact.step()
    error = (narrow.state[params[0]]["master"] - params[1]).detach().norm()
    assert 0 < float(error / (params[1].detach() - start).norm()) < 0.02


def test_master_copy_takes_over_what_was_written_to_the_parameter_only():
    """Megatron-LM#6920: a copy that stays old undoes what was loaded into the model."""
    param = nn.Parameter(torch.full((64, 64), 3.0, dtype=BF16))
    optimizer = AdamW([param], lr=1e-4, weight_decay=0.0, states=Precision(master_weights=True))
    optimizer.state_dict()  # makes the state, before the weights are loaded
    with torch.no_grad():
        param.fill_(5.0)
    for step in range(3):
        param.grad = torch.ones_like(param)
        if step == 2:
            with torch.no_grad():
                param[0] = 7.0
        optimizer.step()
    master = optimizer.state[param]["master"]
    torch.testing.assert_close(master[1:], torch.full((63, 64), 5 - 3e-4), atol=1e-6, rtol=0)
    torch.testing.assert_close(master[0], torch.full((64,), 7 - 1e-4), atol=1e-6, rtol=0)


def test_master_copy_is_saved_and_loaded_bit_by_bit():
    """AReaL#1292: it was derived again from bfloat16."""
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(64, 64).to(BF16))]
    optimizers = [Muon([("w", params[0])], lr=1e-3, states=Precision(master_weights=True))]
    for step in range(6):
        if step == 3:
            params.append(nn.Parameter(params[0].detach().clone()))
            optimizers.append(
                Muon([("w", params[1])], lr=1e-3, states=Precision(master_weights=True))
            )
            optimizers[1].load_state_dict(optimizers[0].state_dict())
        grad = torch.randn(64, 64).to(BF16)
        for param, optimizer in zip(params, optimizers, strict=True):
            param.grad = grad.clone()
            optimizer.step()
    states = [o.state[p] for o, p in zip(optimizers, params, strict=True)]
    assert torch.equal(states[0]["master"], states[1]["master"])
    assert not torch.equal(states[0]["master"], states[0]["master"].to(BF16).float())
    assert torch.equal(params[0], params[1])


def rounded(numbers: Tensor, step: int, *, first: int = 0, fqn: str = "w") -> Tensor:
    param, rule = torch.empty(numbers.numel(), dtype=BF16), RandomRounding()
    place = Place(0, numbers.numel(), stream_of(fqn, step, 0), first)
    rule.close(param, numbers.clone(), [place], Scratch())
    return param


def test_stochastic_rounding_is_unbiased_and_takes_neighbours_only():
    numbers = torch.randn(500, generator=torch.Generator().manual_seed(0))
    numbers[:5] = torch.tensor([1e-30, -1e-39, 0.0, 1.0, 3e38])
    draws = torch.stack([rounded(numbers, step) for step in range(4000)]).double()
    truncated = (numbers.view(torch.int32) & -65536).view(torch.float32)
    away = (truncated.view(torch.int32) + 65536).view(torch.float32).to(BF16).double()
    assert bool(((draws == truncated.double()) | (draws == away)).all())
    exact = numbers == truncated
    assert torch.equal(draws[:, exact].float(), numbers[exact].expand(4000, -1))
    gap = (away - truncated.double()).abs()
    error = (draws.mean(0) - numbers.double()).abs() / gap
    # The mean of n roundings has a deviation of at most gap / (2 sqrt(n)): here 5 of them.
    assert float(error[numbers.abs() < 1e38].max()) < 5 / (2 * 4000**0.5)


def test_stochastic_rounding_leaves_what_is_not_finite():
    numbers = torch.tensor([torch.inf, -torch.inf, torch.nan, 1.0])
    for step in range(50):
        result = rounded(numbers, step)
        assert torch.equal(result[:2].float(), numbers[:2])
        assert bool(result[2].isnan())


def test_stochastic_rounding_depends_on_parameter_element_step_and_nothing_else():
    numbers = torch.full((4096,), 1 + 1 / 256)  # half way between two
    whole = rounded(numbers, 3)
    pieces = [rounded(numbers[a:b], 3, first=a) for a, b in ((0, 5), (5, 1029), (1029, 4096))]
    assert torch.equal(torch.cat(pieces), whole)
    for other in (rounded(numbers, 4), rounded(numbers, 3, fqn="v"), rounded(numbers, 3, first=1)):
        # Independent: half of the elements agree, up to 5 deviations.
        assert abs(float((other == whole).float().mean()) - 0.5) < 5 / (2 * 4096**0.5)


def test_stochastic_rounding_draws_16_bits_without_bias():
    bits = torch.empty(1 << 16, dtype=torch.int64)
    random_bits(Place(0, 1 << 16, stream_of("layer.weight", 7, 0), 12345), bits)
    assert 0 <= int(bits.min())
    assert int(bits.max()) < 1 << 16
    ones = torch.stack([(bits >> i & 1).float().mean() for i in range(16)])
    assert float((ones - 0.5).abs().max()) < 5 / (2 * 256)
    pairs = torch.bincount((bits[1:] >> 12) * 16 + (bits[:-1] >> 12), minlength=256)
    assert int((pairs - 256).abs().max()) < 6 * 16  # neighbours are independent too


@CHOICES
def test_update_in_fp32_is_the_same_where_a_parameter_is_cut(choice):
    full = torch.randn(37, 50, generator=torch.Generator().manual_seed(0)).to(BF16)
    param = nn.Parameter(full.clone())
    step_with_gradients(param, choice)
    for world_size in (1, 2, 3):
        for trained in run_ranks(train_cut, world_size, full, choice):
            assert torch.equal(trained, param.detach())


def train_cut(full: Tensor, choice: str) -> Tensor:
    world_size = torch.distributed.get_world_size()
    mesh = init_device_mesh("cpu", (world_size,))
    held = [700, 0, 1150][:world_size]
    held[-1] += 37 * 50 - sum(held)
    placement = RaggedShard((0, 1), held)
    param = nn.Parameter(distribute_ragged(full, mesh, placement))
    step_with_gradients(param, choice)
    return param.full_tensor().detach()


def step_with_gradients(param: nn.Parameter, choice: str) -> None:
    optimizer = Muon([("w", param)], lr=0.01, weight_decay=0.3, states=Precision(**{choice: True}))
    for step in range(4):
        grad = torch.randn(37, 50, generator=torch.Generator().manual_seed(step)).to(BF16)
        if hasattr(param, "placement"):
            grad = distribute_ragged(grad, param.device_mesh, param.placement)
        param.grad = grad
        optimizer.step()


def test_stochastic_rounding_differs_between_parameters_and_goes_on_after_a_restart():
    start = torch.full((64, 64), 1 + 1 / 128, dtype=BF16)

    def make(params: list[nn.Parameter]) -> Muon:
        return Muon(params, lr=1e-3, weight_decay=0.5, states=Precision(stochastic_rounding=True))

    def step(params: list[nn.Parameter], optimizer: Muon) -> None:
        for param in params:
            param.grad = torch.zeros_like(param)
        optimizer.step()

    params = [nn.Parameter(start.clone()) for _ in range(2)]
    optimizer = make(params)
    for _ in range(3):
        step(params, optimizer)
    assert 0.1 < float((params[0] == params[1]).float().mean()) < 0.9
    resumed = [nn.Parameter(param.detach().clone()) for param in params]
    other = make(resumed)
    other.load_state_dict(optimizer.state_dict())
    before = params[0].detach().clone()
    step(params, optimizer)
    step(resumed, other)
    assert not torch.equal(params[0], before)
    assert all(torch.equal(a, b) for a, b in zip(params, resumed, strict=True))


def test_master_weights_leave_groups_in_fp32_as_they_are():
    """Norms are often kept in fp32 beside matrices in bfloat16."""
    matrix = nn.Parameter(torch.ones(64, 64, dtype=BF16))
    norm = nn.Parameter(torch.ones(64))
    groups = [{"params": [("w", matrix)]}, {"params": [("norm", norm)], "algorithm": "adamw"}]
    optimizer = Muon([dict(group) for group in groups], states=Precision(master_weights=True))
    assert "master" in optimizer.state[matrix]
    assert "master" not in optimizer.state[norm]
    groups[1]["master_weights"] = True  # said of this group
    with pytest.raises(ValueError, match="norm: master_weights=True is for parameters of 16 bits"):
        Muon(groups)


def test_master_weights_and_stochastic_rounding_exclude_each_other():
    param = nn.Parameter(torch.ones(4, 4, dtype=BF16))
    with pytest.raises(ValueError, match="group 0: expected master_weights or stochastic_rounding"):
        AdamW([param], states=Precision(master_weights=True, stochastic_rounding=True))
    half = nn.Parameter(torch.ones(4, 4, dtype=torch.float16))
    with pytest.raises(
        ValueError, match=r"w: stochastic_rounding=True rounds to bfloat16, got .*16"
    ):
        AdamW([("w", half)], states=Precision(stochastic_rounding=True))
    AdamW([("w", half)], states=Precision(master_weights=True))
