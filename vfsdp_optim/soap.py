"""SOAP: Adam in the eigenbases of Shampoo's factors."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.optimizer import ParamsT

from sharding.planning.structure import Unit
from vfsdp_optim.algorithm import (
    Precision,
    StatesName,
    UnitContext,
    UnitState,
    constructor_defaults,
)
from vfsdp_optim.blocked import (
    SIDES,
    BlockedAlgorithm,
    BlockSize,
    Strip,
    average_products,
    blocks_in,
    count_failures,
    due_blocks,
    factor_shapes,
    is_count,
    keep_found,
    picked,
    refuse_ignore,
    sides,
    strips,
)
from vfsdp_optim.matrix_optimizer import MatrixOptimizer
from vfsdp_optim.matrix_roots import eigenbases, next_eigenbases
from vfsdp_optim.optimizer import MAX_EXCHANGE_BYTES
from vfsdp_optim.states.scratch import Scratch
from vfsdp_optim.step.runs import Run

_WHAT_FAILS = "eigenbases", "lower the learning rate"  # and the cure


class SOAPAlgorithm(BlockedAlgorithm):
    """The update rule of `SOAP`."""

    name = "soap"
    structural_keys = ("matrices", "block_size", "max_dim")
    as_torch: ClassVar[Mapping[str, Any]] = {}

    def __init__(self, **overrides: Any) -> None:
        super().__init__(**{**constructor_defaults(SOAP), "matrices": None, **overrides})

    def check_group(self, group: dict[str, Any], where: str) -> None:
        """Check ranges."""
        super().check_group(group, where)
        if not is_count(group["max_dim"]):
            raise ValueError(
                f"{where}: max_dim: expected a number of rows or columns >= 1, got "
                f'{group["max_dim"]!r}; without any basis it is Adam: algorithm="adamw"'
            )
        beta = group["shampoo_beta"]
        if beta is not None and not (isinstance(beta, int | float) and 0 <= beta < 1):
            raise ValueError(
                f"{where}: shampoo_beta: expected a number in [0, 1) or None for betas[1], got "
                f"{beta!r}"
            )

    def unit_states(self, group: dict[str, Any], unit: Unit) -> dict[str, UnitState]:
        """Return the average of gradients, that of squares in the eigenbases, and of each block
        the factors and bases of the sides that have any."""
        shape, size = (unit.rows, unit.cols), group["block_size"]
        states = {
            "exp_avg": UnitState(shape, compressible=True),
            "exp_avg_sq": UnitState(shape, compressible=True, nonnegative=True),
        }
        wholes = dict(zip(SIDES, factor_shapes(*shape, size), strict=True))
        for side in self.factored(group, *shape):
            states[side] = UnitState(wholes[side])
            states[f"{side}_basis"] = UnitState(wholes[side], guarded=True)
        count = blocks_in(*shape, size)
        states["failures"] = UnitState((count,), nonnegative=True, guarded=True)
        return states

    def factored(self, group: dict[str, Any], rows: int, cols: int) -> tuple[str, ...]:
        """Return the sides that have a factor: not those longer than `max_dim`."""
        lengths = zip(SIDES, sides(rows, cols, group["block_size"]), strict=True)
        return tuple(side for side, length in lengths if length <= group["max_dim"])

    def decays(self, run: Run) -> bool:
        """Return False in the first step, which only starts the factors."""
        return run.step > 1

    def matrix_update(
        self, group: dict[str, Any], matrix: Tensor, context: UnitContext, scratch: Scratch
    ) -> Tensor:
        """Return Adam's update in the eigenbases, brought back, (m, n)."""
        beta1, beta2 = (float(beta) for beta in group["betas"])
        moment, square = context.states["exp_avg"], context.states["exp_avg_sq"]
        update = torch.zeros_like(matrix)
        if context.step > 1:
            moment.lerp_(matrix, 1 - beta1)
        steps = context.step - 1  # the first only starts the factors
        factor_beta = beta2 if group["shampoo_beta"] is None else group["shampoo_beta"]
        present = self.factored(group, *matrix.shape)
        for strip in strips(*matrix.shape, group["block_size"]):
            grad = strip.of(matrix)
            bases = {side: strip.factors(context.states[f"{side}_basis"], side) for side in present}
            if steps:
                turned, squares = _turned(grad, bases), strip.of(square)
                squares.mul_(beta2).addcmul_(turned, turned, value=1 - beta2)
                ratio = _turned(strip.of(moment), bases) / squares.sqrt().add_(group["eps"])
                scale = math.sqrt(1 - beta2**steps) / (1 - beta1**steps)
                back = _turned(ratio, {side: basis.mT for side, basis in bases.items()})
                strip.of(update).copy_(back.mul_(scale))
            average_products(context.states, strip, grad, factor_beta)  # after they were used
            if not steps:
                self._start(context, strip, bases)
            elif due := due_blocks(group, context, strip, steps):
                self._refresh(context, strip, due, bases)
        return update

    def _start(self, context: UnitContext, strip: Strip, bases: Mapping[str, Tensor]) -> None:
        """Decompose the factors of all blocks; what fails starts from the original basis."""
        everyone = range(len(strip.numbers))
        failed = torch.zeros(
            len(everyone), dtype=torch.bool, device=context.states["failures"].device
        )
        for side, basis in bases.items():
            first, found = eigenbases(strip.factors(context.states[side], side))
            identity = torch.eye(first.shape[-1], device=first.device)
            first = torch.where(found[:, None, None], first, identity)
            keep_found(basis, everyone, first, torch.ones_like(found), context.skip)
            failed = failed | ~found
        count_failures(context, strip, everyone, failed, *_WHAT_FAILS)

    def _refresh(
        self,
        context: UnitContext,
        strip: Strip,
        due: Sequence[int],
        bases: Mapping[str, Tensor],
    ) -> None:
        """Bring the bases of blocks up to date, and sort the averages of squares along; keep both
        where that fails."""
        squares = strip.of(context.states["exp_avg_sq"])
        failed = torch.zeros(len(due), dtype=torch.bool, device=squares.device)
        for side, basis in bases.items():
            factors = picked(strip.factors(context.states[side], side), due)
            turned, order, found = next_eigenbases(factors, picked(basis, due))
            keep_found(basis, due, turned, found, context.skip)
            old = picked(squares, due)
            dim = 1 if side == "left" else 2
            places = order.unsqueeze(3 - dim).expand_as(old)
            keep_found(squares, due, old.gather(dim, places), found, skip=False)  # a copy is kept
            failed = failed | ~found
        count_failures(context, strip, due, failed, *_WHAT_FAILS)


