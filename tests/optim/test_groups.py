"""Which parameter goes to Muon, which to AdamW: by module type and logical shape, or an error."""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from ranks import on_ranks
from sharding import fully_shard
from vfsdp_optim.groups import param_groups
from vfsdp_optim.muon import Muon


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
