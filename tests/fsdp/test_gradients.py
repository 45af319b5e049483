"""Gradients that users set, keep, zero, hook or differentiate again."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ranks import RankError, run_ranks
from sharding import fully_shard
from sharding.fsdp.module_state import state_of
from sharding.tensor.placement import RaggedShard
from sharding.tensor.ragged_tensor import RaggedDTensor, distribute_ragged
from small_models import (
    assert_weights,
    build,
    full,
    full_gradients,
    loss_of,
    make_optimizer,
    set_gradients,
    shard,
    weights_of,
)

WEIGHT = "blocks.1.down.weight"


def gradients_of(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: full(p.grad) for name, p in model.named_parameters()}


def assert_close(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, value in actual.items():
        # Sums over equal addends of the ranks; float32 rounds in another order.
        torch.testing.assert_close(value, expected[name], atol=1e-5, rtol=1e-4)


# -------------------------------------------------------------------- set by the user


def wrong_gradient(kind: str, p: RaggedDTensor) -> Tensor:
    if kind == "plain":
        return torch.ones(p.shape)
    units = (p.numel(), *[0] * (dist.get_world_size() - 1))
    return distribute_ragged(torch.ones(p.shape), p.device_mesh, RaggedShard((0, 1), units))


def use_wrong_gradient(kind: str, how: str) -> None:
    model = shard(build())
    optimizer = make_optimizer("muon", model)
    p = model.get_parameter(WEIGHT)
    p.grad = wrong_gradient(kind, p)
    if how == "step":
        optimizer.step()
    else:
        loss_of(model, 0).backward()


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("how", ["step", "backward"])
@pytest.mark.parametrize("kind", ["plain", "other_layout"])
def test_gradient_in_another_layout_is_named_on_every_rank(kind, how, world_size):
    """A plain gradient was cut or broadcast into the piece, or failed without a name."""
    with pytest.raises(RankError) as error:
        run_ranks(use_wrong_gradient, world_size, kind, how)
    assert len(error.value.reports) == world_size
    for report in error.value.reports.values():
        assert report.startswith("raised TypeError")
        assert "down.weight" in report
        assert "laid out as its parameter" in report


def train_with_set_gradients(name: str) -> dict[str, Tensor]:
    """Gradients by hand of two parameters, then a backward on top, then by hand of one alone."""
    model = build()
    if dist.is_initialized():
        shard(model)
    optimizer = make_optimizer(name, model)
    chosen = [model.get_parameter(WEIGHT), model.get_parameter("blocks.0.norm.bias")]
    gradients = full_gradients(chosen, 5)
    set_gradients(chosen, gradients)
    optimizer.step()  # of these two only
    loss_of(model, 0).backward()  # is added to them
    optimizer.step()
    optimizer.zero_grad()
    set_gradients(chosen[:1], gradients[:1])
    optimizer.step()
    assert all(p.grad is None for p in model.parameters() if p is not chosen[0])
    optimizer.zero_grad()
    loss_of(model, 1).backward()
    optimizer.step()
    return weights_of(model)


@pytest.mark.parametrize("name", ["muon", "adamw"])
def test_gradients_set_on_some_parameters_are_stepped_and_added_to(name):
    expected = train_with_set_gradients(name)
    for world_size in (2, 3):
        for weights in run_ranks(train_with_set_gradients, world_size, name):
            for key, weight in weights.items():
                # Newton-Schulz and Adam's division amplify the rounding of the averages.
                torch.testing.assert_close(weight, expected[key], atol=3e-3, rtol=0)


def kept_gradients(set_to_none: bool) -> list[dict[str, Tensor | None]]:
    """Two accumulated backwards, zeroed, and one more; the gradients after each part."""
    model = build()
    if dist.is_initialized():
        shard(model)
    optimizer = make_optimizer("adamw", model)
    result = []
    loss_of(model, 0).backward()
    loss_of(model, 1).backward()
    result.append(gradients_of(model))
    kept = [p.grad for p in model.parameters()]
    optimizer.zero_grad(set_to_none=set_to_none)
    if set_to_none:
        assert all(p.grad is None for p in model.parameters())
    else:
        assert all(p.grad is grad for p, grad in zip(model.parameters(), kept, strict=True))
        assert not any(full(grad).any() for grad in kept)
        if dist.is_initialized():
            assert_in_flat_gradients(model)
    loss_of(model, 2).backward()
    result.append(gradients_of(model))
    if not set_to_none:
        assert all(p.grad is grad for p, grad in zip(model.parameters(), kept, strict=True))
    model.zero_grad(set_to_none=set_to_none)
    loss_of(model, 3).backward()
    result.append(gradients_of(model))
    return result


def assert_in_flat_gradients(model: nn.Module) -> None:
    """Gradients are views of the flat buffers, whose padding is zero."""
    for module in model.modules():
        state = state_of(module)
        for parameter in state.bucket.parameters if state and state.bucket else ():
            flat = state.bucket.buffers[parameter.segment]
            local = parameter.sharded.grad.to_local()
            assert local.data_ptr() == flat.local_grad_view(parameter.index).data_ptr()


@pytest.mark.parametrize("set_to_none", [False, True])
def test_zeroed_gradients_stay_views_and_the_next_backward_adds(set_to_none):
    """Zeroed in place, a gradient is added to; set to None, it is written anew."""
    expected = kept_gradients(set_to_none)
    for world_size in (2, 3):
        for result in run_ranks(kept_gradients, world_size, set_to_none):
            for actual, reference in zip(result, expected, strict=True):
                assert_close(actual, reference)


def gradients_after_freezing_one() -> tuple[bool, dict[str, Tensor | None]]:
    model = build()
    if dist.is_initialized():
        shard(model)
    model.get_parameter(WEIGHT).requires_grad_(False)
    loss_of(model, 0).backward()
    loss_of(model, 0).backward()
    return model.get_parameter(WEIGHT).grad is None, gradients_of(model)


def test_gradient_of_a_frozen_parameter_is_none():
    _, expected = gradients_after_freezing_one()
    for is_none, gradients in run_ranks(gradients_after_freezing_one, 2):
        assert is_none
        del gradients[WEIGHT]
        assert_close(gradients, {k: v for k, v in expected.items() if k != WEIGHT})


# -------------------------------------------------------------------- graphs of gradients


class Critic(nn.Module):
    """Layers whose double backward reaches weights, one of them in the root's bucket."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(9, 20), nn.Tanh(), nn.Linear(20, 15), nn.Softplus(), nn.Linear(15, 1)
        )
        self.scale = nn.Parameter(torch.ones(9))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x * self.scale)


