"""Roots, and the updates of Shampoo and SOAP for one matrix, against written-out references."""

import pytest
import torch
from torch import Tensor

from vfsdp_optim.block_grid import block_grid, due_blocks
from vfsdp_optim.matrix_roots import eigenbasis, inverse_root, next_eigenbasis
from vfsdp_optim.shampoo_update import (
    ShampooNumbers,
    SoapNumbers,
    shampoo_update,
    soap_sides,
    soap_update,
)

TOLERANCE = {torch.float64: 1e-8, torch.float32: 2e-3}


def spd(n, count=1, seed=0, dtype=torch.float64):
    x = torch.randn(count, n, 3 * n, dtype=dtype, generator=torch.Generator().manual_seed(seed))
    return x @ x.mT / (3 * n)


def gradients(rows, cols, steps, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(rows, cols, dtype=torch.float64, generator=generator).to(dtype)
        for _ in range(steps)
    ]


def states_for(grid, rows, cols, dtype, kinds, sides=("left", "right")):
    states = {key: torch.zeros(rows, cols, dtype=dtype) for key in ("momentum", "moment")}
    for side in sides:
        for key in (side, *(f"{side}_{kind}" for kind in kinds)):
            states[key] = torch.zeros(grid.sides(side), dtype=dtype)
    return {**states, "failures": torch.zeros(grid.count, dtype=dtype)}


def shampoo_numbers(step=1, **changes):
    numbers = dict(index=0, betas=(0.9, 0.95), eps=1e-8, start=2, frequency=2, grafting="adam")
    return ShampooNumbers(step=step, root="eigh", **{**numbers, **changes})


def root_by_eigh(matrix: Tensor, eps: float) -> Tensor:
    """Return (A + e I)^(-1/4), e relative, in the dtype of A."""
    values, vectors = torch.linalg.eigh(matrix)
    kind = torch.float32 if matrix.dtype == torch.float32 else torch.float64
    eps = max(eps, matrix.size(0) * torch.finfo(kind).eps * float(values[-1]))
    return vectors @ torch.diag((values.clamp(min=0) + eps) ** -0.25) @ vectors.T


class ReferenceShampoo:
    """One block, step by step as the method is written, with a root whenever it is told."""

    def __init__(self, rows, cols, numbers, dtype):
        self.numbers, self.t = numbers, 0
        self.L, self.R = torch.zeros(rows, rows, dtype=dtype), torch.zeros(cols, cols, dtype=dtype)
        self.V, self.M = (torch.zeros(rows, cols, dtype=dtype) for _ in range(2))
        self.IL = self.IR = None

    def step(self, G, refresh):
        (b1, b2), n = self.numbers.betas, self.numbers
        self.t += 1
        self.L = b2 * self.L + (1 - b2) * G @ G.T
        self.R = b2 * self.R + (1 - b2) * G.T @ G
        self.V = b2 * self.V + (1 - b2) * G * G
        self.M = b1 * self.M + (1 - b1) * G
        if refresh:
            self.IL, self.IR = (
                root_by_eigh(A / (1 - b2**self.t), n.eps**2) for A in (self.L, self.R)
            )
        mean = self.M / (1 - b1**self.t)
        graft = mean
        if n.grafting == "adam":
            graft = mean / ((self.V / (1 - b2**self.t)).sqrt() + n.eps)
        if self.IL is None:
            return graft
        S = self.IL @ mean @ self.IR
        return S if n.grafting is None else S * (graft.norm() / S.norm())


