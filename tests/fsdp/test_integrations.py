"""Optimizers built before sharding, by frameworks or by mistake: they train, or say why not."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import vfsdp_optim
from ranks import RankError, assert_as_one_process, run_ranks
from sharding import fully_shard
from small_models import (
    assert_weights,
    build,
    full_gradients,
    loss_of,
    make_optimizer,
    set_gradients,
    shard,
    weights_of,
)
from vfsdp_optim import AdamW

OPTIMIZERS = ["muon", "adamw"]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 4) -> list[float]:
    """The losses of a few steps on one batch; they must fall, and every parameter must move."""
    before = weights_of(model)
    losses = []
    for _ in range(steps):
        loss = loss_of(model, 0)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.05
    assert not [name for name, w in weights_of(model).items() if torch.equal(w, before[name])]
    return losses


def move_to_device(value: object, device: torch.device) -> object:
    """accelerate.utils.operations.send_to_device, for what a state dict holds."""
    if isinstance(value, Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, dict):
        return {key: move_to_device(v, device) for key, v in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(move_to_device(v, device) for v in value)
    return value


def prepare_as_accelerate(
    model: nn.Module, optimizer: torch.optim.Optimizer, fully_shard: Callable[[nn.Module], object]
) -> None:
    """What Accelerator._prepare_fsdp2 and the HF Trainer do with a model and its optimizer.

    accelerate 1.15, accelerator.py `_prepare_fsdp2`, optimizer.py `AcceleratedOptimizer.__init__`
    and utils/fsdp_utils.py `fsdp2_switch_optimizer_parameters`.
    """
    state = move_to_device(optimizer.state_dict(), torch.device("cpu"))
    optimizer.load_state_dict(state)
    old = {name: p.data_ptr() for name, p in model.named_parameters()}
    for group in optimizer.param_groups:
        for i, p in enumerate(group["params"]):
            group["params"][i] = torch.empty(1, dtype=p.dtype, device=p.device)
            group["params"][i].data_ptr = p.data_ptr()
    fully_shard(model)
    new = dict(model.named_parameters())
    mapping = {pointer: new[name] for name, pointer in old.items()}
    for group in optimizer.param_groups:
        group["params"] = [mapping[p.data_ptr] for p in group["params"]]


def train_through_accelerate(
    name: str, optimizer_first: bool, tied: bool
) -> tuple[list[float], dict[str, Tensor]]:
    model = build(tied)
    if optimizer_first:
        optimizer = make_optimizer(name, model)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
        prepare_as_accelerate(model, optimizer, shard)
    else:
        shard(model)
        optimizer = make_optimizer(name, model)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
    losses = train(model, optimizer)
    schedule.step()
    losses += train(model, optimizer)
    assert all(p in optimizer.state for p in model.parameters())
    assert len(optimizer.state) == len(list(model.parameters()))
    return losses, weights_of(model)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_parameters_swapped_by_accelerate_train_as_those_given_later(name, tied):
    """accelerate#3256, accelerate#4142, pytorch#149205: the optimizer kept what nobody trains."""
    for world_size in (2, 3):
        for (losses, weights), (other_losses, other_weights) in zip(
            run_ranks(train_through_accelerate, world_size, name, True, tied),
            run_ranks(train_through_accelerate, world_size, name, False, tied),
            strict=True,
        ):
            assert losses == other_losses
            assert_weights(weights, other_weights)


def step_with_originals(how: str) -> str:
    """Builds the optimizer over what is then sharded without its knowledge; the error of a step."""
    model = build()
    optimizer = make_optimizer("muon" if how == "stepped_before" else "adamw", model)
    if how == "stepped_before":
        set_gradients(model.parameters(), full_gradients(model.parameters(), 0))
        optimizer.step()
        optimizer.zero_grad()
    if how == "state_seen_before":
        assert optimizer.state
    shard(model)
    if how == "backward_between":
        loss_of(model, 0).backward()
    before = weights_of(model)
    with pytest.raises(RuntimeError, match="train nothing") as error:
        optimizer.step()
    assert_weights(weights_of(model), before)
    return str(error.value)


@pytest.mark.parametrize(
    "how", ["at_once", "backward_between", "state_seen_before", "stepped_before"]
)
def test_step_of_originals_names_one_and_the_cures(how):
    """pytorch#149205, pytorch#107843, accelerate#3256: such a step was silently a no-op."""
    messages = run_ranks(step_with_originals, 2, how)
    assert messages[0] == messages[1]
    for words in ["blocks.0." if how == "stepped_before" else "embedding.weight", "optimizer=",
                  "optimizer.param_groups", "after fully_shard"]:  # fmt: skip
        assert words in messages[0]


