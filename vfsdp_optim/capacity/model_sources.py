"""Reads the shapes of a model: a table, a Hugging Face configuration, safetensors, a module.

Reads files and, for `module:function`, imports the user's module; allocates no parameter.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sharding.checkpoint.safetensors_header import indexed_files, parse_object, read_header
from vfsdp_optim.capacity.huggingface import read_config
from vfsdp_optim.capacity.shapes import (
    CONVOLUTION,
    ITEMSIZE,
    ONE_MATRIX,
    BucketShapes,
    ModelShapes,
    NamedShape,
    sort_into_buckets,
    table_bucket,
)

_TABLES = resources.files("vfsdp_optim.capacity").joinpath("models")
_SAFETENSORS = {"F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_INTEGERS = {"I64", "I32", "I16", "BOOL"}  # buffers, such as position ids


def model_names() -> list[str]:
    """Return the models whose shape tables come with this package."""
    files = [f.name for f in _TABLES.iterdir() if f.name.endswith(".json")]
    return sorted(name[:-5].replace("_", "-") for name in files)


def read_model(text: str, *, dtype: str | None = None, experts: str | None = None) -> ModelShapes:
    """Return the shapes of a model.

    Args:
        text: Name of a shape table of this package; path of a table, of a Hugging Face
            `config.json`, of a safetensors file or index, or of a folder with one of them; or
            "module:function", which returns an `nn.Module`.
        dtype: Of all parameters; None keeps what the source says.
        experts: "separate" or "fused", for configurations; None is as in the checkpoints.

    Raises:
        ValueError: There is no such model, or what was read is no description of one.
    """
    path = Path(text)
    if path.exists():
        model = _read_path(path, experts)
    elif text.lower().replace("_", "-") in model_names():
        name = text.lower().replace("-", "_")
        content = _TABLES.joinpath(f"{name}.json").read_text()
        model = _read_table(parse_object(content, name), name)
    elif ":" in text and path.suffix not in (".json", ".safetensors"):
        model = _read_function(text)
    else:
        raise ValueError(
            f"model {text!r}: no such file, and no table of that name; tables: "
            f"{', '.join(model_names())}"
        )
    if not model.numel:
        raise ValueError(f"model {text!r} has no parameters")
    return model if dtype is None else _with_dtype(model, dtype)


def _with_dtype(model: ModelShapes, dtype: str) -> ModelShapes:
    buckets = tuple(
        BucketShapes(
            bucket.name,
            bucket.count,
            tuple(replace(tensor, dtype=dtype) for tensor in bucket.tensors),
        )
        for bucket in model.buckets
    )
    return ModelShapes(model.name, model.source, buckets, model.notes)


def _read_path(path: Path, experts: str | None) -> ModelShapes:
    if path.is_dir():
        for name in ("config.json", "model.safetensors.index.json", "model.safetensors"):
            if (path / name).exists():
                return _read_path(path / name, experts)
        raise ValueError(f"{path}: no config.json and no model.safetensors in this folder")
    if path.suffix == ".safetensors":
        return _from_headers(path, [path])
    try:
        content = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: cannot be read as text: {error}") from None
    values = parse_object(content, str(path))
    if "buckets" in values:
        return _read_table(values, str(path))
    if "weight_map" in values:
        return _from_headers(
            path, list(dict.fromkeys(indexed_files(values["weight_map"], path).values()))
        )
    if "model_type" in values:
        params = read_config(values, str(path), experts)
        return ModelShapes(path.parent.name or path.stem, str(path), sort_into_buckets(params))
    raise ValueError(
        f"{path}: expected a shape table (key 'buckets'), a safetensors index ('weight_map') or a "
        f"Hugging Face configuration ('model_type'), got keys {sorted(values)[:5]}"
    )


# -- shape tables ----------------------------------------------------------------------------------


def _read_table(values: dict[str, Any], where: str) -> ModelShapes:
    buckets = []
    for i, entry in enumerate(_member(values, "buckets", list, where)):
        at = f"{where}: bucket {i}"
        name, count = _member(entry, "bucket", str, at), _positive(entry, "count", at)
        tensors = _member(entry, "tensors", list, at)
        params = [p for tensor in tensors for p in _table_entry(tensor, f"{at} ({name})")]
        (common, times), *_ = [*Counter(p.name for p in params).most_common(1), ("", 0)]
        if times > 1:
            raise ValueError(f"{at} ({name}): {times} tensors are named {common!r}")
        buckets.append(table_bucket(name, count, params))
    source = values.get("source", where)
    notes = (values["note"],) if values.get("note") else ()
    return ModelShapes(str(values.get("model", where)), str(source), tuple(buckets), notes)


def _table_entry(entry: Any, where: str, prefix: str = "") -> Iterator[NamedShape]:
    """Return the tensors of one entry: itself, or a group of tensors that each expert has."""
    if isinstance(entry, dict) and ("group" in entry or "repeat" in entry):
        members = entry.get("group") or [{k: v for k, v in entry.items() if k != "repeat"}]
        for expert in range(_positive(entry, "repeat", where)):
            for member in members:
                yield from _table_entry(member, where, f"experts.{expert}.")
        return
    name = _member(entry, "name", str, where)
    at = f"{where}, tensor {name!r}"
    shape, dtype = _member(entry, "shape", list, at), _member(entry, "dtype", str, at)
    if dtype not in ITEMSIZE:
        raise ValueError(f"{at}: dtype: expected one of {', '.join(ITEMSIZE)}, got {dtype!r}")
    yield NamedShape(prefix + name, _checked_shape(shape, at), dtype)


def _member(values: Any, key: str, kind: type, where: str) -> Any:
    if not isinstance(values, dict):
        raise ValueError(f"{where}: expected a JSON object, got {values!r}")
    if key not in values:
        raise ValueError(f"{where}: key {key!r} is missing")
    if not isinstance(values[key], kind):
        raise ValueError(f"{where}: {key}: expected a {kind.__name__}, got {values[key]!r}")
    return values[key]


def _positive(values: dict[str, Any], key: str, where: str) -> int:
    value = _member(values, key, int, where)
    if isinstance(value, bool) or value < 1:
        raise ValueError(f"{where}: {key}: expected a positive integer, got {value!r}")
    return int(value)


def _checked_shape(shape: Any, where: str) -> tuple[int, ...]:
    if not isinstance(shape, list) or not all(type(n) is int and n >= 0 for n in shape):
        raise ValueError(f"{where}: shape: expected a list of sizes >= 0, got {shape!r}")
    return tuple(shape)


# -- safetensors -----------------------------------------------------------------------------------


def _from_headers(path: Path, files: list[Path]) -> ModelShapes:
    """Return shapes from the headers of safetensors files; data may be missing.

    References: https://huggingface.co/docs/safetensors/index#format
    """
    params, skipped = [], []
    for file in files:
        for name, entry in read_header(file).items():
            if name == "__metadata__":
                continue
            at = f"{file}, tensor {name!r}"
            dtype = _member(entry, "dtype", str, at)
            if dtype in _INTEGERS:
                skipped.append(name)
                continue
            if dtype not in _SAFETENSORS:
                raise ValueError(
                    f"{at}: dtype {dtype!r} is that of a quantized checkpoint, which is not "
                    f"trained as it lies there; plan from its config.json"
                )
            shape = _checked_shape(entry.get("shape"), at)
            params.append(NamedShape(name, shape, _SAFETENSORS[dtype]))
    notes = (f"left out: {len(skipped)} integer tensors, as {skipped[0]}",) if skipped else ()
    params.sort(key=lambda param: _natural(param.name))  # files are in no order of layers
    return ModelShapes(path.stem, str(path), sort_into_buckets(params), notes)


def _natural(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]


# -- modules ---------------------------------------------------------------------------------------


def _read_function(text: str) -> ModelShapes:
    """Return the parameters of what a user's function returns, called under the meta device."""
    module_name, _, function_name = text.partition(":")
    if os.getcwd() not in sys.path:  # a script's path has its own folder alone
        sys.path.insert(0, os.getcwd())
    try:
        function = getattr(importlib.import_module(module_name), function_name)
        with torch.device("meta"):
            module = function()
    except Exception as error:
        raise ValueError(f"model {text!r}: {type(error).__name__}: {error}") from error
    if not isinstance(module, nn.Module):
        raise ValueError(
            f"model {text!r}: expected a function that returns an nn.Module, got {module!r}"
        )
    return ModelShapes(function_name, text, sort_into_buckets(module_shapes(module)))


