"""RaggedDTensor as parameter, gradient and optimizer state; moves between layouts. Gloo ranks."""

import copy
import gc
import io
import itertools
import math
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.profiler import ProfilerActivity, profile

from ranks import distributed_examples, on_ranks, run_ranks
from sharding.tensor import specs
from sharding.tensor.placement import RaggedShard
from sharding.tensor.ragged_tensor import RaggedDTensor, distribute_ragged
from small_models import full

WORLD_SIZES = [1, 2, 3, 5]


def mesh_of(world_size: int) -> DeviceMesh:
    return init_device_mesh("cpu", (world_size,))


def ragged(full: Tensor, units: tuple[int, ...], unit_numel: int = 1) -> RaggedDTensor:
    placement = RaggedShard(tuple(range(full.dim())), units, unit_numel)
    return distribute_ragged(full, mesh_of(len(units)), placement)


def parameter(full: Tensor, units: tuple[int, ...], grad: Tensor | None = None) -> nn.Parameter:
    param = nn.Parameter(ragged(full, units))
    if grad is not None:
        param.grad = ragged(grad, units)
    return param


def random(shape: tuple[int, ...], seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@st.composite
def layouts(draw: st.DrawFn, world_size: int, numel: int) -> tuple[tuple[int, ...], int]:
    """Units of every rank and the size of a unit; empty ranks and a short last unit included."""
    unit_numel = draw(st.integers(1, 4))
    units = -(-numel // unit_numel)
    cuts = sorted(draw(st.tuples(*[st.integers(0, units)] * (world_size - 1))))
    sizes = [b - a for a, b in zip([0, *cuts], [*cuts, units], strict=True)]
    return tuple(sizes), unit_numel


@st.composite
def moves(draw: st.DrawFn) -> tuple[Any, ...]:
    """World size, and for a few tensors their shape, dtype, seed and two layouts."""
    world_size = draw(st.sampled_from(WORLD_SIZES))
    cases = []
    for _ in range(draw(st.integers(1, 8))):
        shape = tuple(draw(st.lists(st.integers(0, 6), max_size=3)))
        numel = math.prod(shape)
        dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.bool, torch.int64]))
        pair = [draw(layouts(world_size, numel)) for _ in range(2)]
        cases.append((shape, dtype, draw(st.integers(0, 99)), *pair))
    return world_size, cases


def check_moves(cases: list[tuple[Any, ...]]) -> None:
    for shape, dtype, seed, source, target in cases:
        full = (random(shape, seed) * 3).to(dtype)
        x = ragged(full, *source)
        assert x.full_tensor().equal(full)
        assert x.full_tensor().dtype == dtype
        replicated = x.redistribute(placements=[Replicate()])
        assert type(replicated) is DTensor
        assert replicated.to_local().equal(full)
        placement = RaggedShard(tuple(range(len(shape))), *target)
        moved = x.redistribute(x.device_mesh, [placement])
        assert type(moved) is RaggedDTensor
        assert moved.placements == (placement,)
        assert moved.to_local().equal(full.reshape(-1)[slice(*moved.bounds)])
        if shape:
            rows = x.redistribute(placements=[Shard(0)])
            stock = distribute_tensor(full, x.device_mesh, [Shard(0)], src_data_rank=None)
            assert (type(rows), rows.placements) == (DTensor, (Shard(0),))
            assert rows.to_local().equal(stock.to_local())
            assert rows.shape == full.shape


@distributed_examples
@given(moves())
def test_redistribute_moves_every_element_to_every_layout(case: tuple[Any, ...]) -> None:
    world_size, cases = case
    run_ranks(check_moves, world_size, cases)


@on_ranks(5)
def test_full_tensor_of_a_tensor_on_one_rank_does_not_pad():
    # A padded all-gather would need the world size times the memory of the tensor.
    x = ragged(torch.arange(6.0), (0, 0, 6, 0, 0))
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
        full = x.full_tensor()
    assert full.tolist() == list(range(6))
    assert [
        event.cpu_memory_usage for event in trace.key_averages() if event.cpu_memory_usage > 24
    ] == []


