"""Users write into optimizer.state and into groups: each way does what it does with torch's
optimizers, in the middle of an edit too, on shards and off."""

import itertools
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard as fully_shard_by_torch

from ranks import run_ranks
from small_models import full, full_gradients
from torch_layouts import cut_like
from vfsdp_optim import AdamW, Muon, fully_shard

Optimizer = torch.optim.Optimizer
SHAPES = [(6, 4), (3, 9), (70, 60)]


def make(kind: str, params: list[Any]) -> Optimizer:
    """An optimizer of torch's ("torch adamw"), or ours; of groups or parameters."""
    options: dict[str, Any] = dict(lr=0.1, weight_decay=0.2)
    if kind == "torch adamw":
        return torch.optim.AdamW(params, foreach=True, **options)
    if kind == "torch muon":
        return torch.optim.Muon(params, **options)
    if kind == "muon":
        return Muon(params, ns_dtype=torch.bfloat16, **options)
    return AdamW(params, states="8bit" if kind == "adamw 8bit" else "32bit", **options)


def moments(optimizer: Optimizer, param: Tensor) -> Iterator[tuple[str, Tensor]]:
    return iter([(k, v) for k, v in optimizer.state[param].items() if k != "step"])


Step = Callable[[], None]


def assign_zeros(o: Optimizer, params: list[Tensor], step: Step) -> None:
    """relora#10, axolotl#1414: the reset of LoRA."""
    for p in params:
        for key, value in moments(o, p):
            o.state[p][key] = torch.zeros_like(value)
    step()


def assign_and_keep(o: Optimizer, params: list[Tensor], step: Step) -> Tensor:
    """The tensor that was assigned is the one that is updated."""
    key, value = next(moments(o, params[0]))
    o.state[params[0]][key] = mine = torch.zeros_like(value)
    step()
    return full(mine)


def move_away_and_back(o: Optimizer, params: list[Tensor], step: Step) -> None:
    """pytorch#144397, verl#284: state is moved to the CPU and back by assignment."""
    for _ in range(2):
        for state in o.state.values():
            for key, value in state.items():
                state[key] = value.clone()
    step()


def delete_one(o: Optimizer, params: list[Tensor], step: Step) -> tuple[bool, bool]:
    """DeepSpeed#5615"""
    del o.state[params[0]]
    gone = params[0] not in o.state
    step()
    return gone, params[0] in o.state


def clear(o: Optimizer, params: list[Tensor], step: Step) -> None:
    o.state.clear()
    step()


def new_state(o: Optimizer, params: list[Tensor], step: Step) -> None:
    o.state = defaultdict(dict)
    step()


def assign_dicts(o: Optimizer, params: list[Tensor], step: Step) -> None:
    for p in params:
        o.state[p] = {key: value * 0 for key, value in o.state[p].items()}
    step()


def assign_steps(o: Optimizer, params: list[Tensor], step: Step) -> None:
    for p in params:
        if "step" in o.state[p]:
            o.state[p]["step"] = torch.tensor(7.0)
    step()


def keep_the_dicts(o: Optimizer, params: list[Tensor], step: Step) -> None:
    """Writes through references that were taken long before."""
    state, of_first = o.state, o.state[params[0]]
    of_second = o.state_dict()["state"][1]
    kept = [value for _, value in moments(o, params[2])]
    step()
    for each in (of_first, of_second):
        for key in set(each) - {"step"}:
            each[key] = torch.zeros_like(each[key])
    step()
    for value in kept:
        value.zero_()
    step()
    del state[params[0]]
    step()


def swap_and_restore(o: Optimizer, params: list[Tensor], step: Step) -> None:
    mine = o.state.pop(params[0])
    step()
    step()
    o.state[params[0]] = mine
    step()


def take_a_group_out(o: Optimizer, params: list[Tensor], step: Step) -> None:
    """A phase without some parameters."""
    first = o.param_groups[0]["params"].pop(0)
    step()
    o.param_groups[0]["params"].insert(0, first)
    step()
    group = o.param_groups.pop()
    o.param_groups.append({**group, "lr": 0.03})
    step()


def add_beside(o: Optimizer, params: list[Tensor], step: Step) -> list[Any]:
    """What users keep in the state beside stays; looking for what has none adds nothing."""
    other = nn.Parameter(torch.ones(2, 2))
    o.state[params[0]]["seen"] = 3
    o.state[params[1]]["seen"] = torch.ones(2)
    o.add_param_group({"params": [other]})
    stranger = nn.Parameter(torch.ones(2, 2))
    assert not o.state[stranger]
    del o.state[stranger]
    step()
    return [o.state[p].get("seen") is not None for p in params]


def replace_a_parameter(o: Optimizer, params: list[Tensor], step: Step) -> None:
    """fvdb#84, as gaussian splatting prunes: a parameter and its state, row by row."""
    state = o.state.get(params[0])
    for key, value in moments(o, params[0]):
        state[key] = value[:4]
    del o.state[params[0]]
    params[0] = o.param_groups[0]["params"][0] = nn.Parameter(params[0].detach()[:4].clone())
    o.state[params[0]] = state
    step()


def replace_all_in_loops(o: Optimizer, params: list[Tensor], step: Step) -> None:
    """The state is of neither parameter between the loops; every look at it is in between."""
    for i in range(2):
        for p in params:
            key = [key for key, _ in moments(o, p)][-i]
            if len(o.state[p][key]) == len(p):
                o.state[p][key] = torch.cat([o.state[p][key], o.state[p][key][:2]])
    for i, p in enumerate(params):
        params[i] = nn.Parameter(torch.cat([p.detach(), p.detach()[:2]]))
        o.state[params[i]] = o.state.pop(p)
    o.param_groups[0]["params"] = list(params)
    step()


