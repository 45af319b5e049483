"""The parameters that a Hugging Face `config.json` describes; imports no transformers, no torch.

Names, shapes and order are those of the modules of `transformers`. Experts are a module each, as in
the checkpoints, or ("fused") two stacks of all experts, as transformers has them from version 5 on;
gpt-oss has stacks in both. Multi-token prediction layers, which transformers does not build, and
buffers (DeepSeek's `e_score_correction_bias`) are left out.

References: https://github.com/huggingface/transformers/tree/main/src/transformers/models, files
modeling_{llama,qwen2,qwen3,qwen2_moe,qwen3_moe,gpt_oss,deepseek_v2,deepseek_v3,mixtral}.py
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from sharding.planning.granule import Shape
from vfsdp_optim.capacity.shapes import ITEMSIZE, NamedShape

_MISSING = object()


@dataclass(frozen=True, slots=True)
class Config:
    """A configuration whose values are checked when they are read.

    Attributes:
        values: What `config.json` holds.
        where: Names the file in errors.
    """

    values: Mapping[str, Any]
    where: str

    def size(self, key: str, default: Any = _MISSING) -> int:
        """Return a positive integer.

        Raises:
            ValueError: The key is missing and there is no default, or it is no positive integer.
        """
        value = self.values.get(key)
        if value is None:
            if default is _MISSING:
                raise ValueError(
                    f"{self.where}: key {key!r} is missing, which models of type "
                    f"{self.values.get('model_type')!r} need"
                )
            value = default
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{self.where}: {key}: expected a positive integer, got {value!r}")
        return value

    def count(self, key: str, default: int) -> int:
        """Return an integer that may be 0."""
        value = self.values.get(key, default)
        return 0 if value == 0 and value is not False else self.size(key, default)

    def flag(self, key: str, default: bool) -> bool:
        """Return a true or false value."""
        value = self.values.get(key, default)
        if not isinstance(value, bool):
            raise ValueError(f"{self.where}: {key}: expected true or false, got {value!r}")
        return value


Layer = Iterator[tuple[str, Shape]]


def read_config(values: Mapping[str, Any], where: str, experts: str | None) -> list[NamedShape]:
    """Return every parameter of the model, in the order of its modules.

    Args:
        values: What `config.json` holds.
        where: Names the file in errors.
        experts: "separate", "fused", or None for what the family's checkpoints have.

    Raises:
        ValueError: An unknown family, a key that is missing, or a value out of range.
    """
    config = Config(values, where)
    family = values.get("model_type")
    if family not in _FAMILIES:
        raise ValueError(
            f"{where}: model_type: expected one of {', '.join(sorted(_FAMILIES))}, got {family!r}; "
            f"for others pass module:function, which returns the model on the meta device"
        )
    dtype = values.get("dtype") or values.get("torch_dtype") or "float32"
    if dtype not in ITEMSIZE:
        raise ValueError(f"{where}: dtype: expected one of {', '.join(ITEMSIZE)}, got {dtype!r}")
    hidden = config.size("hidden_size")
    vocabulary = config.size("vocab_size")
    params: list[tuple[str, Shape]] = [("model.embed_tokens.weight", (vocabulary, hidden))]
    for layer in range(config.size("num_hidden_layers")):
        for name, shape in _FAMILIES[family](config, layer, experts):
            params.append((f"model.layers.{layer}.{name}", shape))
    params.append(("model.norm.weight", (hidden,)))
    if not config.flag("tie_word_embeddings", False):
        params.append(("lm_head.weight", (vocabulary, hidden)))
    return [NamedShape(name, shape, dtype) for name, shape in params]


def _linear(name: str, rows: int, cols: int, bias: bool = False) -> Layer:
    yield f"{name}.weight", (rows, cols)
    if bias:
        yield f"{name}.bias", (rows,)


def _attention(c: Config, *, bias: bool, out_bias: bool, norms: bool = False) -> Layer:
    hidden, heads = c.size("hidden_size"), c.size("num_attention_heads")
    width = c.size("head_dim", max(1, hidden // heads))
    kv = c.size("num_key_value_heads", heads) * width
    yield from _linear("self_attn.q_proj", heads * width, hidden, bias)
    yield from _linear("self_attn.k_proj", kv, hidden, bias)
    yield from _linear("self_attn.v_proj", kv, hidden, bias)
    yield from _linear("self_attn.o_proj", hidden, heads * width, out_bias)
    if norms:
        yield "self_attn.q_norm.weight", (width,)
        yield "self_attn.k_norm.weight", (width,)


def _mlp(name: str, hidden: int, width: int, bias: bool = False) -> Layer:
    yield from _linear(f"{name}.gate_proj", width, hidden, bias)
    yield from _linear(f"{name}.up_proj", width, hidden, bias)
    yield from _linear(f"{name}.down_proj", hidden, width, bias)


def _experts(c: Config, count: int, width: int, experts: str | None) -> Layer:
    hidden = c.size("hidden_size")
    if experts == "fused":
        yield "mlp.experts.gate_up_proj", (count, 2 * width, hidden)
        yield "mlp.experts.down_proj", (count, hidden, width)
        return
    for expert in range(count):
        yield from _mlp(f"mlp.experts.{expert}", hidden, width)


def _norms(c: Config) -> Layer:
    yield "input_layernorm.weight", (c.size("hidden_size"),)
    yield "post_attention_layernorm.weight", (c.size("hidden_size"),)


def _llama(c: Config, layer: int, experts: str | None) -> Layer:
    bias = c.flag("attention_bias", False)
    yield from _attention(c, bias=bias, out_bias=bias)
    width = c.size("intermediate_size")
    yield from _mlp("mlp", c.size("hidden_size"), width, c.flag("mlp_bias", False))
    yield from _norms(c)


def _qwen2(c: Config, layer: int, experts: str | None) -> Layer:
    yield from _attention(c, bias=True, out_bias=False)
    yield from _mlp("mlp", c.size("hidden_size"), c.size("intermediate_size"))
    yield from _norms(c)


def _qwen3(c: Config, layer: int, experts: str | None) -> Layer:
    bias = c.flag("attention_bias", False)
    yield from _attention(c, bias=bias, out_bias=bias, norms=True)
    yield from _mlp("mlp", c.size("hidden_size"), c.size("intermediate_size"))
    yield from _norms(c)


def _is_sparse(c: Config, layer: int) -> bool:
    """Return whether a layer of a Qwen mixture has experts."""
    dense = c.values.get("mlp_only_layers") or []
    return layer not in dense and (layer + 1) % c.size("decoder_sparse_step", 1) == 0


def _qwen_moe(c: Config, layer: int, experts: str | None, *, is_third: bool) -> Layer:
    hidden = c.size("hidden_size")
    bias = c.flag("attention_bias", False) if is_third else c.flag("qkv_bias", True)
    yield from _attention(c, bias=bias, out_bias=is_third and bias, norms=is_third)
    if _is_sparse(c, layer):
        count = c.size("num_experts")
        yield "mlp.gate.weight", (count, hidden)
        yield from _experts(c, count, c.size("moe_intermediate_size"), experts)
        if not is_third:
            shared = c.size("shared_expert_intermediate_size")
            yield from _mlp("mlp.shared_expert", hidden, shared)
            yield "mlp.shared_expert_gate.weight", (1, hidden)
    else:
        yield from _mlp("mlp", hidden, c.size("intermediate_size"))
    yield from _norms(c)


def _qwen2_moe(c: Config, layer: int, experts: str | None) -> Layer:
    return _qwen_moe(c, layer, experts, is_third=False)


def _qwen3_moe(c: Config, layer: int, experts: str | None) -> Layer:
    return _qwen_moe(c, layer, experts, is_third=True)


def _mixtral(c: Config, layer: int, experts: str | None) -> Layer:
    yield from _attention(c, bias=False, out_bias=False)
    hidden, width, count = (
        c.size(key) for key in ("hidden_size", "intermediate_size", "num_local_experts")
    )
    if experts == "fused":
        yield "mlp.gate.weight", (count, hidden)
        yield from _experts(c, count, width, experts)
    else:
        yield "block_sparse_moe.gate.weight", (count, hidden)
        for expert in range(count):
            name = f"block_sparse_moe.experts.{expert}"
            yield from _linear(f"{name}.w1", width, hidden)
            yield from _linear(f"{name}.w2", hidden, width)
            yield from _linear(f"{name}.w3", width, hidden)
    yield from _norms(c)


def _gpt_oss(c: Config, layer: int, experts: str | None) -> Layer:
    if experts == "separate":
        raise ValueError(f"{c.where}: the experts of gpt_oss are stacks; omit --experts")
    hidden, width, count = (
        c.size(key) for key in ("hidden_size", "intermediate_size", "num_local_experts")
    )
    bias = c.flag("attention_bias", True)
    yield "self_attn.sinks", (c.size("num_attention_heads"),)
    yield from _attention(c, bias=bias, out_bias=bias)
    yield from _linear("mlp.router", count, hidden, bias=True)
    yield "mlp.experts.gate_up_proj", (count, hidden, 2 * width)
    yield "mlp.experts.gate_up_proj_bias", (count, 2 * width)
    yield "mlp.experts.down_proj", (count, width, hidden)
    yield "mlp.experts.down_proj_bias", (count, hidden)
    yield from _norms(c)


def _deepseek(c: Config, layer: int, experts: str | None) -> Layer:
    hidden, heads = c.size("hidden_size"), c.size("num_attention_heads")
    rope, nope = c.size("qk_rope_head_dim"), c.size("qk_nope_head_dim")
    value, latent = c.size("v_head_dim"), c.size("kv_lora_rank")
    bias = c.flag("attention_bias", False)
    if c.values.get("q_lora_rank") is None:
        yield from _linear("self_attn.q_proj", heads * (nope + rope), hidden)
    else:
        rank = c.size("q_lora_rank")
        yield from _linear("self_attn.q_a_proj", rank, hidden, bias)
        yield "self_attn.q_a_layernorm.weight", (rank,)
        yield from _linear("self_attn.q_b_proj", heads * (nope + rope), rank)
    yield from _linear("self_attn.kv_a_proj_with_mqa", latent + rope, hidden, bias)
    yield "self_attn.kv_a_layernorm.weight", (latent,)
    yield from _linear("self_attn.kv_b_proj", heads * (nope + value), latent)
    yield from _linear("self_attn.o_proj", hidden, heads * value, bias)
    sparse = layer >= c.count("first_k_dense_replace", 0)
    if sparse and layer % c.size("moe_layer_freq", 1) == 0:
        width, count = c.size("moe_intermediate_size"), c.size("n_routed_experts")
        yield from _experts(c, count, width, experts)
        yield "mlp.gate.weight", (count, hidden)
        shared = c.count("n_shared_experts", 0)
        if shared:
            yield from _mlp("mlp.shared_experts", hidden, shared * width)
    else:
        yield from _mlp("mlp", hidden, c.size("intermediate_size"))
    yield from _norms(c)


_FAMILIES = {
    "llama": _llama,
    "mistral": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen2_moe": _qwen2_moe,
    "qwen3_moe": _qwen3_moe,
    "gpt_oss": _gpt_oss,
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
    "kimi_k2": _deepseek,
    "mixtral": _mixtral,
}
