"""8-bit states: as exact as 32-bit ones on shards, a quarter of their memory, and safe where
rounding could hurt."""

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.profiler import ProfilerActivity, profile

from ranks import run_ranks
from sharding import fully_shard
from sharding.tensor.placement import RaggedShard
from sharding.tensor.ragged_tensor import RaggedDTensor, distribute_ragged
from vfsdp_optim import AdamW, Muon, Precision, param_groups
from vfsdp_optim.step import runs
from vfsdp_optim.testing import assert_sharded_equals_unsharded

# Rows of 300, whole blocks, tails, experts, vectors, and a matrix that only some ranks hold.
SHAPES = [(20, 300), (300,), (64, 65), (16, 256), (7,), (3, 40, 37), (5, 11)]


def make_adamw(module: nn.Module, **options: Any) -> AdamW:
    return AdamW(module.named_parameters(), lr=0.01, states="8bit", **options)


def make_muon(module: nn.Module, **options: Any) -> Muon:
    groups: dict[int, dict[str, Any]] = {
        1: {"params": [], "algorithm": "adamw"},
        2: {"params": []},
        3: {"params": [], "matrices": "e m n -> e m n"},
    }
    for name, param in module.named_parameters():
        groups[param.dim()]["params"].append((name, param))
    used = [group for group in groups.values() if group["params"]]
    return Muon(used, lr=0.01, states="8bit", **options)


MAKERS = {"adamw": make_adamw, "muon": make_muon}
EACH = pytest.mark.parametrize("name", MAKERS)


@EACH
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_8bit_training_of_50_steps_has_the_bits_of_the_unsharded_one(name, dtype):
    shapes = SHAPES if dtype == "float32" else SHAPES[:4]
    assert_sharded_equals_unsharded(
        MAKERS[name], shapes=shapes, world_sizes=[3], steps=50, dtype=dtype
    )
    assert_sharded_equals_unsharded(
        MAKERS[name], shapes=shapes, world_sizes=(1, 2, 5), steps=4, dtype=dtype
    )


@EACH
def test_8bit_step_skipped_by_the_device_leaves_codes_and_scales(name):
    """DeepSpeed#8432: an infinite gradient entered the momentum of a skipped step."""
    torch.manual_seed(0)
    module = nn.ParameterDict({"a": nn.Parameter(torch.randn(20, 300))})
    optimizer = MAKERS[name](module, on_nonfinite="skip")
    optimizer._nonfinite.host_devices = frozenset()  # as if the flag were on a GPU
    param = module["a"]
    for bad in (False, True, False):
        param.grad = torch.randn(20, 300)
        param.grad[3, 5] = torch.inf if bad else 1.0
        before = {key: value.clone() for key, value in optimizer.state[param].items()}
        weights = param.detach().clone()
        optimizer.step()
        after = optimizer.state[param]
        same = [key for key, value in before.items() if torch.equal(value, after[key])]
        assert len(same) == (len(before) if bad else 0)
        assert torch.equal(weights, param.detach()) == bad
    assert optimizer.skipped_steps == 1


def sharded_model(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    params = {f"p{i}": nn.Parameter(torch.randn(shape).to(dtype)) for i, shape in enumerate(shapes)}
    module = nn.ParameterDict(params)
    return fully_shard(module, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))


def state_bytes(name: str) -> tuple[int, int]:
    """Bytes of local storage of the states of 8-bit parameters, and local elements of these."""
    model = sharded_model((200, 300), (128, 257), (300,), (80, 512))
    optimizer = MAKERS[name](model)
    storages, elements = {}, 0
    for param in model.parameters():
        state = optimizer.state[param]
        if any(key.endswith(".codes") for key in state):
            locals_ = [value.to_local() for key, value in state.items() if key != "step"]
            storages |= {x.untyped_storage().data_ptr(): x for x in locals_}
            elements += param.to_local().numel()
    held = sum(x.untyped_storage().nbytes() for x in storages.values())
    return held, elements


