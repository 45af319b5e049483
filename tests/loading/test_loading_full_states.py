"""`load_full_state_dict`: plain full tensors into shards, from every rank or from one."""

import copy
import itertools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.profiler import ProfilerActivity, profile

import vfsdp_optim
from dcp_checkpoints import (
    WIDTH,
    Net,
    difference,
    full_state,
    local_state,
    make_net,
    make_optimizer,
    shard_net,
    take_steps,
)
from ranks import RankError, run_ranks
from sharding import load_full_state_dict
from sharding.checkpoint.names import plain_names


def trained(kind: str, **kwargs: Any) -> dict[str, Any]:
    """The state of an unsharded run of three steps."""
    net = make_net(1)
    optimizer = make_optimizer(net, kind, **kwargs)
    take_steps(net, optimizer, range(3))
    return full_state(net, optimizer)


def continued(kind: str, state: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
    """The same state two steps later, in one process."""
    net = make_net(2)
    optimizer = make_optimizer(net, kind, **kwargs)
    net.load_state_dict(state["model"])
    optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))
    take_steps(net, optimizer, range(3, 5))
    return full_state(net, optimizer)


def load_and_continue(
    kind: str, state: dict[str, Any], kwargs: dict[str, Any]
) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """The states after a load and two steps later, without and with a broadcast."""
    results = []
    for broadcast in (False, True):
        net = make_net(2, sharded=True)
        optimizer = make_optimizer(net, kind, **kwargs)
        mine = None if broadcast and dist.get_rank() else state
        load_full_state_dict(net, optimizer, state=mine, broadcast_from_rank0=broadcast)
        loaded = full_state(net, optimizer)
        take_steps(net, optimizer, range(3, 5))
        results.append((loaded, full_state(net, optimizer)))
    return results


@pytest.mark.parametrize("kind", ["torch_adamw", "adamw", "named_adamw", "muon"])
def test_loading_a_full_state_continues_the_unsharded_run(kind: str) -> None:
    """Weights, buffers, extra state, states of the optimizer: bit for bit, and so is the rest."""
    kwargs = {"foreach": True} if kind == "torch_adamw" else {}
    state = trained(kind, **kwargs)
    expected = continued(kind, state, **kwargs)
    for world_size in (1, 3):
        for results in run_ranks(load_and_continue, world_size, kind, state, kwargs):
            for loaded, later in results:
                assert difference(loaded, state) == ""
                assert difference(later, expected) == ""


def load_into_bf16(state: dict[str, Any], broadcast: bool) -> dict[str, Any]:
    net = make_net(2, sharded=True, dtype=torch.bfloat16)
    mine = None if broadcast and dist.get_rank() else state
    load_full_state_dict(net, state=mine, broadcast_from_rank0=broadcast)
    return full_state(net)["model"]


@pytest.mark.parametrize("broadcast", [False, True])
def test_loading_casts_weights_as_copy_does_from_any_strides(broadcast: bool) -> None:
    state = full_state(make_net(1))["model"]
    for name in ("norm.bias", "blocks.0.2.weight"):  # strided
        state[name] = torch.stack([state[name]] * 2, -1)[..., 1]
    expected = make_net(2, dtype=torch.bfloat16)
    expected.load_state_dict(state)
    for loaded in run_ranks(load_into_bf16, 2, state, broadcast):
        assert difference(loaded, full_state(expected)["model"]) == ""


def received_sizes(state: dict[str, Any]) -> list[int]:
    """Bytes of each tensor that this rank received or sent at once, but for the outline."""
    net = make_net(2, sharded=True)
    optimizer = make_optimizer(net, "adamw")
    mine = state if dist.get_rank() == 0 else None
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        load_full_state_dict(net, optimizer, state=mine, broadcast_from_rank0=True)
    assert difference(full_state(net, optimizer), state) == ""
    return [
        event.input_shapes[0][0]
        for event in profiler.events()
        if event.name == "c10d::alltoall_base_"
    ]


def test_loading_from_rank0_sends_a_rank_its_own_range_one_tensor_at_a_time() -> None:
    state = trained("adamw")
    tensors = [t for t in state["model"].values() if torch.is_tensor(t) and t.dim()]
    largest = max(t.nbytes for t in tensors)
    by_rank = run_ranks(received_sizes, 3, state)
    assert len({len(sizes) for sizes in by_rank}) == 1
    for together in zip(*by_rank, strict=True):
        assert 0 < sum(together) <= largest