class ReferenceSoap:
    """One matrix in the published order: update, factors, then every `frequency` the basis."""

    def __init__(self, rows, cols, numbers, dtype):
        self.n, self.t, self.dtype = numbers, 0, dtype
        self.L, self.R = torch.zeros(rows, rows, dtype=dtype), torch.zeros(cols, cols, dtype=dtype)
        self.V, self.M = (torch.zeros(rows, cols, dtype=dtype) for _ in range(2))
        self.QL, self.QR, self.swaps = torch.eye(rows, dtype=dtype), torch.eye(cols, dtype=dtype), 0
        self.left, self.right = rows <= numbers.max_dim, cols <= numbers.max_dim

    def factors(self, G):
        b = self.n.shampoo_beta
        self.L, self.R = b * self.L + (1 - b) * G @ G.T, b * self.R + (1 - b) * G.T @ G

    def step(self, G):
        (b1, b2), n = self.n.betas, self.n
        if self.M.eq(0).all() and self.t == 0 and self.L.eq(0).all():
            self.factors(G)
            if self.left:
                self.QL = torch.linalg.eigh(self.L).eigenvectors.flip(1)
            if self.right:
                self.QR = torch.linalg.eigh(self.R).eigenvectors.flip(1)
            return torch.zeros_like(G)
        self.t += 1
        projected = self.QL.T @ G @ self.QR
        self.M = b1 * self.M + (1 - b1) * projected  # in the eigenbasis, as published
        self.V = b2 * self.V + (1 - b2) * projected**2
        size = (1 - b2**self.t) ** 0.5 / (1 - b1**self.t)
        update = size * self.QL @ (self.M / (self.V.sqrt() + n.eps)) @ self.QR.T
        self.factors(G)
        if self.t % n.frequency == 0:
            original = self.QL @ self.M @ self.QR.T
            if self.left:
                order = (self.QL.T @ self.L @ self.QL).diagonal().argsort(descending=True)
                self.swaps += int((order != torch.arange(len(order))).any())
                self.V = self.V[order]
                self.QL = torch.linalg.qr(self.L @ self.QL[:, order]).Q
            if self.right:
                order = (self.QR.T @ self.R @ self.QR).diagonal().argsort(descending=True)
                self.V = self.V[:, order]
                self.QR = torch.linalg.qr(self.R @ self.QR[:, order]).Q
            self.M = self.QL.T @ original @ self.QR
        return update


