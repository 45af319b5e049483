"""Which parameter goes to Muon, which to AdamW: by module type and logical shape, or an error; and
its hyper-parameters, by glob, in groups that may be edited."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from model_families import Conv1D
from ranks import on_ranks
from sharding import fully_shard
from vfsdp_optim import AdamW, Muon, Precision, param_groups


class Block(nn.Module):
    """A norm and two projections, one as wide as the model."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)


class Model(nn.Module):
    """Two embeddings, repeated blocks and a head."""

    def __init__(self, vocabulary=50, width=8, positions=16, tied=False) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(positions, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.tokens.weight


def routes(model, **options) -> dict[str, str]:
    return {r.fqn: r.algorithm for r in param_groups(model, **options).routes}


def muon_names(model, **options) -> set[str]:
    return {name for name, algorithm in routes(model, **options).items() if algorithm == "muon"}


BLOCKS = {f"blocks.{i}.{name}.weight" for i in range(2) for name in ("qkv", "out")}


def test_hidden_matrices_go_to_muon_and_the_rest_to_adamw():
    groups = param_groups(Model(), adamw={"lr": 3e-4}, muon={"momentum": 0.9})
    muon, adamw = groups
    assert {name for name, _ in muon["params"]} == BLOCKS
    assert (muon["algorithm"], muon["matrices"], muon["momentum"]) == ("muon", None, 0.9)
    names = [name for name, _ in adamw["params"]]
    assert names[:2] == ["tokens.weight", "positions.weight"]
    assert names[-1] == "head.weight"
    assert adamw["lr"] == 3e-4
    assert "momentum" not in adamw


def test_tied_head_is_in_one_group_once_as_an_embedding():
    model = Model(tied=True)
    groups = param_groups(model)
    where = [group["algorithm"] for group in groups for _, p in group["params"]
             if p is model.tokens.weight]  # fmt: skip
    assert where == ["adamw"]
    assert muon_names(model) == BLOCKS


def test_layers_that_could_all_be_the_head_are_an_error_with_the_cure():
    model = nn.Sequential(nn.Embedding(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    with pytest.raises(ValueError, match=r"1\.weight, 2\.weight: .*'1\.weight': 'm n -> m n'"):
        param_groups(model)
    assert muon_names(model, matrices={"1.weight": "m n -> m n"}) == {"1.weight"}
    assert muon_names(model, matrices={"2.weight": None}) == {"1.weight"}


class Tail(nn.Module):
    """A norm and a head, as the last of a sequence."""

    def __init__(self, width: int, vocabulary: int) -> None:
        super().__init__()
        self.norm, self.project = nn.LayerNorm(width), nn.Linear(width, vocabulary)


def test_head_may_be_inside_the_last_module_of_a_sequence_or_a_list():
    parts = [nn.Embedding(8, 8), Block(8), Block(8), Tail(8, 8)]
    blocks = {f"{i}.{name}.weight" for i in (1, 2) for name in ("qkv", "out")}
    for container in (nn.Sequential(*parts), nn.ModuleList(parts)):
        assert muon_names(container) == blocks
    # One block is not known to be one, where nothing says that the list is of blocks.
    with pytest.raises(ValueError, match=r"1\.out\.weight, 2\.project\.weight: each could be"):
        param_groups(nn.Sequential(parts[0], parts[1], parts[3]))


@pytest.mark.parametrize("tied", [False, True])
def test_smaller_table_has_no_head_beside_one_whose_head_is_known(tied):
    model = Model(vocabulary=50, width=8, tied=tied)
    model.languages = nn.Embedding(8, 8)
    model.pooler = nn.Linear(8, 8)
    assert muon_names(model) == {*BLOCKS, "pooler.weight"}


def test_frozen_layers_that_could_be_the_head_are_no_error():
    model = nn.Sequential(nn.Embedding(8, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 9))
    for layer in model[:3]:
        layer.requires_grad_(False)
    assert muon_names(model) == {"3.weight"}


def test_several_heads_of_one_vocabulary_are_all_heads():
    model = Model()
    model.heads = nn.ModuleList(nn.Linear(8, 50) for _ in range(3))
    assert muon_names(model) == BLOCKS


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        (nn.Conv2d(3, 16, 3), "o ... -> o (...)"),
        (nn.Conv1d(4, 6, 3), "o ... -> o (...)"),
        (nn.ConvTranspose2d(4, 6, 3), "o ... -> o (...)"),
        (nn.Conv2d(8, 6, 3, groups=2), "(g o) ... -> g o (...); g=2"),
        (nn.Conv2d(8, 8, 3, groups=8), "adamw"),  # depthwise: one vector a channel
        (nn.Conv2d(8, 1, 1), "adamw"),
        (nn.Linear(5, 1), "adamw"),
        (nn.Linear(1, 5), "adamw"),
        (nn.Linear(5, 2), None),
        (nn.LayerNorm((4, 5)), "adamw"),
        (nn.BatchNorm2d(4), "adamw"),
        (nn.EmbeddingBag(7, 3), "adamw"),
    ],
    ids=str,
)
def test_weight_of_torchs_modules_is_routed_by_its_type(module, expected):
    weight = next(r for r in param_groups(nn.Sequential(module)).routes if r.fqn == "0.weight")
    assert (weight.algorithm if expected == "adamw" else weight.matrices) == expected


def test_attention_of_torch_is_three_matrices_and_one():
    groups = param_groups(nn.Sequential(nn.MultiheadAttention(8, 2)))
    patterns = {name: group.get("matrices") for group in groups for name, _ in group["params"]}
    assert patterns["0.in_proj_weight"] == "(k m) n -> k m n; k=3"
    assert patterns["0.out_proj.weight"] is None
    optimizer = Muon(groups)
    rows = {row.fqn: row.matrices for row in optimizer.plan().rows}
    assert rows["0.in_proj_weight"] == "3 x 8x8"


class Custom(nn.Module):
    """A parameter of which only its owner knows what it is."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(shape))


@pytest.mark.parametrize("shape", [(3, 4), (2, 3, 4), (2, 2, 3, 4)])
def test_parameter_of_an_unknown_module_is_an_error_with_the_cure(shape):
    model = nn.ModuleDict({"moe": Custom(*shape)})
    with pytest.raises(ValueError, match=r"moe\.w: .*Custom.*matrices=.*'moe\.w': None"):
        param_groups(model)
    assert routes(model, matrices={"moe.w": None}) == {"moe.w": "adamw"}


@pytest.mark.parametrize("shape", [(5,), (), (1, 7), (7, 1), (16, 1, 1)])
def test_parameter_with_one_long_dimension_is_a_vector_in_any_module(shape):
    assert routes(Custom(*shape)) == {"w": "adamw"}


def test_matrices_says_where_they_are_by_glob():
    model = nn.ModuleList(Custom(2, 3, 4) for _ in range(3))
    groups = param_groups(model, matrices={"[01].w": "e m n -> e m n", "2.w": "e m n -> m (e n)"})
    assert [(g["matrices"], [n for n, _ in g["params"]]) for g in groups] == [
        ("e m n -> e m n", ["0.w", "1.w"]),
        ("e m n -> m (e n)", ["2.w"]),
    ]
    Muon(groups)


def test_frozen_parameters_are_in_no_group():
    model = Model()
    model.tokens.requires_grad_(False)
    model.blocks[0].requires_grad_(False)
    groups = param_groups(model)
    grouped = {name for group in groups for name, _ in group["params"]}
    assert not any(name.startswith(("tokens", "blocks.0")) for name in grouped)
    assert routes(model)["blocks.0.qkv.weight"] == "frozen"


def test_names_do_not_have_what_wrappers_add():
    model = Model()
    wrapped = nn.Module()
    wrapped.add_module("module", nn.Module())
    wrapped.module.add_module("_orig_mod", model)
    assert routes(wrapped) == routes(model)


def test_own_module_called_module_keeps_its_name():
    model = nn.ModuleDict(
        {"module": nn.Linear(2, 3), "w": nn.ModuleDict({"module": nn.Linear(2, 3)})}
    )
    assert "w.module.weight" in routes(model)


@pytest.mark.parametrize("shard", [fully_shard, torch_fully_shard])
@on_ranks(3)
def test_sharded_modules_are_routed_by_type_and_global_shape(shard):
    # Placeholders and shards must not be classified by their local shape: DeepSpeed#8438
    model = Model()
    for layer in (*model.blocks, model.head, model):
        shard(layer)
    actual = routes(model)
    assert actual == routes(Model())


def test_table_says_why():
    text = str(param_groups(Model()))
    line = next(line for line in text.splitlines() if "head.weight" in line)
    for word in ("50x8", "adamw", "output head"):
        assert word in line


def test_later_globs_come_before_earlier_ones_key_by_key():
    model = Model()
    model.positions.requires_grad_(False)
    overrides = {
        "*": dict(lr=0.5),
        "*norm*": dict(weight_decay=0.0),
        "*.bias": dict(weight_decay=0.0),
        "blocks.1.*": dict(lr=0.25, momentum=0.5),  # momentum is for its matrices alone
        "positions.*": dict(lr=9.0),
    }
    groups = param_groups(model, adamw=dict(lr=1.0, eps=1e-6), overrides=overrides)
    said = {name: (g["lr"], g.get("weight_decay"), g.get("momentum"), g.get("eps"))
            for g in groups for name, _ in g["params"]}  # fmt: skip
    for i, lr in ((0, 0.5), (1, 0.25)):
        for name in ("norm.weight", "norm.bias", "qkv.bias", "out.bias"):
            assert said.pop(f"blocks.{i}.{name}") == (lr, 0.0, None, 1e-6)
        for name in ("qkv.weight", "out.weight"):
            assert said.pop(f"blocks.{i}.{name}") == (lr, None, 0.5 if i else None, None)
    assert said == dict.fromkeys(("tokens.weight", "head.weight"), (0.5, None, None, 1e-6))
    assert len(groups) == 5  # equal options share a group
    line = next(line for line in str(groups).splitlines() if "blocks.1.norm.bias" in line)
    assert "lr=0.25 weight_decay=0.0" in line
    assert [g["lr"] for g in Muon(groups).param_groups] == [g["lr"] for g in groups]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"*nrom*": {}}, r"'\*nrom\*' matches none of 15 parameters, such as 'blocks.*norm.*(2)"),
        ({"head.*": dict(weight_deacy=0.0)}, r"'head.\*': adamw have no .* of \['weight_decay'"),
        ({"head.*": dict(momentum=0.9)}, r"adamw have no 'momentum'"),
        ({"*": dict(lr_scale=2.0)}, r"adamw and muon have no 'lr_scale'.*into the returned groups"),
        ({"head.*": dict(algorithm="muon")}, r"algorithm cannot.*matrices=\{'head\.\*': None\}"),
        ({"*": dict(keep_32bit=["head.weight"])}, "keep_32bit cannot be given here"),
        ({"*": dict(states=Precision("8bit", keep_32bit=["x"]))}, "keep_32bit cannot be given"),
        ({"head.*": 0.1}, r"'head\.\*': expected a mapping such as .*got 0\.1"),
        (0.1, r"overrides: expected a mapping such as \{'\*norm\*': \{'weight_decay': 0\.0\}\}"),
    ],
)
def test_override_that_would_do_nothing_is_an_error(overrides, words):
    with pytest.raises((TypeError, ValueError), match=words):
        param_groups(Model(), overrides=overrides)


def test_names_in_8_bit_settings_inside_a_precision_are_not_lost():
    with pytest.raises(ValueError, match=r"adamw: keep_32bit=\('head.weight',\) would replace"):
        param_groups(Model(), adamw=dict(states=Precision("8bit", keep_32bit=["head.weight"])))


class Adapted(nn.Module):
    """A frozen layer with a LoRA beside."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(12, 8).requires_grad_(False)
        self.lora_A, self.lora_B = nn.Linear(12, 2, bias=False), nn.Linear(2, 8, bias=False)

    def forward(self, x):
        return self.base(x) + self.lora_B(self.lora_A(x))


def test_lora_plus_and_rates_by_layer_equal_torch_with_groups_written_out():
    # LoRA+ (arXiv:2402.12354): B learns a number of times as fast as A.
    torch.manual_seed(0)
    model = nn.Sequential(Adapted(), nn.Linear(8, 12), Adapted())
    expected = copy.deepcopy(model)
    groups = param_groups(
        model,
        matrices={"*": None},
        adamw=dict(lr=0.01),
        overrides={"2.*": dict(lr=0.02), "*lora_B*": dict(lr=0.16), "*.bias": {"weight_decay": 0}},
    )
    written = [
        {"params": [expected[0].lora_A.weight, expected[1].weight]},
        {"params": [expected[1].bias], "weight_decay": 0},
        {"params": [expected[2].lora_A.weight], "lr": 0.02},
        {"params": [expected[i].lora_B.weight for i in (0, 2)], "lr": 0.16},
    ]
    pairs = (model, Muon(groups)), (expected, torch.optim.AdamW(written, lr=0.01, foreach=True))
    for _ in range(3):
        for each, optimizer in pairs:
            each(torch.ones(3, 12)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    for actual, right in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(actual, right)


def test_groups_that_were_split_keep_their_names_in_32_bits():
    model = Model(vocabulary=1024)
    groups = param_groups(model)
    adamw = groups.pop()
    for half in (adamw["params"][::2], adamw["params"][1::2]):
        groups.append({**adamw, "params": half})
    groups.append({**groups[0], "params": [groups[0]["params"].pop()], "lr": 0.5, "tag": "last"})
    assert isinstance(groups, list)
    optimizer = Muon(groups, states="8bit")
    kept = {n: g["keep_32bit"] for g in optimizer.param_groups for n in g["param_names"]}
    assert "tokens.weight" in kept["tokens.weight"]
    assert "head.weight" in kept["head.weight"]
    assert {row.states for row in optimizer.plan().rows} == {"32bit"}
    with pytest.raises(ValueError, match="needs names"):
        AdamW([{"params": [model.head.weight], "keep_32bit": adamw["keep_32bit"]}])


def test_conv1d_of_transformers_is_a_linear_layer_by_the_other_way_round():
    torch.manual_seed(0)
    linear, transposed = nn.Linear(8, 24, bias=False), Conv1D(8, 24)
    transposed.weight.data = linear.weight.detach().T.clone()
    grad = torch.randn(24, 8)
    linear.weight.grad, transposed.weight.grad = grad, grad.T.clone()
    scales = []
    for model in (linear, transposed):
        optimizer = Muon(param_groups(nn.ModuleDict({"c": model})), lr=0.1)
        scales.append(optimizer.plan().rows[0].scale)
        optimizer.step()
    assert scales == [3**0.5, 3**0.5]  # by (out, in): as (in, out), 1
    assert torch.equal(transposed.weight, linear.weight.T)
