"""For the same full gradients a sharded step has the bits of the unsharded one, in any layout."""

import math
import random
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.profiler import ProfilerActivity, profile

from ranks import run_ranks
from sharding.tensor.placement import RaggedShard
from sharding.tensor.ragged_tensor import RaggedDTensor
from vfsdp_optim.adamw import AdamW
from vfsdp_optim.muon import Muon
from vfsdp_optim.optimizer import StructuredOptimizer

CONV = "o ... -> o (...)"
EXPERTS = "e m n -> e m n"
COLUMN_HEADS = "m (h d) -> h m d; h=3"
ROW_HEADS = "(h d) n -> h d n; h=3"
# Cut by rank edges or whole, on few ranks, vectors both ways, every way to say matrices.
PARAMETERS = [
    ((13, 8), "muon", None),
    ((1, 40), "muon", None),
    ((40, 1), "muon", None),
    ((60, 33), "muon", None),
    ((33, 60), "muon", None),
    ((6, 3, 3, 2), "muon", CONV),
    ((5, 7, 6), "muon", EXPERTS),
    ((12, 9), "muon", COLUMN_HEADS),
    ((12, 9), "muon", ROW_HEADS),
    ((14, 5), "muon", "m n -> m n; row_splits=9,4,1"),
    ((300,), "adamw", None),
    ((20, 11), "adamw", None),
    ((1,), "adamw", None),
    ((), "adamw", None),
]


@dataclass(frozen=True)
class Case:
    """One training run of a few steps; the same on every rank and in the parent."""

    world_size: int
    seed: int
    layout: str = "buffer"  # "buffer": one flat buffer; "units": any cuts, every tensor on its own
    optimizer: str = "muon"
    dtype: torch.dtype = torch.float32
    steps: int = 3
    parameters: tuple[tuple[tuple[int, ...], str, str | None], ...] = tuple(PARAMETERS)
    missing: float = 0.0  # share of gradients that are None in a step
    options: dict[str, Any] = field(default_factory=dict)


def full_tensors(case: Case, step: int) -> list[Tensor]:
    """Return parameters (step 0) or gradients of step 1, 2, ...; full, one for each parameter."""
    generator = torch.Generator().manual_seed(case.seed * 1000 + step)
    return [
        torch.randn(shape, generator=generator).to(case.dtype) for shape, _, _ in case.parameters
    ]


def present(case: Case, step: int) -> list[bool]:
    draw = random.Random(case.seed * 1000 + step)
    return [draw.random() >= case.missing for _ in case.parameters]


def make_optimizer(case: Case, params: list[nn.Parameter]) -> StructuredOptimizer:
    named = [(f"p{i}", p) for i, p in enumerate(params)]
    if case.optimizer == "adamw":
        return AdamW(named, lr=0.1, weight_decay=0.7, **case.options)
    groups: dict[tuple[str, str | None], dict[str, Any]] = {}
    for (_, algorithm, matrices), item in zip(case.parameters, named, strict=True):
        group = {"params": [], "algorithm": algorithm}
        if algorithm == "muon":
            group["matrices"] = matrices
        groups.setdefault((algorithm, matrices), group)["params"].append(item)
    for group in groups.values():
        if group["algorithm"] == "adamw":
            group.update(lr=0.1, weight_decay=0.6)
    return Muon(list(groups.values()), lr=0.1, weight_decay=0.5, **case.options)


@dataclass(frozen=True)
class Layout:
    """Where parameters lie; `shard` is 0 where there is no buffer."""

    placements: list[RaggedShard]
    offsets: list[int]
    shard: int