def module_shapes(module: nn.Module) -> Iterator[NamedShape]:
    """Return the parameters of a module, tied ones once, and what their modules say of them."""
    homes = {id(p): m for m in module.modules() for p in m.parameters(recurse=False)}
    embedded = {
        id(p)
        for m in module.modules()
        if isinstance(m, (nn.Embedding, nn.EmbeddingBag))
        for p in m.parameters(recurse=False)
    }
    for name, parameter in module.named_parameters():
        yield NamedShape(
            name=name,
            shape=tuple(parameter.shape),
            dtype=str(parameter.dtype).removeprefix("torch."),
            is_embedding=id(parameter) in embedded,
            matrices=_pattern(name.rpartition(".")[2], homes[id(parameter)], parameter.ndim),
            trainable=parameter.requires_grad,
        )


def _pattern(name: str, module: nn.Module, ndim: int) -> str | None:
    """Return the matrices of a parameter of torch's own modules; None if they follow from the
    shape."""
    if isinstance(module, nn.modules.conv._ConvNd) and name == "weight":
        if module.groups == 1:
            return CONVOLUTION
        channels = module.weight.shape[0] // module.groups
        one_channel = min(channels, module.weight[0].numel()) == 1
        return "" if one_channel else f"(g o) ... -> g o (...); g={module.groups}"
    if isinstance(module, nn.MultiheadAttention) and name == "in_proj_weight":
        return "(k m) n -> k m n; k=3"
    return ONE_MATRIX if ndim == 2 else None
