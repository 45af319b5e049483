"""What `param_groups` says of public model families, at published shapes, and that it says the same
where the vocabulary happens to be as wide as something hidden (torchtitan#4812, DeepSpeed#8438: a
matrix in the wrong group trains, and nobody sees it)."""

import pytest
from torch import nn

from model_families import FAMILIES, family
from vfsdp_optim import param_groups

# Family: matrices of Muon, vectors of AdamW, and by reason the ends of what else is AdamW's.
HEAD = {"embedding": "model.embed_tokens", "output head": "lm_head"}
TIED = {"embedding": "model.embed_tokens"}
NAMED, ONE = "named in matrices", "one channel a group"
EXPECTED: dict[str, tuple[int, int, dict[str, str]]] = {
    "gpt2-medium": (9, 4, {"embedding": "wte wpe"}),
    "llama3-8b": (14, 10, HEAD),
    "mistral-7b": (14, 10, HEAD),
    "qwen2-0.5b": (14, 10, TIED),
    "qwen3-30b-a3b": (22, 10, HEAD),
    "gemma2-2b": (14, 10, TIED),
    "gemma3-1b": (14, 10, TIED),
    "phi3-mini": (8, 0, HEAD),
    "olmo2-7b": (14, 10, HEAD),
    "deepseek-v3": (22, 0, {**HEAD, NAMED: "1.mlp.gate"}),
    "mixtral-8x7b": (22, 10, HEAD),
    "gpt-oss-20b": (12, 10, {**HEAD, NAMED: "0.mlp.router 0.mlp.experts.gate_up_proj_bias "
                             "1.mlp.router 1.mlp.experts.gate_up_proj_bias"}),
    "glm4-moe": (20, 10, {**HEAD, NAMED: "0.mlp.gate 1.mlp.gate"}),
    "llama4-scout": (20, 10, HEAD),
    "bert-base": (14, 19, {"embedding": "word_embeddings position_embeddings token_type_embeddings",
                           "output head": "cls.seq_relationship"}),
    "t5-small": (24, 0, {"embedding": "shared encoder.block.0.layer.0.SelfAttention."
                         "relative_attention_bias decoder.block.0.layer.0.SelfAttention."
                         "relative_attention_bias"}),
    "vit-base": (14, 19, {NAMED: "position_embeddings"}),
    "resnet50": (8, 8, {}),
    "convnext-tiny": (10, 14, {f"Conv2d, {ONE}": "0.blocks.0.conv_dw 0.blocks.1.conv_dw "
                               "1.blocks.0.conv_dw 1.blocks.1.conv_dw"}),
    "mamba2-130m": (4, 8, {"embedding": "backbone.embedding",
                           f"Conv1d, {ONE}": "0.mixer.conv1d 1.mixer.conv1d"}),
    "whisper-base": (26, 22, {"embedding": "encoder.embed_positions decoder.embed_tokens "
                              "decoder.embed_positions"}),
    "byte gpt": (8, 4, {"embedding": "bytes pos_emb", "output head": "head"}),
    "two byte gpts": (16, 8, {"embedding": "0.bytes 0.pos_emb 1.bytes 1.pos_emb",
                              "output head": "0.head 1.head"}),
}  # fmt: skip


def reasons(name: str, model: nn.Module) -> dict[str, str]:
    """Return why each parameter is AdamW's, by name; Muon's are absent."""
    routes = param_groups(model, matrices=FAMILIES[name][2]).routes
    return {route.fqn: route.reason for route in routes if route.algorithm == "adamw"}


@pytest.mark.parametrize("name", FAMILIES)
def test_matrices_of_a_family_go_to_muon_and_the_rest_is_named(name):
    model = family(name)
    muon, vectors, others = EXPECTED[name]
    adamw = reasons(name, model)
    rest = [fqn for fqn, reason in adamw.items() if reason != "vector"]
    for reason, ends in others.items():
        found = [fqn.removesuffix(".weight") for fqn in rest if adamw[fqn] == reason]
        assert len(found) == len(ends.split()), found
        assert all(fqn.endswith(end) for fqn, end in zip(found, ends.split(), strict=True)), found
    assert len(rest) == sum(len(ends.split()) for ends in others.values())
    total = len(list(model.parameters()))
    assert (total - len(adamw), len(adamw) - len(rest)) == (muon, vectors)


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("name", [name for name, spec in FAMILIES.items() if spec[0]])
def test_routes_do_not_depend_on_how_wide_the_vocabulary_is(name, layers):
    if layers == 1 and name == "deepseek-v3":
        return  # the text says two
    model = family(name, layers=layers)
    expected = reasons(name, model)
    sizes = {s for p in model.parameters() if p.dim() == 2 for s in p.shape}
    for vocabulary in sorted(sizes - {FAMILIES[name][0]}):
        assert reasons(name, family(name, vocabulary, layers)) == expected, vocabulary
