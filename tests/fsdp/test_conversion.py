"""Parameters that leave the flat buffers are taken back, with their values and their identity."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from ranks import RankError, on_ranks, run_ranks
from sharding import fully_shard
from sharding.fsdp.module_state import state_of
from training import Run, build_model, build_optimizer, shard, tokens_of


def weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Full copies of all parameters."""
    return {
        name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
        for name, p in model.named_parameters()
    }


def one_step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> float:
    """One step on this rank's part of a batch; returns this rank's loss."""
    tokens = tokens_of(step).chunk(dist.get_world_size())[dist.get_rank()]
    loss = nn.functional.cross_entropy(
        model(tokens[:, :-1]).float().flatten(0, 1), tokens[:, 1:].flatten()
    )
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def assert_in_buffers(model: nn.Module) -> None:
    """Every parameter is a view of its bucket's shard, and holds what the module holds."""
    for module in model.modules():
        state = state_of(module)
        if state is None or state.bucket is None:
            continue
        for parameter in state.bucket.parameters:
            buffer = state.bucket.buffers[parameter.segment]
            expected = buffer.local_view(parameter.index)
            assert parameter.local.data_ptr() == expected.data_ptr()
            assert parameter.local.shape == expected.shape
            for holder, name in parameter.sites:
                assert holder._parameters[name] is parameter.sharded


def to_bf16(model: nn.Module) -> torch.dtype:
    model.to(torch.bfloat16)
    return torch.bfloat16


def to_fp64_and_back(model: nn.Module) -> torch.dtype:
    model.double().float()
    return torch.float32


def assign_full_tensors(model: nn.Module) -> torch.dtype:
    model.load_state_dict(
        {name: w.clone() for name, w in weights_of(model).items()}, strict=True, assign=True
    )
    return torch.float32


def assign_shards(model: nn.Module) -> torch.dtype:
    model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)
    return torch.float32


def swap(model: nn.Module) -> torch.dtype:
    weight = model.head.weight
    other = nn.Parameter(weight.detach().clone())
    torch.utils.swap_tensors(weight, other)
    return torch.float32


def replace_parameter(model: nn.Module) -> torch.dtype:
    model.blocks[1].qkv.weight = nn.Parameter(model.blocks[1].qkv.weight.detach().clone())
    model.norm.weight = nn.Parameter(model.norm.weight.full_tensor().detach())
    return torch.float32


CHANGES: dict[str, Callable[[nn.Module], torch.dtype]] = {
    change.__name__: change
    for change in (
        to_bf16,
        to_fp64_and_back,
        assign_full_tensors,
        assign_shards,
        swap,
        replace_parameter,
    )
}


@pytest.mark.parametrize("name", CHANGES)
@on_ranks(3)
def test_changed_parameters_stay_in_the_buffer_and_train(name):
    """accelerate#3256: an optimizer of parameters that its module no longer has trains nothing."""
    run = Run(optimizer="muon")
    model = build_model(run)
    shard(model, run)
    optimizer = build_optimizer(model, run)
    one_step(model, optimizer, 0)
    parameters = list(model.parameters())
    before = weights_of(model)
    dtype = CHANGES[name](model)
    if dtype == torch.float32:
        one_step(model, optimizer, 1)
    else:
        with torch.no_grad():
            model(tokens_of(1)[:1, :-1])
    assert_in_buffers(model)
    after = weights_of(model)
    assert list(model.parameters()) == parameters or all(
        a is b for a, b in zip(model.parameters(), parameters, strict=True)
    )
    reference = build_model(run)  # the same two steps without the change
    shard(reference, run)
    reference_optimizer = build_optimizer(reference, run)
    one_step(reference, reference_optimizer, 0)
    if dtype == torch.float32:
        one_step(reference, reference_optimizer, 1)
        expected = weights_of(reference)
    else:
        expected = {key: value.to(dtype) for key, value in before.items()}
    for key, value in after.items():
        assert value.dtype == dtype
        assert torch.equal(value, expected[key]), key


def half_of_a_bucket_converted() -> None:
    model = nn.Sequential(nn.Linear(30, 30), nn.Linear(30, 30))
    fully_shard(model)
    model[0].half()
    model(torch.ones(2, 30))


def test_converting_half_of_a_bucket_names_both_sides() -> None:
    with pytest.raises(RankError, match=r"(?s)0\.weight.*1\.weight.*as a whole") as error:
        run_ranks(half_of_a_bucket_converted, 2)
    assert len(error.value.reports) == 2
