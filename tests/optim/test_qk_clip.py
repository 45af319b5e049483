"""QK-clip: heads with large logits are scaled by what all ranks saw, the others keep their bits."""

import random
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from ranks import distributed_examples, on_ranks, run_ranks
from training import mesh_of
from vfsdp_optim import Muon, Precision, QKHeads, fully_shard
from vfsdp_optim.qk_clip import _Rows


class Attention(nn.Module):
    """Separate or fused projections of a drawn attention; its forward is not needed."""

    def __init__(self, heads: QKHeads, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        each = heads.heads // heads.key_heads
        if heads.key:
            query = heads.heads * heads.head_dim
            self.q = nn.Linear(width, query, bias=len(heads.names()[0]) > 1, dtype=dtype)
            self.k = nn.Linear(width, heads.key_heads * heads.key_rows, bias=False, dtype=dtype)
        else:
            rows = heads.key_heads * (each + 2) * heads.head_dim
            self.qkv = nn.Linear(width, rows, bias=False, dtype=dtype)


@dataclass(frozen=True)
class Case:
    """Attentions and what each rank saw of them."""

    heads: QKHeads
    width: int
    dtype: torch.dtype
    seed: int
    layers: int = 2
    on_fsdp2: bool = False

    def model(self) -> nn.Module:
        torch.manual_seed(self.seed)
        return nn.Sequential(
            *[Attention(self.heads, self.width, self.dtype) for _ in range(self.layers)]
        )

    def heads_of(self, layer: int) -> QKHeads:
        h = self.heads
        query, key = (
            tuple(f"{layer}.{name}" for name in ((names,) if isinstance(names, str) else names))
            for names in (h.query, h.key)
        )
        return QKHeads(
            query, key, h.heads, h.head_dim, h.key_heads, h.rotary_dim, h.key_rows, h.grouped
        )

    def logits(self) -> dict[QKHeads, Tensor]:
        """The largest logits over all ranks: above and below 100, none, negative, zero."""
        draw = random.Random(self.seed)
        kinds = (-torch.inf, -300.0, 0.0, 99.9, 100.0, 100.5, 1e3, 3e38)
        return {
            self.heads_of(layer): torch.tensor(draw.choices(kinds, k=self.heads.heads))
            for layer in range(self.layers)
        }


def seen_by(rank: int, world_size: int, logits: dict[QKHeads, Tensor]) -> dict[QKHeads, Tensor]:
    """What one rank saw: each head's largest logit on one rank alone, less on the others."""
    draw = random.Random(7)
    seen = {}
    for heads, largest in logits.items():
        owners = torch.tensor([draw.randrange(world_size) for _ in largest])
        less = torch.where(largest > 0, largest / 2, largest - 1)
        seen[heads] = torch.where(owners == rank, largest, less)
    return seen


def clip_sharded(case: Case) -> dict[str, Tensor]:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = case.model()
    shard = torch_fsdp.fully_shard if case.on_fsdp2 else fully_shard
    mesh = mesh_of((2, 2) if world_size == 4 else (1, world_size))
    for layer in model:
        shard(layer, mesh=mesh if world_size == 4 else mesh["shard"])
    optimizer = Muon(
        [{"params": list(model.named_parameters()), "algorithm": "adamw", "lr": 1.0}]
    )  # fmt: skip
    optimizer.qk_clip(seen_by(rank, world_size, case.logits()))
    return {name: p.full_tensor().detach() for name, p in model.named_parameters()}


def clip_unsharded(case: Case) -> dict[str, Tensor]:
    model = case.model()
    optimizer = Muon([{"params": list(model.named_parameters()), "algorithm": "adamw"}])
    optimizer.qk_clip(case.logits())
    return {name: p.detach() for name, p in model.named_parameters()}


FUSED = QKHeads("qkv.weight", heads=6, head_dim=3, key_heads=2)
KINDS = {
    "separate": QKHeads("q.weight", "k.weight", heads=4, head_dim=5),
    "bias": QKHeads(("q.weight", "q.bias"), "k.weight", heads=3, head_dim=4),
    "grouped_queries": QKHeads("q.weight", "k.weight", heads=6, head_dim=3, key_heads=2),
    "fused": FUSED,
    "fused_by_group": QKHeads("qkv.weight", heads=6, head_dim=3, key_heads=2, grouped=True),
    "latent": QKHeads("q.weight", "k.weight", heads=3, head_dim=6, rotary_dim=2, key_rows=7),
}


@pytest.mark.parametrize("kind", KINDS)
@distributed_examples
@given(
    world_size=st.sampled_from([2, 3, 1, 4]),
    width=st.integers(1, 40),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 10**6),
    on_fsdp2=st.booleans(),
)
def test_qk_clip_of_muon_has_the_bits_of_one_process(
    kind, world_size, width, dtype, seed, on_fsdp2
):
    """ms-swift#9901: a factor from the logits of one rank made replicas differ at once."""
    case = Case(KINDS[kind], width, dtype, seed, on_fsdp2=on_fsdp2)
    expected = clip_unsharded(case)
    for actual in run_ranks(clip_sharded, world_size, case):
        for name, tensor in expected.items():
            assert torch.equal(actual[name], tensor), name


