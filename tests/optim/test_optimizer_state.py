"""What state and state dicts hold, and their copies."""

import copy
import io
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.optim.swa_utils import AveragedModel

from ranks import on_ranks, run_ranks
from sharding.tensor.ragged_tensor import RaggedDTensor
from small_models import (
    assert_bits,
    assert_weights,
    build,
    full,
    full_gradients,
    local_bits,
    loss_of,
    make_optimizer,
    set_gradients,
    shard,
    weights_of,
)

OPTIMIZERS = ["muon", "adamw"]


def started(name: str, steps: int = 2) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = build()
    if dist.is_initialized():
        shard(model)
    optimizer = make_optimizer(name, model)
    for step in range(steps):
        set_gradients(model.parameters(), full_gradients(model.parameters(), step))
        optimizer.step()
    return model, optimizer


def step_more(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    set_gradients(model.parameters(), full_gradients(model.parameters(), 7))
    optimizer.step()
    return local_bits(optimizer)


def walk_state(name: str) -> list[str]:
    """Checks every entry of the state before and after steps; returns the keys."""
    shapes = []
    for steps in (0, 2):
        _, optimizer = started(name, steps)
        held = {p for group in optimizer.param_groups for p in group["params"]}
        assert set(optimizer.state) == held
        assert {"lr", "weight_decay"} <= optimizer.defaults.keys()
        entries = []
        for p, state in optimizer.state.items():
            for key, value in state.items():
                assert isinstance(key, str)
                assert isinstance(value, Tensor)
                if key != "step":
                    assert type(value) is type(p.data)
                    assert value.shape == p.shape
                entries.append((key, tuple(value.shape)))
        saved = optimizer.state_dict()
        assert sorted(saved) == ["param_groups", "state"]
        assert sorted(saved["state"]) == list(range(len(held)))
        for group in saved["param_groups"]:
            for key, value in group.items():
                plain = (int, float, str, bool, tuple, list, type(None))
                assert isinstance(value, plain), (key, value)
        shapes.append(entries)
    assert shapes[0] == shapes[1]
    return [f"{key}{shape}" for key, shape in shapes[0]]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_entry_of_the_state_is_a_tensor_of_a_parameter(name):
    """HeavyBall#56, VeOmni#1008, lightning#11757, dion#18: entries that no state dict can hold."""
    assert run_ranks(walk_state, 3, name) == [walk_state(name)] * 3


def through_torchs_functions(name: str) -> None:
    for flatten in (False, True):
        through(name, flatten, StateDictOptions(flatten_optimizer_state_dict=flatten))


def through(name: str, flatten: bool, options: StateDictOptions) -> None:
    model, optimizer = started(name)
    saved = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=options))
    weights = copy.deepcopy(model.state_dict())
    expected = step_more(model, optimizer)
    other_model, other = started(name, steps=0)
    before_first_step = get_optimizer_state_dict(other_model, other, options=options)
    keys = before_first_step if flatten else before_first_step["state"]
    assert keys.keys() == (saved if flatten else saved["state"]).keys()
    other_model.load_state_dict(weights)
    set_optimizer_state_dict(other_model, other, saved, options=options)
    assert_bits(step_more(other_model, other), expected)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_goes_through_torchs_functions_and_back(name):
    """HeavyBall#56, VeOmni#1008; the same keys before the first step as after it."""
    through_torchs_functions(name)
    run_ranks(through_torchs_functions, 3, name)


def copy_a_state_dict(name: str, how: str) -> None:
    model, optimizer = started(name)
    saved = optimizer.state_dict()
    if how == "deepcopy":
        copied = copy.deepcopy(saved)
    elif how == "pickle":
        copied = pickle.loads(pickle.dumps(saved))
    else:
        file = io.BytesIO()
        torch.save(saved, file)
        file.seek(0)
        copied = torch.load(file, weights_only=how == "weights_only")
    weights = copy.deepcopy(model.state_dict())
    for i, state in saved["state"].items():
        for key, value in state.items():
            other = copied["state"][i][key]
            assert torch.equal(full(other), full(value))
            if key != "step":
                assert type(other) is RaggedDTensor
                assert other.placements == value.placements
                assert other.to_local().numel() == 0 or (
                    other.to_local().data_ptr() != value.to_local().data_ptr()
                )
    expected = step_more(model, optimizer)  # does not write into the copies
    other_model, other = started(name, steps=0)
    other_model.load_state_dict(weights)
    other.load_state_dict(copied)
    assert_bits(step_more(other_model, other), expected)


