"""Closures, groups, names and schedulers, on ranks as in one process."""

import re
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import CyclicLR, LambdaLR, OneCycleLR, ReduceLROnPlateau, SequentialLR

import vfsdp_optim
from ranks import assert_as_one_process, run_ranks
from sharding import fully_shard
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
from vfsdp_optim import AdamW, Muon

OPTIMIZERS = ["muon", "adamw"]


def on_ranks_and_here(function, *args, worlds=(2, 3)) -> tuple[object, list[object]]:
    """What a function returns in one process, and on every rank of some world sizes."""
    results = [result for world in worlds for result in run_ranks(function, world, *args)]
    return function(*args), results


def train_by_closure(name: str, through_closure: bool) -> dict[str, torch.Tensor]:
    model = build()
    if dist.is_initialized():
        shard(model)
    optimizer = make_optimizer(name, model)
    calls = []

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        assert torch.is_grad_enabled()
        loss = loss_of(model, len(calls))
        loss.backward()
        calls.append(loss)
        return loss

    for step in range(3):
        if through_closure:
            assert optimizer.step(closure) is calls[-1]
            assert len(calls) == step + 1
        else:
            closure()
            assert optimizer.step() is None
    return weights_of(model)


def train_both_ways(name: str) -> list[dict[str, torch.Tensor]]:
    return [train_by_closure(name, through_closure) for through_closure in (True, False)]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_closure_runs_once_with_grad_and_its_gradients_are_used(name):
    """nikhilvyas/SOAP#21, KellerJordan/Muon#33, lightning#18254: no grad, or no loss back."""
    here, results = on_ranks_and_here(train_both_ways, name)
    for weights, expected in [here, *results]:
        assert_weights(weights, expected)


def raise_in_closure(name: str, when: str) -> dict[str, torch.Tensor]:
    """Trains three steps, around which a closure raises before or after its backward."""
    model = build()
    if dist.is_initialized():
        shard(model)
    optimizer = make_optimizer(name, model)

    def closure() -> torch.Tensor:
        loss = loss_of(model, 9)
        if when == "after":
            loss.backward()
        raise ZeroDivisionError

    for step in range(3):
        before = local_bits(optimizer)
        if when:
            with pytest.raises(ZeroDivisionError):
                optimizer.step(closure)
        assert_bits(local_bits(optimizer), before)
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights_of(model)


def raise_in_closures(name: str) -> list[dict[str, torch.Tensor]]:
    return [raise_in_closure(name, when) for when in ("", "before", "after")]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_exception_in_a_closure_changes_nothing_and_training_goes_on(name):
    """Nothing is half taken: no count, no decay, no gradient of the failed call."""
    here, results = on_ranks_and_here(raise_in_closures, name, worlds=(2,))
    for expected, before, after in [here, *results]:
        assert_weights(before, expected)
        assert_weights(after, expected)


KINDS = (
    "only_vectors", "only_matrices", "empty_first", "empty_adamw", "generator_of_names",
    "added_later", "frozen_matrices",
)  # fmt: skip


def train_kind(kind: str) -> list[torch.Tensor]:
    """Trains matrices (m), vectors (v) and frozen ones, given as `kind` says; full results."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 10), nn.Linear(10, 3))
    if kind == "frozen_matrices":
        model[0].weight.requires_grad_(False)
        model[1].weight.requires_grad_(False)
    if dist.is_initialized():
        fully_shard(model)
    vectors = [model[0].bias, model[1].bias]
    matrices = [model[0].weight, model[1].weight]
    adamw = {"algorithm": "adamw", "lr": 0.05}
    made = {
        "only_vectors": lambda: Muon([{"params": iter(vectors), **adamw}]),
        "only_matrices": lambda: Muon(p for p in matrices),
        "empty_first": lambda: Muon([{"params": []}, {"params": matrices}]),
        "empty_adamw": lambda: Muon([{"params": matrices}, {"params": [], **adamw}]),
        "generator_of_names": lambda: AdamW(model.named_parameters()),
        "added_later": lambda: Muon(matrices),
        "frozen_matrices": lambda: Muon([{"params": matrices}, {"params": vectors, **adamw}]),
    }
    optimizer = made[kind]()
    schedule = LambdaLR(optimizer, lambda step: 1 / (step + 1))
    optimizer.step()  # before any backward
    optimizer.zero_grad()
    for step in range(3):
        if kind == "added_later" and step == 1:
            optimizer.add_param_group({"params": vectors, "initial_lr": 0.05, **adamw})
            schedule = LambdaLR(optimizer, lambda step: 1 / (step + 1))
        trained = [p for p in model.parameters() if p.requires_grad]
        set_gradients(trained, full_gradients(trained, step))
        optimizer.step()
        schedule.step()
    optimizer.load_state_dict(optimizer.state_dict())
    assert all(p.requires_grad for p in optimizer.state)
    states = [v for p in model.parameters() if p in optimizer.state for v in state(optimizer, p)]
    return [full(p) for p in model.parameters()] + states


def state(optimizer: torch.optim.Optimizer, p: torch.Tensor) -> list[torch.Tensor]:
    return [full(value) for value in optimizer.state[p].values()]


def train_kinds() -> dict[str, list[torch.Tensor]]:
    return {kind: train_kind(kind) for kind in KINDS}


def test_kind_without_parameters_generator_or_late_group_trains():
    """DeepSpeed#7869, prime-rl#1433, KellerJordan/Muon#9: an empty kind; a generator read twice."""
    assert_as_one_process(train_kinds, (2, 3), atol=0, rtol=0)


