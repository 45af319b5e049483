"""The parameters of public model families as text: names and shapes as published, two layers each.

One line a module: its path, its kind and its shape. `*` stands for each of `layers` numbers. Kinds:
E an embedding, L a linear layer (out x in), B one with a bias, N a norm, C a convolution, D a
depthwise one, P a module of the model's own with the parameter `weight`; `path.name P! shape` is a
bare parameter of the parent. `path = other` shares the weight of another module. V is the
vocabulary.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

LLAMA_ATTENTION = """
{0}.input_layernorm N {1}
{0}.self_attn.q_proj L {1}x{1}
{0}.self_attn.k_proj L {2}x{1}
{0}.self_attn.v_proj L {2}x{1}
{0}.self_attn.o_proj L {1}x{1}
{0}.post_attention_layernorm N {1}
"""
LLAMA_MLP = """
{0}.gate_proj L {2}x{1}
{0}.up_proj L {2}x{1}
{0}.down_proj L {1}x{2}
"""
LAYER = "model.layers.*"


def llama(width: int, keys: int, inner: int, *, tied: bool) -> str:
    """Return what llama, mistral, qwen, gemma and olmo have in common."""
    head = "lm_head = model.embed_tokens" if tied else f"lm_head L Vx{width}"
    mlp = LLAMA_MLP.format(LAYER + ".mlp", width, inner)
    attention = LLAMA_ATTENTION.format(LAYER, width, keys)
    return f"model.embed_tokens E Vx{width}\n{attention}{mlp}model.norm N {width}\n{head}"


def experts(width: int, keys: int, inner: int, mlp: str, gate: str) -> str:
    """Return a llama whose blocks have a list of experts and a gate."""
    text = llama(width, keys, inner, tied=False)
    kept = [line for line in text.splitlines() if ".mlp." not in line]
    return "\n".join(kept) + LLAMA_MLP.format(f"{LAYER}.{mlp}.*", width, inner) + gate


BERT_LAYER = """
{0}.attention.self.query B {1}x{1}
{0}.attention.self.key B {1}x{1}
{0}.attention.self.value B {1}x{1}
{0}.attention.output.dense B {1}x{1}
{0}.intermediate.dense B {2}x{1}
{0}.output.dense B {1}x{2}
{0}.output.LayerNorm N {1}
"""
T5_STACK = """
{0}.embed_tokens = shared
{0}.block.0.layer.0.SelfAttention.relative_attention_bias E 32x8
{0}.block.*.layer.0.SelfAttention.q L 512x512
{0}.block.*.layer.0.SelfAttention.k L 512x512
{0}.block.*.layer.0.SelfAttention.v L 512x512
{0}.block.*.layer.0.SelfAttention.o L 512x512
{0}.block.*.layer.1.DenseReluDense.wi L 2048x512
{0}.block.*.layer.1.DenseReluDense.wo L 512x2048
"""
WHISPER_LAYER = """
{0}.self_attn.q_proj B 512x512
{0}.self_attn.k_proj L 512x512
{0}.self_attn.v_proj B 512x512
{0}.self_attn.out_proj B 512x512
{0}.fc1 B 2048x512
{0}.fc2 B 512x2048
"""
BYTES = """
{0}bytes E Vx256
{0}pos_emb E 256x256
{0}blocks.*.norm N 256
{0}blocks.*.qkv L 768x256
{0}blocks.*.out L 256x256
{0}blocks.*.up L 1024x256
{0}blocks.*.down L 256x1024
{0}head L Vx256
"""

# Family: vocabulary, modules, what `matrices` has to say.
FAMILIES: dict[str, tuple[int, str, dict[str, str | None]]] = {
    "gpt2-medium": (
        50257,
        """
transformer.wte E Vx1024
transformer.wpe E 1024x1024
transformer.h.*.ln_1 N 1024
transformer.h.*.attn.c_attn P 1024x3072
transformer.h.*.attn.c_proj P 1024x1024
transformer.h.*.mlp.c_fc P 1024x4096
transformer.h.*.mlp.c_proj P 4096x1024
pooler L 1024x1024
lm_head = transformer.wte
""",
        {"*.c_attn.weight": "n (k m) -> k m n; k=3", "*.c_proj.weight": "n m -> m n",
         "*.c_fc.weight": "n m -> m n"},
    ),
    "llama3-8b": (128256, llama(4096, 1024, 14336, tied=False), {}),
    "mistral-7b": (32000, llama(4096, 1024, 14336, tied=False), {}),
    "qwen2-0.5b": (151936, llama(896, 128, 4864, tied=True), {}),
    "qwen3-30b-a3b": (
        151936, experts(2048, 512, 768, "mlp.experts", f"{LAYER}.mlp.gate L 128x2048"), {}
    ),
    "gemma2-2b": (256000, llama(2304, 1024, 9216, tied=True), {}),
    "gemma3-1b": (262144, llama(1152, 256, 6912, tied=True), {}),
    "phi3-mini": (
        32064,
        f"""