def clip_replicas(case: Case) -> dict[str, Tensor]:
    model = case.model()
    group = {"params": list(model.named_parameters()), "algorithm": "adamw"}
    optimizer = Muon([group], process_group=dist.group.WORLD)
    optimizer.qk_clip(seen_by(dist.get_rank(), dist.get_world_size(), case.logits()))
    return {name: p.detach() for name, p in model.named_parameters()}


def test_replicas_clip_by_what_all_of_them_saw():
    """ms-swift#9901, with whole parameters on every rank."""
    case = Case(FUSED, 8, torch.float32, seed=0)
    expected = clip_unsharded(case)
    assert any(not torch.equal(p, expected[n]) for n, p in case.model().named_parameters())
    for actual in run_ranks(clip_replicas, 3, case):
        for name, tensor in expected.items():
            assert torch.equal(actual[name], tensor), name


def test_clipped_rows_stay_clipped_where_a_master_copy_is_updated():
    w = nn.Parameter(torch.ones(4, 4, dtype=torch.bfloat16))
    optimizer = Muon([("w", w)], lr=0.0, states=Precision(master_weights=True))
    heads = QKHeads("w", heads=2, head_dim=1)
    for _ in range(2):
        w.grad = torch.ones_like(w)
        optimizer.step()
        optimizer.qk_clip({heads: torch.tensor([400.0, 50.0])})
    w.grad = torch.ones_like(w)
    optimizer.step()
    assert w[:, 0].tolist() == [0.25, 1, 0.25, 1]
    assert torch.equal(optimizer.state[w]["master"], w.float())


def test_qk_clip_scales_logits_of_every_head_to_the_threshold():
    torch.manual_seed(0)
    heads = QKHeads("q.weight", "k.weight", heads=3, head_dim=4)
    model = nn.ModuleDict({"q": nn.Linear(8, 12, bias=False), "k": nn.Linear(8, 12, bias=False)})
    x = torch.randn(16, 8) * torch.tensor(30.0)

    def logits() -> Tensor:
        q, k = (model[name](x).view(16, 3, 4).transpose(0, 1) for name in "qk")
        return (q @ k.mT / 2).detach().amax((1, 2))

    before = logits()
    threshold = before.sort().values[1].item()  # one head is above it
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    Muon(model.named_parameters()).qk_clip({heads: before}, threshold)
    torch.testing.assert_close(logits(), before.clamp(max=threshold), rtol=1e-5, atol=0)
    changed = before > threshold
    for name, p in model.named_parameters():
        same = (p == weights[name]).view(3, -1).all(1)
        assert torch.equal(same, ~changed), name