def draw_layout(case: Case, seed: int) -> Layout:
    """Return a legal layout of the case's parameters."""
    draw = random.Random(seed)
    numels = [math.prod(shape) for shape, _, _ in case.parameters]
    dims = [tuple(range(len(shape))) for shape, _, _ in case.parameters]
    if case.layout == "units":
        placements = []
        for numel, of in zip(numels, dims, strict=True):
            cuts = sorted(draw.randint(0, numel) for _ in range(case.world_size - 1))
            units = [b - a for a, b in zip([0, *cuts], [*cuts, numel], strict=True)]
            placements.append(RaggedShard(of, units))
        return Layout(placements, [0] * len(numels), 0)
    order = list(range(len(numels)))
    draw.shuffle(order)
    end, offsets = 0, [0] * len(numels)
    for i in order:
        offsets[i] = end
        end += -(-numels[i] // 256) * 256 + 256 * (draw.random() < 0.2)  # some larger gaps
    shard = -(-end // case.world_size // 256) * 256
    placements = [
        RaggedShard.from_range(len(of), numel, offset, shard, case.world_size)
        for numel, of, offset in zip(numels, dims, offsets, strict=True)
    ]
    return Layout(placements, offsets, shard)


class Shards:
    """This rank's parameters and gradients, as a bucket would lay them out."""

    def __init__(self, case: Case, mesh: DeviceMesh, full: list[Tensor], layout_seed: int) -> None:
        self.case, self.mesh = case, mesh
        self.layout = draw_layout(case, layout_seed)
        self.params_flat = torch.zeros(self.layout.shard, dtype=case.dtype)
        self.grads_flat = torch.zeros(self.layout.shard, dtype=case.dtype)
        self.params = [
            nn.Parameter(self.cut(i, tensor, self.params_flat)) for i, tensor in enumerate(full)
        ]

    def cut(self, i: int, full: Tensor, flat: Tensor) -> RaggedDTensor:
        """Return this rank's piece of parameter i, in the flat buffer if there is one."""
        placement, rank = self.layout.placements[i], self.mesh.get_local_rank()
        start, stop = placement.bounds(rank, full.numel())
        piece = full.reshape(-1)[start:stop].clone()
        if self.layout.shard and start < stop:
            first = self.layout.offsets[i] + start - rank * self.layout.shard
            piece = flat[first : first + piece.numel()].copy_(piece)
        return RaggedDTensor.from_local(piece, self.mesh, placement, full.shape)

    def set_gradients(self, step: int) -> None:
        self.grads_flat.zero_()
        here = present(self.case, step)
        for i, full in enumerate(full_tensors(self.case, step)):
            self.params[i].grad = self.cut(i, full, self.grads_flat) if here[i] else None

    def padding(self) -> Tensor:
        """Return the elements of the parameter buffer that no parameter has."""
        outside = torch.ones(self.layout.shard, dtype=torch.bool)
        for p in self.params if self.layout.shard else []:
            local = p.to_local()
            outside[local.storage_offset() : local.storage_offset() + local.numel()] = False
        return self.params_flat[outside]


Tensors = list[dict[str, Tensor]]  # of each parameter: itself and its states, in full


def gather(optimizer: StructuredOptimizer, params: list[nn.Parameter]) -> Tensors:
    result = []
    for p in params:
        tensors = {"param": p.detach(), **optimizer.state[p]}
        result.append(
            {
                key: t.full_tensor() if isinstance(t, RaggedDTensor) else t.clone()
                for key, t in tensors.items()
            }
        )
    return result


def train_sharded(case: Case, start: Tensors | None = None) -> Tensors:
    """Return what `train_unsharded` returns; `start` holds what an earlier run returned."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    full = [tensors["param"] for tensors in start] if start else full_tensors(case, 0)
    shards = Shards(case, mesh, full, layout_seed=case.seed)
    optimizer = make_optimizer(case, shards.params)
    first = 1
    if start:
        first = case.steps + 1
        saved = optimizer.state_dict()
        order = [p for group in optimizer.param_groups for p in group["params"]]
        index = {id(p): i for i, p in enumerate(shards.params)}
        saved["state"] = {
            k: {key: t for key, t in start[index[id(p)]].items() if key != "param"}
            for k, p in enumerate(order)
        }
        optimizer.load_state_dict(saved)
    for step in range(first, first + case.steps):
        shards.set_gradients(step)
        optimizer.step()
        assert not shards.padding().any()
    return gather(optimizer, shards.params)


def train_unsharded(case: Case, steps: int | None = None) -> Tensors:
    params = [nn.Parameter(full) for full in full_tensors(case, 0)]
    optimizer = make_optimizer(case, params)
    for step in range(1, (steps or case.steps) + 1):
        here = present(case, step)
        for i, grad in enumerate(full_tensors(case, step)):
            params[i].grad = grad if here[i] else None
        optimizer.step()
    return gather(optimizer, params)


def assert_equal(case: Case, results: list[Tensors], expected: Tensors) -> None:
    for rank, actual in enumerate(results):
        for i, (a, b) in enumerate(zip(actual, expected, strict=True)):
            assert a.keys() == b.keys()
            for key in a:
                assert torch.equal(a[key], b[key]), (rank, case.parameters[i], key)


def assert_same_bits(case: Case) -> None:
    assert_equal(case, run_ranks(train_sharded, case.world_size, case), train_unsharded(case))


WORLDS = [1, 2, 3, 5]


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("layout", ["buffer", "units"])
@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_sharded_step_has_the_bits_of_the_unsharded_one(world_size, layout, optimizer):
    for seed in range(2):
        assert_same_bits(Case(world_size, seed, layout, optimizer))


@settings(max_examples=10)
@given(
    world_size=st.sampled_from(WORLDS),
    seed=st.integers(0, 10**6),
    layout=st.sampled_from(["buffer", "units"]),
    shapes=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=6),
    nesterov=st.booleans(),
    adjust_lr_fn=st.sampled_from(["original", "match_rms_adamw"]),
    room=st.sampled_from([1, 3, 1 << 20]),
)
def test_drawn_matrices_have_the_bits_of_the_unsharded_step(
    world_size, seed, layout, shapes, nesterov, adjust_lr_fn, room
):
    largest = 4 * max(rows * cols for rows, cols in shapes)
    options = dict(nesterov=nesterov, adjust_lr_fn=adjust_lr_fn, max_exchange_bytes=room * largest)
    parameters = tuple((shape, "muon", None) for shape in shapes)
    assert_same_bits(Case(world_size, seed, layout, parameters=parameters, options=options))


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (torch.float32, {"ns_dtype": torch.bfloat16}),  # bfloat16 on the wire
        (torch.bfloat16, {"ns_dtype": torch.bfloat16, "nesterov": False}),
        (torch.bfloat16, {"ns_dtype": torch.float32}),
        (torch.bfloat16, {"state_dtype": torch.float32}),
    ],
    ids=["bf16_wire", "bf16", "bf16_params", "fp32_momentum"],
)
def test_other_dtypes_have_the_bits_of_the_unsharded_step(dtype, options):
    # torch's bfloat16 a + alpha * b depends on the place of an element in its tensor.
    for layout in ("buffer", "units"):
        assert_same_bits(Case(3, 1, layout, dtype=dtype, options=options))


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
@pytest.mark.parametrize("layout", ["buffer", "units"])
def test_missing_gradients_are_skipped_as_unsharded(optimizer, layout):
    for seed in range(2):
        assert_same_bits(Case(3, seed, layout, optimizer, missing=0.4, steps=4))


@pytest.mark.parametrize("options", [{"amsgrad": True}, {"maximize": True}, {"eps": 0.0}])
def test_options_of_adamw_have_the_bits_of_the_unsharded_step(options):
    assert_same_bits(Case(3, 0, "buffer", "adamw", options=options))


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
@pytest.mark.parametrize(("saved_on", "resumed_on"), [(3, 2), (2, 5), (3, 1)])
def test_run_resumed_on_other_ranks_has_the_bits_of_the_uninterrupted_one(
    optimizer, saved_on, resumed_on
):
    first = Case(saved_on, 7, "buffer", optimizer, steps=2)
    second = Case(resumed_on, 7, "units", optimizer, steps=2)
    saved = run_ranks(train_sharded, saved_on, first)[0]
    resumed = run_ranks(train_sharded, resumed_on, second, saved)
    assert_equal(second, resumed, train_unsharded(second, steps=4))


def reference_muon(case: Case) -> list[Tensor]:
    """Return the parameters after training, by float64 arithmetic on whole matrices."""
    params = [x.double() for x in full_tensors(case, 0)]
    momenta = [torch.zeros_like(x) for x in params]
    for step in range(1, case.steps + 1):
        for x, m, g in zip(params, momenta, full_tensors(case, step), strict=True):
            m.lerp_(g.double(), 1 - 0.95)
            u, s, vt = torch.linalg.svd(g.double().lerp(m, 0.95), full_matrices=False)
            s = s / s.norm()
            for _ in range(5):
                s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
            x.mul_(1 - 0.1 * 0.5).sub_(0.1 * max(1, x.size(0) / x.size(1)) ** 0.5 * (u * s) @ vt)
    return params


def test_cut_matrices_are_orthogonalized_whole():
    # Orthogonalizing each rank's rows for itself also moves every parameter, the wrong way:
    # DeepSpeed#7807, Moonlight#27.
    shapes = [(16, 16), (13, 8), (40, 12), (1, 30)]
    case = Case(3, 2, "units", parameters=tuple((shape, "muon", None) for shape in shapes))
    results = run_ranks(train_sharded, 3, case)[0]
    for actual, expected in zip(results, reference_muon(case), strict=True):
        # Five Newton-Schulz steps amplify float32's rounding by about 1e3.
        torch.testing.assert_close(actual["param"].double(), expected, atol=1e-3, rtol=0)


# -------------------------------------------------------------------- what moves


def count_collectives(case: Case) -> list[tuple[str, int]]:
    """Return the process group's calls of one step, the first left out: it compares plans."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    shards = Shards(case, mesh, full_tensors(case, 0), layout_seed=case.seed)
    optimizer = make_optimizer(case, shards.params)
    for step in (1, 2):
        shards.set_gradients(step)
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            optimizer.step()
    return [(e.key, e.count) for e in profiler.key_averages() if e.key.startswith("c10d::")]


@pytest.mark.parametrize("matrices", [2, 14])
def test_wave_has_one_exchange_each_way_whatever_it_holds(matrices):
    parameters = tuple(((9, 7), "muon", None) for _ in range(matrices))
    case = Case(3, 0, "units", parameters=parameters)
    assert run_ranks(count_collectives, 3, case) == [[("c10d::alltoall_base_", 2)]] * 3


def test_waves_bound_what_travels_at_a_time():
    parameters = tuple(((9, 7), "muon", None) for _ in range(12))
    case = Case(3, 0, "units", parameters=parameters, options={"max_exchange_bytes": 9 * 7 * 4})
    # 12 cut matrices for 3 owners, at most one an owner and wave: 4 waves or more.
    ((_, count),) = run_ranks(count_collectives, 3, case)[0]
    assert count >= 2 * 4


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_whole_matrices_and_element_wise_updates_move_nothing(optimizer):
    # Four matrices of 256 elements on two ranks: no boundary cuts one.
    parameters = tuple(((16, 16), "muon", None) for _ in range(4))
    case = Case(2, 5, "buffer", optimizer, parameters=parameters)
    layout = draw_layout(case, case.seed)
    held = [[b - a for a, b in p.all_bounds(256)] for p in layout.placements]
    assert all(sorted(numels) == [0, 256] for numels in held)
    assert run_ranks(count_collectives, 2, case) == [[], []]


def show_plan(case: Case) -> tuple[str, int, int, list[int]]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    shards = Shards(case, mesh, full_tensors(case, 0), layout_seed=case.seed)
    plan = make_optimizer(case, shards.params).plan()
    cut = sum(
        sum(stop > start for start, stop in p.placement.all_bounds(p.numel())) > 1
        for p in shards.params
    )
    return str(plan), plan.moved_bytes, cut, [row.owned for row in plan.rows]


def test_plan_shows_what_moves_and_is_the_same_on_all_ranks():
    parameters = tuple(((9, 7), "muon", None) for _ in range(6))
    case = Case(3, 0, "units", parameters=parameters, options={"ns_dtype": torch.bfloat16})
    shown = run_ranks(show_plan, 3, case)
    assert shown[0] == shown[1] == shown[2]
    _, moved, cut, owned = shown[0]
    assert sum(owned) == cut > 0
    # Two bytes an element and way; an owner that holds a part does not send it to itself.
    assert 0 < moved < cut * 63 * 2 * 2


def disagree() -> None:
    mesh = init_device_mesh("cpu", (2,))
    p = nn.Parameter(
        RaggedDTensor.from_local(torch.ones(8), mesh, RaggedShard((0, 1), (8, 8)), (4, 4))
    )
    p.grad = RaggedDTensor.from_local(torch.ones(8), mesh, RaggedShard((0, 1), (8, 8)), (4, 4))
    optimizer = Muon([("layer.w", p)], ns_steps=4 + dist.get_rank())
    with pytest.raises(RuntimeError, match=r"optimizer's plan .*layer\.w.*ns_steps=4.*ns_steps=5"):
        optimizer.step()


def test_plans_that_differ_raise_on_every_rank():
    run_ranks(disagree, 2)


def move_memory_of_one_rank() -> list[tuple[str, int]]:
    case = Case(2, 0, "units", parameters=(((9, 7), "muon", None),))
    mesh = init_device_mesh("cpu", (2,))
    shards = Shards(case, mesh, full_tensors(case, 0), layout_seed=0)
    optimizer = make_optimizer(case, shards.params)
    shards.set_gradients(1)
    optimizer.step()
    if dist.get_rank() == 0:
        local = shards.params[0]._local_tensor
        local.set_(local.clone())
    shards.set_gradients(2)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        optimizer.step()
    return [(e.key, e.count) for e in profiler.key_averages() if e.key.startswith("c10d::")]


def test_memory_that_moves_on_one_rank_alone_does_not_make_it_wait_for_others():
    assert run_ranks(move_memory_of_one_rank, 2) == [[("c10d::alltoall_base_", 2)]] * 2


# -------------------------------------------------------------------- kinds and states


def step_mixed_kinds() -> list[Tensor]:
    mesh = init_device_mesh("cpu", (2,))
    placement = RaggedShard((0, 1), (10, 5))
    full = torch.arange(15.0).view(5, 3)
    start, stop = placement.bounds(dist.get_rank(), 15)

    def shard(x: Tensor) -> RaggedDTensor:
        return RaggedDTensor.from_local(x.flatten()[start:stop].clone(), mesh, placement, x.shape)

    sharded, plain = nn.Parameter(shard(full)), nn.Parameter(full.clone())
    optimizer = Muon([sharded, plain], lr=0.1)
    for step in range(3):
        grad = torch.randn(5, 3, generator=torch.Generator().manual_seed(step))
        sharded.grad, plain.grad = shard(grad), grad
        optimizer.step()
    return [sharded.full_tensor().detach(), plain.detach()]


def test_sharded_and_plain_parameters_share_a_group():
    for sharded, plain in run_ranks(step_mixed_kinds, 2):
        assert torch.equal(sharded, plain)


def check_states() -> None:
    case = Case(2, 0)
    mesh = init_device_mesh("cpu", (2,))
    shards = Shards(case, mesh, full_tensors(case, 0), layout_seed=0)
    optimizer = make_optimizer(case, shards.params)
    before = optimizer.state_dict()["state"]
    keys = {k: list(state) for k, state in before.items()}
    shards.set_gradients(1)
    optimizer.step()
    assert {k: list(state) for k, state in optimizer.state_dict()["state"].items()} == keys
    for p in shards.params:
        for key, value in optimizer.state[p].items():
            if key != "step":
                assert type(value) is RaggedDTensor
                assert value.placements == p.placements
                assert value.shape == p.shape
                assert value.to_local().any() or not p.to_local().numel()
    bad = shards.params[0]
    bad.grad = RaggedDTensor.from_local(
        torch.zeros(104 * (1 - dist.get_rank())), mesh, RaggedShard((0, 1), (104, 0)), (13, 8)
    )
    with pytest.raises(TypeError, match=r"p0: expected a gradient laid out as its parameter"):
        optimizer.step()


def test_states_are_sharded_as_their_parameters_and_wrong_gradients_are_refused():
    run_ranks(check_states, 2)
