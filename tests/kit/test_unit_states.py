"""States that a unit has on its owner, in an algorithm as users write them, through the kit."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sharding import RowPanels
from sharding.planning.structure import Unit
from vfsdp_optim.algorithm import MatrixAlgorithm, UnitContext, UnitState
from vfsdp_optim.optimizer import StructuredOptimizer
from vfsdp_optim.testing import assert_resume_is_exact, assert_sharded_equals_unsharded

# Rows that no number of ranks divides, two panels a rank and more, one that is kept in 8 bits.
SHAPES = [(37, 7), (19, 3), (96, 64)]
LAYOUTS = ("ours", "negotiated", "fsdp2", "hsdp", "ours_hsdp", "replicated")


class PanelGram(MatrixAlgorithm):
    """Momentum, divided by the root of a running Gram matrix's trace: each step needs all states
    of all earlier ones, on the owner of each panel of 8 rows."""

    name = "panel_gram"

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1, **options})

    def counts_steps(self, group: dict[str, Any]) -> bool:
        return True

    def state_keys(self, group: dict[str, Any]) -> tuple[str, ...]:
        return ()

    def structure(self, group: dict[str, Any], shape: torch.Size) -> RowPanels:
        return RowPanels(8)

    def unit_states(self, group: dict[str, Any], unit: Unit) -> dict[str, UnitState]:
        return {
            "gram": UnitState((unit.rows, unit.rows)),
            "moment": UnitState((unit.rows, unit.cols), compressible=True),
            "largest": UnitState((1,), nonnegative=True),
        }

    def update_run(self, group: dict[str, Any], run: Any, scratch: Any) -> None:
        for param, _, _ in run.chunks(scratch):
            param.mul_(1 - group["lr"] * group["weight_decay"])

    def write_input(
        self, group: dict[str, Any], grad: Tensor, states: dict[str, Tensor], out: Tensor
    ) -> None:
        out.copy_(grad)

    def matrix_update(
        self, group: dict[str, Any], matrix: Tensor, context: UnitContext, scratch: Any
    ) -> Tensor:
        gram, moment, largest = (context.states[key] for key in ("gram", "moment", "largest"))
        gram.mul_(0.95).addmm_(matrix, matrix.T, alpha=0.05)
        moment.lerp_(matrix, 1 - group["momentum"])
        torch.maximum(largest, matrix.abs().amax(), out=largest)
        scale = gram.trace().div(1 - 0.95**context.step).sqrt() + largest + 1e-8
        # A number of the unit, so that a wrong one cannot stay unseen.
        return moment.div(scale).mul_(1 + (context.index % 3) / 8)

    def factor(self, group: dict[str, Any], rows: int, cols: int) -> float:
        return -group["lr"]

    def cost(self, group: dict[str, Any], rows: int, cols: int) -> int:
        return rows * rows * cols


def make_gram(module: nn.Module, **options: Any) -> StructuredOptimizer:
    return StructuredOptimizer(module.named_parameters(), PanelGram(**options))


def make_8bit_gram(module: nn.Module) -> StructuredOptimizer:
    return make_gram(module, states="8bit")


@pytest.mark.parametrize("make_optimizer", [make_gram, make_8bit_gram])
def test_states_of_units_are_exact_in_every_layout(make_optimizer):
    assert_sharded_equals_unsharded(make_optimizer, shapes=SHAPES, layouts=LAYOUTS)
    assert_resume_is_exact(make_optimizer, shapes=SHAPES, layouts=("ours", "fsdp2", "ours_hsdp"))


def test_states_of_units_are_there_from_the_first_look_under_the_number_of_the_unit():
    param = nn.Parameter(torch.ones(12, 4))
    optimizer = StructuredOptimizer([param], PanelGram())
    keys = ["step", *(f"{key}.{unit}" for unit in (0, 1) for key in ("gram", "moment", "largest"))]
    assert list(optimizer.state[param]) == keys
    assert optimizer.state[param]["gram.1"].shape == (4, 4)
    param.grad = torch.ones(12, 4)
    optimizer.step()
    gram = optimizer.state[param]["gram.1"]
    torch.testing.assert_close(gram, torch.full((4, 4), 0.05 * 4))
    assert optimizer.state_dict()["state"][0]["gram.1"] is gram
    gram.zero_()
    optimizer.step()
    torch.testing.assert_close(gram, torch.full((4, 4), 0.05 * 4))