model.embed_tokens E Vx3072
{LAYER}.self_attn.qkv_proj L 9216x3072
{LAYER}.self_attn.o_proj L 3072x3072
{LAYER}.mlp.gate_up_proj L 16384x3072
{LAYER}.mlp.down_proj L 3072x8192
lm_head L Vx3072
""",
        {},
    ),
    "olmo2-7b": (100352, llama(4096, 4096, 11008, tied=False), {}),
    "deepseek-v3": (
        129280,
        f"""
model.embed_tokens E Vx7168
{LAYER}.self_attn.q_a_proj L 1536x7168
{LAYER}.self_attn.q_b_proj L 24576x1536
{LAYER}.self_attn.kv_a_proj_with_mqa L 576x7168
{LAYER}.self_attn.kv_b_proj L 32768x512
{LAYER}.self_attn.o_proj L 7168x16384
{LLAMA_MLP.format("model.layers.0.mlp", 7168, 18432)}
{LLAMA_MLP.format("model.layers.1.mlp.experts.*", 7168, 2048)}
{LLAMA_MLP.format("model.layers.1.mlp.shared_experts", 7168, 2048)}
model.layers.1.mlp.gate P 256x7168
lm_head L Vx7168
""",
        {"*.mlp.gate.weight": None},
    ),
    "mixtral-8x7b": (
        32000,
        experts(4096, 1024, 14336, "block_sparse_moe.experts",
                f"{LAYER}.block_sparse_moe.gate L 8x4096"),
        {},
    ),
    "gpt-oss-20b": (
        201088,
        f"""
model.embed_tokens E Vx2880
{LAYER}.self_attn.q_proj B 4096x2880
{LAYER}.self_attn.k_proj B 512x2880
{LAYER}.self_attn.v_proj B 512x2880
{LAYER}.self_attn.o_proj B 2880x4096
{LAYER}.self_attn.sinks P! 64
{LAYER}.mlp.router P 32x2880
{LAYER}.mlp.experts.gate_up_proj P! 32x2880x5760
{LAYER}.mlp.experts.gate_up_proj_bias P! 32x5760
{LAYER}.mlp.experts.down_proj P! 32x2880x2880
lm_head L Vx2880
""",
        {"*_proj_bias": None, "*.router.weight": None, "*.experts.*_proj": "e n m -> e m n"},
    ),
    "glm4-moe": (
        151552,
        experts(4096, 1024, 1408, "mlp.experts", f"{LAYER}.mlp.gate P 128x4096"),
        {"*.mlp.gate.weight": None},
    ),
    "llama4-scout": (
        202048,
        experts(5120, 1024, 8192, "feed_forward.shared_expert", f"""
{LAYER}.feed_forward.router L 16x5120
{LAYER}.feed_forward.experts.gate_up_proj P! 16x5120x16384
{LAYER}.feed_forward.experts.down_proj P! 16x8192x5120
""").replace("shared_expert.*", "shared_expert"),
        {"*.experts.*_proj": "e n m -> e m n"},
    ),
    "bert-base": (
        30522,
        f"""
bert.embeddings.word_embeddings E Vx768
bert.embeddings.position_embeddings E 512x768
bert.embeddings.token_type_embeddings E 2x768
{BERT_LAYER.format("bert.encoder.layer.*", 768, 3072)}
bert.pooler.dense B 768x768
cls.predictions.transform.dense B 768x768
cls.predictions.decoder = bert.embeddings.word_embeddings
cls.seq_relationship B 2x768
""",
        {},
    ),
    "t5-small": (
        32128,
        f"""
shared E Vx512
{T5_STACK.format("encoder")}
{T5_STACK.format("decoder")}
lm_head = shared
""",
        {},
    ),
    "vit-base": (
        0,
        f"""
vit.embeddings.cls_token P! 1x1x768
vit.embeddings.position_embeddings P! 1x197x768
vit.embeddings.patch_embeddings.projection C 768x3x16x16
{BERT_LAYER.format("vit.encoder.layer.*", 768, 3072)}
classifier B 1000x768
""",
        {"*.position_embeddings": None},
    ),
    "resnet50": (
        0,
        """