@pytest.mark.parametrize(("name", "limit"), [("adamw", 2.04), ("muon", 1.02)])
def test_8bit_states_take_a_quarter_of_the_memory(name, limit):
    held, elements = (sum(part) for part in zip(*run_ranks(state_bytes, 3, name), strict=True))
    assert elements == 200 * 300 + 128 * 257 + 80 * 512
    assert held <= limit * elements


def kinds_of_states(steps: int) -> tuple[list[list[str]], list[Tensor]]:
    model = sharded_model((6, 1024), (64, 64), (63, 65), (2, 4096), (5000,))
    optimizer = make_adamw(model)
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        for param in model.parameters():
            full = torch.randn(param.shape, generator=generator)
            param.grad = distribute_ragged(full, param.device_mesh, param.placement)
        optimizer.step()
    kinds = [sorted(optimizer.state[param]) for param in model.parameters()]
    return kinds, [param.full_tensor().detach() for param in model.parameters()]


def test_8bit_or_not_depends_on_the_global_shape_alone():
    """ao#4912, bitsandbytes#2080: the choice looked at the local shard and changed with the
    mesh."""
    packed = sorted(["step", *(f"{k}{s}" for k in ("exp_avg", "exp_avg_sq") for s in PARTS)])
    plain = ["exp_avg", "exp_avg_sq", "step"]
    weights = []
    for world_size in (1, 2, 3):
        for kinds, full in run_ranks(kinds_of_states, world_size, 2):
            # 6144, 4096 and 8192 elements; 4095; a vector.
            assert kinds == [packed, packed, plain, packed, plain]
            weights.append(full)
    for other in weights[1:]:
        assert all(torch.equal(a, b) for a, b in zip(other, weights[0], strict=True))


PARTS = (".codes", ".absmax")


def named_matrices(count: int) -> list[tuple[str, nn.Parameter]]:
    return [(f"w{i}", nn.Parameter(torch.ones(64, 64))) for i in range(count)]


def test_8bit_states_of_named_parameters_and_of_groups_stay_in_32_bits():
    params = named_matrices(6)
    optimizer = AdamW(
        [
            {"params": params[:2]},
            {"params": params[2:3], "states": "32bit"},
            {"params": params[3:4], "keep_32bit": (name for name in ["w3"])},
            {"params": params[4:5], "states": Precision(keep_32bit=["w4"])},
            {"params": params[5:], "states": Precision("8bit"), "keep_32bit": ["w5"]},
        ],
        states=Precision("8bit", keep_32bit=["w1"]),
    )
    packed = ["exp_avg.codes" in optimizer.state[param] for _, param in params]
    assert packed == [True] + [False] * 5
    states = ["8bit", "32bit", "8bit", "32bit", "8bit"]
    assert [group["states"] for group in optimizer.param_groups] == states


def test_8bit_states_leave_out_embeddings_and_heads_of_a_model():
    model = nn.Sequential(
        nn.Embedding(500, 64), nn.Linear(64, 64), nn.Linear(64, 80), nn.LayerNorm(80),
        nn.Linear(80, 500),
    )  # fmt: skip
    optimizer = Muon(param_groups(model, keep_32bit=["2.weight"]), states="8bit")
    packed = {
        name
        for name, param in model.named_parameters()
        if any(key.endswith(".codes") for key in optimizer.state[param])
    }
    assert packed == {"1.weight"}
    # Named for AdamW, as errors of `param_groups` propose, they are what they are.
    matrices = {"0.weight": None, "4.weight": None, "2.weight": None}
    optimizer = Muon(param_groups(model, matrices=matrices), states="8bit")
    packed = {n for n, p in model.named_parameters() if "exp_avg.codes" in optimizer.state[p]}
    assert packed == {"2.weight"}
    with pytest.raises(ValueError, match=r"keep_32bit names \['nope'\], expected some of"):
        param_groups(model, keep_32bit=["nope"])
    with pytest.raises(ValueError, match=r"adamw: keep_32bit=\['4.bias'\] would replace"):
        param_groups(model, adamw={"keep_32bit": ["4.bias"]})


