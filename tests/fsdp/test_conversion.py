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
from training import Run, build_model, build_optimizer, shard, tokens_of, train_model


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


def change_and_train(name: str) -> None:
    """Applies a change between two steps; the optimizer must still move the model."""
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


@pytest.mark.parametrize("name", CHANGES)
def test_changed_parameters_stay_in_the_buffer_and_train(name: str) -> None:
    """accelerate#3256: an optimizer that keeps parameters the module no longer has trains nothing.

    The step after the change gives bit for bit what it gives without it.
    """
    run_ranks(change_and_train, 3, name)


def materialise_after_sharding() -> dict[str, torch.Tensor]:
    """A model built on meta, sharded, materialised, and loaded with known weights."""
    run = Run()
    with torch.device("meta"):
        model = build_model(run)
    shard(model, run)
    optimizer = build_optimizer(model, run)
    with pytest.raises(RuntimeError, match="to_empty"):
        model(tokens_of(0)[:, :-1])
    model.to_empty(device="cpu")
    model.load_state_dict(build_model(run).state_dict())
    assert_in_buffers(model)
    one_step(model, optimizer, 0)
    return weights_of(model)


def step_without_meta() -> dict[str, torch.Tensor]:
    """The same step of the same model built with its weights."""
    run = Run()
    model = build_model(run)
    shard(model, run)
    optimizer = build_optimizer(model, run)
    one_step(model, optimizer, 0)
    return weights_of(model)


def test_model_on_meta_trains_after_to_empty() -> None:
    """Megatron-LM#6799: parameters of a placeholder were trained with uninitialised values."""
    for world_size in (1, 3):
        expected = run_ranks(step_without_meta, world_size)
        for weights, other in zip(
            run_ranks(materialise_after_sharding, world_size), expected, strict=True
        ):
            assert all(torch.equal(weights[name], other[name]) for name in other)


def half_of_a_bucket_converted() -> None:
    model = nn.Sequential(nn.Linear(30, 30), nn.Linear(30, 30))
    fully_shard(model)
    model[0].half()
    model(torch.ones(2, 30))


def test_converting_half_of_a_bucket_names_both_sides() -> None:
    with pytest.raises(RankError, match=r"(?s)0\.weight.*1\.weight.*as a whole") as error:
        run_ranks(half_of_a_bucket_converted, 2)
    assert len(error.value.reports) == 2


@on_ranks(2)
def test_state_dict_of_an_unsharded_model_is_sharded_and_loading_reaches_the_next_forward() -> None:
    """Megatron-LM#6920: after loading, forward went on with the old copy of the weights."""
    _, model = train_model(Run(steps=1))
    model.unshard()
    assert all(isinstance(value, DTensor) for value in model.state_dict().values())
    model.unshard()
    zeros = {name: torch.zeros(value.shape) for name, value in model.state_dict().items()}
    model.load_state_dict(zeros)
    with torch.no_grad():
        assert not model(tokens_of(0)[:1, :-1]).any()
