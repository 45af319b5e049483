"""Models from folders of safetensors: each rank reads its own part, out of mapped files.

Reads files; writes models through their `load_state_dict`. A file is mapped into memory, of which
the pages of a rank's part are read; a tensor whose bytes are not aligned is copied whole.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.tensor import DTensor

from sharding.checkpoint.messages import Messages
from sharding.checkpoint.model_targets import (
    TensorOutline,
    check_model,
    memory_like,
    state_for,
    targets_of,
)
from sharding.checkpoint.names import plain_names
from sharding.checkpoint.safetensors_header import TensorInFile, tensors_of

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}


def tensors_on_all_ranks(messages: Messages, folder: Path) -> dict[str, TensorInFile] | None:
    """Return what a folder of safetensors holds; None where it is none. A collective.

    Raises:
        ValueError: A file is damaged.
        FileNotFoundError: Ranks see different files.
    """
    found: list[dict[str, TensorInFile] | None] = []

    def look() -> str:
        found.append(tensors_of(folder))
        return hashlib.sha256(repr(found[0]).encode()).hexdigest()

    def compare(by_rank: list[str]) -> list[None]:
        for rank, digest in enumerate(by_rank):
            if digest != by_rank[0]:
                raise FileNotFoundError(
                    f"{folder}: rank {rank} sees other files than rank 0; load from a file system "
                    "that all ranks share"
                )
        return [None] * len(by_rank)

    messages.together(look, compare, f"read {folder}")
    return found[0]


def load_safetensors(
    messages: Messages, model: nn.Module, tensors: Mapping[str, TensorInFile], where: str
) -> None:
    """Load a model whose names are those of the files; a tied tensor may be there once.

    Raises:
        ValueError: Names, shapes or dtypes do not fit; nothing was written.
        RuntimeError: The model is on the meta device.
    """
    named = dict(zip(plain_names(list(tensors)), tensors.values(), strict=True))

    def plan() -> dict[str, Any]:
        outline = {
            name: TensorOutline(tensor.shape, _DTYPES[tensor.dtype])
            for name, tensor in named.items()
        }
        targets = targets_of(model)
        check_model(outline, targets, where)
        return state_for(
            targets,
            {
                name: _filled(memory_like(targets[name].value, outline[name]), tensor)
                for name, tensor in named.items()
            },
        )

    state = messages.agree(plan, f"read {where}")
    messages.agree(lambda: model.load_state_dict(state), f"load {where}")


@torch.no_grad()
def _filled(target: Tensor, source: TensorInFile) -> Tensor:
    """Return `target` with this rank's part of a tensor in a file."""
    if not target.numel():
        return target
    whole = _mapped(source)
    if not isinstance(target, DTensor):
        return target.copy_(whole)
    hooks: Any = target  # of torch.distributed.checkpoint
    for chunk in hooks.__create_chunk_list__():
        box = tuple(slice(o, o + n) for o, n in zip(chunk.offsets, chunk.sizes, strict=True))
        index = MetadataIndex("", chunk.offsets)
        hooks.__get_tensor_shard__(index).copy_(whole[box])
    return target


def _mapped(source: TensorInFile) -> Tensor:
    """Return a tensor of a file, whose pages are read where they are used."""
    dtype, end = _DTYPES[source.dtype], source.start + source.size
    content = torch.from_file(str(source.file), shared=False, size=end, dtype=torch.uint8)
    raw = content[source.start : end]
    if source.start % dtype.itemsize:
        raw = raw.clone()
    return raw.view(dtype).view(source.shape)