@pytest.mark.parametrize("name", OPTIMIZERS)
@on_ranks(2)
def test_copied_state_dict_is_independent_and_loads(name):
    """dion#18: sharded states could not be copied."""
    for how in ("deepcopy", "pickle", "file", "weights_only"):
        copy_a_state_dict(name, how)


@on_ranks(2)
def test_copied_parameters_are_apart_from_the_buffers():
    """dion#18, lightning#11757"""
    model, optimizer = started("adamw")
    loss_of(model, 0).backward()
    before = local_bits(optimizer)
    for p in model.parameters():
        copied = copy.deepcopy(p)
        assert isinstance(copied, nn.Parameter)
        assert isinstance(copied, RaggedDTensor)
        assert copied.requires_grad
        assert copied.placements == p.placements
        assert torch.equal(full(copied), full(p))
        with torch.no_grad():
            copied.fill_(3.0)
    assert_bits(local_bits(optimizer), before)
    average = [copy.deepcopy(p.detach()) for p in model.parameters()]  # as EMA scripts do
    with torch.no_grad():
        torch._foreach_lerp_(average, [p.detach() for p in model.parameters()], 0.5)
    for a, p in zip(average, model.parameters(), strict=True):
        assert torch.allclose(full(a), full(p))


@on_ranks(2)
def test_copy_of_a_sharded_module_says_what_to_do_and_breaks_nothing():
    """lightning#11757: a copied module shared hooks and buffers with its origin."""
    model, optimizer = started("adamw")
    before = weights_of(model)
    for copying in (
        lambda: copy.deepcopy(model),
        lambda: copy.deepcopy(model.blocks),
        lambda: copy.deepcopy(nn.Sequential(model)),
        lambda: AveragedModel(model),
    ):
        with pytest.raises(NotImplementedError, match=r"copy.* before fully_shard.*state_dict"):
            copying()
    loss_of(model, 0).backward()
    optimizer.step()
    after = weights_of(model)
    assert not any(torch.equal(after[name], before[name]) for name in after)


def copies_of_an_optimizer(name: str) -> None:
    """A copy holds copied parameters; both go on alike."""
    _, optimizer = started(name)
    for copied in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        originals = [p for group in optimizer.param_groups for p in group["params"]]
        copies = [p for group in copied.param_groups for p in group["params"]]
        assert not any(a is b for a, b in zip(originals, copies, strict=True))
        assert_bits(local_bits(copied), local_bits(optimizer))
        for parameters in (originals, copies):
            set_gradients(parameters, full_gradients(parameters, 7))
        copied.step()
    optimizer.step()
    assert_bits(local_bits(copied), local_bits(optimizer))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_copied_optimizer_goes_on_as_the_original(name):
    """lightning#11757"""
    copies_of_an_optimizer(name)
    run_ranks(copies_of_an_optimizer, 2, name)


def look_at_state(name: str, look: str) -> dict[str, Tensor]:
    model = build()
    if dist.is_initialized():
        shard(model)
    optimizer = make_optimizer(name, model)
    if look == "state":
        assert optimizer.state
    elif look == "state_dict":
        assert optimizer.state_dict()["state"]
    elif look == "torchs_function":
        get_optimizer_state_dict(model, optimizer)
    if look:
        assert all(p.grad is None for p in model.parameters())
        steps = [s["step"] for s in optimizer.state.values() if "step" in s]
        assert not any(steps)
        assert steps
    set_gradients(model.parameters(), full_gradients(model.parameters(), 0))
    optimizer.step()
    return weights_of(model)


def look_in_every_way(name: str) -> list[dict[str, Tensor]]:
    return [look_at_state(name, look) for look in ("", "state", "state_dict", "torchs_function")]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_looking_at_the_state_takes_no_hidden_step(name):
    """pytorch#164929, Megatron-LM#5974, torchtitan#4382, DeepSpeed#5104"""
    expected, *looked = look_in_every_way(name)
    for result in [looked, *run_ranks(look_in_every_way, 2, name)]:
        for weights in result:
            assert_weights(weights, expected)
