"""Gradients that users set, keep, zero, hook or differentiate again."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ranks import assert_as_one_process
from sharding import fully_shard
from sharding.fsdp.module_state import state_of
from small_models import (
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
    # Newton-Schulz and Adam's division amplify the rounding of the averages.
    assert_as_one_process(train_with_set_gradients, (2, 3), name, atol=3e-3, rtol=0)


class Switched(nn.Module):
    """Reads one of its inputs; the other may have cost an encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.reader = nn.Linear(4, 4), nn.Linear(4, 4)
        self.reader.forward = lambda x, context: F.linear(x, self.reader.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.reader(x * 1, self.encoder(x))


def gradients_without_encoder() -> dict[str, Tensor | None]:
    torch.manual_seed(0)
    model = Switched()
    if dist.is_initialized():
        for part in (model.encoder, model.reader, model):
            fully_shard(part)
    model(torch.ones(2, 4, requires_grad=True)).sum().backward()
    return gradients_of(model)


def test_an_input_that_a_module_does_not_use_brings_no_gradient():
    """Zeros instead would have an optimizer decay the encoder's weights, and move its moments."""
    assert gradients_without_encoder()["encoder.weight"] is None
    assert_as_one_process(gradients_without_encoder, (2,))


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
    values = [full(grad) for grad in kept]
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
    if set_to_none:  # what somebody kept is not written again
        assert all(full(grad).equal(value) for grad, value in zip(kept, values, strict=True))
    else:
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
            grad = parameter.sharded.grad
            assert parameter.own_grad(flat) is grad
            flat.open_reduced(grad.to_local())
            view = flat.local_grad_view(parameter.index)
            assert grad.to_local().data_ptr() == view.data_ptr()


@pytest.mark.parametrize("set_to_none", [False, True])
def test_zeroed_gradients_stay_views_and_the_next_backward_adds(set_to_none):
    """Zeroed in place, a gradient is added to; set to None, it is written anew."""
    assert_as_one_process(kept_gradients, (2, 3), set_to_none, atol=1e-5, rtol=1e-4)


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
    assert_as_one_process(retained, [2], atol=1e-6, rtol=1e-4)
