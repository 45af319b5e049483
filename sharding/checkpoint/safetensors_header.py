"""What lies where in safetensors files: headers and indexes, checked. Pure; imports no torch.

Reads headers and no data. A file is 8 bytes with the length of a JSON header, the header, and the
data of its tensors.

References: https://huggingface.co/docs/safetensors/index#format
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

ONE_FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
# Bytes of an element, by the name that headers have for its dtype.
WIDTHS = {
    **dict.fromkeys(("F64", "I64", "U64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
    **dict.fromkeys(("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2"), 1),
}
_MAX_HEADER = 100_000_000  # bytes; the limit of safetensors itself


@dataclass(frozen=True, slots=True)
class TensorInFile:
    """A tensor of a file.

    Attributes:
        file: That it lies in.
        dtype: As headers call it; one of `WIDTHS`.
        shape: Of the tensor.
        start: Its first byte in the file.
    """

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int

    @property
    def size(self) -> int:
        """Its bytes."""
        return prod(self.shape) * WIDTHS[self.dtype]


def read_header(path: Path) -> dict[str, Any]:
    """Return the header of a file as it is written.

    Raises:
        ValueError: It is too long, cut short, or no JSON object.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(8)
        length = struct.unpack("<Q", head)[0] if len(head) == 8 else 0
        if len(head) < 8 or length > _MAX_HEADER or 8 + length > size:
            raise ValueError(
                f"{path}: the safetensors header is truncated: it needs {8 + length:,} bytes, the "
                f"file has {size:,}"
            )
        content = file.read(length)
    where = f"{path}: the safetensors header"
    try:
        return parse_object(content.decode(), where)
    except UnicodeDecodeError as error:
        raise ValueError(f"{where} is no text: {error}") from None


def parse_object(content: str, where: str) -> dict[str, Any]:
    """Return a JSON object.

    Raises:
        ValueError: It is none.
    """
    try:
        values = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: is no JSON: {error}") from None
    if not isinstance(values, dict):
        raise ValueError(f"{where}: expected a JSON object, got {type(values).__name__}")
    return values


def indexed_files(weight_map: Any, path: Path) -> dict[str, Path]:
    """Return the file of each tensor that an index names; all of them lie beside it.

    Raises:
        ValueError: The index is built otherwise, or names what is no file beside it.
    """
    if not isinstance(weight_map, dict) or not all(
        isinstance(name, str) for name in weight_map.values()
    ):
        raise ValueError(f"{path}: weight_map: expected file names by tensor, got {weight_map!r}")
    files = {name: path.parent / name for name in dict.fromkeys(weight_map.values())}
    for name, file in files.items():
        if Path(name).name != name:
            raise ValueError(f"{path}: weight_map: expected the name of a file, got {name!r}")
        if not file.is_file():
            raise ValueError(f"{path}: {file.name}, which it names, is not beside it")
    return {tensor: files[name] for tensor, name in weight_map.items()}


def tensors_of(folder: Path) -> dict[str, TensorInFile] | None:
    """Return all tensors of a folder of safetensors, as Hugging Face lays them out, or of one file.

    None where the path is of something else.

    Raises:
        ValueError: A file is damaged, or lacks a tensor that the index promises.
    """
    if folder.suffix == ".safetensors" and folder.is_file():
        return _tensors_of_file(folder)
    if (index := folder / INDEX).is_file():
        if (size := index.stat().st_size) > _MAX_HEADER:
            raise ValueError(f"{index} has {size:,} bytes, more than any index can have")
        content = parse_object(index.read_text(errors="replace"), str(index))
        places = indexed_files(content.get("weight_map"), index)
        held = {file: _tensors_of_file(file) for file in dict.fromkeys(places.values())}
        for name, file in places.items():
            if name not in held[file]:
                raise ValueError(f"{index}: {file.name} has no {name!r}, which it should hold")
        return {name: held[file][name] for name, file in places.items()}
    return _tensors_of_file(folder / ONE_FILE) if (folder / ONE_FILE).is_file() else None


def _tensors_of_file(path: Path) -> dict[str, TensorInFile]:
    header, size = read_header(path), path.stat().st_size
    with path.open("rb") as file:
        first = 8 + struct.unpack("<Q", file.read(8))[0]
    found = {}
    for name, entry in header.items():
        if name != "__metadata__":
            found[name] = _entry(entry, path, name, first, size)
    return found


def _entry(entry: Any, path: Path, name: str, first: int, size: int) -> TensorInFile:
    where = f"{path}, tensor {name!r}"
    if not isinstance(entry, Mapping) or entry.get("dtype") not in WIDTHS:
        raise ValueError(f"{where}: expected one of the dtypes {sorted(WIDTHS)}, got {entry!r:.80}")
    shape, offsets = (_sizes(entry, key, where) for key in ("shape", "data_offsets"))
    tensor = TensorInFile(path, entry["dtype"], tuple(shape), first + next(iter(offsets), 0))
    if len(offsets) != 2 or offsets[1] - offsets[0] != tensor.size:
        raise ValueError(
            f"{where}: expected {tensor.size:,} bytes for {list(tensor.shape)} of {tensor.dtype}, "
            f"got data_offsets {offsets!r}"
        )
    if first + offsets[1] > size:
        raise ValueError(f"{where}: the file ends before it, at byte {size:,}")
    return tensor


def _sizes(entry: Mapping[str, Any], key: str, where: str) -> list[int]:
    value = entry.get(key)
    if not isinstance(value, list) or not all(type(n) is int and n >= 0 for n in value):
        raise ValueError(f"{where}: {key}: expected a list of sizes >= 0, got {value!r:.80}")
    return value
