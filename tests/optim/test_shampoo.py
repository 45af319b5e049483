"""Shampoo against its formulas written out for one tensor; what is refused."""

import re

import pytest
import torch
from torch import Tensor, nn

from sharding import FullMatrix, RowPanels
from vfsdp_optim import Shampoo, param_groups
from vfsdp_optim.matrix_roots import inverse_roots
from vfsdp_optim.shampoo import ShampooAlgorithm
from vfsdp_optim.testing import assert_resume_is_exact, assert_sharded_equals_unsharded

LAYOUTS = ("ours", "negotiated", "fsdp2", "hsdp", "ours_hsdp", "replicated")
SOME = ("ours", "fsdp2", "ours_hsdp")  # for what differs in states alone
# Blocks of 8 x 8 do not divide these; the second has fewer rows than ranks hold panels.
SHAPES = [(21, 11), (5, 9), (24, 16)]


def written_out(
    weight: Tensor, grads: list[Tensor], size: int, *, frequency: int, grafting: str | None
) -> Tensor:
    """Shampoo of one matrix, block by block, in the dtype of `weight`; lr 0.1, decay 0.2."""
    weight = weight.clone()
    beta1, beta2, eps = 0.9, 0.95, 1e-8
    number = -1
    for rows in range(0, weight.shape[0], size):
        for cols in range(0, weight.shape[1], size):
            number += 1
            part = slice(rows, rows + size), slice(cols, cols + size)
            w = weight[part].clone()
            m, v = torch.zeros_like(w), torch.zeros_like(w)
            left, right = torch.zeros(len(w), len(w)), torch.zeros(w.shape[1], w.shape[1])
            left, right, roots = left.to(w), right.to(w), None
            # A panel's blocks are numbered from the number of the panel on.
            turn = rows // size + cols // size
            for t, grad in enumerate((grad[part] for grad in grads), start=1):
                left = beta2 * left + (1 - beta2) * grad @ grad.T
                right = beta2 * right + (1 - beta2) * grad.T @ grad
                m, v = beta1 * m + (1 - beta1) * grad, beta2 * v + (1 - beta2) * grad * grad
                mean = m / (1 - beta1**t)
                if (t - 1 - turn) % frequency == 0 or (grafting is None and t == 1):
                    roots = []
                    for factor in (left, right):
                        values, vectors = torch.linalg.eigh(factor / (1 - beta2**t))
                        floor = max(eps**2, len(factor) * 2.0**-23 * float(values.max()))
                        powers = torch.diag((values.clamp_min(0) + floor) ** -0.25)
                        roots.append(vectors @ powers @ vectors.T)
                adam = mean / ((v / (1 - beta2**t)).sqrt() + eps)
                update = {"adam": adam, "sgd": mean, None: mean}[grafting]
                if roots is not None:
                    both = roots[0] @ mean @ roots[1]
                    length = both.norm() if grafting is None else update.norm()
                    update = both * (length / both.norm())
                w = w * (1 - 0.1 * 0.2) - 0.1 * update
            weight[part] = w
    return weight


@pytest.mark.parametrize("grafting", ["adam", "sgd", None])
@pytest.mark.parametrize(("size", "frequency"), [(8, 3), (8, 1), (64, 2)])
def test_steps_are_the_formulas_written_out(grafting, size, frequency):
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(21, 11, generator=generator)
    grads = [torch.randn(21, 11, generator=generator) for _ in range(7)]
    param = nn.Parameter(weight.clone())
    optimizer = Shampoo(
        [param], lr=0.1, weight_decay=0.2, block_size=size, grafting=grafting,
        precondition_frequency=frequency,
    )  # fmt: skip
    for grad in grads:
        param.grad = grad.clone()
        optimizer.step()
    options = dict(frequency=frequency, grafting=grafting)
    # Without grafting, what lies outside of the gradients seen so far is as large as rounding.
    tolerance = 2e-3 if grafting else 5e-2
    for dtype in (torch.float32, torch.float64):
        expected = written_out(weight.to(dtype), [g.to(dtype) for g in grads], size, **options)
        distance = (param.detach().to(dtype) - expected).norm() / (expected - weight).norm()
        assert distance < tolerance, distance


@pytest.mark.parametrize("method", ["eigh", "newton"])
@pytest.mark.parametrize("order", [2, 4])
def test_root_is_the_inverse_root(method, order):
    """HeavyBall#40: an exponent that is off by a factor is right where the root is the identity."""
    generator = torch.Generator().manual_seed(0)
    basis = torch.linalg.qr(torch.randn(20, 20, generator=generator)).Q
    values = torch.logspace(-1, 1, 20)
    matrix = (basis * values) @ basis.T
    bad = torch.full((20, 20), float("nan"))
    three = torch.stack([matrix, torch.zeros(20, 20), bad])
    roots, found = inverse_roots(three, order, 1e-12, method)
    assert found.tolist() == [True, False, False]
    root = roots[0]
    expected = (basis * values ** (-1 / order)) @ basis.T
    assert (root - expected).norm() / expected.norm() < 2e-3


