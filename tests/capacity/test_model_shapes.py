"""Shapes of models from every source: the same parameters, sorted into the same buckets."""

import json
import struct
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from vfsdp_optim.capacity.model_sources import model_names, read_model
from vfsdp_optim.capacity.shapes import ModelShapes, NamedShape, sort_into_buckets

# What the config.json of each model's page has, as far as it decides shapes.
CONFIGS = json.loads((Path(__file__).parent / "model_configs.json").read_text())


def from_config(folder: Path, values: dict[str, Any], **options: Any) -> ModelShapes:
    path = folder / "config.json"
    path.write_text(json.dumps(values))
    return read_model(str(path), **options)


def contents(model: ModelShapes) -> list[tuple[int, Counter[Any]]]:
    """Count, and shapes with kinds, of each bucket; no names, which differ."""
    return [
        (bucket.count, Counter((t.shape, t.kind, t.matrices) for t in bucket.tensors))
        for bucket in model.buckets
    ]


@pytest.mark.parametrize(
    ("config", "experts", "table"),
    [
        ("llama-8b", None, "llama3-8b"),
        ("llama-70b", None, "llama3-70b"),
        ("qwen3-30b", None, "qwen3-30b-a3b-perexpert"),
        ("qwen3-30b", "fused", "qwen3-30b-a3b-fused"),
        ("gpt-oss", None, "gpt-oss-120b"),
        ("deepseek", None, "deepseek-v3-perexpert"),
        ("deepseek", "fused", "deepseek-v3-fused"),
        ("kimi", "separate", "kimi-k2-perexpert"),
        ("kimi", "fused", "kimi-k2-fused"),
    ],
)
def test_configuration_has_the_parameters_of_the_table(tmp_path, config, experts, table):
    expected, values = contents(read_model(table)), CONFIGS[config]
    for _, shapes in expected:
        # In transformers, DeepSeek's correction of the routing is a buffer.
        shapes.pop(((values.get("n_routed_experts"),), "vector", None), None)
    model = from_config(tmp_path, values, experts=experts)
    assert contents(model) == expected
    assert {t.dtype for b in model.buckets for t in b.tensors} == {"bfloat16"}


@pytest.mark.parametrize(
    ("table", "billions"),
    [
        ("llama3-8b", 8.030),
        ("llama3-70b", 70.554),
        ("gpt-oss-120b", 116.829),
        ("deepseek-v3-fused", 671.026),
        ("kimi-k2-perexpert", 1026.408),
        ("qwen3-30b-a3b-fused", 30.532),
        ("vit-l16", 0.3043),
        ("gpt2-small", 0.1244),
        ("resnet50", 0.02556),
    ],
)
def test_table_has_the_published_number_of_parameters(table: str, billions: float) -> None:
    assert read_model(table).numel == pytest.approx(billions * 1e9, rel=5e-4)


def test_tables_name_their_sources() -> None:
    sources = [read_model(name).source for name in model_names()]
    assert all("huggingface.co" in s or "torchvision" in s or "timm" in s for s in sources)