def test_heads_that_share_a_key_are_scaled_as_the_largest_of_them_needs():
    # 4 query heads of 1 row, 2 keys: query 1 is the largest of the first group.
    heads = QKHeads("w", heads=4, head_dim=1, key_heads=2)
    w = nn.Parameter(torch.ones(8, 2))
    Muon([("w", w)]).qk_clip({heads: torch.tensor([50.0, 400.0, 99.0, -1.0])}, 100.0)
    assert w[:, 0].tolist() == [0.5, 0.5, 1, 1, 0.5, 1, 1, 1]
    grouped = QKHeads("w", heads=4, head_dim=1, key_heads=2, grouped=True)
    w = nn.Parameter(torch.ones(8, 2))
    Muon([("w", w)]).qk_clip({grouped: torch.tensor([50.0, 99.0, 99.0, 400.0])}, 100.0)
    assert w[:, 0].tolist() == [1, 1, 1, 1, 0.5, 0.5, 0.5, 1]


def test_rotary_rows_of_latent_attention_take_the_whole_factor_and_values_none():
    heads = QKHeads("q", "kv", heads=1, head_dim=3, rotary_dim=1, key_rows=4)
    q, kv = nn.Parameter(torch.ones(3, 1)), nn.Parameter(torch.ones(4, 1))
    Muon([("q", q), ("kv", kv)]).qk_clip({heads: torch.tensor([400.0])}, 100.0)
    assert q.flatten().tolist() == [0.5, 0.5, 0.25]
    assert kv.flatten().tolist() == [0.5, 0.5, 1, 1]


@pytest.mark.parametrize("logit", [-torch.inf, -5.0, 0.0, 100.0, torch.inf, torch.nan])
def test_logits_that_are_not_positive_or_not_finite_change_nothing(logit):
    """Megatron-LM#7382: a head whose largest logit was negative got NaN weights."""
    w = nn.Parameter(torch.randn(6, 4, generator=torch.Generator().manual_seed(0)))
    before = w.detach().clone()
    heads = QKHeads("w", heads=1, head_dim=2)
    Muon([("w", w)]).qk_clip({heads: torch.tensor([logit])})
    assert torch.equal(w, before)


@on_ranks(2)
def test_qk_clip_of_all_layers_is_one_collective():
    case = Case(FUSED, 8, torch.float32, seed=0, layers=5)
    model = fully_shard(case.model())
    optimizer = Muon(model.named_parameters())
    logits = case.logits()
    optimizer.qk_clip(logits)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        optimizer.qk_clip(logits)
    assert [(e.key, e.count) for e in profiler.key_averages() if e.key.startswith("c10d::")] == [
        ("c10d::allreduce_", 1)
    ]


WEIGHT = nn.Parameter(torch.ones(6, 2))


@pytest.mark.parametrize(
    ("make", "fact"),
    [
        (lambda: ({QKHeads("w", heads=2, head_dim=2): torch.ones(2)}, 100.0), "w: has 6 rows and"),
        (lambda: ({QKHeads("v", heads=1, head_dim=2): torch.ones(1)}, 100.0),
         r"'v' is no parameter of the optimizer.*\['w'\]"),
        (lambda: ({QKHeads("w", heads=1, head_dim=2): torch.ones(2)}, 100.0),
         r"w: expected the largest logit of each of 1 heads, got shape \(2,\)"),
        (lambda: ({QKHeads("w", heads=1, head_dim=2): torch.ones(1)}, 0.0), "threshold"),
        (lambda: ({QKHeads("w", heads=3, head_dim=2, key_heads=2): torch.ones(3)}, 1.0),
         "heads a multiple of key_heads"),
        (lambda: ({QKHeads("w", "w", heads=2, head_dim=1, grouped=True): torch.ones(2)}, 1.0),
         "grouped=True for a single weight"),
    ],
)  # fmt: skip
def test_what_qk_clip_cannot_do_is_an_error_that_changes_nothing(make, fact):
    optimizer = Muon([("w", WEIGHT)])
    with pytest.raises(ValueError, match=fact):
        optimizer.qk_clip(*make())
    assert torch.equal(WEIGHT, torch.ones(6, 2))


def test_rows_of_a_grouped_weight_cover_queries_and_keys_and_no_values():
    query, key = QKHeads("w", heads=4, head_dim=2, key_heads=2, grouped=True).scaled_rows()
    rows: list[_Rows] = sorted([*query, *key])
    assert [(start, stop) for start, stop, _, _ in rows] == [
        (0, 2), (2, 4), (4, 6), (8, 10), (10, 12), (12, 14),
    ]  # fmt: skip
