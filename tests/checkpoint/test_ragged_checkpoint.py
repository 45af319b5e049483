"""RaggedDTensor in torch.distributed.checkpoint and the state-dict functions. Gloo ranks."""

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from ranks import distributed_examples, on_ranks, run_ranks
from sharding.tensor.placement import RaggedShard
from sharding.tensor.ragged_tensor import RaggedDTensor, distribute_ragged

SHAPES = {"matrix": (4, 3), "rows": (3, 2, 4), "vector": (5,), "scalar": (), "empty": (0, 2)}


def full(name: str) -> Tensor:
    shape = SHAPES[name]
    return torch.arange(1.0, 1 + math.prod(shape)).view(shape)


def ragged(tensor: Tensor, units: tuple[int, ...]) -> RaggedDTensor:
    mesh = init_device_mesh("cpu", (len(units),))
    return distribute_ragged(tensor, mesh, RaggedShard(tuple(range(tensor.dim())), units))


def cuts(world_size: int, seed: int) -> dict[str, tuple[int, ...]]:
    """Units of every rank for each tensor; many of them 0."""
    generator = torch.Generator().manual_seed(seed)
    units = {}
    for name, shape in SHAPES.items():
        numel = math.prod(shape)
        at = torch.randint(0, numel + 1, (world_size - 1,), generator=generator).sort().values
        edges = [0, *at.tolist(), numel]
        units[name] = tuple(b - a for a, b in itertools.pairwise(edges))
    return units


def save(path: str, units: dict[str, tuple[int, ...]]) -> None:
    dcp.save({name: ragged(full(name), units[name]) for name in SHAPES}, checkpoint_id=path)


def save_stock(path: str) -> None:
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    state = {name: distribute_tensor(full(name), mesh, [Shard(0)]) for name in ("matrix", "rows")}
    dcp.save(state, checkpoint_id=path)


def load(path: str, names: list[str], units: dict[str, tuple[int, ...]]) -> None:
    state = {name: ragged(torch.zeros(SHAPES[name]), units[name]) for name in names}
    pieces = {name: x.to_local().data_ptr() for name, x in state.items()}
    dcp.load(state, checkpoint_id=path)
    for name, x in state.items():
        assert type(x) is RaggedDTensor
        assert x.to_local().data_ptr() == pieces[name], "not loaded in place"
        assert x.full_tensor().equal(full(name)), name


def load_stock(path: str) -> None:
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    names = [name for name, shape in SHAPES.items() if shape and math.prod(shape)]
    state: dict[str, Any] = {
        name: distribute_tensor(torch.zeros(SHAPES[name]), mesh, [Shard(0)]) for name in names
    }
    state["scalar"] = torch.zeros(())
    dcp.load(state, checkpoint_id=path)
    for name in names:
        assert state[name].full_tensor().equal(full(name)), name
    assert state["scalar"] == full("scalar")


@pytest.mark.parametrize(("saved_on", "loaded_on"), [(1, 3), (2, 2), (3, 5), (5, 2), (5, 1)])
def test_checkpoint_loads_into_other_layouts_and_world_sizes(tmp_path, saved_on, loaded_on):
    path = str(tmp_path / "checkpoint")
    run_ranks(save, saved_on, path, cuts(saved_on, seed=saved_on))
    run_ranks(load, loaded_on, path, list(SHAPES), cuts(loaded_on, seed=7))
    run_ranks(load_stock, loaded_on, path)

    # pytorch#150862: an empty piece saved at an offset may replace the one that holds the data.
    metadata = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    for name, shape in SHAPES.items():
        saved = metadata[name]
        assert isinstance(saved, TensorStorageMetadata)
        assert saved.size == torch.Size(shape)
        assert len({chunk.offsets for chunk in saved.chunks}) == len(saved.chunks)
        volumes = [math.prod(chunk.sizes) for chunk in saved.chunks]
        assert sum(volumes) == math.prod(shape)
        assert all(volumes) or name == "empty"


def test_checkpoint_of_torchs_shards_loads_into_ragged_ones(tmp_path: Path) -> None:
    path = str(tmp_path / "checkpoint")
    run_ranks(save_stock, 2, path)
    run_ranks(load, 3, path, ["matrix", "rows"], cuts(3, seed=1))


def check_chunks(units: dict[str, tuple[int, ...]]) -> None:
    for name in SHAPES:
        x = ragged(full(name), units[name])
        chunks = x.__create_chunk_list__()
        items = x.__create_write_items__(name, x)
        assert [item.index.offset for item in items] == [chunk.offsets for chunk in chunks]
        assert len(chunks) <= max(2 * x.dim() - 1, 1)
        for chunk in chunks:
            shard = x.__get_tensor_shard__(MetadataIndex(name, chunk.offsets))
            ranges = zip(chunk.offsets, chunk.sizes, strict=True)
            assert shard.equal(full(name)[tuple(slice(o, o + s) for o, s in ranges)])
        if not x.to_local().numel() and x.numel():
            assert chunks == []
        with pytest.raises(ValueError, match=rf"{name}.*99"):
            x.__get_tensor_shard__(MetadataIndex(name, torch.Size([99])))


@distributed_examples
@given(world_size=st.sampled_from([1, 2, 3, 5]), seed=st.integers(0, 1000))
def test_chunks_of_a_rank_are_its_range(world_size: int, seed: int) -> None:
    run_ranks(check_chunks, world_size, cuts(world_size, seed))


@on_ranks(3)
def test_state_dict_functions_of_torch_work_or_raise_before_they_write() -> None:
    torch.manual_seed(0)
    weight = torch.randn(4, 3)
    model = nn.Linear(3, 4)
    model.weight = nn.Parameter(ragged(weight, (5, 0, 7)))
    model.bias = nn.Parameter(ragged(torch.ones(4), (0, 0, 4)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    full_options = StateDictOptions(full_state_dict=True, cpu_offload=True)

    sharded = get_model_state_dict(model)
    assert type(sharded["weight"]) is RaggedDTensor
    gathered = get_model_state_dict(model, options=full_options)
    if torch.distributed.get_rank() == 0:
        assert gathered["weight"].equal(weight)
        assert type(gathered["bias"]) is Tensor
    else:
        assert gathered == {}

    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    state = get_optimizer_state_dict(model, optimizer)
    assert type(state["state"]["weight"]["exp_avg"]) is RaggedDTensor
    moments = get_optimizer_state_dict(model, optimizer, options=full_options)
    if torch.distributed.get_rank() == 0:
        torch.testing.assert_close(moments["state"]["weight"]["exp_avg"], torch.full((4, 3), 0.1))
    stepped = model.weight.full_tensor().clone()
    with torch.no_grad():
        model.weight.zero_()
    set_model_state_dict(model, {"weight": ragged(stepped, (5, 0, 7)), "bias": model.bias})
    assert model.weight.full_tensor().equal(stepped)
    set_optimizer_state_dict(model, optimizer, state)
    assert float(optimizer.state[model.weight]["step"]) == 1

    # torch distributes full tensors by itself, which knows no ragged layout.
    with pytest.raises(RuntimeError, match=r"unsupported placements.*load_full_state_dict"):
        set_model_state_dict(
            model,
            {"weight": 2 * weight, "bias": torch.zeros(4)},
            options=StateDictOptions(full_state_dict=True),
        )
    assert model.weight.full_tensor().equal(stepped)
    assert model.bias.full_tensor().all()
