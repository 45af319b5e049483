"""SOAP against its published order written out for one tensor; what is refused."""

import re

import pytest
import torch
from torch import Tensor, nn

from vfsdp_optim import SOAP
from vfsdp_optim.matrix_roots import next_eigenbases
from vfsdp_optim.testing import assert_resume_is_exact, assert_sharded_equals_unsharded

LAYOUTS = ("ours", "negotiated", "fsdp2", "hsdp", "ours_hsdp", "replicated")
SOME = ("ours", "fsdp2", "ours_hsdp")  # for what differs in states alone
SHAPES = [(21, 11), (5, 9), (24, 16)]


def written_out(weight: Tensor, grads: list[Tensor], *, frequency: int, sides: str) -> Tensor:
    """SOAP of one matrix as its authors' code orders it, with the average of gradients turned
    along with the bases; lr 0.1, decay 0.2, betas 0.9 and 0.95."""
    weight, beta1, beta2 = weight.clone(), 0.9, 0.95
    m, v = torch.zeros_like(weight), torch.zeros_like(weight)
    left, right = (torch.zeros(n, n).to(weight) for n in weight.shape)
    ql, qr = torch.empty_like(left), torch.empty_like(right)
    for t, grad in enumerate(grads):
        if t > 0:
            turned = ql.T @ grad @ qr
            m, v = beta1 * m + (1 - beta1) * turned, beta2 * v + (1 - beta2) * turned**2
            scale = (1 - beta2**t) ** 0.5 / (1 - beta1**t)
            weight = weight * (1 - 0.1 * 0.2) - 0.1 * scale * ql @ (m / (v.sqrt() + 1e-8)) @ qr.T
            m = ql @ m @ qr.T
        left = beta2 * left + (1 - beta2) * grad @ grad.T
        right = beta2 * right + (1 - beta2) * grad.T @ grad
        if t == 0:
            ql, qr = (torch.linalg.eigh(x).eigenvectors.flip(1) for x in (left, right))
            ql = ql if "l" in sides else torch.eye(len(ql)).to(weight)
            qr = qr if "r" in sides else torch.eye(len(qr)).to(weight)
        elif t % frequency == 0:
            if "l" in sides:
                order = (ql.T @ left @ ql).diagonal().argsort(descending=True)
                ql, v = torch.linalg.qr(left @ ql[:, order]).Q, v[order]
            if "r" in sides:
                order = (qr.T @ right @ qr).diagonal().argsort(descending=True)
                qr, v = torch.linalg.qr(right @ qr[:, order]).Q, v[:, order]
        if t > 0:
            m = ql.T @ m @ qr
    return weight


@pytest.mark.parametrize(("max_dim", "sides"), [(100, "lr"), (8, "r"), (1, "")])
def test_steps_are_the_published_order_over_changes_of_bases(max_dim, sides):
    """Emerging-Optimizers#68, HeavyBall#40. Later gradients swap the largest eigenvalues."""
    generator = torch.Generator().manual_seed(5)
    cols = 10 if sides == "lr" else 8  # else one side has a basis that is not unique
    weight = torch.randn(10, cols, generator=generator)
    stretch = torch.linspace(3, 1, 10)[:, None]
    noise = [torch.randn(10, cols, generator=generator) / 3 for _ in range(9)]
    grads = [
        (x + torch.eye(10, cols)) * (stretch if t < 4 else 4 * stretch.flip(0))
        for t, x in enumerate(noise)
    ]
    param = nn.Parameter(weight.clone())
    optimizer = SOAP(
        [param], lr=0.1, betas=(0.9, 0.95), weight_decay=0.2, max_dim=max_dim,
        precondition_frequency=2,
    )  # fmt: skip
    for grad in grads:
        param.grad = grad.clone()
        optimizer.step()
    assert ("left.0" in optimizer.state[param], "right.0" in optimizer.state[param]) == (
        "l" in sides, "r" in sides,
    )  # fmt: skip
    for dtype in (torch.float32, torch.float64):
        expected = written_out(weight.to(dtype), [g.to(dtype) for g in grads], frequency=2,
                               sides=sides)  # fmt: skip
        distance = (param.detach().to(dtype) - expected).norm() / (expected - weight).norm()
        assert distance < 2e-3, distance


def test_columns_of_a_basis_are_sorted_when_eigenvalues_swap():
    swapped, bad = torch.diag(torch.tensor([1.0, 5.0, 2.0])), torch.full((3, 3), torch.inf)
    bases, order, found = next_eigenbases(torch.stack([swapped, bad]), torch.eye(3).expand(2, 3, 3))
    assert found.tolist() == [True, False]
    assert order[0].tolist() == [1, 2, 0]
    torch.testing.assert_close(bases[0].abs(), torch.eye(3)[:, [1, 2, 0]])


def make_soap(module: nn.Module, **options) -> SOAP:
    options = {"block_size": 8, "precondition_frequency": 2, **options}
    return SOAP(module.named_parameters(), lr=0.02, **options)


def make_whole_8bit_soap(module: nn.Module) -> SOAP:
    return make_soap(module, states="8bit", block_size=None, max_dim=64)


@pytest.mark.parametrize(
    ("make_optimizer", "shapes", "layouts"),
    [(make_soap, SHAPES, LAYOUTS), (make_whole_8bit_soap, [(96, 64), (21, 11)], SOME)],
)
def test_sharded_equals_unsharded_in_every_layout(make_optimizer, shapes, layouts):
    assert_sharded_equals_unsharded(
        make_optimizer, shapes=shapes, layouts=layouts, world_sizes=(3, 4)
    )
    assert_resume_is_exact(make_optimizer, shapes=shapes, layouts=SOME)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (dict(max_dim=0),
         "max_dim: expected a number of rows or columns >= 1, got 0; without any basis it is Adam: "
         'algorithm="adamw"'),
        (dict(shampoo_beta=1.0),
         "shampoo_beta: expected a number in [0, 1) or None for betas[1], got 1.0"),
        (dict(betas=(0.9, 1.0)), "betas: expected two numbers in [0, 1), got (0.9, 1.0)"),
        (dict(block_size="all"),
         "block_size: expected a number of rows and columns >= 1, (rows, columns), or None for "
         "whole matrices, got 'all'"),
    ],
)  # fmt: skip
def test_bad_options_are_refused_by_name_with_the_cure(options, error):
    with pytest.raises(ValueError, match=f"^{re.escape(f'param group 0: {error}')}$"):
        SOAP([nn.Parameter(torch.ones(4, 4))], **options)