@on_ranks(2)
def test_redistribute_refuses_what_it_would_not_do() -> None:
    x = ragged(torch.ones(4, 3), (5, 7))
    for placements in ([Shard(1)], [], [Replicate(), Replicate()], None):
        with pytest.raises(NotImplementedError, match=r"Shard\(0\).*full_tensor"):
            x.redistribute(placements=placements)
    for options in ({"async_op": True}, {"forward_dtype": torch.float64}):
        with pytest.raises(NotImplementedError, match=next(iter(options))):
            x.redistribute(placements=[Replicate()], **options)
    with pytest.raises(ValueError, match="12 elements"):
        x.redistribute(placements=[RaggedShard((0, 1), (5, 6))])
    with pytest.raises(NotImplementedError, match="grad_placements"):
        x.full_tensor(grad_placements=[Shard(0)])
    with pytest.raises(NotImplementedError, match="grad_placements"):
        x.to_local(grad_placements=[Replicate()])
    assert x.redistribute(placements=[RaggedShard((0, 1), (5, 7))]) is x


@on_ranks(2)
def test_from_local_rejects_what_is_not_the_piece_of_this_rank() -> None:
    mesh, placement = mesh_of(2), RaggedShard((0, 1), (5, 7))
    numel = 5 if mesh.get_local_rank() == 0 else 7
    good = torch.ones(numel)
    x = RaggedDTensor.from_local(good, mesh, placement, (4, 3))
    assert (x.shape, x.stride(), x.numel()) == ((4, 3), (3, 1), 12)
    assert x.to_local() is good
    assert isinstance(x, DTensor)
    for local in (torch.ones(6), torch.ones(numel, 1), torch.ones(2 * numel)[::2]):
        with pytest.raises(ValueError, match=rf"contiguous tensor of {numel} elements.*rank"):
            RaggedDTensor.from_local(local, mesh, placement, (4, 3))
        with pytest.raises(ValueError, match=rf"contiguous tensor.*of shape \({numel},\) as"):
            x.over(local)
    codes = x.over(torch.ones(numel, dtype=torch.uint8))
    assert (codes.placements, codes.shape, codes.dtype) == (x.placements, x.shape, torch.uint8)
    with pytest.raises(ValueError, match="requires_grad=True"):
        x.over(good.clone().requires_grad_())
    with pytest.raises(ValueError, match="requires_grad=True"):
        RaggedDTensor.from_local(good.clone().requires_grad_(), mesh, placement, (4, 3))
    with pytest.raises(ValueError, match="3 ranks"):
        RaggedDTensor.from_local(good, mesh, RaggedShard((0, 1), (5, 7, 0)), (4, 3))
    with pytest.raises(ValueError, match="15 elements"):
        RaggedDTensor.from_local(good, mesh, placement, (5, 3))


