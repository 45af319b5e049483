"""AdamW: torch's bits on plain tensors, state that can be saved and resumed, and its limits."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from ranks import on_ranks
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


def test_parameter_whose_memory_was_replaced_trains_on_with_its_state():
    (p,), (q,) = parameters([(300,)]), parameters([(300,)])
    ours, theirs = AdamW([p], lr=0.1), torch.optim.AdamW([q], lr=0.1, foreach=True)
    train(ours, [p], 2)
    p.data = p.data.clone()
    train(ours, [p], 2, 300)
    train(theirs, [q], 2)
    train(theirs, [q], 2, 300)
    assert_same(ours, [p], theirs, [q])


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


@on_ranks(1)
def test_gradients_in_one_buffer_but_another_order_are_no_run():
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


@on_ranks(1)
def test_parameters_side_by_side_are_one_run_and_padding_stays_zero():
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