def test_group_that_names_no_rule_gets_one_or_an_error_at_construction():
    """KellerJordan/Muon#9: a missing marker was a KeyError in the first step."""
    matrix, vector = nn.Parameter(torch.ones(3, 4)), nn.Parameter(torch.ones(3))
    assert Muon([{"params": [matrix]}]).param_groups[0]["algorithm"] == "muon"
    with pytest.raises(ValueError, match=r"\(3,\).*algorithm=\"adamw\""):
        Muon([{"params": [vector]}])


def train_given_rates() -> tuple[list[tuple[float, float]], list[torch.Tensor]]:
    model = build()
    if dist.is_initialized():
        shard(model)
    names = dict(model.named_parameters())
    matrices = [p for name, p in names.items() if ".up.weight" in name or ".down." in name]
    vectors = [p for p in names.values() if p.dim() == 1]
    optimizer = Muon(
        [
            {"params": matrices, "lr": 0.25, "weight_decay": 0.5, "momentum": 0.0},
            {"params": vectors, "algorithm": "adamw", "lr": 0.125, "weight_decay": 0.0, "eps": 0},
        ],
        lr=7.0,
        weight_decay=7.0,
        momentum=0.7,
    )
    zeros = [torch.zeros(p.shape) for p in (*matrices, *vectors)]
    set_gradients((*matrices, *vectors), zeros)
    optimizer.step()  # of gradients that are zero: what moves is decay
    shown = [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups]
    assert optimizer.param_groups[0]["momentum"] == 0.0
    assert optimizer.param_groups[1]["eps"] == 0
    return shown, [full(p) for p in (*matrices, *vectors)]


def test_explicit_zero_is_no_default_and_vectors_do_not_decay():
    """DeepSpeed#8440, verl-SpeCo#91: groups were rebuilt without the caller's lr and decay."""
    model = build()
    names = dict(model.named_parameters())
    matrices = [p for name, p in names.items() if ".up.weight" in name or ".down." in name]
    vectors = [p for p in names.values() if p.dim() == 1]
    expected = [p.detach() * (1 - 0.25 * 0.5) for p in matrices]
    here, results = on_ranks_and_here(train_given_rates)
    for shown, weights in [here, *results]:
        assert shown == [(0.25, 0.5), (0.125, 0.0)]
        for weight, value in zip(weights[: len(matrices)], expected, strict=True):
            assert torch.equal(weight, value)
        for weight, value in zip(weights[len(matrices) :], vectors, strict=True):
            # eps=0: the update is 0 / 0, as in torch.optim.AdamW; decay would be a number.
            assert weight.isnan().all() or torch.equal(weight, value)


def decay_by_kind_of_gradient(name: str) -> tuple[list[torch.Tensor], int]:
    """Three matrices: a gradient, none, a zero one."""
    torch.manual_seed(0)
    model = nn.ModuleList(nn.Linear(20, 20, bias=False) for _ in range(3))
    model.forward = None
    holder = nn.Sequential(*model)
    if dist.is_initialized():
        fully_shard(holder)
    cls = Muon if name == "muon" else AdamW
    optimizer = cls(holder.parameters(), lr=0.1, weight_decay=0.5)
    parameters = list(holder.parameters())
    set_gradients(parameters, [torch.ones(20, 20), torch.ones(20, 20), torch.zeros(20, 20)])
    parameters[1].grad = None
    optimizer.step()
    steps = [float(optimizer.state[p]["step"]) for p in parameters if name == "adamw"]
    assert steps in ([], [1, 0, 1])
    momenta = [v for key, v in optimizer.state[parameters[1]].items() if key != "step"]
    assert not any(full(value).any() for value in momenta)
    return [full(p) for p in parameters]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_parameter_without_gradient_neither_decays_nor_gets_momentum(name):
    """KellerJordan/Muon#54, moco#14: decay and momentum of parameters whose gradient is None."""
    torch.manual_seed(0)
    before = [nn.Linear(20, 20, bias=False).weight.detach() for _ in range(3)]
    here, results = on_ranks_and_here(decay_by_kind_of_gradient, name)
    for moved, untouched, decayed in [here, *results]:
        assert not torch.allclose(moved, before[0] * 0.95, atol=1e-4)
        assert torch.equal(untouched, before[1])
        torch.testing.assert_close(decayed, before[2] * 0.95, atol=1e-7, rtol=0)