@on_ranks(2)
def test_parameter_keeps_its_class_and_its_piece() -> None:
    full = random((4, 3))
    param = parameter(full, (5, 7), grad=2 * full)
    assert type(param) is RaggedDTensor
    assert isinstance(param, nn.Parameter)
    assert param.is_leaf
    assert param.grad.full_tensor().equal(2 * full)
    assert not param.requires_grad_(False).requires_grad
    param.requires_grad_(True)
    with pytest.raises(RuntimeError, match="copy_"):
        param.data = torch.zeros_like(param)

    twin = copy.deepcopy(param)
    assert isinstance(twin, nn.Parameter)
    assert type(twin.grad) is RaggedDTensor
    with torch.no_grad():
        twin.zero_()
        twin.grad.zero_()
    assert param.full_tensor().equal(full)
    assert param.grad.full_tensor().equal(2 * full)

    file = io.BytesIO()
    torch.save(param.detach(), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert type(loaded) is RaggedDTensor
    assert loaded.placements == param.placements
    assert loaded.full_tensor().equal(full)
    assert "RaggedShard(dims=(0, 1), local_units=(5, 7)" in repr(param)

    shared = ragged(full, (5, 7)).share_memory_()
    assert shared.to_local().is_shared()
    inner, spec = shared.__tensor_flatten__()
    tensors = {name: getattr(shared, name) for name in inner}
    rebuilt = RaggedDTensor.__tensor_unflatten__(tensors, spec, shared.shape, shared.stride())
    assert type(rebuilt) is RaggedDTensor
    assert rebuilt.full_tensor().equal(full)


@on_ranks(2)
def test_export_of_a_sharded_tensor_names_what_to_export() -> None:
    """accelerate#3487, transformers#36434: safetensors failed on storages, or wrote pieces."""
    x = parameter(random((4, 3)), (5, 7))
    net = nn.ParameterDict({"x": x})
    exports = [
        lambda: safetensors.torch.save({"x": x.detach()}),
        lambda: safetensors.torch.save({"x": x.detach().cpu().clone()}),
        lambda: safetensors.torch.save_model(net, "never written"),
        lambda: x.detach().numpy(),
        lambda: x.detach().numpy(force=True),
        lambda: np.asarray(x.detach()),
        lambda: x.tolist(),
    ]
    for export in exports:
        with pytest.raises(
            RuntimeError, match=r"no memory of its own.*full_tensor\(\), or to save"
        ):
            export()
    assert x.full_tensor().tolist() == random((4, 3)).tolist()


@on_ranks(2)
def test_module_loads_full_and_ragged_tensors_and_casts() -> None:
    full = random((4, 3))
    linear = nn.Linear(3, 4, bias=False)
    linear.weight = parameter(full, (0, 12))
    linear.load_state_dict({"weight": 2 * full})
    assert linear.weight.full_tensor().equal(2 * full)
    linear.load_state_dict({"weight": ragged(3 * full, (0, 12))})
    assert linear.weight.full_tensor().equal(3 * full)
    before = linear.weight
    linear.double()
    assert linear.weight is before
    assert (linear.weight.dtype, linear.weight.to_local().dtype) == (torch.float64,) * 2
    assert linear.weight.full_tensor().equal((3 * full).double())


PATHS: dict[str, Callable[[Tensor], Tensor]] = {
    "to_local": lambda w: w.to_local(),
    "full_tensor": lambda w: w.full_tensor(),
    "Replicate": lambda w: w.redistribute(placements=[Replicate()]).to_local(),
    "Shard(0)": lambda w: w.redistribute(placements=[Shard(0)]).to_local(),
    "ragged": lambda w: w.redistribute(placements=[RaggedShard((0, 1), (7, 0, 5))]).to_local(),
    "element-wise": lambda w: (w * 2 / 2).clone().to_local(),
}


@on_ranks(3)
def test_gradient_comes_back_in_the_layout_of_the_parameter() -> None:
    full = random((4, 3))
    for name, path in PATHS.items():
        param = parameter(full, (5, 1, 6))
        path(param).square().sum().backward()
        assert type(param.grad) is RaggedDTensor, name
        assert param.grad.placements == param.placements, name
        torch.testing.assert_close(param.grad.full_tensor(), 2 * full)
        path(param).square().sum().backward()  # accumulates
        torch.testing.assert_close(param.grad.full_tensor(), 4 * full)
    param = parameter(full, (5, 1, 6))
    param.norm().backward()
    torch.testing.assert_close(param.grad.full_tensor(), full / full.norm())
    with torch.no_grad():
        assert param.to_local() is param._local_tensor


ORDERS = [2.0, 1.0, 0.0, 3.0, -1.0, "inf", float("-inf")]


def check_clip(order: float | str, foreach: bool | None, units: list[tuple[int, ...]]) -> None:
    shapes = [(4, 3), (5,), (2, 2)]
    grads = [3 * random(shape, seed) + 4 for seed, shape in enumerate(shapes)]
    ours = [parameter(g, u, grad=g) for g, u in zip(grads[:2], units, strict=True)]
    params = [ours[0], nn.Parameter(grads[2].clone()), ours[1], nn.Parameter(torch.ones(3))]
    params[1].grad = grads[2].clone()  # a plain parameter among ragged ones; one without gradient
    expected = [nn.Parameter(g.clone()) for g in grads]
    for param, grad in zip(expected, grads, strict=True):
        param.grad = grad.clone()
    norm = nn.utils.clip_grad_norm_((p for p in params), 1.0, order, foreach=foreach)
    oracle = nn.utils.clip_grad_norm_(expected, 1.0, order, foreach=False)
    assert type(norm) is Tensor
    found = [full(param.grad) for param in (ours[0], ours[1], params[1])]
    wanted = [param.grad for param in expected]
    torch.testing.assert_close(
        [norm, *found], [oracle, *wanted], msg=lambda text: f"{order} {foreach}: {text}"
    )


def check_all_clips(units: list[tuple[int, ...]]) -> None:
    for order, foreach in itertools.product(ORDERS, (True, False, None)):
        check_clip(order, foreach, units)


CUTS = [
    [(12,), (5,)],
    [(5, 7), (0, 5)],
    [(0, 12, 0), (1, 1, 3)],
    [(3, 0, 9, 0, 0), (0, 0, 0, 0, 5)],
]


@pytest.mark.parametrize("units", CUTS)
def test_clip_grad_norm_equals_one_process(units):
    run_ranks(check_all_clips, len(units[0]), units)


def check_nonfinite(value: float) -> list[float]:
    grad = torch.ones(4)
    grad[0] = value
    x = ragged(grad, (1, 0, 3))
    norms = [torch.linalg.vector_norm(x, order) for order in (2, math.inf, -math.inf)]
    return [float(n) for n in (*norms, *torch._foreach_norm([x], math.inf), x.max(), x.amin())]


def test_norms_of_nonfinite_gradients_do_not_depend_on_who_holds_them() -> None:
    for nan in run_ranks(check_nonfinite, 3, math.nan):
        assert all(math.isnan(value) for value in nan)
    assert (
        run_ranks(check_nonfinite, 3, math.inf)
        == [[math.inf, math.inf, 1, math.inf, math.inf, 1]] * 3
    )


def check_number_of_collectives(count: int) -> int:
    tensors = [ragged(torch.ones(3, 2), units) for units in [(2, 4), (0, 6)] * count]
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        norms = torch._foreach_norm([*tensors, torch.ones(2)])
    assert [float(n) for n in norms] == pytest.approx([6**0.5] * 2 * count + [2**0.5])
    return sum("c10d::" in event.name for event in trace.events())


def test_foreach_norm_packs_the_whole_list_into_one_collective() -> None:
    assert run_ranks(check_number_of_collectives, 2, 1) == [1, 1]
    assert run_ranks(check_number_of_collectives, 2, 8) == [1, 1]


OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "AdamW for-loop": (torch.optim.AdamW, {"foreach": False}),
    "AdamW foreach": (torch.optim.AdamW, {"foreach": True, "amsgrad": True}),
    "AdamW default": (torch.optim.AdamW, {}),
    "AdamW fused": (torch.optim.AdamW, {"fused": True}),
    "SGD for-loop": (torch.optim.SGD, {"momentum": 0.9, "foreach": False}),
    "SGD foreach": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "foreach": True}),
    "SGD fused": (torch.optim.SGD, {"momentum": 0.9, "fused": True}),
    "Adamax": (torch.optim.Adamax, {}),
}


