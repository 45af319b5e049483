"""Folders of safetensors, as Hugging Face writes them, into sharded models."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor, nn

from ranks import run_ranks
from sharding import checkpoint
from sharding.checkpoint.safetensors_header import tensors_of
from small_models import build, full, shard


def tensors() -> dict[str, Tensor]:
    """Of `build(tied=True)`, in bf16 but for one, without the name that is tied."""
    generator = torch.Generator().manual_seed(1)
    drawn = {
        name: torch.randn(value.shape, generator=generator).bfloat16()
        for name, value in build(tied=True).state_dict().items()
    }
    drawn["blocks.0.up.weight"] = drawn["blocks.0.up.weight"].float()
    del drawn["head.weight"]
    return drawn


def write(folder: Path, files: int) -> dict[str, Tensor]:
    """One file, or several and their index."""
    folder.mkdir(parents=True, exist_ok=True)
    saved = tensors()
    if files == 1:
        save_file(saved, folder / "model.safetensors", metadata={"format": "pt"})
        return saved
    places = {name: f"model-{i % files}.safetensors" for i, name in enumerate(saved)}
    for file in set(places.values()):
        save_file({n: t for n, t in saved.items() if places[n] == file}, folder / file)
    index = {"metadata": {}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return saved


def model_of(layout: str) -> nn.Module:
    model = build(tied=True)
    if layout == "ours":
        return shard(model)
    if layout == "torch":
        for block in model.blocks:
            torch_fsdp.fully_shard(block)
        torch_fsdp.fully_shard(model)
    return model


def check_loads(folder: Path, layouts: list[str], expected: dict[str, Tensor]) -> None:
    for layout in layouts:
        model = model_of(layout)
        assert checkpoint.load(folder, model=model) == 0
        loaded = {name: full(p) for name, p in model.named_parameters()}
        assert loaded.keys() == expected.keys()
        for name, value in loaded.items():
            assert torch.equal(value, expected[name].float()), (layout, name)
    with pytest.raises(ValueError, match="a folder of safetensors holds one model: pass model="):
        checkpoint.load(folder, model=model, step=3)
    wrong: Any = nn.Linear(3, 2)
    with pytest.raises(ValueError, match=r"missing \['weight', 'bias'\], unexpected \["):
        checkpoint.load(folder, model=wrong)
    elsewhere = folder if dist.get_rank() == 0 else folder / "elsewhere"
    with pytest.raises(FileNotFoundError, match="rank 1 sees other files than rank 0"):
        checkpoint.load(elsewhere, model=model)


def test_folder_of_safetensors_loads_into_every_layout(tmp_path: Path) -> None:
    for files, world_size in ((3, 2), (1, 3)):
        expected = write(tmp_path / str(files), files)
        run_ranks(
            check_loads, world_size, tmp_path / str(files), ["ours", "torch", "plain"], expected
        )
    odd = tmp_path / "odd.safetensors"  # whose data is not aligned
    content = (tmp_path / "1" / "model.safetensors").read_bytes()
    length = struct.unpack("<Q", content[:8])[0]
    odd.write_bytes(
        struct.pack("<Q", length + 1) + content[8 : 8 + length] + b" " + content[8 + length :]
    )
    model = model_of("plain")
    checkpoint.load(odd, model=model)
    for name, value in model.named_parameters():
        assert torch.equal(value, expected[name].float()), name


@given(seed=st.integers(0, 10**6))
def test_mutated_safetensors_raise_an_error_or_are_as_long_as_they_say(
    tmp_path_factory: pytest.TempPathFactory, seed: int
) -> None:
    folder = tmp_path_factory.mktemp("mutated")
    write(folder, 1 + seed % 2)
    generator = torch.Generator().manual_seed(seed)
    names = sorted(path.name for path in folder.iterdir())
    file = folder / names[int(torch.randint(len(names), (1,), generator=generator))]
    content = bytearray(file.read_bytes())
    for _ in range(1 + seed % 3):
        head = min(len(content), 400)
        at = int(torch.randint(head, (1,), generator=generator))
        content[at] = int(torch.randint(256, (1,), generator=generator))
    file.write_bytes(content[: len(content) - seed % 5])
    try:
        found = tensors_of(folder)
    except ValueError:
        return
    assert found is not None
    for tensor in found.values():
        assert tensor.start + tensor.size <= tensor.file.stat().st_size


@pytest.mark.parametrize(
    ("index", "fault"),
    [
        ({"weight_map": {"a": "../other/model.safetensors"}}, "expected the name of a file, got"),
        ({"weight_map": {"a": "gone.safetensors"}}, "gone.safetensors, which it names, is not"),
        ({"weight_map": {"a": "model.safetensors"}}, r"model.safetensors has no 'a', which it"),
        ({"weight_map": ["a"]}, "weight_map: expected file names by tensor"),
    ],
)
def test_index_names_files_beside_it_that_hold_what_it_says(tmp_path: Path, index, fault) -> None:
    write(tmp_path / "other", 1)
    write(tmp_path / "x", 1)
    (tmp_path / "x" / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=fault):
        checkpoint.load(tmp_path / "x", model=nn.Linear(2, 2))