@pytest.mark.parametrize("root", ["eigh", "newton"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_roots_are_inverse_fourth_roots_at_any_scale(root, dtype):
    for scale in (1e-30, 1.0, 1e30):
        matrices = (spd(7, 3) * scale).to(dtype)
        result, found = inverse_root(matrices, 4, root=root)
        assert found.all()
        values, vectors = torch.linalg.eigh(matrices.double())
        right = vectors @ torch.diag_embed(values**-0.25) @ vectors.mT
        torch.testing.assert_close(
            result.double(), right, rtol=0, atol=TOLERANCE[dtype] * float(right.abs().max())
        )


def test_root_of_a_low_rank_factor_is_within_the_noise_of_its_sum():
    # with an absolute epsilon of 1e-12 a root in fp32 is 98 % away from the exact one
    x = torch.randn(128, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    exact = x @ x.T
    ridge = 128 * torch.finfo(torch.float32).eps * torch.linalg.eigvalsh(exact)[-1]
    values, vectors = torch.linalg.eigh(exact + ridge * torch.eye(128, dtype=torch.float64))
    right = vectors @ torch.diag(values**-0.25) @ vectors.T
    result, _ = inverse_root(exact.float()[None], 4)
    assert float((result[0] - right).norm() / right.norm()) < 0.02
    absolute, _ = inverse_root(exact.float()[None], 4, eps=1.0)
    values, vectors = torch.linalg.eigh(exact + torch.eye(128, dtype=torch.float64))
    right = vectors @ torch.diag(values**-0.25) @ vectors.T
    torch.testing.assert_close(absolute[0], right.float(), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("root", ["eigh", "newton"])
def test_zero_and_nonfinite_factors_fail_alone(root):
    matrices = spd(4, 4, dtype=torch.float32)
    alone, _ = inverse_root(matrices[:1], 4, root=root)
    matrices[1], matrices[2], matrices[3, 0, 1] = 0, float("nan"), float("inf")
    result, found = inverse_root(matrices, 4, root=root)
    assert found.tolist() == [True, True, False, False]
    assert (result[1] == 0).all()
    torch.testing.assert_close(result[:1], alone)
    basis, found = eigenbasis(matrices)
    assert found.tolist() == [True, True, False, False]
    start = torch.eye(4)[[1, 0, 2, 3]].expand(4, 4, 4)
    basis, order, found = next_eigenbasis(matrices, start)
    assert found.tolist() == [True, True, False, False]
    assert torch.equal(basis[1], start[1])
    assert order[1].tolist() == [0, 1, 2, 3]


def test_eigh_that_fails_is_tried_again_in_fp64(monkeypatch):
    real, asked = torch.linalg.eigh, []

    def fails_in_fp32(matrices):
        asked.append(matrices.dtype)
        if matrices.dtype == torch.float32:
            raise torch.linalg.LinAlgError("did not converge")
        return real(matrices)

    matrices = spd(5, dtype=torch.float32)
    right, _ = inverse_root(matrices, 4)
    monkeypatch.setattr(torch.linalg, "eigh", fails_in_fp32)
    result, found = inverse_root(matrices, 4)
    assert found.all()
    assert asked == [torch.float32, torch.float64]
    torch.testing.assert_close(result, right)


def test_blocks_are_those_of_split_and_each_is_refreshed_once_in_its_turn():
    matrix = torch.arange(7 * 11.0).view(7, 11)
    grid = block_grid(7, 11, (3, 4))
    ours = [block for region in grid.regions for block in region.blocks(matrix)]
    right = [block for rows in matrix.split(3) for block in rows.split(4, dim=1)]
    assert {str(block.tolist()) for block in ours} == {str(block.tolist()) for block in right}
    out = torch.zeros_like(matrix)
    for region in grid.regions:
        region.write(region.blocks(matrix), out)
    assert torch.equal(out, matrix)
    region = block_grid(40, 4, (4, 4)).regions[0]
    turns = [due_blocks(region, 3, step, 5, 10) for step in range(1, 25)]
    assert turns[:4] == [[]] * 4
    assert turns[4:14] == turns[14:24]
    assert sorted(block for turn in turns[4:14] for block in turn) == list(range(10))
    assert max(map(len, turns)) <= 2
    one = block_grid(4, 4, None).regions[0]
    for ranks in (1, 2, 5, 10):  # the matrices of one rank, where they are dealt in turns
        shares = [
            sum(len(due_blocks(one, i, s, 1, 10)) for i in range(0, 40 * ranks, ranks))
            for s in range(1, 11)
        ]
        assert max(shares) <= 6


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("grafting", ["adam", "sgd", None])
def test_shampoo_is_its_written_out_reference_block_by_block(dtype, grafting):
    # Of full rank in the first root: without, noise decides about what the roots amplify.
    rows, cols, block, start = (8, 12, (4, 4), 1) if grafting is None else (7, 11, (4, 5), 6)
    grid = block_grid(rows, cols, block)
    base = shampoo_numbers(start=start, frequency=3, grafting=grafting)
    states = states_for(grid, rows, cols, dtype, ["root"])
    blocks = [
        (region, n, ReferenceShampoo(region.rows, region.cols, base, dtype))
        for region in grid.regions
        for n in range(region.count)
    ]
    for step, grad in enumerate(gradients(rows, cols, 11, dtype), 1):
        numbers = shampoo_numbers(step, start=start, frequency=3, grafting=grafting)
        update = shampoo_update(grid, grad, states, numbers)
        for region, n, reference in blocks:
            refresh = n in due_blocks(region, 0, step, start, 3) or (not grafting and step == 1)
            right = reference.step(region.blocks(grad)[n], refresh)
            rtol = TOLERANCE[dtype]
            assert float((region.blocks(update)[n] - right).norm()) <= rtol * float(right.norm())
    assert not states["failures"].any()


def test_shampoo_without_averages_is_the_textbook_and_one_of_grafting_per_block():
    """C44: L^-1/4 G R^-1/4, of which diag(4, 1) shows the identity and another the exponent."""
    grid = block_grid(2, 2, None)
    diagonal = torch.diag(torch.tensor([4.0, 1.0], dtype=torch.float64))
    general = torch.tensor([[1.0, 2.0], [-3.0, 0.5]], dtype=torch.float64)
    numbers = dict(betas=(0.0, 1.0), start=1, frequency=1, grafting=None)
    for grads in ([diagonal], [general], [diagonal, general]):
        states = states_for(grid, 2, 2, torch.float64, ["root"])
        for step, grad in enumerate(grads, 1):
            update = shampoo_update(grid, grad, states, shampoo_numbers(step, **numbers))
        L, R = sum(G @ G.T for G in grads), sum(G.T @ G for G in grads)
        right = root_by_eigh(L, 0.0) @ grads[-1] @ root_by_eigh(R, 0.0)
        torch.testing.assert_close(update, right, rtol=1e-9, atol=1e-9)
        if len(grads) == 1 and grads[0] is diagonal:
            torch.testing.assert_close(update, torch.eye(2, dtype=torch.float64))
    assert (update - torch.eye(2)).norm() > 0.1  # not the identity: a wrong exponent shows


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("max_dim", [100, 6])
def test_soap_is_its_published_order_over_bases_whose_eigenvalues_swap(dtype, max_dim):
    rows, cols = (6, 6) if max_dim == 100 else (6, 8)  # of full rank from the first gradient on
    grid = block_grid(rows, cols, None)
    base = dict(
        index=0, betas=(0.9, 0.95), shampoo_beta=0.6, eps=1e-8, frequency=2, max_dim=max_dim
    )
    sides = soap_sides(rows, cols, max_dim)
    reference = ReferenceSoap(rows, cols, SoapNumbers(step=0, **base), dtype)
    states = states_for(grid, rows, cols, dtype, ["basis"], sides)
    scales = torch.tensor([8.0, 4.0, 2.0, 1.0, 0.5, 0.25], dtype=dtype)
    for step, grad in enumerate(gradients(rows, cols, 13, dtype), 1):
        grad = grad * (scales if step < 6 else scales.flip(0))[:, None]
        update = soap_update(grid, grad, states, SoapNumbers(step=step, **base))
        right = reference.step(grad)
        assert float((update - right).norm()) <= TOLERANCE[dtype] * max(1, float(right.norm()))
    assert reference.swaps
    assert not states["failures"].any()
    assert sides == (("left", "right") if max_dim == 100 else ("left",))


@pytest.mark.parametrize("scale", [0.0, 1e-30, 1e-3, 1e30])
def test_zero_low_rank_tiny_and_huge_gradients_give_finite_updates(scale):
    """C44."""
    grid = block_grid(6, 9, (4, 4))
    x = torch.ones(6, 1) @ torch.linspace(-1, 1, 9)[None] * scale
    for kind in ("adam", None):
        states = states_for(grid, 6, 9, torch.float32, ["root"])
        for step in range(1, 6):
            numbers = shampoo_numbers(step, start=1, grafting=kind)
            update = shampoo_update(grid, x, states, numbers)
        assert update.isfinite().all()
        assert scale or not update.any()
    states = states_for(grid, 6, 9, torch.float32, ["basis"])
    base = dict(index=0, betas=(0.9, 0.95), shampoo_beta=0.95, eps=1e-8, frequency=2, max_dim=9)
    for step in range(1, 6):
        update = soap_update(grid, x, states, SoapNumbers(step=step, **base))
    assert update.isfinite().all()
    assert scale or not update.any()
    assert not states["failures"].any()


def test_a_block_whose_root_fails_keeps_its_last_and_counts(monkeypatch):
    grid = block_grid(4, 8, (4, 4))
    states = states_for(grid, 4, 8, torch.float32, ["root"])
    numbers = dict(start=1, frequency=1)
    grads = gradients(4, 8, 4, torch.float32)
    shampoo_update(grid, grads[0], states, shampoo_numbers(1, **numbers))
    before = states["left_root"].clone()
    states["left"][0] = float("nan")
    for step in (2, 3):
        update = shampoo_update(grid, grads[step], states, shampoo_numbers(step, **numbers))
        assert states["failures"].tolist() == [step - 1, 0]
        assert update.isfinite().all()
    assert torch.equal(states["left_root"][:16], before[:16])
    assert not torch.equal(states["left_root"][16:], before[16:])
    states["left"][:16] = torch.eye(4).flatten()
    shampoo_update(grid, grads[0], states, shampoo_numbers(4, **numbers))
    assert states["failures"].tolist() == [0, 0]