conv1 C 64x3x7x7
layer1.*.conv1 C 64x64x1x1
layer1.*.conv2 C 64x64x3x3
layer1.*.conv3 C 256x64x1x1
fc B 1000x2048
""",
        {},
    ),
    "convnext-tiny": (
        0,
        """
stem.0 C 96x3x4x4
stages.*.blocks.*.conv_dw D 96x1x7x7
stages.*.blocks.*.mlp.fc1 B 384x96
stages.*.blocks.*.mlp.fc2 B 96x384
head.fc B 1000x768
""",
        {},
    ),
    "mamba2-130m": (
        50288,
        """
backbone.embedding E Vx768
backbone.layers.*.norm N 768
backbone.layers.*.mixer.A_log P! 24
backbone.layers.*.mixer.conv1d D 1792x1x4
backbone.layers.*.mixer.in_proj L 3352x768
backbone.layers.*.mixer.out_proj L 768x1536
lm_head = backbone.embedding
""",
        {},
    ),
    "whisper-base": (
        51865,
        f"""
model.encoder.conv1 C 512x80x3
model.encoder.conv2 C 512x512x3
model.encoder.embed_positions E 1500x512
{WHISPER_LAYER.format("model.encoder.layers.*")}
model.decoder.embed_tokens E Vx512
model.decoder.embed_positions E 448x512
{WHISPER_LAYER.format("model.decoder.layers.*")}
proj_out = model.decoder.embed_tokens
""",
        {},
    ),
    "byte gpt": (256, BYTES.format(""), {}),
    "two byte gpts": (256, BYTES.format("models.*."), {}),
}  # fmt: skip


class Own(nn.Module):
    """A module that torch does not have."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape))


class Parent(nn.Module):
    """Whatever has modules and bare parameters."""


def family(name: str, vocabulary: int | None = None, layers: int = 2) -> nn.Module:
    """Return a model on the meta device, with another vocabulary perhaps."""
    published, text, _ = FAMILIES[name]
    root: dict[str, object] = {}
    ties: list[tuple[str, str]] = []
    with torch.device("meta"):
        for line in _expanded(text, layers):
            path, kind, value = line.split()
            if kind == "=":
                ties.append((path, value))
            else:
                rows = published if vocabulary is None else vocabulary
                shape = [rows if size == "V" else int(size) for size in value.split("x")]
                _put(root, path, _leaf(kind, shape))
        for path, other in ties:
            weight = _get(root, other).weight
            # As an embedding where the module is one of the tied encoders.
            tied: nn.Module = nn.Linear(*weight.shape[::-1], bias=False)
            if path.endswith("embed_tokens"):
                tied = nn.Embedding(*weight.shape)
            tied.weight = weight
            _put(root, path, tied)
        return _module(root)


def _expanded(text: str, layers: int) -> Iterator[str]:
    for line in text.splitlines():
        if "*" in line:
            lines = [line.replace("*", str(i), 1) for i in range(layers)]
            yield from _expanded("\n".join(lines), layers)
        elif line.strip():
            yield line


def _leaf(kind: str, shape: list[int]) -> nn.Module | Tensor:
    if kind in "LB":
        return nn.Linear(shape[1], shape[0], bias=kind == "B")
    if kind in "CD":
        convolution = {3: nn.Conv1d, 4: nn.Conv2d}[len(shape)]
        groups = shape[0] if kind == "D" else 1
        return convolution(shape[1] * groups, shape[0], tuple(shape[2:]), groups=groups)
    if kind == "P!":
        return nn.Parameter(torch.empty(shape))
    return {"E": nn.Embedding, "N": nn.LayerNorm, "P": Own}[kind](*shape)


def _put(tree: dict, path: str, leaf: object) -> None:
    *above, last = path.split(".")
    for part in above:
        tree = tree.setdefault(part, {})
    tree[last] = leaf


def _get(tree: dict, path: str) -> nn.Module:
    for part in path.split("."):
        tree = tree[part]
    return tree  # type: ignore[return-value]


def _module(tree: dict) -> nn.Module:
    children = {k: _module(v) if isinstance(v, dict) else v for k, v in tree.items()}
    if all(name.isdigit() for name in children):
        return nn.ModuleList(children.values())
    parent = Parent()
    for name, child in children.items():
        setattr(parent, name, child)
    return parent
