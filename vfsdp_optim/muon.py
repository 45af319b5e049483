"""Muon: momentum, orthogonalized matrix by matrix. The matrix part may travel to owner ranks."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.optimizer import ParamsT

from sharding.planning.structure import FullMatrix, Unit
from vfsdp_optim.algorithm import (
    MatrixAlgorithm,
    OnNonfinite,
    Precision,
    StatesName,
    UnitContext,
    UnitState,
    check_at_least_zero,
    check_is_matrix,
    check_matrices,
    check_state_dtype,
    check_switches,
    constructor_defaults,
    read_matrices,
)
from vfsdp_optim.matrix_optimizer import MatrixOptimizer
from vfsdp_optim.newton_schulz import (
    COEFFICIENTS,
    Coefficients,
    check_algorithm,
    coefficient_schedule,
    newton_schulz_cost,
    orthogonalize,
)
from vfsdp_optim.optimizer import MAX_EXCHANGE_BYTES
from vfsdp_optim.parameters.given import named
from vfsdp_optim.qk_clip import QKHeads, clip
from vfsdp_optim.states.scratch import Scratch
from vfsdp_optim.step.runs import Run

# Of NorMuon, arXiv:2510.05491, algorithm 1: decay of averages, and what is added to their roots.
_BETA2 = 0.95
_ROW_EPS = 1e-8
_KELLER = COEFFICIENTS["keller"][0]
LrScale = Literal["original", "match_rms_adamw", "spectral_norm"]
LR_SCALES = (None, *get_args(LrScale))


class MuonAlgorithm(MatrixAlgorithm):
    """The update rule of `Muon`. With ns_dtype=torch.bfloat16 bitwise equal to torch.optim.Muon."""

    name = "muon"
    structural_keys = (
        "matrices",
        "ns_coefficients",
        "ns_steps",
        "ns_algorithm",
        "ns_dtype",
        "variant",
    )
    as_torch: ClassVar[Mapping[str, Any]] = {
        **MatrixAlgorithm.as_torch,
        "algorithm": "muon",
        "matrices": None,
        "ns_algorithm": "standard",
        "ns_dtype": None,
        "state_dtype": None,
        "variant": None,
        "beta2": _BETA2,
    }

    def __init__(self, **overrides: Any) -> None:
        super().__init__(
            **{**constructor_defaults(Muon), "matrices": None, "beta2": _BETA2, **overrides}
        )

    def check_group(self, group: dict[str, Any], where: str) -> None:
        """Check ranges as torch does, the matrix pattern and the coefficients."""
        check_at_least_zero(group, where, ("lr", "weight_decay", "momentum", "eps"))
        check_switches(group, where, ("nesterov",))
        if group["adjust_lr_fn"] not in LR_SCALES:
            raise ValueError(
                f"{where}: adjust_lr_fn: expected one of {LR_SCALES}, got {group['adjust_lr_fn']!r}"
            )
        if group["variant"] not in (None, "normuon"):
            raise ValueError(
                f"{where}: variant: expected None or 'normuon', got {group['variant']!r}"
            )
        beta2 = group["beta2"]
        if not isinstance(beta2, int | float) or not 0 <= beta2 < 1:
            raise ValueError(f"{where}: beta2: expected 0 <= beta2 < 1, got {beta2!r}")
        ns_dtype = group["ns_dtype"]
        if ns_dtype is not None and not (
            isinstance(ns_dtype, torch.dtype) and ns_dtype.is_floating_point
        ):
            raise ValueError(
                f"{where}: ns_dtype: expected a floating dtype or None, got {ns_dtype!r}"
            )
        check_state_dtype(group, where)
        try:
            coefficient_schedule(group["ns_coefficients"], group["ns_steps"])
            check_algorithm(group["ns_algorithm"])
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
        check_matrices(group, where)

    def check_param(self, group: dict[str, Any], shape: torch.Size, fqn: str) -> None:
        """Refuse what is no matrix, unless the group says where its matrices are."""
        check_is_matrix(group, shape, fqn, "Muon updates", "param_groups(model)")
        super().check_param(group, shape, fqn)

    def state_keys(self, group: dict[str, Any]) -> tuple[str, ...]:
        """Return the momentum."""
        return ("momentum_buffer",)

    def unit_states(self, group: dict[str, Any], unit: Unit) -> dict[str, UnitState]:
        """Return what NorMuon keeps: the running average of squares in each row of the update."""
        if group["variant"] is None:
            return {}
        return {"row_exp_avg_sq": UnitState((unit.rows,), nonnegative=True)}

    def structure(self, group: dict[str, Any], shape: torch.Size) -> FullMatrix:
        """Return where the matrices of a parameter are."""
        return read_matrices(group["matrices"])

    def update_run(self, group: dict[str, Any], run: Run, scratch: Scratch) -> None:
        """Update the momentum and decay the parameters, in place."""
        momentum, decay = group["momentum"], 1 - float(group["lr"]) * group["weight_decay"]
        for param, grad, states in run.chunks(scratch):
            buffer = states["momentum_buffer"]
            buffer.lerp_(grad.to(buffer.dtype), 1 - momentum)
            if decay != 1:
                param.mul_(decay)

    def wire_dtype(self, group: dict[str, Any], device: torch.device) -> torch.dtype:
        """Return bfloat16 where Newton-Schulz casts to it anyway, before and after."""
        dtype = _newton_schulz_dtype(group, device)
        return dtype if dtype in (torch.bfloat16, torch.float64) else torch.float32

    def write_input(
        self, group: dict[str, Any], grad: Tensor, states: dict[str, Tensor], out: Tensor
    ) -> None:
        """Write the momentum, or with Nesterov its look-ahead."""
        buffer = states["momentum_buffer"]
        if not group["nesterov"]:
            out.copy_(buffer)
        elif out.dtype == grad.dtype == buffer.dtype:
            torch.lerp(grad, buffer, group["momentum"], out=out)
        else:
            out.copy_(grad.to(buffer.dtype).lerp(buffer, group["momentum"]))

    def matrix_update(
        self, group: dict[str, Any], matrix: Tensor, context: UnitContext, scratch: Scratch
    ) -> Tensor:
        """Return the orthogonalized matrix, by NorMuon with rows of like size."""
        update = orthogonalize(
            matrix,
            coefficients=group["ns_coefficients"],
            steps=group["ns_steps"],
            algorithm=group["ns_algorithm"],
            eps=group["eps"],
            dtype=group["ns_dtype"] or matrix.dtype,  # which is that of `wire_dtype`
            take=scratch.take,
        )
        if group["variant"] is None:
            return update
        return _equalize_rows(update, context.states["row_exp_avg_sq"], group["beta2"], scratch)

    def factor(self, group: dict[str, Any], rows: int, cols: int) -> float:
        """Return the negative learning rate, scaled for the shape of the matrix."""
        return -(float(group["lr"]) * shape_scale(group["adjust_lr_fn"], rows, cols))

    def scale(self, group: dict[str, Any], rows: int, cols: int) -> float:
        """Return what the learning rate is multiplied by, for tables."""
        return shape_scale(group["adjust_lr_fn"], rows, cols)

    def cost(self, group: dict[str, Any], rows: int, cols: int) -> int:
        """Return the multiply-adds of Newton-Schulz."""
        schedule = coefficient_schedule(group["ns_coefficients"], group["ns_steps"])
        # Restarts as on an accelerator where the dtype is left to the device.
        dtype = group["ns_dtype"] or torch.bfloat16
        return newton_schulz_cost(rows, cols, schedule, group["ns_algorithm"], dtype)


class Muon(MatrixOptimizer):
    """torch.optim.Muon for plain, replicated and sharded parameters, with AdamW groups beside.

    Drop-in for torch.optim.Muon: same arguments, defaults and state. The momentum stays on the
    shards. A matrix that lies whole on one rank is updated there and nothing moves; the others are
    sent to owner ranks, balanced by the cost of their Newton-Schulz, in one packed exchange per
    wave, and return as updates. A group takes these keys besides the arguments below:

    - algorithm: "muon" (default) or "adamw"; an AdamW group has the keys and defaults of `AdamW`.
    - matrices: einops pattern of the matrices of parameters that are not one matrix each, such as
      "o ... -> o (...)" for a convolution or "e m n -> e m n" for stacked experts.

    Args:
        params: matrices, named matrices or groups; `param_groups(model)` makes groups of a whole
            model.
        lr: learning rate; a tensor of one element is read on the host at each step.
        weight_decay: decoupled: each step scales parameters by 1 - lr * weight_decay.
        momentum: decay of the running average of gradients.
        nesterov: look ahead by the gradient.
        ns_coefficients: (a, b, c), one such triple a step, or "keller" (the default), "quintic" (5
            steps, an RMS near 1) or "polar_express" (of small singular values most, any number of
            steps); sources in `newton_schulz.COEFFICIENTS`.
        eps: smallest norm a matrix is divided by, after its largest element was brought to about
            1e9 by a power of two; so it matters to zero gradients alone.
        ns_steps: Newton-Schulz steps.
        adjust_lr_fn: "original" (None): lr * sqrt(max(1, rows / cols)); "match_rms_adamw":
            lr * 0.2 * sqrt(max(rows, cols)); "spectral_norm", as dion calls it: lr *
            sqrt(rows / cols). Of the logical matrix, never of a shard.
        ns_algorithm: "standard", or "gram": iterate on the Gram matrix of the short side, for about
            0.6 of the work where sides are 4 : 1; other roundings, the same polynomials.
        ns_dtype: dtype of Newton-Schulz; None is bfloat16 on CUDA and float32 elsewhere.
        variant: "normuon" divides each row of an orthogonalized matrix by the root of the running
            average of its mean squares, and gives the whole matrix its length back; one number a
            row, on the rank that computes the matrix. The decay is the group key `beta2`, 0.95.
        state_dtype: dtype of the momentum; None is the parameter's, as in torch, or fp32 where one
            of the next arguments is used.
        states: "32bit", "8bit" (the states of large matrices as 8-bit codes, a quarter of the
            memory), or a `Precision` for more: what stays in 32 bits, master copies, rounding by
            chance. Also a group key; holds for AdamW
            groups too.
        max_exchange_bytes: memory on a rank for the matrices that travel at a time; at most twice
            as much is reserved, with replicas three times. Less means more exchanges, with less
            balanced work between.
        on_nonfinite: what to do about infinite or NaN gradients. "ignore": update. "skip":
            if a rank has one, leave parameters, states and step counts as they are on all ranks;
            `skipped_steps` counts. "raise": RuntimeError on every rank, naming the parameters.
        process_group: where every rank has the parameters whole and equal gradients
            (DistributedDataParallel: `model.process_group`), those ranks. Each matrix is
            computed by one of them.

    Raises:
        TypeError: `params`, names in `states` or `process_group` are of a wrong type.
        ValueError: a value out of range, an unknown group key, a parameter that is no matrix in a
            group without `matrices`, or a sharded parameter with a matrix larger than
            `max_exchange_bytes`.
        NotImplementedError: a DTensor placed so that ranks do not hold whole runs of rows.

    References:
        Jordan 2024, https://kellerjordan.github.io/posts/muon/ ; Liu et al. 2025, arXiv:2502.16982
        (match_rms_adamw); Li et al. 2025, arXiv:2510.05491 (NorMuon).
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: str | Coefficients | Sequence[Coefficients] = _KELLER,
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: LrScale | None = None,
        *,
        ns_algorithm: Literal["standard", "gram"] = "standard",
        ns_dtype: torch.dtype | None = None,
        variant: Literal["normuon"] | None = None,
        state_dtype: torch.dtype | None = None,
        states: StatesName | Precision = "32bit",
        max_exchange_bytes: int = MAX_EXCHANGE_BYTES,
        on_nonfinite: OnNonfinite = "ignore",
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(MuonAlgorithm, locals())

    @torch.no_grad()
    def qk_clip(self, max_logits: Mapping[QKHeads, Tensor], threshold: float = 100.0) -> None:
        """Keep attention logits below a threshold, by scaling query and key weights: MuonClip.

        Call it after `step()`, on every rank with the same attentions in the same order
        (VFSDP_DEBUG=1 compares them). A head
        whose largest logit S on any rank is above the threshold t has its query and key rows
        multiplied by sqrt(t / S); all others keep their bits. One reduction for all heads; the
        result is the same, bit by bit, on any number of ranks. Momentum is left alone.

        Args:
            max_logits: for each attention, (heads,) the largest logit before the softmax that this
                rank saw since the last call, after scaling by 1 / sqrt(head_dim); -inf where it saw
                none. The weights may be in any group.
            threshold: 100 in Kimi K2.

        Raises:
            TypeError: `max_logits` is no dict of QKHeads and tensors.
            ValueError: an unknown name, logits of another shape, a weight without these rows, or a
                threshold that is not positive.

        References:
            Kimi K2, arXiv:2507.20534, algorithm 1.
        """
        parameters = {
            fqn: param
            for g, group in enumerate(self.param_groups)
            for param, fqn in named(group, f"group {g}")
        }
        clip(max_logits, parameters, threshold, self._replicas)


