"""Files: safetensors folders of Hugging Face, torch.save with weights-only loads, and DCP's own."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.serialization import get_unsafe_globals_in_checkpoint

import vfsdp_optim
from dcp_checkpoints import Net, difference, full_state, make_net, make_optimizer, plain, take_steps
from ranks import RankError, run_ranks
from sharding import RaggedDTensor, load_full_state_dict


def tensors_of(net: Net) -> dict[str, Tensor]:
    """What a safetensors file can hold: tensors, a shared one once, in memory of their own."""
    state = full_state(net)["model"]
    del state["head.weight"], state["scale._extra_state"]
    return {name: value.contiguous().clone() for name, value in state.items()}


def write_folder(path: Path, tensors: dict[str, Tensor]) -> None:
    """As `save_pretrained` writes a model that is split over files."""
    files: dict[str, dict[str, Tensor]] = {}
    for i, (name, value) in enumerate(tensors.items()):
        files.setdefault(f"model-{i % 2 + 1:05}-of-00002.safetensors", {})[name] = value
    for file, part in files.items():
        save_file(part, path / file, metadata={"format": "pt"})
    index = {name: file for file, part in files.items() for name in part}
    (path / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": 0}, "weight_map": index})
    )


def read_folder(path: str, dtype: torch.dtype) -> dict[str, Any]:
    """Reads with torch's reader straight into the shards; pieces start and end inside of rows."""
    net = make_net(2, sharded=True, dtype=dtype)
    pieces = {name: p.to_local().data_ptr() for name, p in net.named_parameters()}
    state = {
        name: value
        for name, value in get_model_state_dict(net).items()
        if name not in ("head.weight", "scale._extra_state")
    }
    dcp.load(state, storage_reader=HuggingFaceStorageReader(path))
    assert pieces == {name: p.to_local().data_ptr() for name, p in net.named_parameters()}
    return full_state(net)["model"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("world_size", [1, 3])
def test_loading_a_safetensors_folder_with_torchs_reader(
    tmp_path: Path, world_size: int, dtype: torch.dtype
) -> None:
    saved = make_net(1)
    write_folder(tmp_path, tensors_of(saved))
    expected = make_net(2, dtype=dtype)
    expected.load_state_dict(full_state(saved)["model"])
    expected.scale.calls = 2
    for state in run_ranks(read_folder, world_size, str(tmp_path), dtype):
        assert difference(state, full_state(expected)["model"]) == ""


def test_loading_a_safetensors_folder_of_other_shapes_names_the_tensor(tmp_path: Path) -> None:
    tensors = tensors_of(make_net(1))
    tensors["blocks.0.0.weight"] = tensors["blocks.0.0.weight"].T.contiguous()
    write_folder(tmp_path, tensors)
    with pytest.raises(RankError, match=r"Size mismatch.*blocks\.0\.0\.weight") as error:
        run_ranks(read_folder, 2, str(tmp_path), torch.float32)
    assert len(error.value.reports) == 2


def save_sharded(path: str) -> None:
    net = make_net(1, sharded=True)
    optimizer = make_optimizer(net, "muon", ns_dtype=torch.float32)
    take_steps(net, optimizer, range(2))
    state = {"model": net.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(state, f"{path}/{dist.get_rank()}.pt")


def load_sharded(path: str) -> str:
    """Loads this rank's file with weights_only, and trains on as if nothing had happened."""
    net = make_net(1, sharded=True)
    optimizer = make_optimizer(net, "muon", ns_dtype=torch.float32)
    take_steps(net, optimizer, range(2))
    other = make_net(2, sharded=True)
    other_optimizer = make_optimizer(other, "muon", ns_dtype=torch.float32)
    file = f"{path}/{dist.get_rank()}.pt"
    assert get_unsafe_globals_in_checkpoint(file) == []
    state = torch.load(file, weights_only=True)
    assert type(state["model"]["head.weight"]) is RaggedDTensor
    other.load_state_dict(state["model"])
    other_optimizer.load_state_dict(state["optimizer"])
    for model, opt in ((net, optimizer), (other, other_optimizer)):
        take_steps(model, opt, range(2, 4))
    return difference(full_state(other, other_optimizer), full_state(net, optimizer))


def load_on_other_ranks(path: str) -> None:
    state = torch.load(f"{path}/0.pt", weights_only=True)
    make_net(2, sharded=True).load_state_dict(state["model"])


def test_loading_shards_with_weights_only_on_the_ranks_that_saved_them(tmp_path: Path) -> None:
    """Pieces lie anywhere in a buffer: torch took offsets for addresses and failed to save."""
    run_ranks(save_sharded, 2, str(tmp_path))
    assert run_ranks(load_sharded, 2, str(tmp_path)) == ["", ""]
    with pytest.raises(RankError, match=r"embedding\.weight: .*torch\.distributed\.checkpoint"):
        run_ranks(load_on_other_ranks, 3, str(tmp_path))


def save_full(path: str) -> None:
    net = make_net(1, sharded=True)
    optimizer = make_optimizer(net, "named_adamw", state_dtype=torch.float32)
    take_steps(net, optimizer, range(2))
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = {
        "model": get_model_state_dict(net, options=options),
        "optimizer": get_optimizer_state_dict(net, optimizer, options=options),
        "index": full_state(net, optimizer),
    }
    if dist.get_rank() == 0:
        torch.save(state, path)


def load_full(path: str) -> list[str]:
    """Loads one file that only rank 0 reads, by name and by index; returns what is wrong."""
    state = torch.load(path, weights_only=True) if dist.get_rank() == 0 else {}
    wrong = []
    for part in (state, state.get("index")):
        net = make_net(2, sharded=True)
        optimizer = make_optimizer(net, "named_adamw", state_dtype=torch.float32)
        if part is not None:
            part = {key: part.get(key) for key in ("model", "optimizer")}
        load_full_state_dict(net, optimizer, state=part, broadcast_from_rank0=True)
        now = full_state(net, optimizer)
        wrong.append(difference(now, state["index"]) if dist.get_rank() == 0 else "")
    return wrong


def test_loading_a_full_file_with_weights_only(tmp_path: Path) -> None:
    path = str(tmp_path / "full.pt")
    run_ranks(save_full, 2, path)
    assert get_unsafe_globals_in_checkpoint(path) == []
    for wrong in run_ranks(load_full, 3, path):
        assert wrong == ["", ""]
    load_without_distributed(path)


def load_without_distributed(path: str) -> Net:
    """What a script without ranks does with such a file."""
    state = torch.load(path, weights_only=True)["index"]
    net = Net()
    optimizer = vfsdp_optim.AdamW(net.named_parameters())
    net.load_state_dict(state["model"])
    trainable = [(name, p) for name, p in net.named_parameters() if name[:6] != "frozen"]
    optimizer = vfsdp_optim.AdamW(trainable, state_dtype=torch.float32)
    optimizer.load_state_dict(state["optimizer"])
    assert difference(full_state(net, optimizer), plain(state)) == ""
    return net


def save_dcp(path: str) -> None:
    net = make_net(1, sharded=True)
    optimizer = make_optimizer(net, "muon", ns_dtype=torch.float32)
    take_steps(net, optimizer, range(1))
    state = {
        "model": get_model_state_dict(net),
        "optimizer": get_optimizer_state_dict(net, optimizer),
    }
    dcp.save(state, checkpoint_id=path)


def test_loading_of_a_distributed_checkpoint_needs_no_class_of_ours(tmp_path: Path) -> None:
    """No name of our modules is in its files, so that code may move, and others may read them."""
    run_ranks(save_dcp, 2, str(tmp_path))
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) > 2
    for path in files:
        content = path.read_bytes()
        for name in (b"sharding", b"vfsdp", b"Ragged"):
            assert name not in content, (path, name)
