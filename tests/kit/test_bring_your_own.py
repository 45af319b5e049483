"""Optimizers that users write with `Algorithm` and `MatrixAlgorithm`, through the kit."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import vfsdp_optim
from examples.lion import Lion, LionAlgorithm
from examples.one_sided_shampoo import OneSidedShampoo
from sharding import Elementwise, RowPanels
from vfsdp_optim import Muon
from vfsdp_optim.algorithm import Algorithm, MatrixAlgorithm
from vfsdp_optim.optimizer import StructuredOptimizer
from vfsdp_optim.testing import assert_resume_is_exact, assert_sharded_equals_unsharded
from vfsdp_optim.testing.trial import Parameters

# Rows that no number of ranks divides, a vector, an empty one, and one that is kept in 8 bits.
SHAPES = [(37, 7), (5, 13, 3), (11,), (0, 3), (96, 64)]
LAYOUTS = ("ours", "negotiated", "fsdp2", "hsdp", "ours_hsdp", "replicated")


class PanelNorm(MatrixAlgorithm):
    """Divides momentum by the norm of each panel of 8 rows: as simple as needs a whole panel."""

    name = "panel_norm"

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1, **options})

    def state_keys(self, group: dict[str, Any]) -> tuple[str, ...]:
        return ("momentum_buffer",)

    def structure(self, group: dict[str, Any], shape: torch.Size) -> RowPanels:
        return RowPanels(8)

    def update_run(self, group: dict[str, Any], run: Any, scratch: Any) -> None:
        for param, grad, states in run.chunks(scratch):
            states["momentum_buffer"].lerp_(grad, 1 - group["momentum"])
            param.mul_(1 - group["lr"] * group["weight_decay"])

    def write_input(
        self, group: dict[str, Any], grad: Tensor, states: dict[str, Tensor], out: Tensor
    ) -> None:
        out.copy_(states["momentum_buffer"])

    def matrix_update(
        self, group: dict[str, Any], matrix: Tensor, context: Any, scratch: Any
    ) -> Tensor:
        return matrix / matrix.norm().clamp_min(1e-12)

    def cost(self, group: dict[str, Any], rows: int, cols: int) -> int:
        return rows * cols


def make_lion(module: nn.Module, **options: Any) -> Lion:
    return Lion(module.named_parameters(), lr=0.01, weight_decay=0.1, **options)


def make_8bit_lion(module: nn.Module) -> Lion:
    return make_lion(module, states="8bit")


def make_panels(module: nn.Module) -> StructuredOptimizer:
    return StructuredOptimizer(module.named_parameters(), PanelNorm())


def make_one_sided(module: nn.Module, **options: Any) -> StructuredOptimizer:
    own = {"lr": 0.05, "rows": 8, "every": 3, "weight_decay": 0.1, **options}
    return StructuredOptimizer(module.named_parameters(), OneSidedShampoo(**own))


def make_8bit_one_sided(module: nn.Module) -> StructuredOptimizer:
    return make_one_sided(module, rows=16, states="8bit")


def make_three_in_one(module: nn.Module) -> Muon:
    """Muon, AdamW, Lion and panels in one object."""
    matrices, *others = module.named_parameters()
    return Muon(
        [
            {"params": [matrices]},
            {"params": others[:1], "algorithm": LionAlgorithm(lr=0.01)},
            {"params": others[1:2], "algorithm": "adamw", "lr": 0.01},
            {"params": others[2:], "algorithm": PanelNorm()},
        ],
        lr=0.02,
    )


@pytest.mark.parametrize(
    "make_optimizer", [make_lion, make_panels, make_one_sided, make_three_in_one]
)
def test_algorithm_from_outside_is_exact_in_every_layout(make_optimizer):
    assert_sharded_equals_unsharded(
        make_optimizer, shapes=SHAPES, layouts=LAYOUTS, world_sizes=(3, 4)
    )
    assert_resume_is_exact(make_optimizer, shapes=SHAPES, layouts=("ours", "fsdp2", "ours_hsdp"))


@pytest.mark.parametrize("make_optimizer", [make_8bit_lion, make_8bit_one_sided])
def test_algorithm_from_outside_keeps_its_states_in_8_bits(make_optimizer):
    assert_sharded_equals_unsharded(
        make_optimizer, shapes=SHAPES, layouts=("ours", "negotiated"), world_sizes=(1, 2)
    )
    assert_resume_is_exact(make_optimizer, shapes=SHAPES, layouts="ours")


def test_panels_are_updated_and_not_only_their_momentum():
    """A structure other than FullMatrix stepped its momentum and never its weights, in silence."""
    param = nn.Parameter(torch.ones(12, 4))
    param.grad = torch.ones(12, 4)
    optimizer = StructuredOptimizer([param], PanelNorm(weight_decay=0.0))
    optimizer.step()
    expected = torch.ones(12, 4)
    for first, last in ((0, 8), (8, 12)):
        panel = torch.full((last - first, 4), 0.1)
        expected[first:last] -= 0.1 * panel / panel.norm()
    torch.testing.assert_close(param.data, expected)


def test_lion_is_lion():
    """Chen et al. 2023, arXiv:2302.06675, algorithm 2, written out."""
    param, moment = torch.linspace(-1, 1, 10), torch.zeros(10)
    held = nn.Parameter(param.clone())
    optimizer = Lion([held], lr=0.1, betas=(0.9, 0.99), weight_decay=0.5)
    for step in range(3):
        grad = torch.linspace(1, -1, 10) + step / 3
        held.grad = grad.clone()
        optimizer.step()
        param = param - 0.1 * (torch.sign(0.9 * moment + 0.1 * grad) + 0.5 * param)
        moment = 0.99 * moment + 0.01 * grad
    torch.testing.assert_close(held.data, param)


def test_one_sided_shampoo_is_one_sided():
    """Each panel of 4 rows by itself, written out in float64; the second takes its turn later."""
    generator = torch.Generator().manual_seed(1)
    grads = [torch.randn(8, 6, generator=generator) for _ in range(5)]
    held = nn.Parameter(torch.zeros(8, 6))
    optimizer = make_one_sided(Parameters({"w": held}), rows=4, weight_decay=0.0)
    for grad in grads:
        held.grad = grad.clone()
        optimizer.step()
    for index, rows in enumerate((slice(0, 4), slice(4, 8))):
        average, left, weight = torch.zeros(4, 6), torch.zeros(4, 4).double(), torch.zeros(4, 6)
        for step, grad in enumerate((grad[rows].double() for grad in grads), start=1):
            average, left = 0.9 * average + 0.1 * grad, 0.95 * left + 0.05 * grad @ grad.T
            if step == 1 or (step - index) % 3 == 0:
                values, vectors = torch.linalg.eigh(left / (1 - 0.95**step))
                root = (vectors * values**-0.5) @ vectors.T
            weight = weight - 0.05 * root @ average / (1 - 0.9**step)
        torch.testing.assert_close(held.data[rows], weight.float(), rtol=1e-3, atol=1e-4)


def test_algorithm_that_would_leave_its_units_alone_is_refused():
    class Lost(Algorithm):
        name = "lost"

        def state_keys(self, group: dict[str, Any]) -> tuple[str, ...]:
            return ()

        def structure(self, group: dict[str, Any], shape: torch.Size) -> RowPanels:
            return RowPanels(4)

        def update_run(self, group: dict[str, Any], run: Any, scratch: Any) -> None: ...

    expected = (
        r"w: algorithm 'lost' declares RowPanels\(rows=4, batch_dims=0\), whose units nothing "
        r"would update; derive Lost from MatrixAlgorithm, or declare Elementwise\(\)"
    )
    with pytest.raises(TypeError, match=expected):
        StructuredOptimizer([("w", nn.Parameter(torch.ones(8, 2)))], Lost(lr=1.0))
    assert Algorithm.structure(Lost(), {}, torch.Size([8, 2])) == Elementwise()


def test_another_algorithm_of_the_same_name_is_refused():
    params = [nn.Parameter(torch.ones(4, 2)) for _ in range(3)]
    optimizer = Lion(params[:1], lr=0.1)
    optimizer.add_param_group({"params": params[1:2], "algorithm": LionAlgorithm(lr=0.1)})
    with pytest.raises(ValueError, match="param group 2: algorithm: there is another 'lion'"):
        optimizer.add_param_group({"params": params[2:], "algorithm": LionAlgorithm(lr=0.2)})
    assert [len(group["params"]) for group in optimizer.param_groups] == [1, 1]


def test_page_shows_the_example_and_its_code_runs():
    root = Path(__file__).parents[2]
    page = (root / "docs" / "write-an-optimizer.md").read_text()
    lion, check, one_sided, check_too, several = re.findall(
        r"```python\n(.*?)```", page, flags=re.DOTALL
    )
    assert lion == (root / "examples" / "lion.py").read_text()
    assert one_sided == (root / "examples" / "one_sided_shampoo.py").read_text()
    own = {
        "Lion": Lion, "OneSidedShampoo": OneSidedShampoo, "StructuredOptimizer": StructuredOptimizer
    }  # fmt: skip
    exec(compile(check + check_too, "write-an-optimizer.md", "exec"), own)
    names = ("matrices", "embeddings", "vectors")
    params = {name: [nn.Parameter(torch.ones(4, 4))] for name in names}
    scope = {"vfsdp_optim": vfsdp_optim, "LionAlgorithm": LionAlgorithm, **params}
    exec(compile(several, "write-an-optimizer.md", "exec"), scope)
    groups = scope["optimizer"].param_groups
    assert [group["algorithm"] for group in groups] == ["muon", "lion", "adamw"]
