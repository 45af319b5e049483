"""AdamW: torch's bits on plain tensors, state that can be saved and resumed, and its limits."""

import copy
import io

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from ranks import run_ranks
from sharding.tensor.placement import RaggedShard
from sharding.tensor.ragged_tensor import RaggedDTensor
from vfsdp_optim.adamw import AdamW

SHAPES = [(3,), (70000,), (4, 5, 6), (), (7, 1)]


def parameters(shapes=SHAPES, seed=0, dtype=torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for s in shapes]


def set_gradients(params, seed: int, missing: frozenset[int] = frozenset()) -> None:
    generator = torch.Generator().manual_seed(seed)
    for i, p in enumerate(params):
        grad = torch.randn(p.shape, generator=generator).to(p.dtype)
        p.grad = None if i in missing else grad


def train(optimizer, params, steps, first_seed=100, missing=frozenset()):
    for step in range(steps):
        set_gradients(params, first_seed + step, missing if step % 2 else frozenset())
        optimizer.step()


def assert_same(ours, params, theirs, reference):
    for i, (p, q) in enumerate(zip(params, reference, strict=True)):
        assert torch.equal(p, q), i
        for key, value in theirs.state[q].items():
            assert torch.equal(ours.state[p][key], value), (i, key)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@given(
    shapes=st.lists(
        st.lists(st.integers(1, 12), min_size=1, max_size=3).map(tuple), min_size=1, max_size=5
    ),
    seed=st.integers(0, 2**31),
    amsgrad=st.booleans(),
    maximize=st.booleans(),
    weight_decay=st.sampled_from([0.0, 0.6]),
    betas=st.sampled_from([(0.9, 0.999), (0.0, 0.5)]),
    missing=st.frozensets(st.integers(0, 4)),
)
def test_step_has_torchs_bits(dtype, shapes, seed, amsgrad, maximize, weight_decay, betas, missing):
    # In bfloat16 foreach rounds betas and decay to bfloat16, the loop over tensors does not: there
    # ours has the bits of the loop, and 0-D tensors, whose scalars torch rounds too, are left out.
    foreach = dtype is not torch.bfloat16
    if foreach:
        shapes = [(), *shapes]
    options = dict(
        lr=0.1, weight_decay=weight_decay, betas=betas, amsgrad=amsgrad, maximize=maximize
    )
    params, reference = parameters(shapes, seed, dtype), parameters(shapes, seed, dtype)
    ours, theirs = (
        AdamW(params, **options),
        torch.optim.AdamW(reference, foreach=foreach, **options),
    )
    train(ours, params, 4, seed + 1, missing)
    train(theirs, reference, 4, seed + 1, missing)
    assert_same(ours, params, theirs, reference)


def test_step_of_a_long_tensor_has_torchs_bits_in_every_chunk():
    params, reference = parameters([(400_001,)]), parameters([(400_001,)])
    ours, theirs = AdamW(params, lr=0.1), torch.optim.AdamW(reference, lr=0.1, foreach=True)
    train(ours, params, 3)
    train(theirs, reference, 3)
    assert_same(ours, params, theirs, reference)


