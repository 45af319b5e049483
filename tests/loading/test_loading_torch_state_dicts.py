"""torch.distributed.checkpoint.state_dict on sharded models, in every combination of options."""

import copy
import itertools
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
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
    set_gradients,
    take_steps,
)
from ranks import on_ranks, run_ranks
from sharding import load_full_state_dict

KINDS = ["torch_adamw", "adamw", "muon"]


def combinations(*names: str, without: str = "") -> list[dict[str, bool]]:
    values = itertools.product(*([False] if name == without else [False, True] for name in names))
    return [dict(zip(names, chosen, strict=True)) for chosen in values]


def least(kind: str) -> str:
    """An option that torch treats alike for all optimizers: one of them is tried with it."""
    return "" if kind == "muon" else "cpu_offload"


def trained(seed: int, kind: str, steps: int, *, sharded: bool) -> tuple[Any, Any]:
    net = make_net(seed, sharded=sharded)
    optimizer = make_optimizer(net, kind)
    take_steps(net, optimizer, range(seed, seed + steps))
    return net, optimizer


def check_types(state: Any, flags: dict[str, bool]) -> str:
    """Whether tensors are full, or else sharded, wherever they are in a state."""
    if isinstance(state, dict):
        return next(filter(None, (check_types(value, flags) for value in state.values())), "")
    if isinstance(state, Tensor) and state.dim():
        if flags["full_state_dict"] and type(state) is not Tensor:
            return f"{type(state).__name__} in a full state"
    return ""


def get_in_every_way(kind: str, expected: dict[str, Any]) -> list[str]:
    """What is wrong, by options; `expected` is by options of an unsharded run."""
    net, optimizer = trained(1, kind, 2, sharded=True)
    wrong = []
    names = (
        "full_state_dict", "cpu_offload", "ignore_frozen_params", "flatten_optimizer_state_dict",
    )  # fmt: skip
    for flags in combinations(*names, without=least(kind)):
        options = StateDictOptions(**flags)
        state = {
            "model": get_model_state_dict(net, options=options),
            "optimizer": get_optimizer_state_dict(net, optimizer, options=options),
        }
        together = get_state_dict(net, optimizer, options=options)
        wanted = expected[options.ignore_frozen_params, options.flatten_optimizer_state_dict]
        if options.full_state_dict and options.cpu_offload and dist.get_rank():
            wanted = {"model": {}, "optimizer": {}}
        found = check_types(state, flags)
        found = found or difference(plain(state), wanted)
        found = found or difference(plain(dict(zip(state, together, strict=True))), wanted)
        wrong += [f"{flags}: {found}"] if found else []
    return wrong


@pytest.mark.parametrize("kind", KINDS)
def test_loading_starts_with_states_that_are_those_of_one_process(kind: str) -> None:
    net, optimizer = trained(1, kind, 2, sharded=False)
    expected = {}
    for flags in combinations("ignore_frozen_params", "flatten_optimizer_state_dict"):
        options = StateDictOptions(**flags)
        expected[tuple(flags.values())] = {
            "model": plain(get_model_state_dict(net, options=options)),
            "optimizer": plain(get_optimizer_state_dict(net, optimizer, options=options)),
        }
    assert run_ranks(get_in_every_way, 2, kind, expected) == [[], []]


def expected_error(flags: dict[str, bool], part: str) -> tuple[type[Exception], str] | None:
    """What setting a state has to raise; None where it has to work."""
    if flags["broadcast_from_rank0"] and not flags["full_state_dict"]:
        return ValueError, "full_state_dict must be True"
    if flags["broadcast_from_rank0"]:
        return NotImplementedError, "call load_full_state_dict"
    if flags["full_state_dict"]:
        return RuntimeError, "unsupported placements.*load_full_state_dict"
    if flags["strict"] and flags["ignore_frozen_params"] and part == "model":
        return RuntimeError, "Missing key.*frozen.weight"
    return None