HOWS = ("once", "both_names", "unnamed", "param_groups")


def train_tied(how: str) -> tuple[list[str], dict[str, torch.Tensor]]:
    model = build(tied=True)
    if dist.is_initialized():
        shard(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if how == "once":
            optimizer = AdamW(model.named_parameters(), lr=0.1)
        elif how == "both_names":
            optimizer = AdamW(model.named_parameters(remove_duplicate=False), lr=0.1)
        elif how == "unnamed":
            optimizer = AdamW([*model.parameters(), model.head.weight], lr=0.1)
        else:
            optimizer = Muon(vfsdp_optim.param_groups(model, adamw={"lr": 0.1}), lr=0.1)
    messages = [str(w.message) for w in caught if "same parameter" in str(w.message)]
    norms = []
    for step in range(3):
        loss_of(model, step).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 100.0))
        optimizer.step()
        optimizer.zero_grad()
        assert model.head.weight is model.embedding.weight
    held = [p for group in optimizer.param_groups for p in group["params"]]
    assert sum(p is model.head.weight for p in held) == 1
    assert optimizer.state[model.head.weight].get("step", 3) == 3
    saved = model.state_dict()
    assert {"head.weight", "embedding.weight"} <= saved.keys()
    del saved["embedding.weight"]
    model.load_state_dict(saved, strict=False)  # asked for under the other name
    assert model.head.weight is model.embedding.weight
    weights = weights_of(model)
    return messages, {**weights, "norms": torch.stack(norms)}


def train_tied_ways() -> list[tuple[list[str], dict[str, torch.Tensor]]]:
    return [train_tied(how) for how in HOWS]


def test_tied_weight_is_updated_and_counted_once():
    """pytorch#101343, Automodel#2986, composer#3822: tied weights were updated or clipped twice."""
    here, results = on_ranks_and_here(train_tied_ways)
    facts = {
        "both_names": r"param group 0: 'embedding\.weight' and 'head\.weight' are the same param",
        "unnamed": r"param group 0: 0 and \d+ are the same parameter",
    }
    for result in [here, *results]:
        for how, (messages, weights), (_, expected) in zip(HOWS, result, here, strict=True):
            assert len(messages) == (how in facts)
            assert all(re.match(facts[how], message) for message in messages)
            for name, weight in weights.items():
                torch.testing.assert_close(weight, expected[name], atol=1e-4, rtol=1e-4)
    once, both, unnamed, _ = (weights for _, weights in here)
    assert_weights(both, once)
    assert_weights(unnamed, once)


SCHEDULERS = {
    "lambda": lambda o: LambdaLR(o, [lambda step: 0.5**step, lambda step: 0.8**step]),
    "one_cycle": lambda o: OneCycleLR(o, max_lr=[0.1, 0.2], total_steps=9),
    "cyclic": lambda o: CyclicLR(o, base_lr=[0.01, 0.02], max_lr=[0.1, 0.2], step_size_up=2),
    "sequential": lambda o: SequentialLR(
        o, [LambdaLR(o, lambda s: 0.5), LambdaLR(o, lambda s: 0.25)], milestones=[2]
    ),
    "plateau": lambda o: ReduceLROnPlateau(o, patience=0, factor=0.5),
}


def train_on_schedule(which: str) -> tuple[list[object], dict[str, torch.Tensor]]:
    model = build()
    if dist.is_initialized():
        shard(model)
    optimizer = make_optimizer("muon", model)
    schedule = SCHEDULERS[which](optimizer)
    seen = []
    for step in range(4):
        set_gradients(model.parameters(), full_gradients(model.parameters(), step))
        optimizer.step()
        schedule.step(*[1.0] * (which == "plateau"))
        seen.append([(g["lr"], g["betas"], g.get("momentum")) for g in optimizer.param_groups])
        assert [lr for lr, *_ in seen[-1]] == list(schedule.get_last_lr())
    assert len({str(rates) for rates in seen}) > 1
    return seen, weights_of(model)


def train_on_schedules() -> dict[str, tuple[list[object], dict[str, torch.Tensor]]]:
    return {which: train_on_schedule(which) for which in SCHEDULERS}


def test_schedule_of_mixed_groups_is_the_same_on_ranks():
    """lightning#11757: schedulers met groups without the keys that they write."""
    rates, _ = train_on_schedule("plateau")
    assert [rate[0][0] for rate in rates] == [0.1, 0.05, 0.025, 0.0125]
    assert_as_one_process(train_on_schedules, (2, 3), atol=0, rtol=0)