def names_of(folder: Path, values: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names within layer 0, and their shapes."""
    model = from_config(folder, values)
    return {t.name: t.shape for t in model.buckets[1].tensors}


def test_families_differ_in_biases_norms_and_experts(tmp_path: Path) -> None:
    small = {
        "hidden_size": 8,
        "intermediate_size": 12,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "vocab_size": 32,
        "tie_word_embeddings": True,
    }
    qwen2 = names_of(tmp_path, small | {"model_type": "qwen2"})
    assert qwen2["self_attn.k_proj.bias"] == (4,)
    assert "self_attn.o_proj.bias" not in qwen2
    qwen3 = names_of(tmp_path, small | {"model_type": "qwen3", "head_dim": 16})
    assert qwen3["self_attn.q_norm.weight"] == (16,)
    assert qwen3["self_attn.o_proj.weight"] == (8, 64)
    mixtral = names_of(tmp_path, small | {"model_type": "mixtral", "num_local_experts": 2})
    assert mixtral["block_sparse_moe.experts.1.w2.weight"] == (8, 12)
    moe = {
        "model_type": "qwen2_moe",
        "num_experts": 3,
        "moe_intermediate_size": 6,
        "shared_expert_intermediate_size": 10,
        "decoder_sparse_step": 2,
    }
    model = from_config(tmp_path, small | moe)
    dense, sparse = ({t.name: t.shape for t in b.tensors} for b in model.buckets[1:])
    assert dense["mlp.gate_proj.weight"] == (12, 8)
    assert sparse["mlp.experts.2.up_proj.weight"] == (6, 8)
    assert sparse["mlp.shared_expert_gate.weight"] == (1, 8)
    latent = {
        "model_type": "deepseek_v2",
        "q_lora_rank": None,
        "kv_lora_rank": 4,
        "qk_nope_head_dim": 3,
        "qk_rope_head_dim": 2,
        "v_head_dim": 5,
        "first_k_dense_replace": 2,
    }
    deepseek = names_of(tmp_path, small | latent)
    assert deepseek["self_attn.q_proj.weight"] == (20, 8)
    assert deepseek["self_attn.kv_a_proj_with_mqa.weight"] == (6, 8)
    assert deepseek["self_attn.kv_b_proj.weight"] == (32, 4)
    assert [b.name for b in from_config(tmp_path, small | latent).buckets] == [
        "root",
        "model.layers.0-1",
    ]


def write_safetensors(path: Path, tensors: dict[str, tuple[str, list[int]]]) -> None:
    """A file of which the data are missing: only the header is read."""
    header = {
        name: {"dtype": dtype, "shape": shape, "data_offsets": [0, 0]}
        for name, (dtype, shape) in tensors.items()
    }
    content = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    path.write_bytes(struct.pack("<Q", len(content)) + content)


def test_safetensors_are_read_by_header_in_the_order_of_layers(tmp_path: Path) -> None:
    weights = {f"h.{i}.up.weight": ("BF16", [8, 4]) for i in (10, 2, 1, 0)}
    others = {"embed.weight": ("F32", [16, 4]), "position_ids": ("I64", [1, 4])}
    write_safetensors(tmp_path / "model.safetensors", weights | others)
    model = read_model(str(tmp_path))
    assert [(b.name, b.count) for b in model.buckets] == [("root", 1), ("h.0-2,10", 4)]
    assert model.buckets[0].tensors[0].kind == "embedding"
    assert model.notes == ("left out: 1 integer tensors, as position_ids",)
    write_safetensors(tmp_path / "a.safetensors", weights)
    write_safetensors(tmp_path / "b.safetensors", others)
    files = {
        name: "a.safetensors" if name in weights else "b.safetensors" for name in weights | others
    }
    (tmp_path / "x.index.json").write_text(json.dumps({"weight_map": files}))
    assert read_model(str(tmp_path / "x.index.json")).buckets == model.buckets


def test_safetensors_written_by_the_library_are_read(tmp_path: Path) -> None:
    torch_files = pytest.importorskip("safetensors.torch")
    tensors = {"layers.0.w": torch.zeros(3, 5), "norm.w": torch.zeros(5, dtype=torch.bfloat16)}
    torch_files.save_file(tensors, tmp_path / "model.safetensors")
    buckets = read_model(str(tmp_path / "model.safetensors")).buckets
    assert [(t.name, t.shape, t.dtype) for b in buckets for t in b.tensors] == [
        ("norm.w", (5,), "bfloat16"),
        ("w", (3, 5), "float32"),
    ]


def build_tied() -> nn.Module:
    model = nn.ModuleDict(
        {
            "embed": nn.Embedding(20, 6),
            "layers": nn.ModuleList(nn.Linear(6, 6) for _ in range(3)),
            "out": nn.Linear(6, 20, bias=False),
        }
    )
    model["out"].weight = model["embed"].weight
    return model


def test_module_is_built_without_memory_and_ties_count_once() -> None:
    model = read_model(f"{__name__}:build_tied", dtype="float16")
    assert model.numel == 20 * 6 + 3 * (36 + 6)
    assert [(b.name, b.count) for b in model.buckets] == [("root", 1), ("layers.0-2", 3)]
    assert {t.dtype for b in model.buckets for t in b.tensors} == {"float16"}


def test_equal_blocks_under_two_names_and_experts_stay_apart() -> None:
    names = ["enc.0.w", "enc.1.w", "dec.0.w", "dec.0.experts.0.w", "dec.0.experts.1.w"]
    buckets = sort_into_buckets(NamedShape(name, (4, 4), "float32") for name in names)
    assert [(b.name, b.count, len(b.tensors)) for b in buckets] == [
        ("enc.0-1", 2, 1),
        ("dec.0", 1, 3),
    ]
    assert [t.kind for t in buckets[1].tensors] == ["matrix", "expert", "expert"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": None}, "key 'hidden_size' is missing, which models of type 'llama' need"),
        ({"vocab_size": -1}, "vocab_size: expected a positive integer, got -1"),
        ({"num_hidden_layers": 2.5}, "num_hidden_layers: expected a positive integer, got 2.5"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings: expected true or false, got 1"),
        ({"torch_dtype": "int8"}, "dtype: expected one of float64, float32, bfloat16, float16"),
        ({"model_type": "bert"}, "model_type: expected one of deepseek_v2, deepseek_v3, gpt_oss"),
    ],
)
def test_configuration_that_is_none_names_the_key(tmp_path, change, message):
    with pytest.raises(ValueError, match=message):
        from_config(tmp_path, CONFIGS["llama-8b"] | change)