@pytest.mark.parametrize("kind", KINDS)
@on_ranks(2)
def test_loading_with_torchs_functions_is_right_or_raises_before_it_writes(kind):
    """Ranks end together: none is left waiting for one that raised."""
    wrong = []
    source_net, source_optimizer = trained(1, kind, 2, sharded=True)
    source = local_state(source_net, source_optimizer)
    net, optimizer = trained(2, kind, 1, sharded=True)
    start = local_state(net, optimizer)
    weights, states = copy.deepcopy((net.state_dict(), optimizer.state_dict()))
    for flags, part in itertools.product(
        combinations(
            "full_state_dict",
            "cpu_offload",
            "broadcast_from_rank0",
            "flatten_optimizer_state_dict",
            "ignore_frozen_params",
            "strict",
            without=least(kind),
        ),
        ("model", "optimizer"),
    ):
        options = StateDictOptions(**flags)
        kept = ("full_state_dict", "flatten_optimizer_state_dict", "ignore_frozen_params")
        getting = StateDictOptions(**{key: flags[key] for key in kept})
        if part == "model":
            state = get_model_state_dict(source_net, options=getting)
        else:
            state = get_optimizer_state_dict(source_net, source_optimizer, options=getting)
        if options.broadcast_from_rank0 and dist.get_rank():
            state = {}
        error = expected_error(flags, part)
        raised = None
        try:
            if part == "model":
                set_model_state_dict(net, state, options=options)
            else:
                set_optimizer_state_dict(net, optimizer, state, options=options)
        except Exception as exception:
            raised = exception
        now = local_state(net, optimizer)
        if error is None:
            wanted = {**start, part: source[part]}
            if part == "model" and options.ignore_frozen_params:
                frozen = {k: v for k, v in start["model"].items() if k.startswith("frozen")}
                wanted["model"] = source["model"] | frozen
        else:
            wanted = start
            try:
                with pytest.raises(error[0], match=f"(?s){error[1]}"):
                    raise raised or AssertionError("nothing was raised")
                raised = None
            except Exception as other:
                raised = other
        if raised is not None or (found := difference(now, wanted)):
            wrong.append(f"{part} {flags}: {raised!r} {'' if raised else found}")
        if error is None:
            net.load_state_dict(weights)
            optimizer.load_state_dict(copy.deepcopy(states))  # torch's keep what they are given
    assert wrong == [], wrong


def load_in_another_order(flatten: bool) -> str:
    """Names and groups of the two optimizers are in different orders."""
    options = StateDictOptions(flatten_optimizer_state_dict=flatten)
    source = make_net(1, sharded=True)
    named = [(n, p) for n, p in source.named_parameters() if p.requires_grad]
    optimizer = vfsdp_optim.AdamW([{"params": named[:4], "lr": 0.1}, {"params": named[4:]}])
    take_steps(source, optimizer, range(2))
    net = make_net(2, sharded=True)
    mine = [(n, p) for n, p in net.named_parameters() if p.requires_grad]
    other = vfsdp_optim.AdamW([{"params": mine[4:]}, {"params": mine[:4][::-1], "lr": 7.0}])
    saved = get_optimizer_state_dict(source, optimizer, options=options)
    set_optimizer_state_dict(net, other, saved, options=options)
    for (name, p), (_, q) in zip(mine, named, strict=True):
        if found := difference(plain(other.state[p]), plain(optimizer.state[q])):
            return f"{name}{found}"
    return difference([group["lr"] for group in other.param_groups], [1e-3, 0.1])


@pytest.mark.parametrize("flatten", [False, True])
def test_loading_named_groups_in_another_order_follows_the_names(flatten: bool) -> None:
    """pytorch#113673, torchtitan#3356: reordered groups got each other's state."""
    assert run_ranks(load_in_another_order, 2, flatten) == ["", ""]


def frozen_and_unused(save: bool) -> dict[str, Any]:
    """Trains two steps with `scale` unused, then freezes the first block."""
    net = make_net(1, sharded=True)
    optimizer = make_optimizer(net, "named_adamw")
    for step in range(2):
        set_gradients(net, step)
        net.scale.factor.grad = None
        optimizer.step()
    net.blocks[0].requires_grad_(False)
    state = full_state(net, optimizer)
    state["by name"] = plain(get_optimizer_state_dict(net, optimizer))
    return state


def load_frozen_and_unused(state: dict[str, Any], by_name: bool) -> list[str]:
    net = make_net(2, sharded=True)
    optimizer = make_optimizer(net, "named_adamw")
    net.blocks[0].requires_grad_(False)
    part = state["by name"] if by_name else state["optimizer"]
    load_full_state_dict(net, optimizer, state={"model": state["model"], "optimizer": part})
    names = [str(sorted(map(str, optimizer.state_dict()["state"])))]
    wrong = [difference(full_state(net, optimizer)["optimizer"], state["optimizer"])]
    set_gradients(net, 3)
    optimizer.step()
    steps = {
        n: float(optimizer.state[p]["step"])
        for n, p in net.named_parameters()
        if p.grad is not None
    }
    wrong.append("" if steps.pop("scale.factor") == 1 else "the unused one does not start at 1")
    wrong.append("" if set(steps.values()) == {3} else f"steps {steps}")
    return names + wrong


@pytest.mark.parametrize("by_name", [False, True])
def test_loading_keeps_the_state_of_what_was_frozen_and_starts_what_was_never_used(
    by_name: bool,
) -> None:
    """pytorch#192202, pytorch#76671: frozen or unused parameters dropped state, or failed to."""
    state = run_ranks(frozen_and_unused, 2, True)[0]
    for world_size in (1, 3):
        results = run_ranks(load_frozen_and_unused, world_size, state, by_name)
        assert len({names for names, *_ in results}) == 1, "ranks have other keys"
        for _, *wrong in results:
            assert wrong == ["", "", ""]