def train(param: Tensor, gradient: Any, steps: int, **options: Any) -> tuple[Tensor, float]:
    """Return the trained parameter, and the longest step over the learning rate."""
    param, longest = nn.Parameter(param.clone()), 0.0
    optimizer = AdamW([param], **{"lr": 0.01, "weight_decay": 0.0, "states": "8bit", **options})
    for step in range(steps):
        before = param.detach().clone()
        param.grad = gradient(step)
        optimizer.step()
        longest = max(longest, float((param.detach() - before).abs().max()))
    return param.detach(), longest / 0.01


def test_8bit_entries_without_gradients_do_not_move_in_500_steps():
    """bitsandbytes' CPU quantizer moves them by 0.18 learning rates in 50."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(32, 256, generator=generator)
    still = torch.rand(start.shape, generator=generator) < 0.3

    def gradient(step: int) -> Tensor:
        return torch.randn(start.shape, generator=generator).masked_fill_(still, 0.0)

    trained, _ = train(start, gradient, 500)
    assert torch.equal(trained[still], start[still])
    assert bool((trained[~still] != start[~still]).all())


def test_8bit_steps_of_sparse_gradients_stay_short():
    """A second moment that rounds to zero beside a first one makes steps of hundreds of lr."""
    generator = torch.Generator().manual_seed(0)
    scale = torch.exp(1.5 * torch.randn(128, 64, generator=generator))

    def gradient(step: int) -> Tensor:
        rows = torch.rand(128, 1, generator=generator) < 0.1  # groups of 64
        return torch.randn(128, 64, generator=generator) * scale * rows

    _, longest = train(torch.zeros(128, 64), gradient, 300)
    assert longest <= 3.0


def test_8bit_update_differs_from_the_32bit_one_by_a_percent():
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(300, 256, generator=generator)
    grads = [torch.randn(300, 256, generator=generator) + 0.5 for _ in range(50)]
    for grad in grads:
        grad.view(-1)[::3] = 0
    exact, _ = train(start, grads.__getitem__, 50, states="32bit", weight_decay=0.01)
    trained, _ = train(start, grads.__getitem__, 50, weight_decay=0.01)
    assert 0 < float((trained - exact).norm() / (exact - start).norm()) < 0.012


def collectives_of_a_step(name: str, states: str) -> list[tuple[str, int, Any]]:
    model = sharded_model((96, 300), (64, 65), (33, 200))
    optimizer = MAKERS[name](model)
    for group in optimizer.param_groups:
        group["states"] = states
    for step in range(2):
        for param in model.parameters():
            full = torch.randn(param.shape, generator=torch.Generator().manual_seed(step))
            param.grad = distribute_ragged(full, param.device_mesh, param.placement)
        with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
            optimizer.step()
    events = profiler.key_averages(group_by_input_shape=True)
    return [(e.key, e.count, e.input_shapes) for e in events if e.key.startswith("c10d::")]


@EACH
def test_8bit_codes_and_scales_do_not_travel_in_a_step(name):
    packed, plain = (run_ranks(collectives_of_a_step, 3, name, s) for s in ("8bit", "32bit"))
    assert packed == plain  # calls and sizes
    assert bool(packed[0]) == (name == "muon")


def cut_in_blocks(unaligned: str) -> list[Tensor]:
    mesh = init_device_mesh("cpu", (2,))
    full = torch.randn(20, 300, generator=torch.Generator().manual_seed(0))
    param = nn.Parameter(distribute_ragged(full, mesh, RaggedShard((0, 1), (11, 9), 300)))
    optimizer = AdamW([("wide", param)], lr=0.01, states=Precision("8bit", unaligned=unaligned))
    for step in range(20):
        grad = torch.randn(20, 300, generator=torch.Generator().manual_seed(step))
        param.grad = distribute_ragged(grad, mesh, param.placement)
        optimizer.step()
    other = nn.Parameter(distribute_ragged(full, mesh, RaggedShard((0, 1), (10, 10), 300)))
    moved = AdamW([("wide", other)], states=Precision("8bit", unaligned=unaligned))
    with pytest.raises(ValueError, match=r"wide: the checkpoint has states_format=.*local blocks"):
        moved.load_state_dict(optimizer.state_dict())
    again = AdamW([("wide", param)], states=Precision("8bit", unaligned=unaligned))
    again.load_state_dict(optimizer.state_dict())
    for key in ("exp_avg.codes", "exp_avg.absmax"):
        assert torch.equal(
            again.state[param][key].to_local(), optimizer.state[param][key].to_local()
        )
    absmax = again.state[param]["exp_avg.absmax"]
    return [param.full_tensor().detach(), torch.tensor(absmax.shape)]


def test_8bit_states_on_cuts_inside_blocks_are_refused_or_local():
    message = (
        r"wide: 8-bit states are blocks of 256 elements, and shard 1 holds elements 3300 to 6000, "
        r"from the middle of a block on; shard with vfsdp_optim.fully_shard, or pass "
        r'unaligned="local_blocks"'
    )
    with pytest.raises(Exception, match=message):
        run_ranks(cut_in_blocks, 2, "raise")
    full = torch.randn(20, 300, generator=torch.Generator().manual_seed(0))
    param = nn.Parameter(full.clone())
    optimizer = AdamW([param], lr=0.01, states="8bit")
    for step in range(20):
        param.grad = torch.randn(20, 300, generator=torch.Generator().manual_seed(step))
        optimizer.step()
    for trained, shape in run_ranks(cut_in_blocks, 2, "local_blocks"):
        assert shape.tolist() == [13 + 11]
        # A small statistical error, and no more: exactness is given up.
        difference = (trained - param.detach()).norm() / (trained - full).norm()
        assert 0 < float(difference) < 0.05


@pytest.mark.parametrize(
    ("choice", "error", "message"),
    [
        ("4bit", ValueError, r"group 0: states: expected one of .*'8bit'.*got '4bit'"),
        (dict(unaligned="ok"), ValueError, r"group 0: unaligned: expected one of .*got 'ok'"),
        (
            dict(keep_32bit=["w9"]),
            ValueError,
            r"AdamW: keep_32bit names \['w9'\], expected some of",
        ),
        (dict(keep_32bit="w0"), TypeError, r"keep_32bit: expected names like .*got 'w0'"),
        (dict(keep_32bit=5), TypeError, r"keep_32bit: expected names like .*got 5"),
        (dict(master_weights=1), ValueError, r"master_weights: expected True or False, got 1"),
        (dict(master_weights=True), ValueError, r"w0: master_weights=True is for .* 16 bits"),
        (dict(stochastic_rounding=True), ValueError, r"w0: stochastic_rounding=True is for .* 16"),
    ],
)
def test_8bit_options_that_are_wrong_are_named(choice, error, message):
    states = choice if isinstance(choice, str) else Precision(**choice)
    with pytest.raises(error, match=message):
        AdamW(named_matrices(2), states=states)


def test_8bit_names_need_named_parameters():
    with pytest.raises(ValueError, match=r"keep_32bit=\['w0'\] needs names: pass model.named"):
        AdamW(
            [param for _, param in named_matrices(1)], states=Precision("8bit", keep_32bit=["w0"])
        )
    group = {"params": named_matrices(1), "keep_32bit": ["w7"]}
    with pytest.raises(ValueError, match=r"group 0: keep_32bit names \['w7'\]"):
        AdamW([group], states="8bit")


def test_8bit_choice_changed_after_the_fact_says_what_to_do():
    ((name, param),) = named_matrices(1)
    optimizer = AdamW([(name, param)], states="8bit")
    param.grad = torch.ones(64, 64)
    optimizer.step()
    optimizer.param_groups[0]["states"] = "32bit"
    with pytest.raises(RuntimeError, match=r"w0: exp_avg is kept as 8-bit codes.*convert_state"):
        optimizer.step()


def test_8bit_views_are_ragged_tensors():
    for shapes in run_ranks(view_shapes, 2):
        assert shapes == [(20, 300), (24,)]


def view_shapes() -> list[tuple[int, ...]]:
    model = sharded_model((20, 300))
    (param,) = model.parameters()
    state = make_muon(model).state[param]
    assert all(type(value) is RaggedDTensor for value in state.values())
    return [tuple(value.shape) for value in state.values()]


def test_8bit_states_are_in_the_plan():
    params = named_matrices(2)
    optimizer = AdamW(params, states=Precision("8bit", keep_32bit=["w1"]))
    plan = optimizer.plan()
    assert [(row.fqn, row.states) for row in plan.rows] == [("w0", "8bit"), ("w1", "32bit")]
    assert "1 in 8 bits" in str(plan)
    half = AdamW([("h", nn.Parameter(torch.zeros(4, 4, dtype=torch.bfloat16)))]).plan()
    assert (half.rows[0].states, half.memory.states, half.memory.states_32bit) == ("16bit", 64, 128)


def test_8bit_optimizer_is_copied_and_pickled_with_its_codes():
    ((_, param),) = params = named_matrices(1)
    optimizer = AdamW(params, states="8bit")
    for copied in (copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))):
        param.grad = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
        optimizer.step()
        other = copied(optimizer)
        (twin,) = other.param_groups[0]["params"]
        twin.grad = param.grad.clone()
        other.step()
        optimizer.step()
        for key, value in optimizer.state[param].items():
            assert torch.equal(other.state[twin][key], value)
        assert torch.equal(twin, param)


def test_8bit_matrix_is_read_in_pieces_with_the_same_bits(monkeypatch):
    results = []
    for size in (1 << 17, 512):
        monkeypatch.setattr(runs, "_COPIED_CHUNK", size)
        param = nn.Parameter(torch.ones(50, 100, dtype=torch.bfloat16))
        optimizer = Muon(
            [("w", param)], lr=0.01, states=Precision("8bit", stochastic_rounding=True)
        )
        for step in range(3):
            grad = torch.randn(50, 100, generator=torch.Generator().manual_seed(step))
            param.grad = grad.to(torch.bfloat16)
            optimizer.step()
        results.append(param.detach())
    assert torch.equal(*results)


def test_8bit_states_are_made_under_any_default_dtype_and_without_memory():
    try:
        torch.set_default_dtype(torch.bfloat16)
        param = nn.Parameter(torch.ones(64, 64))
        optimizer = AdamW([param], states="8bit", lr=0.5)
        param.grad = torch.ones(64, 64)
        optimizer.step()
    finally:
        torch.set_default_dtype(torch.float32)
    assert optimizer.state[param]["exp_avg.absmax"].dtype == torch.float32
    assert float(param.detach()[0, 0]) == 0.49609375  # 1 - lr weight_decay - lr in bfloat16
    with FakeTensorMode():
        AdamW(named_matrices(1), states="8bit")
    with torch.device("meta"):
        ((_, param),) = named_matrices(1)
        assert AdamW([param], states="8bit").state[param]["exp_avg.codes"].is_meta


def test_8bit_states_follow_parameters_to_other_memory_and_new_groups():
    (_, first), (_, second) = params = named_matrices(2)
    optimizer = AdamW(params[:1], states="8bit")
    first.grad = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    optimizer.step()
    before = {key: value.clone() for key, value in optimizer.state[first].items()}
    assert before["exp_avg.absmax"].all()
    optimizer.add_param_group({"params": params[1:]})
    first.data = first.data.clone()
    assert all(torch.equal(optimizer.state[first][key], value) for key, value in before.items())
    assert not optimizer.state[second]["exp_avg.absmax"].any()


def test_8bit_amsgrad_keeps_its_maximum_without_drift():
    """Encoded again in every step: what has not changed gets the same codes."""
    param = nn.Parameter(torch.zeros(64, 64))
    optimizer = AdamW([param], states="8bit", amsgrad=True)
    for step in range(30):
        grad = torch.randn(64, 64, generator=torch.Generator().manual_seed(step))
        param.grad = grad * (1.0 if step < 10 else 1e-3)
        optimizer.step()
        if step == 10:
            before = {key: value.clone() for key, value in optimizer.state[param].items()}
    for part in PARTS:
        key = f"max_exp_avg_sq{part}"
        assert bool(before[key].any())
        assert torch.equal(optimizer.state[param][key], before[key])
    assert not torch.equal(optimizer.state[param]["exp_avg_sq.absmax"], before["exp_avg_sq.absmax"])
