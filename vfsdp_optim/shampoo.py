"""Shampoo: blocks of the gradient, preconditioned from both sides by the running averages of their
products."""

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
    correction_of,
    count_failures,
    due_blocks,
    factor_shapes,
    is_count,
    keep_found,
    picked,
    refuse_ignore,
    strips,
    weight_of,
)
from vfsdp_optim.matrix_optimizer import MatrixOptimizer
from vfsdp_optim.matrix_roots import inverse_roots
from vfsdp_optim.optimizer import MAX_EXCHANGE_BYTES
from vfsdp_optim.states.scratch import Scratch


class ShampooAlgorithm(BlockedAlgorithm):
    """The update rule of `Shampoo`."""

    name = "shampoo"
    sums = True
    structural_keys = ("matrices", "block_size", "grafting")
    as_torch: ClassVar[Mapping[str, Any]] = {}

    def __init__(self, **overrides: Any) -> None:
        super().__init__(**{**constructor_defaults(Shampoo), "matrices": None, **overrides})

    def check_group(self, group: dict[str, Any], where: str) -> None:
        """Check ranges, the choices, and that something is done before the first root."""
        super().check_group(group, where)
        for key, choices in (("grafting", ("adam", "sgd", None)), ("root", ("eigh", "newton"))):
            if group[key] not in choices:
                raise ValueError(f"{where}: {key}: expected one of {choices}, got {group[key]!r}")
        start = group["start_preconditioning_step"]
        if start is not None and not is_count(start):
            raise ValueError(
                f"{where}: start_preconditioning_step: expected a step >= 1, or None for the first,"
                f" got {start!r}"
            )
        if group["grafting"] is None and start not in (None, 1):
            raise ValueError(
                f"{where}: start_preconditioning_step={start!r} without grafting would train by "
                'plain gradients until then; pass grafting="adam" or "sgd", or leave it out'
            )

    def unit_states(self, group: dict[str, Any], unit: Unit) -> dict[str, UnitState]:
        """Return the averages of gradients and, with Adam grafting, of their squares; both factors
        of each block, their roots, and whether and how often in a row these failed."""
        shape = unit.rows, unit.cols
        states = {"exp_avg": UnitState(shape, compressible=True)}
        if group["grafting"] == "adam":
            states["exp_avg_sq"] = UnitState(shape, compressible=True, nonnegative=True)
        for side, whole in zip(SIDES, factor_shapes(*shape, group["block_size"]), strict=True):
            states[side] = UnitState(whole)
            states[f"{side}_root"] = UnitState(whole, guarded=True)
        count = blocks_in(*shape, group["block_size"])
        states["ready"] = UnitState((count,), nonnegative=True, guarded=True)
        states["failures"] = UnitState((count,), nonnegative=True, guarded=True)
        return states

    def matrix_update(
        self, group: dict[str, Any], matrix: Tensor, context: UnitContext, scratch: Scratch
    ) -> Tensor:
        """Return the preconditioned average of gradients, (m, n), each block as long as what is
        grafted."""
        beta1, beta2 = (float(beta) for beta in group["betas"])
        states, step = context.states, context.step
        mean = states["exp_avg"].lerp_(matrix, 1 - beta1) / (1 - beta1**step)
        graft = self._graft(group, matrix, mean, context)
        update = torch.empty_like(mean)
        for strip in strips(*matrix.shape, group["block_size"]):
            average_products(states, strip, strip.of(matrix), beta2)
            due = _due(group, context, strip)
            if due:
                self._refresh(group, strip, due, context, correction_of(beta2, step))
            left, right = (strip.factors(states[f"{side}_root"], side) for side in SIDES)
            blocks = strip.of(mean)
            strip.of(update).copy_(
                _grafted(
                    left @ blocks @ right,
                    blocks,
                    None if graft is None else strip.of(graft),
                    strip.counts(states["ready"]),
                )
            )
        return update

    def _graft(
        self, group: dict[str, Any], grad: Tensor, mean: Tensor, context: UnitContext
    ) -> Tensor | None:
        """Return the update whose length each block takes; None takes its own."""
        if group["grafting"] != "adam":
            return mean if group["grafting"] == "sgd" else None
        beta2 = float(group["betas"][1])
        square = context.states["exp_avg_sq"].mul_(beta2)
        square.addcmul_(grad, grad, value=weight_of(beta2))
        return mean / (square / correction_of(beta2, context.step)).sqrt_().add_(group["eps"])

    def _refresh(
        self,
        group: dict[str, Any],
        strip: Strip,
        due: Sequence[int],
        context: UnitContext,
        correction: float,
    ) -> None:
        """Compute the roots of the blocks that are due; keep the last ones where that fails."""
        states = context.states
        factors = [picked(strip.factors(states[side], side), due) for side in SIDES]
        roots, each_found = zip(
            *(
                inverse_roots(factor / correction, 4, group["eps"] ** 2, group["root"])
                for factor in factors
            ),
            strict=True,
        )
        found = each_found[0] & each_found[1]
        for side, root in zip(SIDES, roots, strict=True):
            keep_found(strip.factors(states[f"{side}_root"], side), due, root, found, context.skip)
        ready = strip.counts(states["ready"])
        keep_found(ready, due, torch.ones_like(found), found, context.skip)
        # Without a gradient yet there is nothing to decompose.
        failed = ~found & factors[0].flatten(1).any(dim=1)
        cure = 'raise eps, or pass root="eigh"'
        count_failures(context, strip, due, failed, what="roots", cure=cure)