def check_optimizer(name: str, units: list[tuple[int, ...]]) -> None:
    optimizer_class, options = OPTIMIZERS[name]
    options = {"lr": 0.1, "weight_decay": 0.5, **options}
    fulls = [random((4, 3)), random((5,), 1), random((2, 2), 2)]
    params = [parameter(f, u) for f, u in zip(fulls[:2], units, strict=True)]
    # A plain parameter in the same group: optimizers#79, pytorch#183207.
    params.insert(1, nn.Parameter(fulls[2].clone()))
    expected = [nn.Parameter(fulls[i].clone()) for i in (0, 2, 1)]
    ours, theirs = optimizer_class(params, **options), optimizer_class(expected, **options)
    for step in range(3):
        for param, want in zip(params, expected, strict=True):
            want.grad = random(tuple(want.shape), seed=10 + step)
            if isinstance(param, RaggedDTensor):
                param.grad = ragged(want.grad, param.placements[0].local_units)
            else:
                param.grad = want.grad.clone()
        ours.step()
        theirs.step()
    # Fused kernels treat the tail of a tensor, which is elsewhere in a piece, in another way.
    close = {"rtol": 1e-6, "atol": 1e-7} if "fused" in name else {"rtol": 0, "atol": 0}
    for param, want in zip(params, expected, strict=True):
        got = [param, *ours.state[param].values()]
        for tensor, target in zip(got, [want, *theirs.state[want].values()], strict=True):
            if target.shape == want.shape:
                assert isinstance(tensor, RaggedDTensor) == isinstance(param, RaggedDTensor)
            torch.testing.assert_close(
                full(tensor), target, msg=lambda text: f"{name}: {text}", **close
            )


