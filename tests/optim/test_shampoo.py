"""Shampoo against its formulas written out for one tensor; what is refused."""

import re
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from ranks import run_ranks
from sharding import FullMatrix, RowPanels, fully_shard
from vfsdp_optim import SOAP, Muon, Shampoo, param_groups
from vfsdp_optim.matrix_roots import inverse_roots
from vfsdp_optim.shampoo import ShampooAlgorithm
from vfsdp_optim.testing import assert_resume_is_exact, assert_sharded_equals_unsharded
from vfsdp_optim.testing.gradients import GradientStream
from vfsdp_optim.testing.trial import Parameters

LAYOUTS = ("ours", "negotiated", "fsdp2", "hsdp", "ours_hsdp", "replicated")
SOME = ("ours", "fsdp2", "ours_hsdp")  # for what differs in states alone
# Blocks of 8 x 8 do not divide these; the second has fewer rows than ranks hold panels.
SHAPES = [(21, 11), (5, 9), (24, 16)]


def written_out(
    weight: Tensor, grads: list[Tensor], size: int, *, frequency: int, grafting: str | None,
    beta2: float = 0.95,
) -> Tensor:  # fmt: skip
    """Shampoo of one matrix, block by block, in the dtype of `weight`; lr 0.1, decay 0.2."""
    weight = weight.clone()
    beta1, eps, new = 0.9, 1e-8, 1 - beta2 or 1.0
    number = -1
    for rows in range(0, weight.shape[0], size):
        for cols in range(0, weight.shape[1], size):
            number += 1
            part = slice(rows, rows + size), slice(cols, cols + size)
            w = weight[part].clone()
            m, v = torch.zeros_like(w), torch.zeros_like(w)
            left, right = torch.zeros(len(w), len(w)), torch.zeros(w.shape[1], w.shape[1])
            left, right, roots = left.to(w), right.to(w), None
            # Multiples of the golden ratio; the last rows are another kind of panel.
            panel = 2 * (rows // size) if rows + size <= len(weight) else 1
            place = panel * 1327217885 % 2**32 / 2**32
            turn = int(frequency * (place + cols // size) / -(-weight.shape[1] // size))
            for t, grad in enumerate((grad[part] for grad in grads), start=1):
                left = beta2 * left + new * grad @ grad.T
                right = beta2 * right + new * grad.T @ grad
                m, v = beta1 * m + (1 - beta1) * grad, beta2 * v + new * grad * grad
                mean, corrected = m / (1 - beta1**t), 1 - beta2**t or 1.0
                if (t - 1 - turn) % frequency == 0 or (grafting is None and t == 1):
                    roots = []
                    for factor in (left, right):
                        values, vectors = torch.linalg.eigh(factor / corrected)
                        floor = max(eps**2, len(factor) * 2.0**-23 * float(values.max()))
                        powers = torch.diag((values.clamp_min(0) + floor) ** -0.25)
                        roots.append(vectors @ powers @ vectors.T)
                adam = mean / ((v / corrected).sqrt() + eps)
                update = {"adam": adam, "sgd": mean, None: mean}[grafting]
                if roots is not None:
                    both = roots[0] @ mean @ roots[1]
                    length = both.norm() if grafting is None else update.norm()
                    update = both * (length / both.norm())
                w = w * (1 - 0.1 * 0.2) - 0.1 * update
            weight[part] = w
    return weight


@pytest.mark.parametrize("grafting", ["adam", "sgd", None])
@pytest.mark.parametrize(("size", "frequency", "beta2"), [(8, 3, 0.95), (8, 1, 1.0), (64, 2, 0.95)])
def test_steps_are_the_formulas_written_out(grafting, size, frequency, beta2):
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(21, 11, generator=generator)
    grads = [torch.randn(21, 11, generator=generator) for _ in range(7)]
    param = nn.Parameter(weight.clone())
    optimizer = Shampoo(
        [param], lr=0.1, betas=(0.9, beta2), weight_decay=0.2, block_size=size, grafting=grafting,
        precondition_frequency=frequency,
    )  # fmt: skip
    for grad in grads:
        param.grad = grad.clone()
        optimizer.step()
    options = dict(frequency=frequency, grafting=grafting, beta2=beta2)
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
        ("m n -> m n", RowPanels(8)),
        ("(q m) n -> (q m) n; q=3", FullMatrix.parse("(q m) n -> (q m) n; q=3")),
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


def sums_of(*grads: Tensor, **options) -> tuple[Shampoo, nn.Parameter]:
    """The textbook's: sums, a root in each step, no grafting; after steps with these gradients."""
    param = nn.Parameter(torch.zeros(grads[0].shape))
    own = dict(lr=1.0, betas=(0.0, 1.0), precondition_frequency=1, grafting=None)
    optimizer = Shampoo([{"params": [("w", param)], **options}], **own)
    for grad in grads:
        param.data.zero_()
        param.grad = grad.clone()
        optimizer.step()
    return optimizer, param


def textbook(*grads: Tensor) -> Tensor:
    """L^(-1/4) G R^(-1/4) of the last gradient, L and R the sums over all, on their ranges."""
    wide = [grad.double() for grad in grads]
    roots = []
    for factor in (sum(g @ g.T for g in wide), sum(g.T @ g for g in wide)):
        values, vectors = torch.linalg.eigh(factor)
        there = values > 1e-9 * values.max()
        roots.append((vectors[:, there] * values[there] ** -0.25) @ vectors[:, there].T)
    return (roots[0] @ wide[-1] @ roots[1]).float()


def test_update_is_that_of_the_textbook_and_not_on_identities_alone():
    """HeavyBall#40, aorta#30: a wrong root is right on the identity, and a zero gradient is NaN."""
    draw = partial(torch.randn, generator=torch.Generator().manual_seed(2))
    _, updated = sums_of(torch.diag(torch.tensor([4.0, 1.0])))
    torch.testing.assert_close(updated.data, -torch.eye(2), rtol=1e-5, atol=1e-5)
    stack = draw(3, 5, 4)
    thin = draw(6, 2) @ draw(2, 4)  # rank 2
    for grads in ((draw(6, 4),), (draw(6, 4), 3 * draw(6, 4), draw(6, 4)), (thin,)):
        expected = textbook(*grads)
        assert (sums_of(*grads)[1] + expected).norm() < 2e-3 * expected.norm()
    _, updated = sums_of(stack, stack + 1, matrices="e m n -> e m n")  # of order 2 each
    expected = torch.stack([textbook(first, first + 1) for first in stack])
    assert (updated + expected).norm() < 2e-3 * expected.norm()
    optimizer, updated = sums_of(torch.zeros(6, 4))
    assert torch.equal(updated.data, torch.zeros(6, 4))
    updated.grad = draw(6, 4)
    expected = textbook(updated.grad)
    optimizer.step()
    assert (updated + expected).norm() < 2e-3 * expected.norm()
    kept = optimizer.state[updated]["left.0"].clone()
    updated.grad = torch.full((6, 4), torch.inf)
    with pytest.raises(RuntimeError, match="infinite or NaN gradients of w"):
        optimizer.step()
    assert torch.equal(optimizer.state[updated]["left.0"], kept)


def on_some_steps(step: int, name: str, shape: torch.Size) -> Tensor | None:
    """Gradients, but of the first parameter on steps 2 and 6 alone."""
    return None if name == "p0" and step not in (2, 6) else GradientStream()(step, name, shape)


def test_missing_gradients_and_a_resume_leave_the_turns_of_refreshes_where_they_were():
    """optimizers#149, #271, #278, Emerging-Optimizers#68. The first step after the load has no
    gradient of a parameter, which then goes on with its own count."""
    for ranks in (2, 3):
        assert_resume_is_exact(
            make_shampoo, shapes=SHAPES[::2], layouts=("ours", "fsdp2"), gradients=on_some_steps,
            steps=4, resumed_on=ranks,
        )  # fmt: skip
    ends = []
    for steps in (range(1, 9), (2, 6)):  # alone, it steps twice
        params = {f"p{i}": nn.Parameter(torch.ones(shape)) for i, shape in enumerate(SHAPES[::2])}
        optimizer = make_shampoo(Parameters(params))
        for step in steps:
            for name, param in params.items():
                param.grad = on_some_steps(step, name, param.shape)
            optimizer.step()
        assert float(optimizer.state[params["p0"]]["step"]) == 2
        ends.append([params["p0"], *optimizer.state[params["p0"]].values()])
    assert all(torch.equal(one, other) for one, other in zip(*ends, strict=True))


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


def make_shampoo_and_load(module: nn.Module) -> Shampoo:
    optimizer = make_shampoo(module)
    optimizer.state_dict()
    with torch.no_grad():
        for param in module.parameters():
            param.fill_(5.0)
    return optimizer


def test_weights_that_are_loaded_after_construction_are_those_that_are_updated():
    """Copies of weights that an optimizer keeps bring back what was there when it was built."""
    param = nn.Parameter(torch.ones(21, 11))
    optimizer = make_shampoo_and_load(Parameters({"w": param}))
    param.grad = torch.ones(21, 11)
    optimizer.step()
    assert (param > 4.8).all()
    assert_sharded_equals_unsharded(
        make_shampoo_and_load,
        shapes=SHAPES[:1],
        layouts=("ours", "fsdp2"),
        world_sizes=[2],
        steps=2,
    )


def collectives_of_a_step(kind: type) -> dict[str, int]:
    """Of matrices of which each rank has a whole one."""
    model = nn.Sequential(*[nn.Linear(16, 16, bias=False) for _ in range(2)])
    fully_shard(model)
    optimizer = kind(model.named_parameters(), block_size=8, precondition_frequency=1)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        optimizer.step()
    return {e.key: e.count for e in profiler.key_averages() if e.key.startswith("c10d::")}


def test_step_on_panels_that_are_all_resident_asks_for_infinities_and_sends_nothing_else():
    for kind in (Shampoo, SOAP):
        assert run_ranks(collectives_of_a_step, 2, kind) == [{"c10d::allreduce_": 1}] * 2


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


BLOCKS = (
    "block_size: expected a number of rows and columns >= 1, (rows, columns), or None for whole "
    "matrices, got "
)
FREQUENCY = "precondition_frequency: expected a number of steps >= 1, got "
START = "start_preconditioning_step"


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (dict(block_size=0), f"{BLOCKS}0"),
        (dict(block_size=(8, -1)), f"{BLOCKS}(8, -1)"),
        (dict(block_size=True), f"{BLOCKS}True"),
        (dict(grafting=None, start_preconditioning_step=5),
         f"{START}=5 without grafting would train by plain gradients until then; pass "
         'grafting="adam" or "sgd", or leave it out'),
        (dict(start_preconditioning_step=0),
         f"{START}: expected a step >= 1, or None for the first, got 0"),
        (dict(grafting="rms"), "grafting: expected one of ('adam', 'sgd', None), got 'rms'"),
        (dict(root="svd"), "root: expected one of ('eigh', 'newton'), got 'svd'"),
        (dict(precondition_frequency=0),
         f"{FREQUENCY}0; 1 decomposes every factor in every step"),
        (dict(precondition_frequency=2.5),
         f"{FREQUENCY}2.5; 1 decomposes every factor in every step"),
        (dict(betas=(0.9, 1.5)),
         "betas: expected two numbers in [0, 1), the second also 1, for sums, got (0.9, 1.5)"),
    ],
)  # fmt: skip
def test_bad_options_are_refused_by_name_with_the_cure(options, error):
    with pytest.raises(ValueError, match=f"^{re.escape(f'param group 0: {error}')}$"):
        Shampoo([nn.Parameter(torch.ones(4, 4))], **options)


@pytest.mark.parametrize("kind", [Shampoo, SOAP])
def test_ignoring_infinities_is_refused(kind):
    error = (
        'on_nonfinite="ignore" would leave infinities and NaN in the factors for good; pass '
        '"raise", or "skip" to leave such steps out'
    )
    with pytest.raises(ValueError, match=f"^{re.escape(error)}$"):
        kind([nn.Parameter(torch.ones(4, 4))], on_nonfinite="ignore")


def test_parameter_without_matrices_is_refused_with_the_cure():
    error = (
        "w: shampoo preconditions matrices, and got shape (2, 4, 4) in a group without `matrices`; "
        "build the groups with vfsdp_optim.param_groups(model, algorithm='shampoo'), or put the "
        'parameter into a group with algorithm="adamw", or with a pattern such as '
        'matrices="e m n -> e m n"'
    )
    with pytest.raises(ValueError, match=f"^{re.escape(error)}$"):
        Shampoo([("w", nn.Parameter(torch.ones(2, 4, 4)))])
    fused = {"params": [("w", nn.Parameter(torch.ones(4, 4)))], "matrices": "(q m) n -> q m n; q=3"}
    with pytest.raises(ValueError, match=r"^w: FullMatrix.*cannot find the matrices"):
        Shampoo([fused])
    texts = set()
    for kind in (Shampoo, SOAP, Muon):  # once accepted in silence where rows are runs
        with pytest.raises(ValueError, match=r"^w: FullMatrix\(.e m n -> e m n") as refused:
            kind([{**fused, "matrices": "e m n -> e m n"}])
        texts.add(str(refused.value))
    assert len(texts) == 1
    groups = param_groups(nn.Conv2d(4, 8, 3), algorithm="shampoo")
    optimizer = Shampoo(groups, block_size=4)
    assert [group["algorithm"] for group in optimizer.param_groups] == ["shampoo", "adamw"]
    assert optimizer.state[groups[0]["params"][0][1]]["right.1"].shape == (1, 36, 4)