def load_reordered(state: dict[str, Any], broadcast: bool) -> str:
    """Loads torch's by-name format into an optimizer with other groups in another order."""
    net = make_net(2, sharded=True)
    named = dict(net.named_parameters())
    blocks = [p for n, p in named.items() if n.startswith("blocks")]
    rest = [p for n, p in reversed(named.items()) if not n.startswith("blocks") and p.requires_grad]
    optimizer = vfsdp_optim.AdamW(
        [{"params": rest, "lr": 7.0}, {"params": blocks[::-1], "lr": 8.0}]
    )
    mine = None if broadcast and dist.get_rank() else state
    load_full_state_dict(net, optimizer, state=mine, broadcast_from_rank0=broadcast)
    by_name = get_optimizer_state_dict(
        net, optimizer, options=StateDictOptions(full_state_dict=True)
    )
    return difference(by_name["state"], state["optimizer"]["state"]) or difference(
        [group["lr"] for group in by_name["param_groups"]], [0.2, 0.1]
    )


@pytest.mark.parametrize("broadcast", [False, True])
def test_loading_by_name_gives_no_parameter_the_state_of_another(broadcast: bool) -> None:
    """pytorch#113673: with groups in another order, parameters got each other's state."""
    net = make_net(1)
    named = dict(net.named_parameters())
    blocks = [p for n, p in named.items() if n.startswith("blocks")]
    rest = [p for n, p in named.items() if not n.startswith("blocks") and p.requires_grad]
    optimizer = vfsdp_optim.AdamW([{"params": blocks, "lr": 0.1}, {"params": rest, "lr": 0.2}])
    take_steps(net, optimizer, range(2))
    saved = {
        "model": get_model_state_dict(net),
        "optimizer": get_optimizer_state_dict(net, optimizer),
    }
    assert run_ranks(load_reordered, 2, saved, broadcast) == ["", ""]


def load_without_one_tied_name(state: dict[str, Any]) -> str:
    net = make_net(2, sharded=True)
    less = {name: value for name, value in state.items() if name != "head.weight"}
    load_full_state_dict(net, state=less)
    return difference(full_state(net)["model"], state)


def test_loading_takes_a_tied_parameter_under_one_of_its_names() -> None:
    """Files in safetensors format hold a shared tensor once."""
    state = full_state(make_net(1))["model"]
    assert run_ranks(load_without_one_tied_name, 2, state) == ["", ""]


def load_compiled(state: dict[str, Any], broadcast: bool) -> str:
    """Names with a prefix in the middle and, of another wrapper, in front."""
    net = make_net(2, sharded=True)
    net.blocks[0] = torch.compile(net.blocks[0], backend="eager")
    optimizer = make_optimizer(net, "named_adamw")
    mine = None if broadcast and dist.get_rank() else state
    whole = torch.compile(net, backend="eager")
    load_full_state_dict(whole, optimizer, state=mine, broadcast_from_rank0=broadcast)
    found = full_state(net, optimizer)
    found["model"] = dict(
        zip(plain_names(list(found["model"])), found["model"].values(), strict=True)
    )
    found["optimizer"]["param_groups"] = state["optimizer"]["param_groups"]
    return difference(found, state)


@pytest.mark.parametrize("broadcast", [False, True])
def test_loading_into_compiled_modules_knows_their_names(broadcast: bool) -> None:
    state = trained("named_adamw")
    assert run_ranks(load_compiled, 2, state, broadcast) == ["", ""]


@pytest.mark.parametrize("kind", ["muon", "adamw", "torch_adamw"])
def test_loading_an_unsharded_model_needs_no_process_group(kind: str) -> None:
    """Names of parameters come with the state to groups that have none, as torch's load does."""
    state = trained("muon" if kind == "muon" else "named_adamw")
    net = make_net(2)
    optimizer = make_optimizer(net, kind)
    load_full_state_dict(net, optimizer, state=state)
    found = full_state(net, optimizer)
    if kind == "torch_adamw":  # which has keys of its own
        names = [group["param_names"] for group in state["optimizer"]["param_groups"]]
        assert [group["param_names"] for group in optimizer.param_groups] == names
        found["optimizer"]["param_groups"] = state["optimizer"]["param_groups"]
    assert difference(found, state) == ""


