"""Optimizer states between torch's AdamW and ours, on shards and off, and between algorithms."""

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import vfsdp_optim
from dcp_checkpoints import (
    difference,
    full_state,
    local_state,
    make_net,
    make_optimizer,
    plain,
    take_steps,
)
from ranks import RankError, on_ranks, run_ranks
from sharding import RaggedDTensor, load_full_state_dict

Optimizer = torch.optim.Optimizer


def adamw(kind: str, net: nn.Module, named: bool, amsgrad: bool) -> Optimizer:
    """One of the two AdamWs, with the parameters' names or without."""
    trainable = [(n, p) for n, p in net.named_parameters() if p.requires_grad]
    params: Any = trainable if named else [p for _, p in trainable]
    if kind == "torch":
        return torch.optim.AdamW(params, lr=0.01, amsgrad=amsgrad, foreach=True)
    return vfsdp_optim.AdamW(params, lr=0.01, amsgrad=amsgrad)


def states(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Full states in the order of the groups."""
    return [plain(optimizer.state[p]) for group in optimizer.param_groups for p in group["params"]]


@pytest.mark.parametrize(("named", "amsgrad"), [(False, True), (True, False)])
@on_ranks(2)
def test_loading_torchs_adamw_into_ours_and_back_continues_bit_for_bit(named, amsgrad):
    wrong = []
    for source, target in (("torch", "ours"), ("ours", "torch"), ("ours", "ours")):
        for sharded, full in ((False, True), (True, False), (True, True)):
            net = make_net(1, sharded=sharded)
            optimizer = adamw(source, net, named, amsgrad)
            take_steps(net, optimizer, range(3))
            weights = full_state(net)["model"]
            saved = plain(optimizer.state_dict()) if full else optimizer.state_dict()
            assert all(
                value["step"].dim() == 0 and isinstance(value["exp_avg"], Tensor)
                for value in saved["state"].values()
            )
            saved = copy.deepcopy(saved)  # torch's optimizers keep the tensors that they are given
            other = make_net(1, sharded=True)
            other_optimizer = adamw(target, other, named, amsgrad)
            other.load_state_dict(weights)
            if full and target == "torch":
                state = {"model": weights, "optimizer": saved}
                load_full_state_dict(other, other_optimizer, state=state)
            else:
                other_optimizer.load_state_dict(saved)
            take_steps(net, optimizer, range(3, 5))
            take_steps(other, other_optimizer, range(3, 5))
            found = difference(full_state(other)["model"], full_state(net)["model"])
            found = found or difference(states(other_optimizer), states(optimizer))
            if found:
                wrong.append(f"{source} {'shards' if sharded else 'plain'} to {target}: {found}")
    assert wrong == [], wrong


Pair = tuple[nn.Module, Optimizer]


def load_shards(source: Pair, target: Pair) -> None:
    target[1].load_state_dict(source[1].state_dict())


def load_full_tensors(source: Pair, target: Pair) -> None:
    target[1].load_state_dict(plain(source[1].state_dict()))


def load_full(source: Pair, target: Pair) -> None:
    load_full_state_dict(*target, state=full_state(*source), broadcast_from_rank0=True)


def load_by_torch(source: Pair, target: Pair) -> None:
    set_optimizer_state_dict(*target, get_optimizer_state_dict(*source))


def load_flattened_by_torch(source: Pair, target: Pair) -> None:
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    state = get_optimizer_state_dict(*source, options=options)
    set_optimizer_state_dict(*target, state, options=options)


WAYS: list[Callable[[Pair, Pair], None]] = [
    load_shards,
    load_full_tensors,
    load_full,
    load_by_torch,
    load_flattened_by_torch,
]


@pytest.mark.parametrize(
    ("param_dtype", "state_dtype"),
    [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)],
    ids=["float32 states", "bfloat16 states"],
)
@on_ranks(2)
def test_loading_keeps_the_dtype_and_the_bits_of_states(param_dtype, state_dtype):
    """DeepSpeed#7746, torchtitan#4615: loading cast states to the dtype of the parameters."""
    wrong = []
    for kind, way in itertools.product(("adamw", "muon"), WAYS):
        net = make_net(1, sharded=True, dtype=param_dtype)
        optimizer = make_optimizer(net, kind, state_dtype=state_dtype)
        take_steps(net, optimizer, range(2))
        other = make_net(1, sharded=True, dtype=param_dtype)
        other.load_state_dict(net.state_dict())
        other_optimizer = make_optimizer(other, kind)
        way((net, optimizer), (other, other_optimizer))
        momenta = [
            value
            for state in other_optimizer.state.values()
            for key, value in state.items()
            if key != "step"
        ]
        # Muon's AdamW groups have states in the dtype of the parameters.
        if {type(m) for m in momenta} != {RaggedDTensor} or state_dtype not in {
            m.dtype for m in momenta
        }:
            wrong.append(f"{kind} {way.__name__}: {[m.dtype for m in momenta]}")
        take_steps(net, optimizer, range(2, 3))
        take_steps(other, other_optimizer, range(2, 3))
        states = [local_state(other, other_optimizer), local_state(net, optimizer)]
        for state in states:
            for group in state["optimizer"]["param_groups"]:
                # torch's flat form has the keys that the loading optimizer asks for; the dtype of
                # what is there already counts.
                group.pop("state_dtype", None)
        if found := difference(*states):
            wrong.append(f"{kind} {way.__name__}: {found}")
    assert wrong == [], wrong


def load_across(source_kind: str, target_kind: str, facts: dict[str, str]) -> list[str]:
    wrong = []
    net = make_net(1, sharded=True)
    optimizer = make_optimizer(net, source_kind)
    take_steps(net, optimizer, range(2))
    for way in WAYS:
        other = make_net(2, sharded=True)
        target = make_optimizer(other, target_kind)
        take_steps(other, target, range(1))
        before = local_state(other, target)
        try:
            way((net, optimizer), (other, target))
            wrong.append(f"{way.__name__}: loaded")
        except Exception as error:
            try:
                with pytest.raises(type(error), match=facts[way.__name__]):
                    raise error
            except AssertionError as complaint:
                wrong.append(f"{way.__name__}: {type(error).__name__} {complaint}")
        if changed := difference(local_state(other, target), before):
            wrong.append(f"{way.__name__} changed {changed}")
        take_steps(other, target, range(1, 2))  # nothing is left half loaded
    return wrong


@pytest.mark.parametrize("source", ["torch_adamw", "adamw", "named_adamw"])
def test_loading_adamw_into_muon_says_at_once_what_is_missing(source: str) -> None:
    """pytorch#7499, DeepSpeed#8609: a KeyError in a later step."""
    groups = "1 parameter groups, the optimizer has 2"
    facts = {
        "load_shards": groups,
        "load_full_tensors": groups,
        "load_full": rf"state\['optimizer'\]: loaded state dict has {groups}",
    }
    if source == "named_adamw":
        facts = dict.fromkeys(facts, "expected state .*momentum_buffer.*, got .*'exp_avg'")
    facts["load_by_torch"] = "0.0.weight: expected state .'momentum_buffer'., got .'exp_avg'"
    facts["load_flattened_by_torch"] = r"param_groups\.blocks\.0\.0\.weight\.\w+"
    assert run_ranks(load_across, 2, source, "muon", facts) == [[], []]


def test_loading_muon_into_adamw_says_at_once_what_does_not_fit() -> None:
    """DeepSpeed#8608: the other way round."""
    groups = "2 parameter groups, the optimizer has 1"
    facts = {
        "load_shards": groups,
        "load_full_tensors": groups,
        "load_full": rf"state\['optimizer'\]: loaded state dict has {groups}",
        "load_by_torch": "expected state .'exp_avg', .*got .'momentum_buffer'.",
        "load_flattened_by_torch": "exp_avg: expected a tensor",
    }
    assert run_ranks(load_across, 2, "muon", "adamw", facts) == [[], []]


def matrices(kind: str, state: dict[str, Any] | None) -> Any:
    """A model of one matrix, so that groups fit whatever the algorithm."""
    torch.manual_seed(0)
    net = nn.Linear(20, 30, bias=False)
    vfsdp_optim.fully_shard(net)
    classes = {"torch": torch.optim.AdamW, "adamw": vfsdp_optim.AdamW, "muon": vfsdp_optim.Muon}
    optimizer = classes[kind](net.parameters(), lr=0.01)
    if state is None:
        take_steps(net, optimizer, range(1))
        return plain(optimizer.state_dict())
    optimizer.load_state_dict(state)
    return None


@pytest.mark.parametrize(
    ("source", "target", "fact"),
    [
        ("torch", "muon", r"parameter 0.*expected state \['momentum_buffer'\], got \['exp_avg', "),
        ("adamw", "muon", r"parameter 0.*expected state \['momentum_buffer'\], got \['exp_avg', "),
        ("muon", "adamw", r"parameter 0.*expected state \['exp_avg', .*got \['momentum_buffer'\]"),
    ],
)
def test_loading_states_of_another_algorithm_names_them(
    source: str, target: str, fact: str
) -> None:
    """SCNN_Pytorch#34: groups that fit hid that the states do not."""
    saved = run_ranks(matrices, 2, source, None)[0]
    with pytest.raises(RankError, match=f"(?s){fact}") as error:
        run_ranks(matrices, 2, target, saved)
    assert len(error.value.reports) == 2


def reorder(named: bool) -> str:
    """Saves [{w1, b1}, {w2, b2}], of equal shapes, and loads into [{w2, b2}, {w1, b1}]."""

    def build(order: tuple[int, int], seed: int) -> tuple[nn.Module, Optimizer]:
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Linear(20, 20), nn.Linear(20, 20))
        vfsdp_optim.fully_shard(net)
        groups = []
        for i in order:
            members = [(f"{i}.{name}", p) for name, p in net[i].named_parameters()]
            params = members if named else [p for _, p in members]
            groups.append({"params": params, "lr": 0.1 * (i + 1)})
        return net, vfsdp_optim.AdamW(groups)

    net, optimizer = build((0, 1), 1)
    take_steps(net, optimizer, range(2))
    other, swapped = build((1, 0), 2)
    swapped.load_state_dict(plain(optimizer.state_dict()))
    pairs = zip(net.parameters(), other.parameters(), strict=True)
    same = all(
        difference(plain(swapped.state[q]), plain(optimizer.state[p])) == "" for p, q in pairs
    )
    rates = [group["lr"] for group in swapped.param_groups]
    return f"{'by name' if same else 'by position'} {rates}"