def build_after_a_forward(name: str) -> dict[str, Tensor]:
    """An optimizer over `parameters()` of a model that ran before, of which some are unsharded."""
    model = shard(build())
    loss_of(model, 0)  # without a backward: the root's parameters stay unsharded
    with pytest.raises(RuntimeError, match=r"unsharded form of 'embedding\.weight'.*reshard\(\)"):
        vfsdp_optim.AdamW([model.embedding.weight])
    optimizer = make_optimizer(name, model)
    train(model, optimizer)
    return weights_of(model)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_parameters_of_a_gathered_model_are_the_sharded_ones(name):
    """accelerate#4142: parameters() gave gathered parameters that are thrown away."""
    expected = run_ranks(train_optimizer_last, 2, name)
    for weights, other in zip(run_ranks(build_after_a_forward, 2, name), expected, strict=True):
        assert_weights(weights, other)


def train_optimizer_first(name: str) -> dict[str, Tensor]:
    model = build()
    optimizer = make_optimizer(name, model)
    shard(model, optimizer=optimizer)
    train(model, optimizer)
    return weights_of(model)


def train_optimizer_last(name: str) -> dict[str, Tensor]:
    model = shard(build())
    optimizer = make_optimizer(name, model)
    train(model, optimizer)
    return weights_of(model)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_passed_to_fully_shard_trains_as_one_built_later(name):
    """pytorch#149205"""
    expected = run_ranks(train_optimizer_last, 2, name)
    for weights, other in zip(run_ranks(train_optimizer_first, 2, name), expected, strict=True):
        assert_weights(weights, other)


def keep_some_out(how: str) -> None:
    """Passes the optimizer to calls that do not take all of its parameters, then trains."""
    model = build()
    extra = nn.Linear(3, 3)
    named = list(model.named_parameters())
    if how == "foreign":
        named += [(f"extra.{name}", p) for name, p in extra.named_parameters()]
    optimizer = AdamW(named, lr=0.1)
    for block in model.blocks:
        fully_shard(block, optimizer=optimizer)
    if how == "ignored":
        fully_shard(model, optimizer=optimizer, ignored_params={model.head.weight})
    elif how != "root_forgotten":
        fully_shard(model, optimizer=optimizer)
    train(model, optimizer)


@pytest.mark.parametrize(
    ("how", "name"), [("foreign", "extra.weight"), ("root_forgotten", "embedding.weight")]
)
def test_parameter_that_no_call_took_is_named_on_every_rank(how, name):
    """accelerate#4142: each rank trained its own copy of what was left out."""
    with pytest.raises(RankError) as error:
        run_ranks(keep_some_out, 2, how)
    assert len(error.value.reports) == 2
    for report in error.value.reports.values():
        assert report.startswith("raised RuntimeError")
        assert f"{name} of shape" in report
        assert "ignored_params" in report


def test_ignored_parameter_stays_plain_and_trains():
    """accelerate#4142"""
    run_ranks(keep_some_out, 2, "ignored")


def optimizer_of_some_calls() -> None:
    model = build()
    optimizer = vfsdp_optim.AdamW(model.named_parameters())
    fully_shard(model.blocks[0])
    fully_shard(model, optimizer=optimizer)
    loss_of(model, 0).backward()
    optimizer.step()


def test_call_that_did_not_get_the_optimizer_is_named():
    """pytorch#107843"""
    with pytest.raises(RankError, match=r"norm\.weight") as error:
        run_ranks(optimizer_of_some_calls, 2)
    assert len(error.value.reports) == 2
    assert all("optimizer=" in report for report in error.value.reports.values())


def rank_specific_data() -> dict[str, Tensor]:
    """Three steps in which each rank has its own batch; equal seeds give the sum of all ranks."""
    model = build()
    world_size, rank = 2, 0
    if dist.is_initialized():
        shard(model)
        world_size, rank = dist.get_world_size(), dist.get_rank()
    optimizer = make_optimizer("muon", model)
    for step in range(3):
        mine = [rank] if dist.is_initialized() else range(world_size)
        scale = 1 if dist.is_initialized() else world_size
        for part in mine:
            (loss_of(model, 10 * step + part) / scale).backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights_of(model)


def test_matrices_of_averaged_gradients_are_orthogonalized_not_of_one_ranks():
    """AReaL#1270, DeepSpeed#8090, Megatron-LM#5961: Newton-Schulz of a part-reduced one."""
    # Newton-Schulz amplifies the rounding of sums in another order by about 1e4; the gradient of
    # one rank alone gives differences of 0.1.
    assert_as_one_process(rank_specific_data, [2], atol=5e-3, rtol=0)
