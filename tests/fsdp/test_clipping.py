"""Gradient clipping with torch's own functions: one norm for all ranks, of the raw gradient."""

import itertools
import math

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, get_total_norm
from torch.testing import assert_close

from ranks import assert_as_one_process, on_ranks, run_ranks
from sharding import fully_shard
from small_models import (
    build,
    full,
    full_gradients,
    make_optimizer,
    set_gradients,
    shard,
    weights_of,
)

ORDERS = [1.0, 2.0, 3.0, math.inf, "inf", 0.0]


class Mixed(nn.Module):
    """Two dtypes, an ignored parameter, one without gradient, and pieces that are empty."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(10, 30), nn.Linear(30, 3).to(torch.bfloat16)])
        self.plain = nn.Parameter(torch.ones(7))
        self.unused = nn.Parameter(torch.ones(5, 5))


def mixed_gradients() -> tuple[Mixed, list[Tensor]]:
    """A model, sharded where there are ranks, with the same gradients in every process."""
    model = Mixed()
    if dist.is_initialized():
        fully_shard(model.layers[0], ignored_params={model.plain})
        fully_shard(model, ignored_params={model.plain})
    parameters = [p for name, p in model.named_parameters() if name != "unused"]
    set_gradients(parameters, full_gradients(parameters, 3))
    return model, parameters


def clipped_in_every_way() -> list[tuple[list[Tensor], list[Tensor]]]:
    """For each order and foreach: norms by every function of torch's, and clipped gradients."""
    found = []
    for order, foreach in itertools.product(ORDERS, (True, False, None)):
        model, parameters = mixed_gradients()
        norms = [
            get_total_norm([p.grad for p in parameters], order, foreach=foreach),
            clip_grad_norm_(iter(parameters[1:2]), 1e9, order, foreach=foreach),
            clip_grad_norm_(model.parameters(), 0.5, order, foreach=foreach),
        ]
        assert all(type(norm) is Tensor and norm.dim() == 0 for norm in norms)
        found.append((norms, [full(p.grad) for p in parameters]))
    return found


def test_norm_is_a_plain_number_the_same_on_every_rank_and_clips_alike():
    """pytorch#149768, pytorch#170862, miles_diffusion#35, pytorch#180346, torchrec#3199.

    The returned norm was one rank's part; a constant was added once for each rank; mixtures of
    plain and sharded gradients and of dtypes failed; the infinity norm was always 1; coefficients
    that differ between ranks in a bit make the pieces drift apart.
    """
    expected = clipped_in_every_way()
    for world_size in (2, 3):
        results = run_ranks(clipped_in_every_way, world_size)
        for found in results:
            # One ulp of bfloat16, where the coefficient differs in its last bit.
            assert_close(found, expected, atol=1e-6, rtol=1e-2)
            of_norms = [norms for norms, _ in found]
            assert_close(of_norms, [norms for norms, _ in expected], atol=1e-6, rtol=1e-5)
            assert_close(found, results[0], atol=0, rtol=0)


def pieces_by_hand(world_size: int) -> list[float]:
    """A gradient of which rank 0 has 256 elements of 1 (norm 16), and the others few or none."""
    layer = nn.Linear(16, 16, bias=False)
    layer.extra = nn.Parameter(torch.zeros(3))
    fully_shard(layer)
    layer.weight.grad, layer.extra.grad = (torch.ones_like(p) for p in (layer.weight, layer.extra))
    held = layer.weight.to_local().numel()
    counts = [0] * world_size
    dist.all_gather_object(counts, held)
    assert sorted(counts)[:-1] == [0] * (world_size - 1)
    norm = clip_grad_norm_(layer.parameters(), 1.0)
    return [norm.item(), float(norm), full(layer.weight.grad).unique().item()]


def test_norm_with_empty_pieces_counts_every_element_once():
    """miles_diffusion#35, pytorch#170862: 256 + 3 ones have norm sqrt(259) on each rank."""
    for norm, number, clipped in run_ranks(pieces_by_hand, 3, 3):
        assert norm == number == pytest.approx(math.sqrt(259), rel=1e-6)
        # The constant in the coefficient is added once.
        assert clipped == pytest.approx(1 / (math.sqrt(259) + 1e-6), rel=1e-6)


