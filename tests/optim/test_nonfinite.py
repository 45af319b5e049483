"""Infinite and NaN gradients: all ranks decide alike, and a step left out leaves no trace."""

import pickle

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.profiler import ProfilerActivity, profile

from ranks import on_ranks, run_ranks
from sharding import fully_shard
from small_models import (
    assert_bits,
    assert_weights,
    build,
    full_gradients,
    local_bits,
    loss_of,
    make_optimizer,
    set_gradients,
    shard,
    weights_of,
)
from vfsdp_optim import AdamW, Muon, Precision

OPTIMIZERS = ["muon", "adamw"]
# Where the host may read the flag, and (as on CUDA) where only the device knows it.
HOST, DEVICE = frozenset({"cpu"}), frozenset()


def poison(model, bad: float) -> None:
    """Put one bad element into the last element of the head's gradient: one rank's piece of it."""
    grad = model.head.weight.grad
    piece = grad._local_tensor if dist.is_initialized() else grad.view(-1)
    holders = [piece]
    if dist.is_initialized():
        pieces = [None] * dist.get_world_size()
        dist.all_gather_object(pieces, piece.numel())
        last = max(rank for rank, numel in enumerate(pieces) if numel)
        holders = [piece] if dist.get_rank() == last else []
    for holder in holders:
        holder[-1] = bad


def train_past_bad_step(name: str, bad: float, host_devices) -> dict[str, torch.Tensor]:
    """Steps 0, a bad one, 2, the bad one between two good ones; returns the weights."""
    model = build()
    if dist.is_initialized():
        shard(model)
    optimizer = make_optimizer(name, model, on_nonfinite="skip")
    optimizer._nonfinite.host_devices = host_devices
    for step in range(3):
        set_gradients(model.parameters(), full_gradients(model.parameters(), step))
        if step == 1:
            poison(model, bad)
            before = local_bits(optimizer)
            assert optimizer.step() is None
            assert optimizer.skipped_steps == 1
            assert_bits(local_bits(optimizer), before)
            optimizer.step()  # the gradient is still there
            assert_bits(local_bits(optimizer), before)
        else:
            optimizer.step()
    assert optimizer.skipped_steps == 2
    assert all(s["step"] == 2 for s in optimizer.state.values() if "step" in s)
    return weights_of(model)


def train_without_bad_step(name: str) -> dict[str, torch.Tensor]:
    model = build()
    optimizer = make_optimizer(name, model)
    for step in (0, 2):
        set_gradients(model.parameters(), full_gradients(model.parameters(), step))
        optimizer.step()
    return weights_of(model)


def train_past_bad_steps(name: str) -> list[dict[str, torch.Tensor]]:
    infinities = (float("inf"), float("-inf"), float("nan"))
    return [
        train_past_bad_step(name, bad, devices) for bad in infinities for devices in (HOST, DEVICE)
    ]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_inf_on_one_rank_never_enters_the_states_of_a_skipped_step(name):
    """DeepSpeed#8432, fairscale#754: an inf gradient entered the momentum of a step thrown away."""
    expected = train_without_bad_step(name)
    for results in [train_past_bad_steps(name), *run_ranks(train_past_bad_steps, 3, name)]:
        for weights in results:
            assert_weights(weights, expected)


@pytest.mark.parametrize("name", OPTIMIZERS)
@on_ranks(3)
def test_ignored_nan_is_seen_by_every_rank_in_the_same_step(name):
    """DeepSpeed#8435. The default is torch's: the step is taken, and NaN shows at once."""
    model = shard(build())
    optimizer = make_optimizer(name, model)
    seen = []
    for step in range(3):
        set_gradients(model.parameters(), full_gradients(model.parameters(), step))
        if step == 0:
            poison(model, float("nan"))
        optimizer.step()
        seen.append(bool(weights_of(model)["head.weight"].isnan().any()))
    assert seen == [True] * 3


