"""Checkpoints of models on a 2-D mesh: written once, loaded on any other mesh, and full states."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor

from dcp_checkpoints import (
    Net,
    difference,
    full_state,
    local_state,
    make_net,
    make_optimizer,
    shard_net,
    take_steps,
    tokens_of,
)
from ranks import on_ranks, run_ranks
from sharding import fully_shard, load_full_state_dict
from training import mesh_of

KIND = "torch_adamw"


def sharded_net(seed: int, sizes: tuple[int, ...]) -> Net:
    """A net over a mesh of these sizes; without any, over all ranks."""
    net = make_net(seed)
    shard_net(net, **({"mesh": mesh_of(sizes)} if sizes else {}))
    return net


def go_on(
    sizes: tuple[int, ...], load_from: str | None, save_to: str | None, steps: range
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Maybe loads, steps with given gradients, maybe saves; the full and this rank's state."""
    net = sharded_net(1 if load_from is None else 2, sizes)
    optimizer = make_optimizer(net, KIND)
    if load_from is not None:
        weights, state = get_state_dict(net, optimizer)
        dcp.load({"model": weights, "optimizer": state}, checkpoint_id=load_from)
        set_state_dict(net, optimizer, model_state_dict=weights, optim_state_dict=state)
    take_steps(net, optimizer, steps)
    if save_to is not None:
        weights, state = get_state_dict(net, optimizer)
        dcp.save({"model": weights, "optimizer": state}, checkpoint_id=save_to)
    return full_state(net, optimizer), local_state(net, optimizer)


def unsharded(steps: range) -> dict[str, Any]:
    net = make_net(1)
    optimizer = make_optimizer(net, KIND)
    take_steps(net, optimizer, steps)
    return full_state(net, optimizer)


def assert_same(
    results: list[tuple[dict[str, Any], dict[str, Any]]], expected: Any, shards: int
) -> None:
    for rank, (full, local) in enumerate(results):
        assert not difference(full, expected)
        assert not difference(local, results[rank % shards][1])


def test_run_continues_bitwise_from_replicas_to_shards_and_back(tmp_path: Path) -> None:
    """With the same full gradients, 2 + 2 + 2 steps on other meshes are 6 steps in one process."""
    first, second = str(tmp_path / "2x2"), str(tmp_path / "3")
    assert_same(run_ranks(go_on, 4, (2, 2), None, first, range(2)), unsharded(range(2)), 2)
    run_ranks(go_on, 3, (), first, second, range(2, 4))
    assert_same(run_ranks(go_on, 4, (2, 2), second, None, range(4, 6)), unsharded(range(6)), 2)
    assert_same(run_ranks(go_on, 2, (2, 1), second, None, range(4, 6)), unsharded(range(6)), 1)
    assert_same(run_ranks(go_on, 3, (1, 3), second, None, range(4, 6)), unsharded(range(6)), 3)


def save_weights(path: str, sizes: tuple[int, ...]) -> int:
    """Saves the parameters alone, which are all sharded; their bytes."""
    state = get_model_state_dict(sharded_net(1, sizes))
    state = {name: value for name, value in state.items() if isinstance(value, DTensor)}
    dcp.save(state, checkpoint_id=path)
    return sum(value.numel() * value.element_size() for value in state.values())


def test_replicas_write_each_piece_once(tmp_path: Path) -> None:
    """The tied weight has two names and is written under both, as torch does."""
    nbytes = run_ranks(save_weights, 4, str(tmp_path), (2, 2))[0]
    metadata = dcp.FileSystemReader(tmp_path).read_metadata()
    pieces = metadata.storage_data.values()
    files = list(tmp_path.glob("*.distcp"))
    assert sum(piece.length for piece in pieces) == sum(file.stat().st_size for file in files)
    assert len(files) > 2, "replicas share the writing"
    header = 2000  # of torch.save, for each piece
    assert nbytes < sum(piece.length for piece in pieces) < nbytes + header * len(pieces)
    volumes = [
        sum(chunk.sizes.numel() for chunk in each.chunks)
        for each in metadata.state_dict_metadata.values()
    ]
    assert volumes == [each.size.numel() for each in metadata.state_dict_metadata.values()]


def load(sizes: tuple[int, ...], state: dict[str, Any], broadcast: bool) -> tuple[Any, Any]:
    net = sharded_net(2, sizes)
    optimizer = make_optimizer(net, KIND)
    mine = None if broadcast and dist.get_rank() else state
    load_full_state_dict(net, optimizer, state=mine, broadcast_from_rank0=broadcast)
    return full_state(net, optimizer), local_state(net, optimizer)


@pytest.mark.parametrize("broadcast", [False, True])
@pytest.mark.parametrize("sizes", [(2, 2), (2, 1), (1, 2)])
def test_full_states_reach_every_replica(sizes: tuple[int, int], broadcast: bool) -> None:
    expected = unsharded(range(3))
    results = run_ranks(load, sizes[0] * sizes[1], sizes, expected, broadcast)
    assert_same(results, expected, sizes[1])


@pytest.mark.parametrize("broadcast", [False, True])
@on_ranks(4)
def test_states_that_do_not_fit_raise_on_every_rank_of_both_dims(broadcast):
    net = sharded_net(2, (2, 2))
    before = local_state(net)
    state = full_state(make_net(1))["model"]
    if dist.get_rank() == (0 if broadcast else 3):
        del state["blocks.1.0.bias"]
    with pytest.raises((ValueError, RuntimeError)) as error:
        load_full_state_dict(net, state=state, broadcast_from_rank0=broadcast)
    message, changed = str(error.value), difference(local_state(net), before)
    assert "blocks.1.0.bias" in message
    assert broadcast or "ranks 0 and 3" in message
    assert not changed


@on_ranks(4)
def test_modules_load_convert_and_materialise():
    """`load_state_dict`, torch's full state dicts, meta devices, assignment."""
    mesh, expected = mesh_of((2, 2)), make_net(1).state_dict()
    net = sharded_net(2, (2, 2))
    net.load_state_dict(expected)
    options = StateDictOptions(full_state_dict=True)
    gathered = get_model_state_dict(net, options=options)
    for name, value in gathered.items():
        if isinstance(value, Tensor):
            assert type(value) is Tensor
            assert torch.equal(value, expected[name]), name
    with pytest.raises(RuntimeError, match=r"unsupported placements.*load_full_state_dict"):
        set_model_state_dict(net, gathered, options=options)

    other = sharded_net(3, (2, 2))
    other.load_state_dict(net.state_dict())  # sharded into sharded
    for (name, a), b in zip(net.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b), name
    with torch.device("meta"):
        empty = nn.Linear(30, 30)
    fully_shard(empty, mesh=mesh)
    empty.to_empty(device="cpu")
    empty.load_state_dict({"weight": torch.ones(30, 30), "bias": torch.arange(30.0)})
    x = torch.ones(2, 30)
    assert torch.equal(empty(x)[1], 30 + torch.arange(30.0))
    loss = net.double()(tokens_of(0)).square().mean()
    loss.backward()
    assert all(p.grad.dtype == torch.float64 for p in net.parameters() if p.requires_grad)
