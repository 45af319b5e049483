"""The update of AdamW on lists of tensors: torch's operators, a call for many parameters.

Touches the tensors of runs; communicates nothing.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from vfsdp_optim.step.run_lists import FusedPieces
from vfsdp_optim.step.runs import Run


def update_lists(group: dict[str, Any], runs: Sequence[Run]) -> None:
    """Update runs of one dtype, device and step: the operations of `update_run` in its order."""
    lr, weight_decay, eps = float(group["lr"]), group["weight_decay"], group["eps"]
    beta1, beta2 = (float(beta) for beta in group["betas"])
    step = runs[0].step
    params = [run.param for run in runs]
    dtype = params[0].dtype
    grads = [run.grad.to(dtype) for run in runs]
    means = [run.states["exp_avg"].parts()[""] for run in runs]
    squares = [run.states["exp_avg_sq"].parts()[""] for run in runs]
    if group["maximize"]:
        grads = list(torch._foreach_neg(grads))
    if weight_decay != 0:
        torch._foreach_mul_(params, 1 - lr * weight_decay)
    torch._foreach_lerp_(means, grads, 1 - beta1)
    torch._foreach_mul_(squares, beta2)
    torch._foreach_addcmul_(squares, grads, grads, value=1 - beta2)
    if group["amsgrad"]:
        largest = [run.states["max_exp_avg_sq"].parts()[""] for run in runs]
        torch._foreach_maximum_(largest, squares)
        squares = largest
    denominators = list(torch._foreach_sqrt(squares))
    torch._foreach_div_(denominators, (1 - beta2**step) ** 0.5)
    torch._foreach_add_(denominators, eps)
    torch._foreach_addcdiv_(params, means, denominators, value=(lr / (1 - beta1**step)) * -1)
    if eps < torch.finfo(dtype).smallest_normal:
        for run in runs:
            run.clear_gaps()  # see `update_run`


def update_fused(group: dict[str, Any], runs: Iterable[Run], keys: Sequence[str]) -> None:
    """Update runs by torch's fused kernel, bitwise as it does unsharded tensors; store them."""
    lists: dict[object, FusedPieces] = {}
    for run in runs:
        key = run.step, run.device, run.param.dtype
        if key not in lists:
            lists[key] = FusedPieces(keys)
        lists[key].add(run)
    beta1, beta2 = (float(beta) for beta in group["betas"])
    for pieces in lists.values():
        first = pieces.runs[0]
        step = torch.full((), first.step, dtype=torch.float32, device=first.device)
        skip = first.skip
        torch._fused_adamw_(
            pieces.params,
            pieces.grads,
            pieces.states["exp_avg"],
            pieces.states["exp_avg_sq"],
            pieces.states.get("max_exp_avg_sq", []),
            [step] * len(pieces.params),
            lr=float(group["lr"]),
            beta1=beta1,
            beta2=beta2,
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            amsgrad=bool(group["amsgrad"]),
            maximize=bool(group["maximize"]),
            # The kernel writes nothing where it is 1.
            found_inf=skip.to(first.device, torch.float32) if isinstance(skip, Tensor) else None,
        )
        pieces.write_back()
        for run in pieces.runs:
            run.store()