def _turned(blocks: Tensor, bases: Mapping[str, Tensor]) -> Tensor:
    """Return blocks, (blocks, rows, cols), in eigenbases, whose columns are eigenvectors."""
    if "left" in bases:
        blocks = bases["left"].mT @ blocks
    return blocks @ bases["right"] if "right" in bases else blocks


class SOAP(MatrixOptimizer):
    """SOAP for plain, replicated and sharded parameters, with AdamW groups beside.

    Adam in the eigenbases of Shampoo's factors L and R: the gradient is turned into them, its
    squares are averaged there, and the update is turned back. The average of gradients is kept in
    the original basis. As in the paper, the factors see a gradient after it was used, the first
    step only starts them, and bases follow by one step of orthogonal iteration, with the averages
    of squares sorted along. States of a matrix, or of a panel of blocks, are on one rank: where it
    lies whole nothing moves, else its gradient and update travel. Same bits at every world size.

    Args:
        params: matrices, named matrices or groups; `param_groups(model, algorithm="soap")` makes
            groups of a whole model.
        lr: learning rate.
        betas: decay of the averages of gradients and squares.
        eps: added to the root of the average of squares.
        weight_decay: decoupled: each step but the first scales parameters by 1 - lr * weight_decay.
        shampoo_beta: decay of the factors; None is betas[1].
        block_size: rows and columns of a block, or both; None, as in the paper, for whole matrices.
        max_dim: a side that is longer has no factor: its basis stays what it is.
        precondition_frequency: steps from one basis to the next. Blocks take turns.
        states: as in `Muon`; averages of gradients and squares can be 8-bit, factors are fp32.
        max_exchange_bytes: as in `Muon`.
        on_nonfinite: as in `Muon`, without "ignore": factors would keep what is not finite.
        process_group: as in `Muon`.

    Raises:
        ValueError: a value out of range, or a parameter that is no matrix in a group without
            `matrices`.
        RuntimeError: in a step, on every rank: bases of a block failed more than 3 times in a row.

    References:
        Vyas et al. 2024, arXiv:2409.11321.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 3e-3,
        betas: tuple[float, float] = (0.95, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        *,
        shampoo_beta: float | None = None,
        block_size: BlockSize = None,
        max_dim: int = 10000,
        precondition_frequency: int = 10,
        states: StatesName | Precision = "32bit",
        max_exchange_bytes: int = MAX_EXCHANGE_BYTES,
        on_nonfinite: Literal["skip", "raise"] = "raise",
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        refuse_ignore(on_nonfinite)
        super().__init__(SOAPAlgorithm, locals())
