"""`module.load_state_dict` on sharded modules: loads what fits, or writes nothing."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard

from dcp_checkpoints import (
    WIDTH,
    Net,
    difference,
    full_state,
    local_state,
    make_net,
    shard_net,
    tokens_of,
)
from ranks import RankError, on_ranks, run_ranks
from sharding import RaggedDTensor, RaggedShard, fully_shard, load_full_state_dict
from sharding.fsdp.module_state import state_of


def assert_in_buffers(net: nn.Module) -> None:
    """Every parameter is the one that its bucket knows, over the bucket's memory."""
    for module in net.modules():
        state = state_of(module)
        for parameter in state.bucket.parameters if state and state.bucket else ():
            view = state.bucket.buffers[parameter.segment].local_view(parameter.index)
            assert parameter.local.data_ptr() == view.data_ptr()
            for holder, name in parameter.sites:
                assert holder._parameters[name] is parameter.sharded


def other_units(numel: int, world_size: int) -> list[int]:
    """The last rank holds what the others do not: a layout that no bucket has."""
    return [1 if numel >= world_size else 0] * (world_size - 1) + [
        numel - (world_size - 1 if numel >= world_size else 0)
    ]


def in_other_layout(net: nn.Module, placement_of: Callable[[Tensor], Any]) -> dict[str, Any]:
    return {
        name: value.detach().redistribute(placements=[placement_of(value)])
        if isinstance(value, RaggedDTensor)
        else value
        for name, value in net.state_dict().items()
    }


