"""Checkpoints by torch's recipe: get_optimizer_state_dict, dcp.load, set_optimizer_state_dict."""

import copy
import itertools
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.optim.lr_scheduler import OneCycleLR

from dcp_checkpoints import difference, plain
from ranks import run_ranks
from torch_layouts import cut_like, full, full_tensors, on_fsdp2
from vfsdp_optim import AdamW, Muon, Precision, fully_shard

Optimizers = list[torch.optim.Optimizer]
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


class Net(nn.Module):
    """Two matrices with 8-bit states where asked, one too small, stacked experts and a vector."""

    def __init__(self, seed: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        shapes = [(64, 80), (80, 64), (9, 7), (3, 5, 6), (11,)]
        self.ws = nn.ParameterList(w.to(dtype) for w in full_tensors(shapes, seed))


def matrices(net: nn.Module) -> list[nn.Parameter]:
    return [p for p in net.parameters() if p.ndim == 2]


def others(net: nn.Module) -> list[nn.Parameter]:
    return [p for p in net.parameters() if p.ndim != 2]


def torch_adamw(net: nn.Module) -> Optimizers:
    return [torch.optim.AdamW(net.parameters(), lr=0.02, betas=(0.8, 0.95), foreach=True)]


def torch_muon(net: nn.Module) -> Optimizers:
    adamw = torch.optim.AdamW(others(net), lr=0.02)
    return [torch.optim.Muon(matrices(net), lr=0.01, momentum=0.9), adamw]


def our_adamw(net: nn.Module) -> Optimizers:
    return [AdamW(net.parameters())]


def our_muon(net: nn.Module) -> Optimizers:
    adamw = {"params": others(net), "algorithm": "adamw"}
    return [Muon([{"params": matrices(net)}, adamw])]


def train(net: nn.Module, optimizers: Optimizers, steps: range) -> None:
    for seed in steps:
        params = list(net.parameters())
        for param, grad in zip(params, full_tensors([p.shape for p in params], seed), strict=True):
            param.grad = cut_like(grad.to(param.dtype), param)
        for optimizer in optimizers:
            optimizer.step()


def all_states(net: nn.Module, optimizers: Optimizers) -> list[dict[str, Any]]:
    of = {p: state for each in optimizers for p, state in each.state.items()}
    return [{"weight": full(p), **plain(dict(of[p]))} for p in net.parameters()]


def load(net: nn.Module, optimizers: Optimizers, path: Path, options: Any) -> None:
    weights, states = get_state_dict(net, optimizers, options=options)
    dcp.load({"model": weights, "optimizer": states}, checkpoint_id=path)
    set_state_dict(
        net, optimizers, model_state_dict=weights, optim_state_dict=states, options=options
    )


def save(net: nn.Module, optimizers: Optimizers, path: Path, options: Any) -> None:
    weights, states = get_state_dict(net, optimizers, options=options)
    dcp.save({"model": weights, "optimizer": states}, checkpoint_id=path)


def load_what_torch_wrote(folder: Path) -> list[str]:
    """What differs from torch's own run, which goes on, by kind, options and layout."""
    wrong = []
    kinds = ((torch_adamw, our_adamw, 0.0), (torch_muon, our_muon, 4e-4))
    for (theirs, ours, atol), options in itertools.product(kinds, (None, FLAT)):
        path = folder / f"{theirs.__name__}{options is FLAT}"
        source = on_fsdp2(Net(0))
        optimizers = theirs(source)
        train(source, optimizers, range(2))
        save(source, optimizers, path, options)
        saved = all_states(source, optimizers)
        train(source, optimizers, range(2, 4))
        expected = all_states(source, optimizers)
        for layout in (on_fsdp2, fully_shard):
            net = layout(Net(1))
            (mine,) = ours(net)
            load(net, [mine], path, options)
            found = difference(all_states(net, [mine]), saved)
            for group in mine.param_groups:
                if "ns_dtype" in group:
                    group["ns_dtype"] = torch.bfloat16  # as torch's Muon, on the CPU too
            train(net, [mine], range(2, 4))
            for a, b in zip(all_states(net, [mine]), expected, strict=True):
                weight, wanted = a.pop("weight"), b["weight"]
                # On shards torch adds parts of bfloat16 products, of updates of about 1e-3 a step.
                close = (weight - wanted).abs().max() <= atol
                found = found or difference(a, {k: v for k, v in b.items() if k != "weight"})
                found = found or ("" if close else f"{tuple(weight.shape)}: the weight is off")
            groups = [g for each in optimizers for g in each.param_groups]
            for group, wanted in zip(mine.param_groups, groups, strict=True):
                kept = {k: wanted[k] for k in group if k not in ("params", "foreach", "ns_dtype")}
                found = found or difference({k: group[k] for k in kept}, kept)
            wrong += [f"{path.name} on {layout.__name__}: {found}"] if found else []
    return wrong


def test_loading_a_checkpoint_of_torchs_optimizers_by_torchs_recipe_finds_all_keys(
    tmp_path: Path,
) -> None:
    """`Missing key in checkpoint state_dict: optimizer.param_groups.0.algorithm`."""
    assert run_ranks(load_what_torch_wrote, 2, tmp_path) == [[], []]


def with_options(net: nn.Module, lr: float) -> list[Callable[[], torch.optim.Optimizer]]:
    named = list(net.named_parameters())
    vectors = [(n, p) for n, p in named if p.ndim == 1]
    half = {
        "params": [(n, p) for n, p in named if p.ndim == 2],
        "matrices": "(h m) n -> h m n; h=1",
        "ns_dtype": torch.float64,
    }
    experts = {"params": [(n, p) for n, p in named if p.ndim == 3], "matrices": "e m n -> e m n"}
    adamw = {"params": vectors, "algorithm": "adamw", "amsgrad": True, "name": "vectors"}
    packed = Precision("8bit", keep_32bit=["ws.1"], master_weights=True)
    return [
        lambda: AdamW(named, lr=lr),
        lambda: AdamW(named, lr=lr, amsgrad=True, maximize=True, state_dtype=torch.float32),
        lambda: AdamW(named, lr=lr, states=packed),
        lambda: AdamW(named, lr=lr, states=Precision(stochastic_rounding=True)),
        lambda: Muon([half, experts, adamw], lr=lr, ns_coefficients="quintic"),
        lambda: Muon([half, experts, adamw], lr=lr, states=packed.states),
    ]


def load_what_we_wrote(folder: Path) -> list[str]:
    wrong = []
    for i, options in itertools.product(range(6), (None, FLAT)):
        path = folder / f"{i}{options is FLAT}"
        source, net = (fully_shard(Net(seed, torch.bfloat16)) for seed in range(2))
        optimizer = with_options(source, 0.01)[i]()
        train(source, [optimizer], range(2))
        save(source, [optimizer], path, options)
        other = with_options(net, 0.5)[i]()
        load(net, [other], path, options)
        found = difference(all_states(net, [other]), all_states(source, [optimizer]))
        train(source, [optimizer], range(2, 3))
        train(net, [other], range(2, 3))
        found = found or difference(all_states(net, [other]), all_states(source, [optimizer]))
        for a, b in zip(other.param_groups, optimizer.param_groups, strict=True):
            found = found or ("" if {**a, "params": []} == {**b, "params": []} else f"{a} != {b}")
        wrong += [f"{path.name}: {found}"] if found else []
    return wrong


def test_loading_own_checkpoints_by_torchs_recipe_brings_all_options_back(tmp_path: Path) -> None:
    assert run_ranks(load_what_we_wrote, 2, tmp_path) == [[], []]


def load_older_and_other_files(folder: Path) -> list[str]:
    """What differs of files with keys that are not held any more; what others are refused with."""
    said = []
    source, net = (fully_shard(Net(seed, torch.bfloat16)) for seed in range(2))
    older = AdamW(source.parameters(), lr=0.01)
    train(source, [older], range(2))
    every = {k: v for k, v in older.param_groups[0].items() if k != "params"}
    for options in (None, FLAT):
        path = folder / f"older{options is FLAT}"
        state: Any = get_optimizer_state_dict(source, older, options=options)
        if options is FLAT:
            names = [name for name, _ in source.named_parameters()]
            state |= {f"param_groups.{n}.{k}": v for n in names for k, v in every.items()}
        else:
            state["param_groups"][0] |= every
        dcp.save({"optimizer": state}, checkpoint_id=path)
        newer = AdamW(net.parameters(), lr=0.5)
        own = get_optimizer_state_dict(net, newer, options=options)
        dcp.load({"optimizer": own}, checkpoint_id=path)
        set_optimizer_state_dict(net, newer, own, options=options)
        states = [[plain(dict(o.state[p])) for p in m.parameters()]
                  for m, o in ((net, newer), (source, older))]  # fmt: skip
        said.append(difference(*states) + ("" if newer.param_groups[0]["lr"] == 0.01 else "lr"))
    made = {
        "default": AdamW(net.parameters()),
        "master": AdamW(net.parameters(), states=Precision(master_weights=True)),
        "8bit": AdamW(net.parameters(), states="8bit"),
        "drawn": AdamW(net.parameters(), states=Precision(stochastic_rounding=True)),
    }
    for name, optimizer in made.items():
        state = {"optimizer": get_optimizer_state_dict(net, optimizer)}
        dcp.save(state, checkpoint_id=folder / name)
    for saved, loading in itertools.permutations(made, 2):
        state = {"optimizer": get_optimizer_state_dict(net, made[loading])}
        try:
            dcp.load(state, checkpoint_id=folder / saved)
            set_optimizer_state_dict(net, made[loading], state["optimizer"])
            said.append(f"{saved} loads into {loading}")
        except (CheckpointException, ValueError) as error:
            expected = "Missing key in checkpoint|the checkpoint has "
            said.append("" if re.search(expected, str(error)) else str(error))
    return said


def test_loading_older_files_has_all_keys_and_files_of_another_precision_are_refused(
    tmp_path: Path,
) -> None:
    for said in run_ranks(load_older_and_other_files, 2, tmp_path):
        assert said == [""] * 14


def test_loading_leaves_groups_with_every_key_however_they_are_read_and_copied() -> None:
    net = Net(0)
    optimizer = our_muon(net)[0]
    scheduler = OneCycleLR(optimizer, max_lr=0.1, total_steps=9)
    for each in (optimizer, copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        for group, name in zip(each.param_groups, ("muon", "adamw"), strict=True):
            assert not {"algorithm", "states", "keep_32bit", "ns_dtype"} & set(iter(group))
            copies = (group, dict(group), {**group}, group | {}, copy.deepcopy(group), group.copy())
            for read in copies:
                assert read["algorithm"] == read.get("algorithm") == name
                assert {"states", "master_weights", "keep_32bit", "betas"} <= read.keys()
            assert group.setdefault("states", "8bit") == "32bit"
            assert "'states': '32bit'" in repr(group)
            assert type(copies[4]) is type(pickle.loads(pickle.dumps(dict(group)))) is dict
    saved = optimizer.state_dict()["param_groups"]
    assert [set(group) for group in saved] == [set(iter(g)) for g in optimizer.param_groups]
    optimizer.step()
    scheduler.step()

    # What a loop over a group makes, as what torch's own optimizers take back.
    train(net, [optimizer], range(1))
    other_net = copy.deepcopy(net)
    other = our_muon(other_net)[0]
    other.load_state_dict(optimizer.state_dict())
    other.param_groups = [{key: group[key] for key in group} for group in other.param_groups]
    train(net, [optimizer], range(1, 3))
    train(other_net, [other], range(1, 3))
    assert difference(all_states(other_net, [other]), all_states(net, [optimizer])) == ""
    assert [group["algorithm"] for group in other.param_groups] == ["muon", "adamw"]


def test_loading_gets_the_options_that_differ_from_those_of_torch() -> None:
    group = AdamW(Net(0).parameters()).param_groups[0]
    shown = set(iter(group))
    group["state_dtype"] = torch.float64
    assert set(iter(group)) == shown | {"state_dtype"}
    group["state_dtype"] = None
    group["states"] = "8bit"  # torch could not go on with its state
    assert set(iter(group)) == shown - {"foreach", "fused", "capturable", "differentiable"} | {
        "states"
    }