def raise_and_go_on(name: str) -> tuple[str, dict[str, torch.Tensor]]:
    model = build()
    if dist.is_initialized():
        shard(model)
    optimizer = make_optimizer(name, model, on_nonfinite="raise")
    message = ""
    for step in range(3):
        set_gradients(model.parameters(), full_gradients(model.parameters(), step))
        if step != 1:
            optimizer.step()
            continue
        poison(model, float("inf"))
        before = local_bits(optimizer)
        with pytest.raises(RuntimeError, match="infinite or NaN") as error:
            optimizer.step()
        message = str(error.value)
        assert_bits(local_bits(optimizer), before)
    return message, weights_of(model)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_nonfinite_gradient_is_named_on_every_rank_and_nothing_changes(name):
    """DeepSpeed#8432: one rank left out the step, the others took it."""
    expected = train_without_bad_step(name)
    results = [raise_and_go_on(name), *run_ranks(raise_and_go_on, 3, name)]
    for message, weights in results:
        assert message == results[0][0]
        assert "head.weight" in message
        assert "blocks" not in message
        assert 'on_nonfinite="skip"' in message
        assert_weights(weights, expected)


def bad_on_every_rank() -> tuple[str, str]:
    """The name of a parameter that is bad on this rank, another than on the others; the error."""
    model = shard(build())
    optimizer = make_optimizer("adamw", model, on_nonfinite="raise")
    set_gradients(model.parameters(), full_gradients(model.parameters(), 0))
    held = [name for name, p in model.named_parameters() if p.to_local().numel() > 0]
    name = held[0] if dist.get_rank() == 0 else held[-1]
    model.get_parameter(name).grad.to_local()[0] = float("nan")
    with pytest.raises(RuntimeError) as error:
        optimizer.step()
    return name, str(error.value)


def test_bad_gradients_of_all_ranks_are_in_the_error_of_each():
    (first, message), (second, other) = run_ranks(bad_on_every_rank, 2)
    assert message == other
    assert f"gradients of {first}, {second};" in message


def skip_on_two_meshes(bad_rank: int) -> list[bool]:
    """Whether each parameter moved; the blocks are on two dimensions of a mesh, one rank is bad."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    model = build()
    for block, dimension in zip(model.blocks, "ab", strict=True):
        fully_shard(block, mesh=mesh[dimension])
    parameters = list(model.blocks.parameters())
    optimizer = AdamW(parameters, lr=0.1, on_nonfinite="skip")
    set_gradients(parameters, full_gradients(parameters, 0))
    if dist.get_rank() == bad_rank:
        held = [p for p in parameters if p.to_local().numel() > 0]
        held[0].grad.to_local()[0] = float("inf")
    before = local_bits(optimizer)
    optimizer.step()
    return [torch.equal(a, b) for a, b in zip(local_bits(optimizer), before, strict=True)]


def test_ranks_of_all_meshes_skip_together():
    """DeepSpeed#8432: the rank that was bad shares no group with the one across."""
    for bad_rank in (0, 3):
        for same in run_ranks(skip_on_two_meshes, 4, bad_rank):
            assert all(same)


@pytest.mark.parametrize("host_devices", [HOST, DEVICE], ids=["host", "device"])
@on_ranks(2)
def test_muon_counts_no_step_of_a_parameter_without_a_gradient_where_steps_are_skipped(
    host_devices,
):
    """It counted down where only the device knew that the step was to be left out."""
    params = [nn.Parameter(torch.ones(40, 33, dtype=torch.bfloat16)) for _ in range(2)]
    mesh = init_device_mesh("cpu", (2,))
    params = [nn.Parameter(distribute_tensor(p.detach(), mesh, [Shard(0)])) for p in params]
    named = [("absent", params[0]), ("present", params[1])]
    optimizer = Muon(named, lr=0.1, on_nonfinite="skip", states=Precision(stochastic_rounding=True))
    optimizer._nonfinite.host_devices = host_devices
    steps, moved = [], []
    for bad in (True, False):
        params[1].grad = torch.ones_like(params[1])
        if bad and dist.get_rank() == 1:
            params[1].grad.to_local()[0, 0] = float("inf")
        optimizer.step()
        steps += [float(optimizer.state[p]["step"]) for p in params]
        moved += [
            not torch.equal(p.full_tensor(), torch.ones_like(p).full_tensor()) for p in params
        ]
    assert steps == [0.0, 0.0, 0.0, 1.0]
    assert moved == [False, False, False, True]


