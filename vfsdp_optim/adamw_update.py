"""The update of AdamW: torch's operators on chunks of long runs, the same on lists of short ones,
or torch's fused kernel.

Touches the tensors of runs; communicates nothing.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vfsdp_optim.fused_adam import can_fuse, fused_adam
from vfsdp_optim.states.scratch import Scratch
from vfsdp_optim.step.group_runs import StepRuns
from vfsdp_optim.step.run_lists import RunList
from vfsdp_optim.step.runs import Run


@dataclass(frozen=True, slots=True)
class _Operators:
    """What the update is made of, on tensors or on lists of them; in place but for `neg`."""

    neg: Callable[..., Any]
    mul: Callable[..., Any]
    lerp: Callable[..., Any]
    addcmul: Callable[..., Any]
    maximum: Callable[..., Any]
    div: Callable[..., Any]
    add: Callable[..., Any]
    addcdiv: Callable[..., Any]


def _maximum_(largest: Tensor, other: Tensor) -> None:
    torch.maximum(largest, other, out=largest)


_ON_TENSORS = _Operators(
    torch.neg,
    Tensor.mul_,
    Tensor.lerp_,
    Tensor.addcmul_,
    _maximum_,
    Tensor.div_,
    Tensor.add_,
    Tensor.addcdiv_,
)
_ON_LISTS = _Operators(
    torch._foreach_neg,
    torch._foreach_mul_,
    torch._foreach_lerp_,
    torch._foreach_addcmul_,
    torch._foreach_maximum_,
    torch._foreach_div_,
    torch._foreach_add_,
    torch._foreach_addcdiv_,
)


class AdamWUpdate:
    """One step of a group, whose hyper-parameters are read once.

    Args:
        group: complete.
        step: number of the step, from 1.
    """

    def __init__(self, group: Mapping[str, Any], step: float) -> None:
        lr, self._weight_decay = float(group["lr"]), group["weight_decay"]
        beta1, beta2 = (float(beta) for beta in group["betas"])
        self._lr, self._betas, self._eps = lr, (beta1, beta2), group["eps"]
        self._maximize, self._amsgrad = group["maximize"], group["amsgrad"]
        self._root_of_correction = (1 - beta2**step) ** 0.5
        self._factor = (lr / (1 - beta1**step)) * -1

    def of_run(self, run: Run, scratch: Scratch) -> None:
        """Update a run in pieces that fit a CPU's caches, or by one kernel."""
        if not self._maximize and can_fuse(run):
            options = dict(eps=self._eps, weight_decay=self._weight_decay)
            fused_adam(run, scratch, lr=self._lr, betas=self._betas, **options)
            return

        def root(square: Tensor) -> Tensor:
            return torch.sqrt(square, out=scratch.take(square.numel(), square.dtype, square.device))

        for param, grad, states in run.chunks(scratch):
            dtype = states["exp_avg"].dtype
            self._compute(_ON_TENSORS, param, grad.to(dtype), states, root)
        if self._writes_padding(dtype):
            run.clear_gaps()

    def of_list(self, runs: StepRuns, each: RunList) -> None:
        """Update runs in a list by a call of each operator."""
        self._compute(
            _ON_LISTS, each.params, each.gradients(runs), each.states, torch._foreach_sqrt
        )
        if self._writes_padding(each.params[0].dtype):
            for cut in each.cuts:
                if cut.gaps:
                    runs.run(cut).clear_gaps()

    def _compute(
        self,
        on: _Operators,
        param: Any,
        grad: Any,
        states: Mapping[str, Any],
        root: Callable[[Any], Any],
    ) -> None:
        """Update weights and moments: tensors, or lists of them, as the operators take.

        `grad` has the dtype of the moments; `root` returns square roots in memory of their own.
        """
        mean, square = states["exp_avg"], states["exp_avg_sq"]
        beta1, beta2 = self._betas
        if self._maximize:
            grad = on.neg(grad)
        if self._weight_decay != 0:
            on.mul(param, 1 - self._lr * self._weight_decay)
        on.lerp(mean, grad, 1 - beta1)
        on.mul(square, beta2)
        on.addcmul(square, grad, grad, value=1 - beta2)
        if self._amsgrad:
            largest = states["max_exp_avg_sq"]
            on.maximum(largest, square)
            square = largest
        denominator = root(square)
        on.div(denominator, self._root_of_correction)
        on.add(denominator, self._eps)
        on.addcdiv(param, mean, denominator, value=self._factor)

    def _writes_padding(self, dtype: torch.dtype) -> bool:
        """Return whether eps may round to 0: the padding is 0 / 0 then."""
        return self._eps < torch.finfo(dtype).smallest_normal


def update_fused(group: dict[str, Any], runs: StepRuns, each: RunList) -> None:
    """Update runs in a list by torch's fused kernel, bitwise as it does unsharded tensors."""
    beta1, beta2 = (float(beta) for beta in group["betas"])
    device, skip = each.params[0].device, runs.skip
    step = torch.full((), runs.step_of(each.cuts[0]), dtype=torch.float32, device=device)
    each.open()
    torch._fused_adamw_(
        each.params,
        each.gradients(runs),
        each.states["exp_avg"],
        each.states["exp_avg_sq"],
        each.states.get("max_exp_avg_sq", []),
        [step] * len(each.params),
        lr=float(group["lr"]),
        beta1=beta1,
        beta2=beta2,
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        amsgrad=bool(group["amsgrad"]),
        maximize=bool(group["maximize"]),
        # The kernel writes nothing where it is 1.
        found_inf=skip.to(device, torch.float32) if isinstance(skip, Tensor) else None,
    )
    each.close()
