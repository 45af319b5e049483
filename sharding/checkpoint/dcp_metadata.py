"""The `.metadata` of torch.distributed.checkpoint (DCP), read without running what it names.

DCP unpickles the file, and a pickle may call anything. Here it may build DCP's own descriptions, of
dtypes, layouts, sizes and text.
"""

from __future__ import annotations

import collections
import io
import pathlib
import pickle
from collections.abc import Collection
from typing import Any

import torch
import torch.distributed.checkpoint.filesystem as dcp_filesystem
import torch.distributed.checkpoint.metadata as dcp
import torch.serialization
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    TensorStorageMetadata,
)

METADATA = ".metadata"

_CLASSES = {
    (module.__name__, name): getattr(module, name)
    for module, names in (
        (
            dcp,
            (
                "BytesStorageMetadata",
                "ChunkStorageMetadata",
                "Metadata",
                "MetadataIndex",
                "StorageMeta",
                "TensorProperties",
                "TensorStorageMetadata",
                "_MEM_FORMAT_ENCODING",
            ),
        ),
        (dcp_filesystem, ("_StorageInfo",)),
        (torch, ("Size",)),
        (torch.serialization, ("_get_layout",)),
        (collections, ("OrderedDict",)),
    )
    for name in names
}
_PATHS = ("Path", "PosixPath", "PurePosixPath", "WindowsPath")


class _Descriptions(pickle.Unpickler):
    """Builds what DCP's metadata consists of, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        """Return a class of the list, or a dtype.

        Raises:
            pickle.UnpicklingError: Anything else is asked for.
        """
        if (module, name) in _CLASSES:
            return _CLASSES[module, name]
        if module in ("pathlib", "pathlib._local") and name in _PATHS:
            return getattr(pathlib, name)
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no metadata needs")


def parse_metadata(content: bytes, files: Collection[str] | None = None) -> Metadata:
    """Return the metadata of a checkpoint.

    Args:
        content: Of its `.metadata`.
        files: That its data may lie in; None where any plain name will do.

    Raises:
        ValueError: It is none, or names other files.
    """
    try:
        metadata = _Descriptions(io.BytesIO(content)).load()
        entries = metadata.state_dict_metadata
        places = metadata.storage_data
        kinds = {type(entry) for entry in entries.values()}
        names = {place.relative_path for place in places.values()}
        paths = {} if metadata.planner_data is None else dict(metadata.planner_data)
    except Exception as error:  # whatever the bytes make of pickle
        raise ValueError(
            f"{METADATA} is no description of a checkpoint: {type(error).__name__}: {error}"
        ) from None
    if strange := kinds - {TensorStorageMetadata, BytesStorageMetadata}:
        raise ValueError(f"{METADATA} describes {strange}, expected tensors and bytes")
    for name in names:
        outside = not isinstance(name, str) or pathlib.PurePath(name).name != name
        if outside or (files is not None and name not in files):
            raise ValueError(f"{METADATA} names {name!r}, which is no file of the checkpoint")
    # Without them (DCP's `flatten_state_dict=False`) a key stands for itself.
    metadata.planner_data = {key: paths.get(key, (key,)) for key in entries}
    return metadata
