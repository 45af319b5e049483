"""Shampoo from the left alone as an optimizer of one's own: panels of rows, factors on owners."""

from typing import Any

import torch
from torch import Tensor

from sharding import RowPanels
from vfsdp_optim.algorithm import MatrixAlgorithm, Recurring, UnitContext, UnitState
from vfsdp_optim.matrix_roots import inverse_roots


class OneSidedShampoo(MatrixAlgorithm):
    """L^(-1/2) times the average of gradients of each panel of rows; L is the average of G G^T."""

    name = "one_sided_shampoo"
    structural_keys = ("rows",)

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"lr": 1e-3, "betas": (0.9, 0.95), "rows": 256, "every": 10, **options})

    def structure(self, group: dict[str, Any], shape: torch.Size) -> RowPanels:
        """Return what lies whole on a rank while its update is computed."""
        return RowPanels(group["rows"])

    def counts_steps(self, group: dict[str, Any]) -> bool:
        """Return True: averages are corrected for their start at zero."""
        return True

    def unit_states(self, group: dict[str, Any], unit: Any) -> dict[str, UnitState]:
        """Return what the owner of a panel keeps; the average of gradients can be 8-bit."""
        average = UnitState((unit.rows, unit.cols), compressible=True)
        square = UnitState((unit.rows, unit.rows))
        return {"exp_avg": average, "left": square, "root": square}

    def matrix_update(
        self, group: dict[str, Any], matrix: Tensor, context: UnitContext, scratch: Any
    ) -> Tensor:
        """Return the update for the gradient of a panel; panels take turns with their roots."""
        (beta1, beta2), step = group["betas"], context.step
        average, left, root = (context.states[key] for key in ("exp_avg", "left", "root"))
        left.mul_(beta2).addmm_(matrix, matrix.T, alpha=1 - beta2)
        if step == 1 or context.turns[0] == step % group["every"]:
            roots, found = inverse_roots(left[None] / (1 - beta2**step), order=2, epsilon=1e-12)
            root.copy_(torch.where(found, roots[0], root))
        return root @ average.lerp_(matrix, 1 - beta1) / (1 - beta1**step)

    def cost(self, group: dict[str, Any], rows: int, cols: int) -> int:
        """Return multiply-adds of a mean step, by which owners are balanced."""
        return 2 * rows * rows * cols + 16 * rows**3 // group["every"]

    def recurring(self, group: dict[str, Any], rows: int, cols: int) -> Recurring:
        """Return those that are done once in `every` steps."""
        return Recurring(group["every"], (16 * rows**3,))
