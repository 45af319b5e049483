"""torch.distributed.checkpoint and the state-dict API on sharded models, across world sizes."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.fsdp as torch_fsdp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor, Shard

from ranks import run_ranks
from training import Run, build_model, build_optimizer, shard, train_model

RUN = Run(optimizer="muon", steps=3)


def full(value: object) -> object:
    """The whole tensor of anything sharded."""
    return value.full_tensor().detach() if isinstance(value, DTensor) else value


def full_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, object]:
    """Weights and optimizer states as full tensors by one flat name each."""
    weights, state = get_state_dict(model, optimizer)
    flat: dict[str, object] = {name: full(value) for name, value in weights.items()}
    for name, states in state["state"].items():
        flat.update({f"{name}.{key}": full(value) for key, value in states.items()})
    return flat


def set_gradients(model: nn.Module, step: int) -> None:
    """The same full gradients whatever the number of ranks, as if they had been averaged."""
    generator = torch.Generator().manual_seed(step)
    for parameter in model.parameters():
        gradient = torch.randn(parameter.shape, generator=generator)
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        parameter.grad.copy_(gradient)


def run_of(
    load_from: str | None, save_to: str | None, steps: range
) -> tuple[dict[str, object], list[str]]:
    """Builds, maybe loads, steps with given gradients, maybe saves; returns the full state."""
    model = build_model(RUN)
    shard(model, RUN)
    optimizer = build_optimizer(model, RUN)
    if load_from is not None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        weights, state = get_state_dict(model, optimizer)
        dcp.load({"model": weights, "optimizer": state}, checkpoint_id=load_from)
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
    for step in steps:
        set_gradients(model, step)
        optimizer.step()
        optimizer.zero_grad()
    if save_to is not None:
        weights, state = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optimizer": state}, checkpoint_id=save_to)
    return full_state(model, optimizer), [str(p.placements) for p in model.parameters()]


def assert_same_state(state: dict[str, object], expected: dict[str, object]) -> None:
    assert state.keys() == expected.keys()
    for name, value in state.items():
        other = expected[name]
        if isinstance(value, Tensor) and isinstance(other, Tensor):
            assert torch.equal(value, other), name
        else:
            assert value == other, name


def test_run_saved_on_some_ranks_continues_bitwise_on_others(tmp_path: Path) -> None:
    """bitsandbytes#89 and others: state that cannot be loaded on another world size.

    With the same full gradients, 3 + 2 steps with a save and a load between them are 5 steps.
    """
    straight, _ = run_ranks(run_of, 1, None, None, range(5))[0]
    saved = run_ranks(run_of, 2, None, str(tmp_path / "two"), range(3))
    layouts = [saved[0][1]]
    for world_size in (3, 1, 5, 2):
        resumed = run_ranks(run_of, world_size, str(tmp_path / "two"), None, range(3, 5))
        for state, layout in resumed:
            assert_same_state(state, straight)
            layouts.append(layout)
    assert layouts[0] != layouts[1], (
        "the layouts of 2 and 3 ranks must differ for this to mean much"
    )


def train_and_save(path: str) -> dict[str, Tensor]:
    _, model = train_model(RUN)
    dcp.save(get_model_state_dict(model), checkpoint_id=path)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    gathered = get_model_state_dict(model, options=options)
    weights = {name: p.full_tensor().detach() for name, p in model.named_parameters()}
    assert len(gathered) == (len(weights) if dist.get_rank() == 0 else 0)
    for name, value in gathered.items():
        assert type(value) is Tensor
        assert torch.equal(value, weights[name])
    return weights


def load_into_fsdp2(path: str) -> dict[str, Tensor]:
    model = build_model(RUN)
    for block in model.blocks:
        torch_fsdp.fully_shard(block)
    torch_fsdp.fully_shard(model)
    state = get_model_state_dict(model)
    assert all(value.placements == (Shard(0),) for value in state.values())
    with torch.no_grad():
        for value in state.values():
            value.zero_()
    dcp.load(state, checkpoint_id=path)
    return {name: p.full_tensor().detach() for name, p in model.named_parameters()}


@pytest.mark.parametrize("world_size", [2, 5])
def test_checkpoint_loads_into_fsdp2(tmp_path: Path, world_size: int) -> None:
    weights = run_ranks(train_and_save, 3, str(tmp_path / "three"))[0]
    for loaded in run_ranks(load_into_fsdp2, world_size, str(tmp_path / "three")):
        assert loaded.keys() == weights.keys()
        for name, value in loaded.items():
            assert torch.equal(value, weights[name]), name


def save_fsdp2(path: str) -> None:
    model = build_model(RUN)
    torch_fsdp.fully_shard(model)
    dcp.save(get_model_state_dict(model), checkpoint_id=path)


def load_from_fsdp2(path: str) -> dict[str, Tensor]:
    model = build_model(Run(seed=1))
    shard(model, RUN)
    state = get_model_state_dict(model)
    dcp.load(state, checkpoint_id=path)
    return {name: p.full_tensor().detach() for name, p in model.named_parameters()}


def test_checkpoint_of_fsdp2_loads(tmp_path: Path) -> None:
    expected = dict(build_model(RUN).named_parameters())
    run_ranks(save_fsdp2, 2, str(tmp_path / "fsdp2"))
    for loaded in run_ranks(load_from_fsdp2, 3, str(tmp_path / "fsdp2")):
        for name, value in loaded.items():
            assert torch.equal(value, expected[name]), name