def clip_on_two_meshes(foreach: bool | None) -> tuple[float, list[Tensor]]:
    """Each block on its own dimension of a 2 by 2 mesh."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    model = build()
    for block, dimension in zip(model.blocks, "ab", strict=True):
        fully_shard(block, mesh=mesh[dimension])
    parameters = list(model.blocks.parameters())
    set_gradients(parameters, full_gradients(parameters, 0))
    norm = clip_grad_norm_(parameters, 1.0, foreach=foreach)
    return norm.item(), [full(p.grad) for p in parameters]


def test_norm_of_parameters_on_two_meshes_is_that_of_all():
    """pytorch#149768, pytorch#180346: gradients of two meshes could not be stacked."""
    parameters = list(build().blocks.parameters())
    set_gradients(parameters, full_gradients(parameters, 0))
    expected = clip_grad_norm_(parameters, 1.0).item()
    for foreach in (True, False):
        for norm, gradients in run_ranks(clip_on_two_meshes, 4, foreach):
            assert norm == pytest.approx(expected, rel=1e-5)
            for gradient, p in zip(gradients, parameters, strict=True):
                assert_close(gradient, p.grad, atol=1e-6, rtol=1e-4)


@on_ranks(2)
def test_nonfinite_norm_raises_on_every_rank_and_clips_nothing() -> None:
    """DeepSpeed#8432: the rank with the inf stopped, the others went on."""
    model, parameters = mixed_gradients()
    piece = model.layers[0].weight.grad.to_local()
    if dist.get_rank() == 0:
        piece[0] = float("inf")
    before = [full(p.grad) for p in parameters]
    for foreach in (True, False):
        with pytest.raises(RuntimeError, match="non-finite"):
            clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True, foreach=foreach)
    for p, value in zip(parameters, before, strict=True):
        assert torch.equal(full(p.grad), value)


def clip_values() -> list[Tensor]:
    model, parameters = mixed_gradients()
    for foreach in (True, False, None):
        clip_grad_value_(model.parameters(), 1.0, foreach=foreach)
        clip_grad_value_(iter(model.parameters()), 0.5, foreach=foreach)
    assert all(full(p.grad).abs().max() == 0.5 for p in parameters)
    return [full(p.grad) for p in parameters]


def test_values_are_clipped_as_in_one_process():
    """pytorch#183207: foreach of plain and sharded tensors in one list."""
    assert_as_one_process(clip_values, [3], atol=0, rtol=0)


@on_ranks(3)
def test_norm_of_zeros_and_of_nothing_is_zero():
    """torchrec#3809, torchrec#3891: the infinity norm was 1, or raised on an empty piece."""
    for order in (1.0, 2.0, math.inf):
        model = shard(build())
        assert clip_grad_norm_(model.parameters(), 1.0, order).item() == 0
        set_gradients(model.parameters(), [torch.zeros(p.shape) for p in model.parameters()])
        assert clip_grad_norm_(model.parameters(), 1.0, order).item() == 0
        assert not any(full(p.grad).any() for p in model.parameters())


def first_step(max_norm: float | None) -> tuple[float, dict[str, Tensor]]:
    """The first Muon step after large gradients; the reported norm and how far matrices moved."""
    model = build()
    if dist.is_initialized():
        shard(model)
    optimizer = make_optimizer("muon", model, weight_decay=0.0)
    before = weights_of(model)
    gradients = full_gradients(model.parameters(), 0)
    set_gradients(model.parameters(), [100 * g for g in gradients])
    norm = 0.0
    if max_norm is not None:
        norm = clip_grad_norm_(model.parameters(), max_norm).item()
    optimizer.step()
    after = weights_of(model)
    return norm, {k: after[k] - before[k] for k in after if "up.weight" in k or "down" in k}


def test_clipping_acts_on_the_raw_gradient_and_does_not_pin_the_step():
    """DeepSpeed#8439, DeepSpeed#7776: the orthogonalized update was clipped instead."""
    raw = math.sqrt(sum((100 * g).square().sum().item() for g in
                        full_gradients(build().parameters(), 0)))  # fmt: skip
    for results in ([first_step(1.0)], run_ranks(first_step, 2, 1.0)):
        for norm, moved in results:
            assert norm == pytest.approx(raw, rel=1e-5)
            _, unclipped = first_step(None)
            for name, update in moved.items():
                # The smallest norm that Muon divides by, 1e-7, is all that scale can change.
                assert_close(update, unclipped[name], atol=1e-4, rtol=0)
                rows, cols = update.shape
                rms = 0.1 * max(1, rows / cols) ** 0.5 * min(rows, cols) ** 0.5
                assert 0.6 * rms < update.norm() < 1.3 * rms
