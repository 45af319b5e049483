"""Saved states of optimizers that are none: refused by name with nothing written, or loaded right;
never a step that makes NaN, never a bare KeyError."""

import copy
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hypothesis import settings
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

import vfsdp_optim
from dcp_checkpoints import difference, local_state, plain, take_steps
from ranks import run_ranks

DOCUMENTED = (TypeError, ValueError, RuntimeError, NotImplementedError)
SHAPES = {"w": (8, 6), "b": (5,), "wide": (70, 60)}
KINDS = ["adamw", "muon", "adamw 8bit", "named adamw"]


class Net(nn.Module):
    """Parameters without a forward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        for name, shape in SHAPES.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape)))


def make(kind: str, net: Net) -> torch.optim.Optimizer:
    named = list(net.named_parameters())
    if kind == "muon":
        groups = [
            {"params": [net.w, net.wide]},
            {"params": [net.b], "algorithm": "adamw", "state_dtype": torch.float32},
        ]
        return vfsdp_optim.Muon(groups, lr=0.1)
    states = "8bit" if kind == "adamw 8bit" else "32bit"
    groups = [{"params": named[:2]}, {"params": named[2:], "lr": 0.01}]
    if kind == "adamw":
        groups = [{"params": [p for _, p in group["params"]]} for group in groups]
    return vfsdp_optim.AdamW(groups, states=states, amsgrad=kind == "named adamw")


def trained(kind: str) -> tuple[Net, torch.optim.Optimizer]:
    net = Net()
    if dist.is_initialized():
        vfsdp_optim.fully_shard(net)
    optimizer = make(kind, net)
    take_steps(net, optimizer, range(2))
    return net, optimizer


NUMBERS = [float("nan"), float("inf"), -1, -0.5, 1, 0, 2.5, 10**400, True]
THINGS = [None, "text", "torch.nn", "torch.float16", [], {}, (0.9,), [0.5, None], b"x", object()]
DTYPES = [torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.complex64]


def junk(rng: random.Random) -> Any:
    tensors = [torch.tensor(float("nan")), torch.ones(3), torch.ones(2, 2).to_sparse()]
    return copy.deepcopy(
        rng.choice([*NUMBERS, *THINGS[:-1], *tensors, torch.ones(2, device="meta")])
    )


def spoil(rng: random.Random, value: Tensor) -> Tensor:
    """A tensor like `value` that is wrong, or maybe not."""
    value = value.clone()
    way = rng.randrange(6)
    if way == 0 and value.is_floating_point():
        bad = [float("nan"), float("inf"), float("-inf"), -1.0, 0.0, 3.0]
        value.view(-1)[rng.randrange(value.numel())] = rng.choice(bad)
    elif way == 1:
        value = value.to(rng.choice(DTYPES))
    elif way == 2:
        value = value.reshape(-1)[: rng.randrange(value.numel())]
    elif way == 3:
        value = rng.choice(
            [value.to_sparse(), value.to("meta"), value.t() if value.dim() > 1 else value[None]]
        )
    elif way == 4:
        value = value.unsqueeze(0)
    else:
        value = -value if value.is_floating_point() else value + 1
    return value


def pick(rng: random.Random, mapping: Any) -> Any:
    return rng.choice(list(mapping))


def change_state(rng: random.Random, saved: Any) -> None:
    state = saved["state"][pick(rng, saved["state"])]
    key = pick(rng, state)
    old = state[key]
    spoiled = isinstance(old, Tensor) and rng.random() < 0.7
    state[key] = spoil(rng, old) if spoiled else junk(rng)


def change_keys(rng: random.Random, saved: Any) -> None:
    part = rng.choice([saved, saved["state"], *saved["state"].values(), *saved["param_groups"]])
    key, way = pick(rng, part), rng.randrange(4)
    if way == 0:
        del part[key]
    elif way == 1:
        part[key] = junk(rng)
    elif way == 2:
        part[rng.choice([str(key), 77, "other", None, ("a",)])] = part.pop(key)
    else:
        part[rng.choice(["other", 3, None])] = junk(rng)


def change_group(rng: random.Random, saved: Any) -> None:
    group = rng.choice(saved["param_groups"])
    group[pick(rng, group)] = junk(rng)


def change_groups(rng: random.Random, saved: Any) -> None:
    groups, way = saved["param_groups"], rng.randrange(6)
    group = rng.choice(groups)
    if way == 0:
        groups.remove(group)
    elif way == 1:
        groups.append(copy.deepcopy(group))
    elif way == 2:
        groups.reverse()
    elif way == 3:
        group["params"][rng.randrange(len(group["params"]))] = rng.choice(
            [0, 9, "w", None, [1], 1.5]
        )
    elif way == 4:
        group["params"].pop()
    else:
        names = group.setdefault("param_names", ["w"])
        names[rng.randrange(len(names))] = rng.choice(["w", "b", "other", 3, None])


def change_top(rng: random.Random, saved: Any) -> None:
    saved[rng.choice(["state", "param_groups"])] = junk(rng)


MUTATIONS: list[Callable[[random.Random, Any], None]] = [
    *[change_state] * 4,
    *[change_group] * 3,
    change_keys,
    change_keys,
    change_groups,
    change_top,
]


def mutated(seed: int, good: Any) -> Any:
    rng = random.Random(seed)
    saved = copy.deepcopy(good)
    for _ in range(rng.choice([1, 1, 2])):
        try:
            rng.choice(MUTATIONS)(rng, saved)
        except (LookupError, AttributeError, TypeError, ValueError, RuntimeError):
            pass  # the first mutation left nothing for the second
    return saved


def load_one(seed: int, net: Net, optimizer: Any, good: Any, start: Any) -> str:
    """Load a mutated state dict; return what is wrong with the outcome."""
    saved = mutated(seed, good)
    before = local_state(net, optimizer)
    try:
        if seed % 4 == 0:
            saved = optimizer.convert_state_dict(saved)
        optimizer.load_state_dict(saved)
    except DOCUMENTED as error:
        if changed := difference(local_state(net, optimizer), before):
            return f"{error!r} after a change of {changed}"
        place = r"group \d|state|param_groups|\bw\b|\bb\b|wide|param_names|\[\d\]"
        return "" if re.search(place, str(error)) else f"names nothing: {error!r}"
    except Exception as error:
        return f"undocumented {error!r}"
    try:
        take_steps(net, optimizer, range(5, 6))
        optimizer.state_dict()
        if not all(bool(p.isfinite().all()) for p in net.parameters()):
            return "NaN after a step"
    except Exception as error:
        return f"loaded, and then {error!r}"
    net.load_state_dict(start)
    optimizer.load_state_dict(copy.deepcopy(good))
    return ""


@pytest.mark.parametrize("kind", KINDS)
def test_malformed_state_dicts_are_refused_by_name_or_load_right(kind: str) -> None:
    """Of 2,000 such state dicts 393 gave a bare KeyError, AttributeError and the like."""
    net, optimizer = trained(kind)
    good, start = plain(optimizer.state_dict()), plain(dict(net.state_dict()))
    wrong = {}
    for seed in range(min(2000, settings.default.max_examples * 5 // 2)):
        if found := load_one(seed, net, optimizer, good, start):
            wrong[seed] = found
            net, optimizer = trained(kind)
    assert wrong == {}


def load_on_ranks(kind: str, seeds: range) -> list[str]:
    """By seed, what was raised where one rank has a mutated state dict."""
    net, optimizer = trained(kind)
    good = plain(optimizer.state_dict())
    outcomes = []
    for seed in seeds:
        before = local_state(net, optimizer)
        try:
            optimizer.load_state_dict(
                mutated(seed, good) if seed % 2 == dist.get_rank() else copy.deepcopy(good)
            )
            outcomes.append("")
        except DOCUMENTED as error:
            outcomes.append(f"{type(error).__name__}: {error}")
            if changed := difference(local_state(net, optimizer), before):
                outcomes[-1] += f"after a change of {changed}"
        optimizer.load_state_dict(copy.deepcopy(good))
    return outcomes


@pytest.mark.parametrize("kind", ["muon", "adamw 8bit"])
def test_malformed_state_dict_of_one_rank_is_refused_on_all(kind: str) -> None:
    seeds = range(30)
    other = "RuntimeError: another rank refuses to load, so nothing was written: "
    refused = 0
    for pair in zip(*run_ranks(load_on_ranks, 2, kind, seeds), strict=True):
        for mine, theirs in (pair, pair[::-1]):
            assert "after a change" not in mine
            if mine and not mine.startswith(other):
                assert theirs == other + mine
                refused += 1
        assert bool(pair[0]) == bool(pair[1])
    assert refused > len(seeds) // 2


def edited(edit: Callable[[Any], None], kind: str = "named adamw") -> tuple[Any, Any]:
    _, optimizer = trained(kind)
    saved = copy.deepcopy(optimizer.state_dict())
    edit(saved)
    return optimizer, saved


def text_ids(saved: Any) -> None:
    saved["state"] = {str(key): value for key, value in saved["state"].items()}


def name_ids(saved: Any) -> None:
    saved["state"] = dict(zip(SHAPES, saved["state"].values(), strict=True))


def put(part: str, where: int, key: str, value: Any) -> Callable[[Any], None]:
    return lambda saved: saved[part][where].update({key: value})


NAN = torch.full(SHAPES["w"], float("nan"))


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (text_ids,
         "state: entries ['0', '1', '2'] are of no parameter of the saved groups, whose ids are "
         "[0, 1, 2]; JSON and others make text of numbers: load {int(key): value for key, value "
         "in state.items()}"),
        (name_ids,
         "state: entries ['w', 'b', 'wide'] are of no parameter of the saved groups, whose ids "
         "are [0, 1, 2]; pass states and groups of one optimizer"),
        (put("state", 0, "exp_avg", NAN),
         "w.exp_avg: expected finite numbers, got others; the checkpoint is damaged"),
        (put("state", 2, "exp_avg_sq", -torch.ones(SHAPES["wide"])),
         "wide.exp_avg_sq: expected finite numbers >= 0, got others; the checkpoint is damaged"),
        (put("state", 1, "step", -1),
         "b.step: expected a finite number >= 0, got -1"),
        (put("state", 0, "exp_avg", torch.ones(SHAPES["w"], dtype=torch.int64)),
         "w.exp_avg: expected torch.float32 or torch.bfloat16 or torch.float64, got torch.int64"),
        (put("param_groups", 1, "lr", float("nan")),
         "param group 1: lr: expected finite numbers, got nan"),
        (put("param_groups", 0, "lr", None),
         "param group 0: lr: expected a number >= 0, got None"),
        (put("param_groups", 0, "betas", (0.9, 1.5)),
         "param group 0: betas: expected two numbers in [0, 1), got (0.9, 1.5)"),
        (put("param_groups", 0, "maximize", "no"),
         "param group 0: maximize: expected True or False, got 'no'"),
        (put("param_groups", 0, "state_dtype", "torch.nn"),
         "param group 0: state_dtype: expected a floating dtype or None, got 'torch.nn'"),
        (put("param_groups", 0, "initial_lr", "high"),
         "param group 0: initial_lr: expected a number >= 0, got 'high'"),
    ],
)  # fmt: skip
def test_damage_is_named_with_parameter_or_group_and_key(edit, message):
    """Accepted before, and the weights were NaN or the next step raised."""
    optimizer, saved = edited(edit)
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        optimizer.load_state_dict(saved)


def load_in_part(path: Path, theirs: torch.optim.Optimizer, ours: torch.optim.Optimizer) -> None:
    """A checkpoint of one optimizer into another, without what the file does not have."""
    dcp.save({"optimizer": theirs.state_dict()}, checkpoint_id=path, no_dist=True)
    state = {"optimizer": ours.state_dict()}
    planner = DefaultLoadPlanner(allow_partial_load=True)
    dcp.load(state, checkpoint_id=path, planner=planner, no_dist=True)
    ours.load_state_dict(state["optimizer"])


@pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")
def test_8bit_moments_that_a_file_does_not_have_are_no_zeros_in_silence(tmp_path: Path) -> None:
    """With allow_partial_load an 8-bit optimizer resumed with zero moments."""
    net = Net()
    theirs, ours = torch.optim.AdamW([net.wide]), vfsdp_optim.AdamW([net.wide], states="8bit")
    net.wide.grad = torch.ones_like(net.wide)
    theirs.step()
    with pytest.raises(ValueError, match=r"step is 1, and .*exp_avg.absmax.* are the zeros"):
        load_in_part(tmp_path, theirs, ours)
    ours.load_state_dict(ours.convert_state_dict(theirs.state_dict()))
    ours.load_state_dict(ours.state_dict())


@pytest.mark.parametrize("kind", [vfsdp_optim.Shampoo, vfsdp_optim.SOAP])
def test_early_state_of_matrices_whose_turn_comes_later_is_its_own(kind: type) -> None:
    """The roots of the second matrix were zeros after the first step, and loading them refused."""
    net = Net()
    optimizer = kind([("wide", net.wide), ("w", net.w)])
    for _ in range(2):
        net.wide.grad, net.w.grad = torch.ones_like(net.wide), torch.ones_like(net.w)
        optimizer.step()
        optimizer.load_state_dict(optimizer.state_dict())


@pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")
def test_8bit_momentum_that_a_file_does_not_have_is_warned_of(tmp_path: Path) -> None:
    net = Net()
    theirs = torch.optim.Muon([net.wide, net.w])
    ours = vfsdp_optim.Muon([("wide", net.wide), ("w", net.w)], states="8bit")
    net.wide.grad, net.w.grad = torch.ones_like(net.wide), torch.ones_like(net.w)
    theirs.step()
    with pytest.warns(UserWarning, match=r"the state of \['wide'\] is the zeros of a new"):
        load_in_part(tmp_path, theirs, ours)
    assert bool(ours.state[net.w]["momentum_buffer"].any())