def train_with_penalty(only_penalty: bool, reshard: bool | None) -> tuple[list[float], dict]:
    """A gradient penalty, as of WGAN-GP, in every step."""
    torch.manual_seed(0)
    model = Critic()
    if dist.is_initialized():
        for layer in model.layers[::2]:
            fully_shard(layer, reshard_after_forward=reshard)
        fully_shard(model, reshard_after_forward=reshard)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(3):
        x = torch.randn(6, 9, generator=torch.Generator().manual_seed(step)).requires_grad_()
        y = model(x).mean()
        (gradient,) = torch.autograd.grad(y, x, create_graph=True)
        assert all(p.grad is None for p in model.parameters())
        penalty = (gradient.norm(dim=1) - 1).square().mean()
        (penalty if only_penalty else y + penalty).backward()
        if dist.is_initialized():
            held = [state_of(module) for module in model.modules()]
            assert all(s.bucket.state.name == "SHARDED" for s in held if s and s.bucket)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(penalty.item())
    return losses, weights_of(model)


@pytest.mark.parametrize("reshard", [None, True, False])
@pytest.mark.parametrize("only_penalty", [False, True])
def test_penalty_on_gradients_of_inputs_trains_as_one_process(only_penalty, reshard):
    """The second backward found the weights freed ("storage of size 0")."""
    expected, weights = train_with_penalty(only_penalty, reshard)
    for world_size in (2, 3):
        for losses, others in run_ranks(train_with_penalty, world_size, only_penalty, reshard):
            assert losses == pytest.approx(expected, abs=1e-5)
            assert_close(others, weights)


def gradient_with_a_graph() -> dict[str, Tensor]:
    model = shard(build())
    with pytest.raises(NotImplementedError, match=r"weight got a gradient with a graph.*autograd"):
        loss_of(model, 0).backward(create_graph=True)
    loss_of(model, 0).backward()  # goes on
    return gradients_of(model)


@pytest.mark.filterwarnings("ignore:Using backward.*create_graph")
def test_gradient_with_a_graph_is_refused_by_name_instead_of_losing_it():
    """A penalty on parameters' gradients would have been a constant."""
    model = build()
    loss_of(model, 0).backward()
    for gradients in run_ranks(gradient_with_a_graph, 2):
        assert_close(gradients, gradients_of(model))


# -------------------------------------------------------------------- hooks and retained gradients


def step_in_backward(in_backward: bool) -> dict[str, Tensor]:
    """One optimizer per parameter, stepped as soon as its gradient is there, or afterwards."""
    model = shard(build())
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}

    def update(p: Tensor) -> None:
        optimizers[p].step()
        optimizers[p].zero_grad()

    if in_backward:
        for p in optimizers:
            p.register_post_accumulate_grad_hook(update)
    for step in range(3):
        loss_of(model, step).backward()
        if in_backward:
            assert all(p.grad is None for p in optimizers)
        else:
            for p in optimizers:
                update(p)
    return weights_of(model)


def test_hook_after_accumulation_sees_the_averaged_gradient():
    """torchtune's optimizer in backward: the hooks of sharded parameters were never called."""
    expected = run_ranks(step_in_backward, 2, False)
    for weights, other in zip(run_ranks(step_in_backward, 2, True), expected, strict=True):
        assert_weights(weights, other)


def retained() -> list[Tensor]:
    """Gradients of activations inside and at the edges of sharded modules, and of the input."""
    model = build()
    if dist.is_initialized():
        shard(model)
    kept = []

    def keep(module: nn.Module, args: object, output: Tensor) -> None:
        output.retain_grad()
        kept.append(output)

    model.blocks[0].up.register_forward_hook(keep)
    model.blocks[1].register_forward_hook(keep)
    model.embedding.register_forward_hook(keep)
    loss_of(model, 0).backward()
    return [x.grad for x in kept]


def test_retained_gradients_of_activations_are_those_of_one_process():
    expected = retained()
    assert len(expected) == 3
    for gradients in run_ranks(retained, 2):
        for actual, value in zip(gradients, expected, strict=True):
            torch.testing.assert_close(actual, value, atol=1e-6, rtol=1e-4)
