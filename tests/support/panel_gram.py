"""An algorithm with states of units, as users write them."""

from typing import Any

import torch
from torch import Tensor

from sharding import RowPanels
from sharding.planning.structure import Unit
from vfsdp_optim.algorithm import MatrixAlgorithm, UnitContext, UnitState


class PanelGram(MatrixAlgorithm):
    """Momentum, divided by the root of a running Gram matrix's trace: each step needs all states
    of all earlier ones, on the owner of each panel of 8 rows."""

    name = "panel_gram"

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1, **options})

    def counts_steps(self, group: dict[str, Any]) -> bool:
        return True

    def structure(self, group: dict[str, Any], shape: torch.Size) -> RowPanels:
        return RowPanels(8)

    def unit_states(self, group: dict[str, Any], unit: Unit) -> dict[str, UnitState]:
        return {
            "gram": UnitState((unit.rows, unit.rows)),
            "moment": UnitState((unit.rows, unit.cols), compressible=True),
            "largest": UnitState((1,), nonnegative=True),
        }

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

    def cost(self, group: dict[str, Any], rows: int, cols: int) -> int:
        return rows * rows * cols
