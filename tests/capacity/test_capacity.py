"""What a model takes on many ranks: division, memory, balance, against figures made by hand."""

import re
from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sharding.fsdp.buffer import slot_pieces
from sharding.fsdp.reduction import LARGE
from sharding.planning.structure import Blocks, FullMatrix
from vfsdp_optim.capacity.advice import group_sizes
from vfsdp_optim.capacity.model_sources import read_model
from vfsdp_optim.capacity.optimizers import block_optimizer
from vfsdp_optim.capacity.parallelism import DividedModel, Parallelism, divide
from vfsdp_optim.capacity.picture import _outlines
from vfsdp_optim.capacity.prediction import Capacity, measure
from vfsdp_optim.capacity.shapes import ModelShapes, NamedShape, TensorShape, sort_into_buckets
from vfsdp_optim.capacity.step_buffers import (
    BucketBuffers,
    ReductionBuffers,
    StepDtypes,
    reduction_memory,
    unsharded_peak,
)
from vfsdp_optim.capacity.training_setup import Granularity, Setup
from vfsdp_optim.states.precision import STATES


def capacity(model: str, ranks: int, **options: str) -> Capacity:
    return measure(divide(read_model(model), Parallelism(ranks)), Setup(**options))


def shapes_of(model: DividedModel) -> dict[str, tuple[int, ...]]:
    return {t.name: t.shape for bucket in model.buckets for t in bucket.shapes.tensors}