@pytest.mark.parametrize("epsilon", [0.0, 1.0])
@pytest.mark.parametrize("method", ["eigh", "newton"])
def test_root_of_large_and_of_small_matrices(method, epsilon):
    matrix = torch.tensor([[2.0, 1.0], [1.0, 2.0]])  # has eigenvalues 3 and 1
    large, small = (3 + epsilon) ** -0.25, (1 + epsilon) ** -0.25
    expected = torch.tensor([[large + small, large - small], [large - small, large + small]]) / 2
    for scale in (1e-24, 1.0, 1e24):
        (root,), _ = inverse_roots(matrix[None] * scale, 4, epsilon * scale, method)
        torch.testing.assert_close(root * scale**0.25, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("matrices", "structure"),
    [
        (None, RowPanels(8)),
        ("o ... -> o (...)", RowPanels(8)),
        ("e m n -> e m n", RowPanels(8, batch_dims=1)),
        ("e n m -> e m n", FullMatrix.parse("e n m -> e m n")),
        ("(q m) n -> q m n; q=3", FullMatrix.parse("(q m) n -> q m n; q=3")),
    ],
)
def test_units_are_panels_of_rows_where_rows_are_runs(matrices, structure):
    group = {"matrices": matrices, "block_size": (8, 4)}
    assert ShampooAlgorithm().structure(group, torch.Size([6, 9, 4])) == structure


def test_one_huge_finite_gradient_does_not_end_the_run():
    param = nn.Parameter(torch.ones(8, 12))
    optimizer = Shampoo([param], block_size=8, precondition_frequency=1)
    for scale in (1e25, 1.0, 1.0, 1.0, 1.0, 1.0):
        param.grad = scale * torch.ones(8, 12)
        optimizer.step()
    assert param.isfinite().all()


def test_zero_gradients_move_nothing():
    """aorta#30, HeavyBall#40: a zero gradient gave NaN."""
    param = nn.Parameter(torch.ones(12, 8))
    optimizer = Shampoo([param], block_size=8, precondition_frequency=1)
    for _ in range(3):
        param.grad = torch.zeros(12, 8)
        optimizer.step()
    assert torch.equal(param.data, torch.ones(12, 8))
    param.grad = torch.ones(12, 8)
    optimizer.step()
    assert (param < 1).all()


def make_shampoo(module: nn.Module, **options) -> Shampoo:
    options = {"block_size": 8, "precondition_frequency": 3, "weight_decay": 0.1, **options}
    return Shampoo(module.named_parameters(), lr=0.05, **options)


def make_whole_shampoo(module: nn.Module) -> Shampoo:
    return make_shampoo(module, block_size=None, root="newton", on_nonfinite="skip")


@pytest.mark.parametrize(
    ("make_optimizer", "shapes", "layouts"),
    [(make_shampoo, SHAPES, LAYOUTS), (make_whole_shampoo, SHAPES[:2], SOME)],
)
def test_sharded_equals_unsharded_in_every_layout(make_optimizer, shapes, layouts):
    """optimizers#149, #271, #278: refreshes at other steps on ranks, or after a resume."""
    assert_sharded_equals_unsharded(
        make_optimizer, shapes=shapes, layouts=layouts, world_sizes=(3, 4), steps=4
    )
    assert_resume_is_exact(make_optimizer, shapes=shapes, layouts=SOME)


def test_roots_that_fail_keep_the_last_ones_and_raise_in_the_end(monkeypatch):
    param = nn.Parameter(torch.ones(8, 8))
    optimizer = Shampoo([("w", param)], block_size=8, precondition_frequency=1)
    param.grad = torch.eye(8)
    optimizer.step()
    root = optimizer.state[param]["left_root.0"].clone()
    nothing = torch.zeros(1, 8, 8), torch.zeros(1, dtype=torch.bool)
    monkeypatch.setattr("vfsdp_optim.shampoo.inverse_roots", lambda *args: nothing)
    for _ in range(4):
        optimizer.step()
    assert torch.equal(optimizer.state[param]["left_root.0"], root)
    ungrafted = Shampoo([nn.Parameter(torch.ones(8, 8))], lr=0.1, weight_decay=0.0, grafting=None)
    (start,) = ungrafted.param_groups[0]["params"]
    start.grad = torch.eye(8)
    ungrafted.step()  # by the mean of gradients
    torch.testing.assert_close(start.detach(), torch.ones(8, 8) - 0.1 * torch.eye(8))
    before = param.detach().clone()
    with pytest.raises(
        RuntimeError, match=r"failed: w: the roots of block 0 failed more than 3 ti"
    ):
        optimizer.step()
    assert torch.equal(param, before)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (dict(block_size=0), "block_size: expected a number of rows and columns >= 1"),
        (dict(block_size=(8, 0)), "block_size: expected a number of rows and columns >= 1"),
        (dict(grafting=None, start_preconditioning_step=5), "start_preconditioning_step=5 without"),
        (dict(grafting="rms"), "grafting: expected one of ('adam', 'sgd', None), got 'rms'"),
        (dict(root="svd"), "root: expected one of ('eigh', 'newton'), got 'svd'"),
        (dict(precondition_frequency=0), "precondition_frequency: expected a number of steps"),
        (dict(on_nonfinite="ignore"), 'on_nonfinite="ignore" would leave infinities'),
    ],
)
def test_bad_options_are_refused_by_name(options, error):
    with pytest.raises(ValueError, match=re.escape(error)):
        Shampoo([nn.Parameter(torch.ones(4, 4))], **options)


def test_parameter_without_matrices_is_refused_with_the_cure():
    with pytest.raises(ValueError, match="shampoo preconditions matrices, and got shape"):
        Shampoo([nn.Parameter(torch.ones(2, 4, 4))])
    fused = {"params": [("w", nn.Parameter(torch.ones(4, 4)))], "matrices": "(q m) n -> q m n; q=3"}
    with pytest.raises(ValueError, match=r"^w: FullMatrix.*cannot find the matrices"):
        Shampoo([fused])
    groups = param_groups(nn.Conv2d(4, 8, 3), algorithm="shampoo")
    optimizer = Shampoo(groups, block_size=4)
    assert [group["algorithm"] for group in optimizer.param_groups] == ["shampoo", "adamw"]
    assert optimizer.state[groups[0]["params"][0][1]]["right.1"].shape == (1, 36, 4)