def test_step_follows_the_paper():
    (p,) = parameters([(50,)])
    x = p.detach().double()
    m = v = torch.zeros(50, dtype=torch.float64)
    optimizer = AdamW([p], lr=0.1, betas=(0.8, 0.9), eps=1e-3, weight_decay=0.5)
    for step in range(1, 6):
        set_gradients([p], step)
        g = p.grad.double()
        optimizer.step()
        m, v = 0.8 * m + 0.2 * g, 0.9 * v + 0.1 * g * g
        update = (m / (1 - 0.8**step)) / ((v / (1 - 0.9**step)).sqrt() + 1e-3)
        x = x - 0.1 * 0.5 * x - 0.1 * update
    torch.testing.assert_close(p.detach().double(), x, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("scale", [0.0, 1.0])
def test_explicit_zeros_are_kept(scale):
    params, reference = parameters([(9,)]), parameters([(9,)])
    options = dict(lr=0.1 * scale, weight_decay=0.0, eps=0.0)
    ours = AdamW([{"params": params, **options}], lr=7.0, weight_decay=7.0, eps=7.0)
    theirs = torch.optim.AdamW([{"params": reference, **options}], foreach=True)
    train(ours, params, 2)
    train(theirs, reference, 2)
    assert_same(ours, params, theirs, reference)


def test_tensor_learning_rate_is_read_at_each_step():
    params, reference = parameters(), parameters()
    lr = torch.tensor(0.5)
    ours, theirs = AdamW(params, lr=lr), torch.optim.AdamW(reference, lr=0.5, foreach=True)
    train(ours, params, 1)
    train(theirs, reference, 1)
    lr.fill_(0.25)
    theirs.param_groups[0]["lr"] = 0.25
    train(ours, params, 1, 200)
    train(theirs, reference, 1, 200)
    assert_same(ours, params, theirs, reference)


@pytest.mark.parametrize("option", ["capturable", "differentiable"])
def test_options_that_are_not_supported_are_refused_by_name(option):
    with pytest.raises(NotImplementedError, match=f"param group 0: {option}=True.*leave it out"):
        AdamW(parameters(), **{option: True})


@pytest.mark.parametrize(
    ("options", "fact"),
    [
        ({"lr": -1.0}, "lr.*-1.0"),
        ({"lr": torch.ones(2)}, "1 element"),
        ({"eps": -1.0}, "eps.*-1.0"),
        ({"betas": (1.0, 0.9)}, r"\(1\.0, 0\.9\)"),
        ({"weight_decay": float("nan")}, "weight_decay.*nan"),
        ({"state_dtype": torch.int32}, "torch.int32"),
    ],
)
def test_values_out_of_range_are_an_error(options, fact):
    with pytest.raises(ValueError, match=f"param group 0: .*{fact}"):
        AdamW(parameters(), **options)


def test_unknown_key_is_an_error_that_names_it():
    with pytest.raises(ValueError, match="param group 1: algorithm 'adamw' has no 'momentum'"):
        AdamW([{"params": parameters()}, {"params": parameters(), "momentum": 0.9}])


def test_sparse_gradient_is_refused_by_name():
    (p,) = parameters([(3, 2)])
    optimizer = AdamW([("e.weight", p)])
    p.grad = torch.ones(3, 2).to_sparse()
    with pytest.raises(RuntimeError, match=r"e\.weight.*SparseAdam"):
        optimizer.step()


@pytest.mark.parametrize("grad_strides", ["same", "other"])
def test_strides_of_parameters_are_kept_and_do_not_matter(grad_strides):
    (full,) = parameters([(4, 3, 5, 5)])
    p = nn.Parameter(full.detach().to(memory_format=torch.channels_last))
    strides = p.stride()
    ours, theirs = AdamW([p], lr=0.1), torch.optim.AdamW([full], lr=0.1, foreach=True)
    for step in range(3):
        set_gradients([full], step)
        p.grad = full.grad.clone()
        if grad_strides == "same":
            p.grad = p.grad.to(memory_format=torch.channels_last)
        ours.step()
        theirs.step()
    assert p.stride() == strides
    assert_same(ours, [p], theirs, [full])


def test_float32_states_of_bfloat16_parameters_take_what_bfloat16_states_lose():
    (p,) = parameters([(64,)], dtype=torch.bfloat16)
    (reference,) = parameters([(64,)], dtype=torch.bfloat16)
    reference = nn.Parameter(reference.detach().float())
    optimizer = AdamW([p], lr=0.01, state_dtype=torch.float32)
    full = torch.optim.AdamW([reference], lr=0.01, foreach=True)
    for step in range(5):
        set_gradients([p], step)
        reference.grad = p.grad.float()
        optimizer.step()
        full.step()
    for key in ("exp_avg", "exp_avg_sq"):
        assert optimizer.state[p][key].dtype is torch.float32
        assert torch.equal(optimizer.state[p][key], full.state[reference][key])


# -------------------------------------------------------------------- state


def test_states_of_a_step_are_views_users_can_write():
    (p,) = parameters([(6,)])
    optimizer = AdamW([p], lr=0.1)
    optimizer.state[p]["exp_avg"].fill_(3.0)
    optimizer.state[p]["step"].fill_(10.0)
    p.grad = torch.zeros(6)
    optimizer.step()
    torch.testing.assert_close(optimizer.state[p]["exp_avg"], torch.full((6,), 2.7))
    assert optimizer.state[p]["step"].item() == 11


@pytest.mark.parametrize("through", ["memory", "file", "deepcopy"])
def test_resumed_training_has_the_bits_of_the_uninterrupted_one(through):
    params, resumed = parameters(), parameters(seed=5)
    optimizer, other = AdamW(params, lr=0.1), AdamW(resumed, lr=0.3)
    train(optimizer, params, 2, missing=frozenset({1}))
    saved = optimizer.state_dict()
    if through == "file":
        file = io.BytesIO()
        torch.save(saved, file)
        file.seek(0)
        saved = torch.load(file, weights_only=True)
    elif through == "deepcopy":
        saved = copy.deepcopy(saved)
    with torch.no_grad():
        for p, q in zip(params, resumed, strict=True):
            q.copy_(p)
    other.load_state_dict(saved)
    train(optimizer, params, 2, 300)
    train(other, resumed, 2, 300)
    assert_same(other, resumed, optimizer, params)
    assert other.param_groups[0]["lr"] == 0.1


@pytest.mark.parametrize(
    ("groups", "fact"),
    [
        ([{"params": ["w1", "w3"]}], r"missing \['w3'\], unexpected \['w2'\]"),
        ([{"params": ["w1", "w2"], "amsgrad": True}], "amsgrad=False, the optimizer True"),
    ],
)
def test_checkpoint_that_does_not_fit_is_an_error_and_changes_nothing(groups, fact):
    w1, w2 = parameters([(4, 4), (4, 4)])
    first = AdamW([("w1", w1), ("w2", w2)], lr=0.1)
    train(first, [w1, w2], 2)
    mine = parameters([(4, 4), (4, 4)])
    for group in groups:
        group["params"] = list(zip(group["params"], mine, strict=True))
    other = AdamW(groups, lr=0.5)
    with pytest.raises(ValueError, match=fact):
        other.load_state_dict(first.state_dict())
    assert other.param_groups[0]["lr"] == 0.5
    assert not any(other.state[p]["step"] for p in mine)


def test_checkpoint_of_another_shape_is_an_error_that_names_the_state():
    params, others = parameters([(4, 4)]), parameters([(4, 5)])
    optimizer = AdamW(params)
    with pytest.raises(ValueError, match=r"parameter 0.*exp_avg: expected shape \(4, 5\)"):
        AdamW(others).load_state_dict(optimizer.state_dict())


def test_parameters_swapped_in_place_are_the_ones_that_train():
    # accelerate and the HF Trainer build the optimizer early and swap its parameters.
    old, new = parameters([(4,)]), parameters([(4,)], seed=3)
    optimizer = AdamW(old, lr=0.1)
    train(optimizer, old, 1)
    optimizer.param_groups[0]["params"][:] = new
    before = new[0].detach().clone()
    train(optimizer, new, 1)
    assert not torch.equal(new[0], before)
    assert [id(p) for p in optimizer.state] == [id(*new), id(*old)]  # as torch's, which ...
    assert list(optimizer.state_dict()["state"]) == [0]  # ... cannot be saved


def test_parameter_whose_memory_was_replaced_trains_on_with_its_state():
    (p,), (q,) = parameters([(300,)]), parameters([(300,)])
    ours, theirs = AdamW([p], lr=0.1), torch.optim.AdamW([q], lr=0.1, foreach=True)
    train(ours, [p], 2)
    p.data = p.data.clone()
    train(ours, [p], 2, 300)
    train(theirs, [q], 2)
    train(theirs, [q], 2, 300)
    assert_same(ours, [p], theirs, [q])


# -------------------------------------------------------------------- runs of sharded parameters


def flat_parameters(shapes):
    """Return parameters and gradients as views of two flat buffers, on one rank."""
    mesh = init_device_mesh("cpu", (1,))
    offsets, total = [], 0
    for shape in shapes:
        offsets.append(total)
        total += -(-torch.Size(shape).numel() // 256) * 256
    flat, grads = torch.zeros(total), torch.zeros(total)
    params = []
    for offset, shape in zip(offsets, shapes, strict=True):
        numel = torch.Size(shape).numel()
        placement = RaggedShard.from_range(len(shape), numel, offset, total, 1)
        pieces = []
        for buffer in (flat, grads):
            view = buffer[offset : offset + numel]
            view.copy_(torch.randn(numel))
            pieces.append(RaggedDTensor.from_local(view, mesh, placement, shape))
        params.append(nn.Parameter(pieces[0]))
        params[-1].grad = pieces[1]
    return params, flat


def count_calls(optimizer: AdamW) -> int:
    """Return the number of calls of lerp_ in one step: one for each run (all are short)."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        optimizer.step()
    return sum(event.count for event in profiler.key_averages() if event.key == "aten::lerp_")


def runs_of_a_step() -> None:
    torch.manual_seed(0)
    params, flat = flat_parameters([(7, 3), (300,), (5,), (16, 16), (2,)])
    optimizer = AdamW(params, lr=0.1, weight_decay=0.5, eps=0.0)
    assert count_calls(optimizer) == 1
    assert count_calls(optimizer) == 1
    params[2].grad = None  # cuts the run in two
    assert count_calls(optimizer) == 2
    for p in params:
        p.grad = RaggedDTensor.from_local(
            torch.ones(p.numel()), p.device_mesh, p.placement, p.shape
        )  # gradients apart from each other
    assert count_calls(optimizer) == len(params)
    assert [optimizer.state[p]["step"].item() for p in params] == [4, 4, 3, 4, 4]
    padding = torch.ones_like(flat, dtype=torch.bool)
    for p in params:
        local = p.to_local()
        start = local.storage_offset()
        padding[start : start + local.numel()] = False
    assert padding.any()
    assert torch.equal(flat[padding], torch.zeros(int(padding.sum())))  # eps=0 makes 0 / 0 there


def gradients_in_another_order() -> None:
    """As one buffer of a user's that holds gradients from the last parameter to the first."""
    shapes = [(7, 3), (300,), (5,)]
    (params, _), (others, _) = flat_parameters(shapes), flat_parameters(shapes)
    buffer, end = torch.randn(1000), 0
    for p, q in reversed(list(zip(params, others, strict=True))):
        q.data.copy_(p.detach())
        view, end = buffer[end : end + p.numel()], end + p.numel()
        for param, grad in ((p, view), (q, view.clone())):
            param.grad = RaggedDTensor.from_local(grad, p.device_mesh, p.placement, p.shape)
    for each in (params, others):
        AdamW(each, lr=0.1).step()
    for p, q in zip(params, others, strict=True):
        assert torch.equal(p.to_local(), q.to_local())


def test_gradients_in_one_buffer_but_another_order_are_no_run():
    run_ranks(gradients_in_another_order, 1)


def test_parameters_side_by_side_are_one_run_and_padding_stays_zero():
    run_ranks(runs_of_a_step, 1)