def test_loading_reordered_groups_follows_names_or_positions_and_never_half() -> None:
    """pytorch#113673, fairscale#601: state by name with hyper-parameters by position, or so."""
    assert run_ranks(reorder, 2, True) == ["by name [0.2, 0.1]"] * 2
    assert run_ranks(reorder, 2, False) == ["by position [0.1, 0.2]"] * 2


def split_a_group() -> None:
    net = make_net(1, sharded=True)
    optimizer = make_optimizer(net, "adamw")
    take_steps(net, optimizer, range(1))
    params = optimizer.param_groups[0]["params"]
    split = vfsdp_optim.AdamW([{"params": params[:3], "lr": 0.5}, {"params": params[3:]}])
    set_optimizer_state_dict(net, split, get_optimizer_state_dict(net, optimizer))


def test_loading_a_group_that_was_split_is_refused_where_torch_drops_its_values() -> None:
    """fairscale#380: one half of a group got the saved learning rate, the other kept its own."""
    with pytest.raises(RankError, match="param group 0: the checkpoint has no hyper-param") as e:
        run_ranks(split_a_group, 2)
    assert len(e.value.reports) == 2


@pytest.mark.parametrize("state", [{}, {"state": {}}, {"model": {}}])
def test_what_is_no_optimizer_state_is_refused_by_its_keys(state):
    weight = torch.nn.Parameter(torch.ones(3, 3))
    with pytest.raises(ValueError, match=r"param_groups.*optimizer\.state_dict\(\)"):
        vfsdp_optim.AdamW([weight]).load_state_dict(state)