DROP = object()
# Where a state is changed, to what, and what the error says.
MISFITS: list[tuple[tuple[Any, ...], Any, str]] = [
    (("model", "blocks.1.0.weight"), DROP, r"ValueError.*missing \['blocks.1.0.weight'\]"),
    (("model", "extra.weight"), torch.zeros(2), r"ValueError.*unexpected \['extra.weight'\]"),
    (("model", "blocks.0.0.weight"), torch.zeros(WIDTH, 50),
     r"ValueError.*blocks.0.0.weight: expected shape \(50, 24\), got \(24, 50\)"),
    (("model", "norm.running_mean"), torch.zeros(1, WIDTH),
     r"ValueError.*norm.running_mean: expected shape \(24,\), got \(1, 24\)"),
    (("model", "frozen.bias"), torch.zeros(WIDTH, dtype=torch.int64),
     r"ValueError.*frozen.bias: expected torch.float32, got torch.int64"),
    (("model", "norm.weight"), [1.0] * WIDTH,
     r"ValueError.*norm.weight: expected a tensor, got list"),
    (("optimizer", "state", 0, "momentum_buffer"), torch.zeros(3, 3),
     r"ValueError.*\['momentum_buffer'\]: expected shape .*got \(3, 3\)"),
    (("optimizer", "state", 0, "momentum_buffer"), DROP,
     r"ValueError.*blocks.0.0.weight.*momentum_buffer"),
    (("optimizer", "param_groups", 0, "ns_steps"), 3,
     r"ValueError.*param group 0.*ns_steps=3, the optimizer 5"),
    (("optimizer", "param_groups", 1), DROP, r"ValueError.*missing \[.*embedding.weight"),
]  # fmt: skip


def misfits() -> list[tuple[Any, str]]:
    """States that do not fit a trained net with Muon, and what the errors say."""
    good = trained("muon")
    states = [
        (good["model"], r"TypeError.*expected a dict of \['model', 'optimizer'\], got keys \['blo"),
        (None, r"TypeError.*got NoneType"),
    ]
    for (*path, key), value, fact in MISFITS:
        state = part = copy.deepcopy(good)
        for step in path:
            part = part[step]
        if value is DROP:
            del part[key]
        else:
            part[key] = value
        states.append((state, fact))
    return states


def load_misfits(states: list[Any]) -> list[tuple[str, str]]:
    """What was raised, and what changed, by misfit, without and with a broadcast."""
    found = []
    net = make_net(2, sharded=True)
    optimizer = make_optimizer(net, "muon")
    take_steps(net, optimizer, range(1))
    before = local_state(net, optimizer)
    for state, broadcast in itertools.product(states, (False, True)):
        mine = None if broadcast and dist.get_rank() else state
        try:
            load_full_state_dict(net, optimizer, state=mine, broadcast_from_rank0=broadcast)
            raised = "nothing"
        except Exception as error:
            raised = f"{type(error).__name__}: {error}"
        found.append((raised, difference(local_state(net, optimizer), before)))
    return found


def test_loading_a_state_that_does_not_fit_raises_on_every_rank_and_writes_nothing() -> None:
    states, facts = zip(*misfits(), strict=True)
    for results in run_ranks(load_misfits, 2, list(states)):
        for (raised, changed), fact in zip(results, [f for f in facts for _ in "ab"], strict=True):
            assert re.search(f"(?s){fact}", raised), raised
            assert changed == "", fact


def load_on_rank0_only(state: dict[str, Any]) -> None:
    net = make_net(2, sharded=True)
    load_full_state_dict(net, state=state if dist.get_rank() == 0 else None)


def load_sharded_values() -> None:
    net = make_net(2, sharded=True)
    load_full_state_dict(net, state=dict(net.state_dict()))


def load_into_meta(state: dict[str, Any]) -> None:
    with torch.device("meta"):
        net = Net()
    shard_net(net)
    load_full_state_dict(net, state=state)


def load_what_cannot_be_sent() -> None:
    net = make_net(2, sharded=True)
    state = full_state(net)["model"]
    state["scale._extra_state"] = lambda: None
    load_full_state_dict(net, state=state, broadcast_from_rank0=True)


@pytest.mark.parametrize(
    ("load", "fact"),
    [
        (load_on_rank0_only, "broadcast_from_rank0=True.*differs between ranks 0 and 1"),
        (load_sharded_values, r"\['embedding.weight'\]: expected a plain full tensor, got a Rag"),
        (load_into_meta, "embedding.weight.*on the meta device; call module.to_empty"),
        (load_what_cannot_be_sent, "cannot be sent from rank 0"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_loading_misuse_raises_on_every_rank(load: Callable[..., None], fact: str) -> None:
    state = full_state(make_net(1))["model"]
    args = (state,) if load.__code__.co_argcount else ()
    with pytest.raises(RankError, match=f"(?s){fact}") as error:
        run_ranks(load, 2, *args)
    assert len(error.value.reports) == 2