def _due(group: dict[str, Any], context: UnitContext, strip: Strip) -> Sequence[int]:
    """Return the blocks of a strip whose roots are computed in this step.

    Until its first turn a block is updated by what is grafted; without grafting all have their
    first turn at the start.
    """
    steps = context.step - (group["start_preconditioning_step"] or 1)
    if group["grafting"] is None and steps == 0:
        return range(len(strip.numbers))
    return due_blocks(group, context, strip, steps) if steps >= 0 else ()


def _grafted(update: Tensor, mean: Tensor, graft: Tensor | None, ready: Tensor) -> Tensor:
    """Return the updates of blocks, (blocks, rows, cols), with the length of those that are
    grafted; these, or without them the means of gradients, as long as there are no roots."""
    has_roots = (ready > 0)[:, None, None]
    if graft is None:
        return torch.where(has_roots, update, mean)
    lengths = (torch.linalg.matrix_norm(x, keepdim=True) for x in (graft, update))
    return torch.where(has_roots, update * (next(lengths) / (next(lengths) + 1e-16)), graft)


class Shampoo(MatrixOptimizer):
    """Shampoo for plain, replicated and sharded parameters, with AdamW groups beside.

    Each matrix is cut into blocks. A block's gradient G is averaged (betas[0]), and multiplied by
    L^(-1/4) from the left and R^(-1/4) from the right, where L and R are the averages (betas[1]) of
    G G^T and G^T G, both corrected for their start at zero; then it is scaled to the length of
    another optimizer's update of the block. A panel of blocks has its states on one rank: where it
    lies whole nothing moves, else its gradient and update travel. Same bits at every world size.

    Args:
        params: matrices, named matrices or groups; `param_groups(model, algorithm="shampoo")` makes
            groups of a whole model.
        lr: learning rate.
        betas: decay of the average of gradients, and of those of squares and products. A second of
            1 makes sums of those, as in the first paper and in AdaGrad.
        eps: added to the root of Adam's second moment; its square is the least that is added to
            the eigenvalues of factors. Relative to the largest, n x 1.2e-7 is added.
        weight_decay: decoupled: each step scales parameters by 1 - lr * weight_decay.
        block_size: rows and columns of a block, or both; None for whole matrices. Fewer rows make
            more panels, for more ranks.
        precondition_frequency: steps from one root of a factor to the next. Blocks take turns.
        start_preconditioning_step: the first step with a root; None is 1.
        grafting: whose length updates have: "adam", "sgd" (the average of gradients), or None.
        root: "eigh", or "newton", which only multiplies.
        states: as in `Muon`; the averages of gradients and squares can be 8-bit, factors are fp32.
        max_exchange_bytes: as in `Muon`.
        on_nonfinite: as in `Muon`, without "ignore": factors would keep what is not finite.
        process_group: as in `Muon`.

    Raises:
        ValueError: a value out of range, a late start without grafting, or a parameter that is no
            matrix in a group without `matrices`.
        RuntimeError: in a step, on every rank: roots of a block failed more than 3 times in a row.

    References:
        Gupta et al. 2018, arXiv:1802.09568; Anil et al. 2020, arXiv:2002.09018 (grafting);
        Shi et al. 2023, arXiv:2309.06497 (blocks).
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        block_size: BlockSize = 1024,
        precondition_frequency: int = 10,
        start_preconditioning_step: int | None = None,
        grafting: Literal["adam", "sgd"] | None = "adam",
        root: Literal["eigh", "newton"] = "eigh",
        states: StatesName | Precision = "32bit",
        max_exchange_bytes: int = MAX_EXCHANGE_BYTES,
        on_nonfinite: Literal["skip", "raise"] = "raise",
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        refuse_ignore(on_nonfinite)
        super().__init__(ShampooAlgorithm, locals())