def test_tensor_parallelism_divides_heads_widths_and_vocabulary() -> None:
    llama = shapes_of(divide(read_model("llama3-8b"), Parallelism(8, tp=4)))
    assert llama["embed"] == llama["lm_head"] == (128256 // 4, 4096)
    assert llama["q_proj"] == (1024, 4096)
    assert llama["k_proj"] == (256, 4096)
    assert llama["o_proj"] == (4096, 1024)
    assert llama["down"] == (4096, 14336 // 4)
    assert llama["in_norm"] == (4096,)
    oss = shapes_of(divide(read_model("gpt-oss-120b"), Parallelism(8, tp=2)))
    assert oss["experts.gate_up_proj"] == (128, 2880, 2880)  # (experts, in, out)
    assert oss["experts.down_proj"] == (128, 1440, 2880)
    assert oss["experts.gate_up_proj_bias"] == (128, 2880)
    assert oss["experts.down_proj_bias"] == (128, 2880)
    assert (oss["sinks"], oss["q.b"], oss["o.b"]) == ((32,), (2048,), (2880,))
    assert oss["router.w"] == (128, 2880)
    qwen = shapes_of(divide(read_model("qwen3-30b-a3b-fused"), Parallelism(8, tp=2)))
    assert qwen["experts.gate_up"] == (128, 768, 2048)  # (experts, out, in)
    assert qwen["experts.down"] == (128, 2048, 384)
    deepseek = shapes_of(divide(read_model("deepseek-v3-perexpert"), Parallelism(8, tp=2)))
    assert deepseek["q_a"] == (1536, 7168)
    assert deepseek["q_b"] == (12288, 1536)
    assert deepseek["experts.255.down"] == (7168, 1024)


def test_expert_parallelism_keeps_all_experts_of_a_group_of_ranks() -> None:
    for name in ("deepseek-v3-perexpert", "deepseek-v3-fused", "gpt-oss-120b"):
        model = read_model(name)
        whole = divide(model, Parallelism(64))
        parts = divide(model, Parallelism(64, ep=8))
        assert {(b.world_size, b.per_position) for b in parts.buckets} == {(64, 1), (8, 8)}
        for divided in (whole, parts):
            total = sum(b.shapes.count * b.per_position * b.shapes.numel for b in divided.buckets)
            assert total == model.numel


def test_pipeline_plans_the_largest_stage() -> None:
    model = read_model("llama3-70b")
    stage = divide(model, Parallelism(64, pp=8))
    assert [(b.shapes.name, b.shapes.count) for b in stage.buckets] == [("root", 1), ("layer", 10)]
    assert stage.parallelism.shard_ranks == 8
    assert stage.notes[-1] == "stage 8 of 8, the largest, is planned"
    assert set(shapes_of(stage)) >= {"norm", "lm_head", "q_proj"} - {"embed"}
    uneven = divide(read_model("deepseek-v3-fused"), Parallelism(8, pp=4))
    assert sum(b.shapes.count for b in uneven.buckets if b.shapes.name != "root") in (15, 16)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("llama3-8b", {"tp": 3}, "tp=3: layer, q_proj of shape (4096, 4096): axis 0 cannot be"),
        (
            "gpt2-small",
            {"tp": 2},
            "tp=2: root, wte of shape (50257, 768): axis 0 cannot be divided",
        ),
        ("vit-l16", {"tp": 2}, "tp=2: root, patch.w: no rule says how tensor parallelism divides"),
        ("gpt-oss-120b", {"ep": 3}, "ep=3: layer, experts.gate_up_proj of shape (128, 2880, 5760)"),
        ("qwen3-30b-a3b-perexpert", {"ep": 3}, "ep=3: layer has 128 experts, no multiple of it"),
    ],
)
def test_division_that_leaves_a_rest_names_the_tensor(name, options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        divide(read_model(name), Parallelism(prod(options.values()), **options))


def test_group_sizes_are_those_that_the_ranks_allow() -> None:
    assert group_sizes(Parallelism(96, tp=2)) == [48, 24, 16, 12, 8]
    assert group_sizes(Parallelism(64, ep=16)) == [64, 32, 16]
    assert group_sizes(Parallelism(4)) == [4]


@pytest.mark.parametrize(
    ("name", "ranks", "percent"),
    [
        ("gpt-oss-120b", 128, 0.01),
        ("gpt-oss-120b", 256, 98.2),
        ("gpt-oss-120b", 1024, 687),
        ("deepseek-v3-perexpert", 1024, 0.11),
        ("deepseek-v3-fused", 512, 97.5),
        ("llama3-8b", 1000, 13.6),
        ("gpt2-small", 512, 15.45),
        ("resnet50", 1024, 131),
    ],
)
def test_padding_of_fsdp2_is_that_of_rows_dealt_to_ranks(name, ranks, percent):
    padding = capacity(name, ranks).torch.padding * 100
    assert padding == pytest.approx(percent, rel=0.01, abs=0.01)


@pytest.mark.parametrize(
    ("name", "ranks", "matrices", "skew"),
    [
        ("llama3-70b", 64, 560, 1.01),
        ("llama3-70b", 256, 560, 1.17),
        ("llama3-70b", 512, 560, 1.70),
        ("gpt-oss-120b", 256, 9396, 1.01),
        ("gpt-oss-120b", 1024, 9396, 1.05),
        ("llama3-8b", 512, 224, 4.2),
    ],
)
def test_skew_is_that_of_the_longest_processing_time_first(name, ranks, matrices, skew):
    found = capacity(name, ranks, optimizer="muon")
    assert found.matrices == matrices
    assert found.skew == pytest.approx(skew, abs=0.06)
    assert found.largest_share <= found.skew + 1e-9


@pytest.mark.parametrize("optimizer", ["adamw", "muon", "shampoo"])
@pytest.mark.parametrize("states", STATES)
@pytest.mark.parametrize("ep", [1, 4])
def test_states_of_all_ranks_add_up_to_those_of_the_model(optimizer, states, ep):
    model = read_model("gpt-oss-120b")
    found = measure(divide(model, Parallelism(16, ep=ep)), Setup(optimizer, states))
    total = of_units = 0
    for bucket in model.buckets:
        block = block_optimizer(optimizer, states, bucket.tensors, "nccl")
        of_units += bucket.count * block.unit_state_bytes
        for i, tensor in enumerate(bucket.tensors):
            total += bucket.count * block.state_bytes(i, tensor.numel)
    assert sum(found.unit_states_by_rank) == of_units
    total += of_units
    assert sum(found.states_by_rank) == pytest.approx(total, rel=1e-6)  # parts of ragged blocks
    assert found.memory.states == max(found.states_by_rank)
    assert found.memory.total < sum(
        getattr(found.memory, key)
        for key in ("parameters", "gradients", "states", "unsharded", "communication", "exchange")
    ) * (1 + 1e-9)


def test_blocks_of_llama_pad_little_and_every_factor_is_kept_once() -> None:
    """Elsewhere each of 64 ranks keeps a right factor of its own rows: 8 times the bytes."""
    model = read_model("llama3-8b")
    # Both factors of each block of 1024 x 1024, their roots, and moments of blocks.
    blocks = 32 * (4 * 4 * 2 + 1 * 4 * 2 + 3 * 4 * 14)
    factors, moments, marks = 4 * 1024**2, 2 * 1024**2, 2
    whole = 4 * blocks * (factors + moments + marks)
    for ranks in (8, 64, 512):
        found = measure(divide(model, Parallelism(ranks)), Setup("shampoo"))
        assert found.padding <= found.setup.resident_padding, ranks
        assert sum(found.unit_states_by_rank) == whole, ranks


def test_eight_bit_states_are_a_byte_and_a_scale_per_block() -> None:
    def bytes_of(
        optimizer: str, states: str, shape: tuple[int, ...], numel: int, kind: str = "matrix"
    ) -> int:
        tensor = TensorShape("w", shape, "bfloat16", kind, "m n -> m n")
        return block_optimizer(optimizer, states, (tensor,), "nccl").state_bytes(0, numel)

    assert bytes_of("muon", "8bit", (64, 64), 4096) == 4096 + 16 * 4
    assert bytes_of("adamw", "8bit", (64, 64), 300) == 2 * (300 + 2 * 4)
    assert bytes_of("adamw", "32bit", (64, 64), 300) == 2 * 300 * 2
    # What is not quantized is in fp32, where 32-bit states are as wide as the parameter.
    assert bytes_of("adamw", "8bit", (64,), 64, "vector") == 2 * 64 * 4
    assert bytes_of("adamw", "8bit", (64, 63), 300) == 2 * 300 * 4  # 4,032 elements
    assert bytes_of("adamw", "8bit", (64, 64), 300, "embedding") == 2 * 300 * 4
    assert bytes_of("adamw", "8bit", (64, 64), 300, "head") == 2 * 300 * 4


def test_wider_compute_and_reduction_show_in_buffers_and_traffic() -> None:
    model = divide(read_model("llama3-8b", dtype="float32"), Parallelism(8))
    plain = measure(model, Setup())
    mixed = measure(model, Setup(precision=StepDtypes("bfloat16", "float32")))
    assert mixed.memory.unsharded * 2 == plain.memory.unsharded
    assert mixed.traffic.gather * 2 == plain.traffic.gather
    assert mixed.traffic.reduce == plain.traffic.reduce
    assert mixed.memory.parameters == plain.memory.parameters


def test_copies_add_an_average_and_larger_shards() -> None:
    model = read_model("llama3-8b")
    one = measure(divide(model, Parallelism(64)), Setup())
    four = measure(divide(model, Parallelism(64, replicate=4)), Setup())
    assert (one.traffic.replicate, one.model.parallelism.shard_ranks) == (0, 64)
    assert four.model.parallelism.shard_ranks == 16
    assert four.memory.parameters == pytest.approx(4 * one.memory.parameters, rel=0.01)
    # Of a ring over 4 copies, each rank sends 2 * 3 / 4 of its gradients.
    assert four.traffic.replicate == pytest.approx(1.5 * four.memory.gradients, rel=1e-6)


def test_peak_of_gathers_is_the_root_a_block_and_its_neighbour() -> None:
    assert unsharded_peak(10, []) == 10
    assert unsharded_peak(10, [(1, [7])]) == 17
    assert unsharded_peak(0, [(2, [7])]) == 14
    assert unsharded_peak(10, [(3, [7]), (5, [4])]) == 24
    assert unsharded_peak(10, [(1, [7]), (5, [6])]) == 23


def buffers(numel: int, *, receives: bool = False) -> BucketBuffers:
    reduction = ReductionBuffers(numel, torch.float32, receives)
    return BucketBuffers(0, 0, 0, 0, 0, 0, (reduction,))


def test_reductions_hold_two_in_flight_one_that_fills_and_the_root() -> None:
    blocks = [buffers(100)] * 5
    assert reduction_memory(buffers(1000), blocks, "cpu").peak == 4 * (1000 + 3 * 100)
    assert reduction_memory(None, blocks[:1], "cpu").peak == 400
    with_receive = reduction_memory(None, [buffers(100, receives=True)] * 5, "cpu")
    assert with_receive.peak == 4 * 100 * 5  # two in flight with two each, one that fills
    assert with_receive.kept == with_receive.peak


def test_reductions_of_large_buckets_hold_one_in_flight_and_keep_nothing_on_devices() -> None:
    """Three buffers of a bucket were 20 GiB a rank of GPT-OSS-120B, and stayed between steps."""
    for numel, held in ((LARGE // 4, 3), (LARGE // 4 + 1, 2)):
        memory = reduction_memory(None, [buffers(numel)] * 5, "cuda")
        assert (memory.peak, memory.kept) == (4 * numel * held, 0)


def test_memory_of_fsdp2_is_that_of_padded_rows_and_whole_gradients() -> None:
    sizes = {"embed": (10, 4), "head": (10, 4), "layers.0.w": (6, 4), "layers.0.b": (6,)}
    sizes |= {name.replace("0", "1"): shape for name, shape in sizes.items() if "0" in name}
    named = [NamedShape(name, shape, "float32") for name, shape in sizes.items()]
    model = divide(ModelShapes("small", "here", sort_into_buckets(named)), Parallelism(4))
    found = measure(model, Setup(precision=StepDtypes("bfloat16", "float32"))).torch
    root, block = 2 * 4 * 3 * 4, 4 * (2 * 4 + 2)  # elements of 4 ranks, of 3 rows and of 2
    assert found.unsharded == 2 * (root + 2 * block)
    # At the root's reduction: in fp32, beside the bf16 gradient of one of its two matrices.
    assert found.communication == 4 * root + 2 * 40
    assert found.total == found.at_rest + found.unsharded + found.communication


def test_granularity_is_read_and_written() -> None:
    for text in ("element", "16", "e128", "matrix"):
        assert str(Granularity.parse(text)) == text
    for text in ("", "e", "0", "-1", "1.5", "rows", "E16", "ematrix"):
        with pytest.raises(ValueError, match="granularity: expected 'element'"):
            Granularity.parse(text)


def test_granularity_holds_for_rows_of_the_tensors_it_names() -> None:
    def structure(text: str, *tensor: object) -> object:
        demand = Granularity.parse(text).demand(TensorShape(*tensor))  # type: ignore[arg-type]
        return None if demand is None else demand.structure

    stack = ("e", (8, 64, 32), "float32", "expert", "e m n -> e m n")
    matrix = ("q", (64, 32), "float32", "matrix", "m n -> m n")
    conv = ("c", (64, 3, 5, 5), "float32", "matrix", "o ... -> o (...)")
    norm = ("n", (64,), "float32", "vector", None)
    embedding = ("t", (64, 32), "float32", "embedding", None)
    assert structure("16", *stack) == structure("e16", *stack) == Blocks(16 * 32)
    assert structure("16", *matrix) == structure("16", *embedding) == Blocks(16 * 32)
    assert structure("16", *conv) == Blocks(16 * 75)
    assert structure("e16", *matrix) is structure("16", *norm) is None
    assert structure("matrix", *stack) == FullMatrix("e m n -> e m n")
    assert structure("matrix", *embedding) is structure("element", *matrix) is None


def area(outline: list[tuple[float, float]]) -> float:
    """Of a polygon, by the shoelace formula."""
    pairs = zip(outline, outline[1:] + outline[:1], strict=True)
    return abs(sum(a * d - c * b for (a, b), (c, d) in pairs)) / 2


@given(st.integers(0, 200), st.integers(1, 200), st.integers(1, 40), st.integers(0, 5))
def test_outlines_cover_what_the_buffer_holds(start, numel, shard, left):
    outlines = _outlines(start, start + numel, shard, left)
    assert sum(map(area, outlines)) == numel
    pieces = slot_pieces(start, numel, shard)
    corners = [corner for outline in outlines for corner in outline]
    assert min(y for _, y in corners) == pieces[0].row
    assert max(y for _, y in corners) == pieces[-1].row + pieces[-1].rows
    assert min(x for x, _ in corners) == left + min(piece.column for piece in pieces)
    assert max(x for x, _ in corners) == left + max(p.column + p.width for p in pieces)
    assert all(len(outline) <= 8 for outline in outlines)