def calls_of_a_step(name: str, choice: str) -> dict[str, int]:
    """How often some calls are made in a step whose flag only the device knows."""
    model = shard(build())
    optimizer = make_optimizer(name, model, on_nonfinite=choice)
    optimizer._nonfinite.host_devices = DEVICE
    for step in range(2):
        set_gradients(model.parameters(), full_gradients(model.parameters(), step))
        loss_of(model, step).backward()  # into the flat buffers
        optimizer.skipped_steps  # noqa: B018  (reads the flag of the step before)
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            optimizer.step()
        optimizer.zero_grad()
    counts = {event.key: event.count for event in profiler.key_averages()}
    names = ["aten::_local_scalar_dense", "aten::amax", "c10d::allreduce_"]
    return {key: counts.get(key, 0) for key in names}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_check_is_one_reduction_without_host_reads_over_runs(name):
    """A host read in every step would make the device wait for the host."""
    ignore, skip = (run_ranks(calls_of_a_step, 2, name, choice)[0] for choice in ("ignore", "skip"))
    assert skip["aten::_local_scalar_dense"] == ignore["aten::_local_scalar_dense"]
    assert (ignore["c10d::allreduce_"], skip["c10d::allreduce_"]) == (0, 1)
    assert ignore["aten::amax"] == 0
    # 3 buckets; in the blocks' two, Muon's matrices cut AdamW's vectors into a few more runs.
    assert 1 <= skip["aten::amax"] <= (3 if name == "adamw" else 9)


def train_with_scaler(name: str) -> list[object]:
    """A GradScaler loop in which one rank's piece of one gradient is inf in the second step."""
    model = shard(build())
    optimizer = make_optimizer(name, model)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=100)
    scales = []
    for step in range(3):
        scaler.scale(loss_of(model, step)).backward()
        if step == 1:
            poison(model, float("inf"))
        else:
            scaler.unscale_(optimizer)
            assert torch.nn.utils.clip_grad_norm_(model.parameters(), 10.0).isfinite()
        before = local_bits(optimizer)
        scaler.step(optimizer)
        scaler.update()
        after = local_bits(optimizer)
        same = all(torch.equal(a, b) for a, b in zip(after, before, strict=True))
        scales.append((scaler.get_scale(), same))
        optimizer.zero_grad()
    return scales


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_grad_scaler_skips_on_all_ranks_for_an_inf_on_one(name):
    """DeepSpeed#8432: ranks that scaled down and ranks that did not went apart."""
    results = run_ranks(train_with_scaler, 3, name)
    assert [same for _, same in results[0]] == [False, True, False]
    assert [scale for scale, _ in results[0]] == [64.0, 32.0, 32.0]
    assert results == [results[0]] * 3


def test_choice_survives_pickling_and_an_unknown_one_is_an_error():
    parameter = torch.nn.Parameter(torch.ones(3, 3))
    with pytest.raises(ValueError, match=r"on_nonfinite: expected one of .*'skip'.*got 'zero'"):
        AdamW([parameter], on_nonfinite="zero")
    other = pickle.loads(pickle.dumps(Muon([parameter], on_nonfinite="skip")))
    (copied,) = other.param_groups[0]["params"]
    copied.grad = torch.full((3, 3), float("inf"))
    other.step()
    assert torch.equal(copied, torch.ones(3, 3))
    assert other.skipped_steps == 1