def check_optimizers(units: list[tuple[int, ...]]) -> None:
    for name in OPTIMIZERS:
        check_optimizer(name, units)


@pytest.mark.parametrize("units", CUTS)
def test_optimizer_of_torch_equals_one_process(units):
    run_ranks(check_optimizers, len(units[0]), units)


@on_ranks(2)
def test_scalars_of_torchs_dtensor_take_part() -> None:
    full = random((4, 3))
    x, mesh = ragged(full, (5, 7)), mesh_of(2)
    factor = DTensor.from_local(torch.tensor(0.5), mesh, [Replicate()])
    assert (x * factor).full_tensor().equal(full / 2)
    with pytest.raises(NotImplementedError, match=r"Shard\(dim=0\)|shape"):
        x * distribute_tensor(full, mesh, [Shard(0)])
    stock = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
    ours, theirs = torch._foreach_norm([x, stock])
    torch.testing.assert_close(ours, full.norm())
    assert theirs.full_tensor().item() == pytest.approx(2, rel=1e-7)


def test_transposed_view_is_neither_saved_nor_cut_anew_by_the_order_of_its_dims() -> None:
    assert run_ranks(moves_of_transposed_view, 1) == [None]


def moves_of_transposed_view() -> None:
    x = ragged(random((4, 3)), (12,))
    turned = x.t()
    assert turned.stride() == (1, 3)
    assert turned.t().placement == x.placement
    cuts = {
        "redistribute": lambda: turned.redistribute(placements=[Shard(0)]),
        "a checkpoint": lambda: turned.__create_chunk_list__(),
    }
    for name, cut in cuts.items():
        with pytest.raises(NotImplementedError, match=f"^{name}: expected no transposed view, got"):
            cut()
    with pytest.raises(ValueError, match="flattened in the order of its dims, got RaggedShard"):
        RaggedDTensor.from_local(x.to_local(), x.device_mesh, turned.placement, turned.shape)


def test_gradients_of_a_transposed_parameter_have_its_layout() -> None:
    """`t()` of sharded parameters in penalties, as pytorch#144289 has `sum` of them."""
    assert run_ranks(transposed_penalty, 2) == [True, True]


def transposed_penalty() -> bool:
    full = random((4, 3)).requires_grad_()
    x = ragged(full, (5, 7)).requires_grad_()
    for w in (full, x):
        (w.t().square().sum(0) * 3).sum().backward()
        (w.T.norm(dim=0) + w.mT.mean(1).sum()).sum().backward()
    assert isinstance(x.grad, RaggedDTensor)
    assert x.grad.placement == x.placement
    torch.testing.assert_close(x.grad.full_tensor(), full.grad)
    return True


@on_ranks(2)
def test_record_of_a_layout_is_shared_and_goes_with_the_last_tensor_that_has_it() -> None:
    # It holds the mesh, and with it process groups that a user has destroyed.
    mesh = mesh_of(2)
    placement = RaggedShard((0, 1), (7, 7), 1)

    def made() -> RaggedDTensor:
        return RaggedDTensor.from_local(torch.zeros(7), mesh, placement, (14, 1))

    first, second = made(), made()
    assert first._spec is second._spec
    seen, known = weakref.ref(first._spec), len(specs._known)
    del first
    assert made()._spec is second._spec
    del second
    gc.collect()
    assert seen() is None
    assert len(specs._known) == known - 1