def shape_scale(adjust_lr_fn: str | None, rows: int, cols: int) -> float:
    """Return what the learning rate of a (rows, cols) matrix is multiplied by.

    "original" is Keller Jordan's; "match_rms_adamw" gives updates the RMS of AdamW's
    (arXiv:2502.16982, section 2.2); "spectral_norm" brings the RMS of outputs to that of inputs
    (arXiv:2310.17813).
    """
    if adjust_lr_fn == "spectral_norm":
        return math.sqrt(rows / cols)
    if adjust_lr_fn == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, cols))
    return math.sqrt(max(1, rows / cols))


def _equalize_rows(update: Tensor, averages: Tensor, beta2: float, scratch: Scratch) -> Tensor:
    """Return an update (m, n) with its rows divided by the roots of `averages` (m,), which are
    updated first, and with the norm it had.

    The paper gives it a fixed RMS of 0.2; its own norm leaves `adjust_lr_fn` the choice.
    """
    wide = update
    if update.dtype.itemsize < 4:
        wide = scratch.take(update.numel(), torch.float32, update.device, "normuon")
        wide = wide.view(update.shape).copy_(update)
    squares = torch.linalg.vector_norm(wide, dim=1).square_()  # (m,)
    norm = squares.sum().sqrt_()
    averages.lerp_(squares.div_(wide.size(1)).to(averages.dtype), 1 - float(beta2))
    wide.div_(averages.sqrt().add_(_ROW_EPS).unsqueeze(1).to(wide.dtype))
    smallest = torch.finfo(wide.dtype).tiny  # of zeros, which stay zeros
    return wide.mul_(norm / torch.linalg.vector_norm(wide).clamp_(min=smallest))


def _newton_schulz_dtype(group: dict[str, Any], device: torch.device) -> torch.dtype:
    # By device type, never probed: the bits must not depend on the speed of a host.
    default = torch.bfloat16 if device.type == "cuda" else torch.float32
    return group["ns_dtype"] or default