def of_parameters(net: nn.Module, change: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    names = [name for name, _ in net.named_parameters(remove_duplicate=False)]
    state = full_state(net)["model"]
    return state | {name: change(state[name]) for name in names}


def ragged(value: Tensor) -> RaggedShard:
    units = other_units(value.numel(), value.device_mesh.size())
    return RaggedShard(tuple(range(value.dim())), units)


# What a state dict may hold, made of a sharded net that has the values to load.
FORMS: dict[str, Callable[[Net], Mapping[str, Any]]] = {
    "plain": lambda net: full_state(net)["model"],
    "double precision": lambda net: of_parameters(net, Tensor.double),
    "parameters": lambda net: of_parameters(net, nn.Parameter),
    "alike": lambda net: net.state_dict(),
    "ragged": lambda net: in_other_layout(net, ragged),
    "rows": lambda net: in_other_layout(net, lambda v: Shard(0) if v.dim() else Replicate()),
    "replicated": lambda net: in_other_layout(net, lambda _: Replicate()),
}


@on_ranks(1, 3)
def test_loading_plain_tensors_and_shards_of_any_layout():
    wrong = []
    source = make_net(1, sharded=True)
    expected = local_state(source)["model"]
    for name, form in FORMS.items():
        for options in ({}, {"strict": False}, {"assign": True}, {"strict": True, "assign": True}):
            net = make_net(2, sharded=True)
            parameters = list(net.parameters())
            result = net.load_state_dict(form(source), **options)
            found = difference(local_state(net)["model"], expected)
            if found or result.missing_keys or result.unexpected_keys:
                wrong.append(f"{name} {options}: {found} {result}")
            assert_in_buffers(net)
            if [id(p) for p in net.parameters()] != list(map(id, parameters)):
                wrong.append(f"{name} {options}: other parameters")
    assert wrong == [], wrong


class Wrapper(nn.Module):
    """A module that is not sharded itself, around one that is."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net


# What to change of a good state dict, and what the error must say.
MISFITS: dict[str, tuple[dict[str, Any], str]] = {
    "missing": ({"blocks.1.0.weight": None}, r"Missing key.*blocks\.1\.0\.weight"),
    "missing buffer": ({"norm.running_var": None}, r"Missing key.*norm\.running_var"),
    "missing extra state": ({"scale._extra_state": None}, r"Missing key.*scale\._extra_state"),
    "unexpected": ({"blocks.2.weight": torch.ones(1)}, r"Unexpected key.*blocks\.2\.weight"),
    "unexpected here": ({"scratch": torch.ones(3)}, r"Unexpected key.*scratch"),
    "shape": (
        {"blocks.0.0.weight": torch.ones(WIDTH, 50)},
        r"size mismatch for .*blocks\.0\.0\.weight.*\(24, 50\).*\(50, 24\)",
    ),
    "shape that broadcasts": (
        {"norm.weight": torch.ones(1)},
        r"size mismatch for .*norm\.weight.*\(1,\).*\(24,\)",
    ),
    "shape of a buffer": (
        {"norm.running_mean": torch.ones(3)},
        r"size mismatch for .*norm\.running_mean",
    ),
    "no tensor": ({"frozen.bias": "x"}, r"frozen\.bias: expected a tensor, got str"),
}
KEYS = ("missing", "unexpected")


@pytest.mark.parametrize("wrapped", [False, True])
@on_ranks(2)
def test_loading_what_does_not_fit_names_it_and_writes_nothing(wrapped):
    wrong = []
    good = full_state(make_net(1))["model"]
    for name, (change, fact) in MISFITS.items():
        for options in ({}, {"strict": False}, {"assign": True}):
            if wrapped and name.startswith(KEYS):
                continue  # torch finds these at the end; only a sharded root knows `strict` before
            state = {k: v for k, v in (good | change).items() if v is not None}
            net = make_net(2, sharded=True)
            before = local_state(net)["model"]
            prefix = "net." if wrapped else ""
            target = Wrapper(net) if wrapped else net
            state = {prefix + key: value for key, value in state.items()}
            raised = ""
            try:
                result = target.load_state_dict(state, **options)
            except RuntimeError as error:
                raised = str(error)
            changed = difference(local_state(net)["model"], before)
            if name.startswith(KEYS) and options.get("strict") is False:
                other = "missing_keys" if name.startswith("missing") else "unexpected_keys"
                if raised or getattr(result, other) != list(change) or not changed:
                    wrong.append(f"{name} {options}: {raised} {changed}")
                continue
            try:
                with pytest.raises(RuntimeError, match=f"(?s){fact}"):
                    raise RuntimeError(raised)
            except AssertionError as error:
                wrong.append(f"{name} {options}: {error}")
            if changed:
                wrong.append(f"{name} {options} wrote {changed}")
    assert wrong == [], wrong


class Renames(nn.Linear):
    """Reads an old name, as modules with a history do."""

    def _load_from_state_dict(self, state_dict, prefix, *args):
        if f"{prefix}kernel" in state_dict:
            state_dict[f"{prefix}weight"] = state_dict.pop(f"{prefix}kernel").T
        super()._load_from_state_dict(state_dict, prefix, *args)


@on_ranks(2)
def test_loading_leaves_modules_that_rename_their_keys_their_own_way():
    net = nn.Sequential(nn.Linear(5, 7), Renames(7, 300, bias=False))
    net[0].register_load_state_dict_pre_hook(
        lambda module, state, prefix, *_: state.setdefault(f"{prefix}bias", torch.full((7,), 3.0))
    )
    fully_shard(net)
    kernel = torch.arange(2100.0).view(7, 300)
    state = {"0.weight": torch.ones(7, 5), "1.kernel": kernel}
    assert not any(net.load_state_dict(state))
    assert net[0].bias.full_tensor().eq(3).all()
    assert net[1].weight.full_tensor().equal(kernel.T)


def load_into_meta(assign: bool, form: str) -> str:
    """Loads into a net on meta; returns what is wrong with it afterwards."""
    with torch.device("meta"):
        net = Net()
    shard_net(net)
    state = FORMS[form](make_net(1, sharded=True))
    parameters = list(net.parameters())
    if not assign:
        with pytest.raises(RuntimeError, match=r"embedding\.weight is on the meta.*to_empty"):
            net.load_state_dict(state)
        return "" if all(p.is_meta for p in net.parameters()) else "no longer on meta"
    net.load_state_dict(state, assign=True)
    assert [id(p) for p in net.parameters()] == list(map(id, parameters))
    assert not any(p.is_meta or p.to_local().is_meta for p in net.parameters())
    assert_in_buffers(net)
    reference = make_net(1, sharded=True)
    optimizers = [torch.optim.AdamW(n.parameters(), lr=0.01) for n in (net, reference)]
    for model, optimizer in zip((net, reference), optimizers, strict=True):
        model(tokens_of(0)).square().mean().backward()
        optimizer.step()
    return difference(local_state(net), local_state(reference))


@pytest.mark.parametrize("form", ["plain", "ragged"])
def test_loading_into_a_model_on_meta_needs_assign(form: str) -> None:
    assert run_ranks(load_into_meta, 2, False, form) == ["", ""]
    assert run_ranks(load_into_meta, 2, True, form) == ["", ""]


@on_ranks(2)
def test_loading_a_second_checkpoint_while_unsharded_reaches_the_next_forward():
    """Megatron-LM#6920, Megatron-Bridge#3397: forward went on with the old copy of the weights."""
    net = make_net(3, sharded=True).eval()
    for reshard in (True, False):
        net.set_reshard_after_forward(reshard)
        for seed in (1, 2):
            net(tokens_of(0))  # under grad: some buckets stay gathered for backward
            net.blocks[0].unshard()
            assert isinstance(net.state_dict()["blocks.0.0.weight"], RaggedDTensor)
            reference = make_net(seed).eval()
            state = full_state(reference)["model"]
            if seed == 1:
                net.load_state_dict(state)
            else:
                load_full_state_dict(net, state=state, broadcast_from_rank0=True)
            found, expected = net(tokens_of(1)), reference(tokens_of(1))
            torch.testing.assert_close(found.detach(), expected.detach())
            found.sum().backward()


def load_another_mesh() -> None:
    from torch.distributed.device_mesh import DeviceMesh

    source, net = make_net(1), make_net(2, sharded=True)
    fully_shard(source, mesh=DeviceMesh("cpu", [1, 0]))
    net.load_state_dict(source.state_dict())


def test_loading_shards_of_another_mesh_is_refused_by_name() -> None:
    with pytest.raises(RankError, match=r"embedding\.weight: expected a tensor sharded over") as e:
        run_ranks(load_another_mesh, 2)
    assert len(e.value.reports) == 2