SHARDED_TOO = [
    assign_zeros,
    assign_and_keep,
    move_away_and_back,
    delete_one,
    assign_dicts,
    assign_steps,
    keep_the_dicts,
    swap_and_restore,
    take_a_group_out,
]
EDITS = [*SHARDED_TOO, clear, new_state, add_beside, replace_a_parameter, replace_all_in_loops]


def run(edit: Any, kind: str, layout: str = "plain") -> list[Any]:
    """Train, edit, train on; what the edit saw, weights, states and the state dict."""
    torch.manual_seed(0)
    model = nn.ParameterList(torch.randn(shape) for shape in SHAPES)
    if layout != "plain":
        {"ours": fully_shard, "torch": fully_shard_by_torch}[layout](model)
    params: list[Tensor] = list(model.parameters())
    optimizer = make(kind, params)
    seeds = itertools.count()

    def step() -> None:
        held = [p for group in optimizer.param_groups for p in group["params"]]
        for p, gradient in zip(held, full_gradients(held, next(seeds)), strict=True):
            p.grad = cut_like(gradient, p)
        optimizer.step()

    for _ in range(3):
        step()
    seen = edit(optimizer, params, step)
    step()
    # The state dict first: it may not be older than the state.
    saved = optimizer.state_dict()["state"]
    states = [{k: full(v) for k, v in saved[i].items()} for i in range(len(params))]
    live = [{k: full(v) for k, v in optimizer.state[p].items()} for p in params]
    return [seen, [full(p) for p in params], states, live]


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


@pytest.mark.parametrize("kind", ["adamw", "muon"])
@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: edit.__name__)
def test_what_is_written_into_the_state_counts_as_with_torch(edit, kind):
    """DeepSpeed#5615, relora#10, axolotl#1414, pytorch#144397, verl#284"""
    assert same(run(edit, kind), run(edit, f"torch {kind}"))


def run_all(names: list[tuple[str, str]], layout: str) -> list[list[Any]]:
    here = sys.modules[__name__]
    return [run(getattr(here, edit), kind, layout) for edit, kind in names]


@pytest.mark.parametrize("layout", ["ours", "torch"])
def test_what_is_written_into_sharded_state_counts_as_in_one_process(layout):
    kinds = ["adamw", "muon"] + (["adamw 8bit"] if layout == "ours" else [])
    cases = [(edit.__name__, kind) for edit in SHARDED_TOO for kind in kinds]
    expected = run_all(cases, "plain")
    for results in run_ranks(run_all, 2, cases, layout):
        wrong = [c for c, a, b in zip(cases, results, expected, strict=True) if not same(a, b)]
        assert wrong == []


def nothing() -> AdamW:
    optimizer = AdamW([("w", nn.Parameter(torch.ones(4, 3)))])
    optimizer.param_groups[0]["params"][0].grad = torch.ones(4, 3)
    optimizer.step()
    return optimizer


@pytest.mark.parametrize(
    ("state", "error", "message"),
    [
        ({"exp_avg": torch.ones(3, 4)}, ValueError, "w.exp_avg: expected shape (4, 3), got (3, 4)"),
        (
            {"exp_avg": None},
            TypeError,
            "w.exp_avg in optimizer.state: expected a dense tensor of a floating dtype, got None",
        ),
        (
            {"exp_avg_sq": torch.ones(4, 3, dtype=torch.int64)},
            TypeError,
            "w.exp_avg_sq in optimizer.state: expected a dense tensor of a floating dtype, got "
            "torch.int64, torch.strided",
        ),
        ({"step": -1}, ValueError, "w.step: expected a finite number >= 0, got -1"),
        ({"step": "two"}, ValueError, "w.step: expected a finite number >= 0, got 'two'"),
        (
            "exp_avg",
            RuntimeError,
            "w: expected ['step', 'exp_avg', 'exp_avg_sq'] in its optimizer.state, got ['step', "
            "'exp_avg_sq']; assign ['exp_avg'] too, or del optimizer.state[param] to start anew",
        ),
        (
            None,
            TypeError,
            "w: expected its optimizer.state to be a dict of tensors, got a list; del "
            "optimizer.state[param] starts it anew",
        ),
    ],
)
def test_written_state_that_does_not_fit_is_refused_and_changes_nothing(state, error, message):
    optimizer = nothing()
    w = optimizer.param_groups[0]["params"][0]
    before = w.detach().clone()
    good = dict(optimizer.state[w])
    if state is None:
        optimizer.state[w] = ["no dict"]
    elif isinstance(state, str):
        del optimizer.state[w][state]
    else:
        optimizer.state[w].update(state)
    for use in (optimizer.step, optimizer.state_dict):
        with pytest.raises(error) as raised:
            use()
        assert str(raised.value).startswith(message)
    assert torch.equal(w, before)
    optimizer.state[w] = good
    optimizer.step()
    assert optimizer.state[w]["step"] == 2


def test_replaced_state_frees_its_memory():
    """verl#284: what is moved to another device has to leave the first."""
    params = [nn.Parameter(torch.ones(4, 3)) for _ in range(3)]
    optimizer = AdamW(params)
    for p in params:
        p.grad = torch.ones(4, 3)
    optimizer.step()
    freed = []
    for p in params:
        for key, value in list(optimizer.state[p].items()):
            freed.append(torch.multiprocessing.reductions.StorageWeakRef(value.untyped_storage()))
            optimizer.state[p][key] = value.clone()
    del value
    assert all(storage.expired() for storage in freed)
