"""AdamW: Adam with decoupled weight decay. Element-wise, so it never communicates."""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.optimizer import ParamsT

from vfsdp_optim.adamw_update import AdamWUpdate, update_fused
from vfsdp_optim.algorithm import (
    Algorithm,
    OnNonfinite,
    Precision,
    StatesName,
    check_at_least_zero,
    check_betas,
    check_state_dtype,
    check_switches,
    constructor_defaults,
    hyper_parameters,
)
from vfsdp_optim.optimizer import StructuredOptimizer
from vfsdp_optim.states.scratch import Scratch
from vfsdp_optim.step.group_runs import StepRuns
from vfsdp_optim.step.run_lists import batches, fused_lists
from vfsdp_optim.step.runs import Run


class AdamWAlgorithm(Algorithm):
    """The update rule of `AdamW`, for its groups and for AdamW groups of other optimizers.

    Bitwise equal to torch.optim.AdamW: the same operations in the same order on longer runs, or on
    lists of short ones; with `fused`, its own kernel, on pieces that have the bits of the whole. In
    bfloat16 torch has two results; this is that of foreach=False, which does not round betas.
    """

    name = "adamw"
    structural_keys = ("amsgrad",)
    nonnegative = frozenset({"exp_avg_sq", "max_exp_avg_sq"})
    as_torch: ClassVar[Mapping[str, Any]] = {
        **Algorithm.as_torch,
        "algorithm": "adamw",
        "state_dtype": None,
    }

    def __init__(self, **overrides: Any) -> None:
        super().__init__(**{**constructor_defaults(AdamW), **overrides})

    def check_group(self, group: dict[str, Any], where: str) -> None:
        """Check ranges as torch does, and refuse what is not supported."""
        for key in ("capturable", "differentiable"):
            if group[key]:
                raise NotImplementedError(
                    f"{where}: {key}={group[key]!r} is not supported; leave it out (the update is "
                    "one pass over long runs, bitwise equal to torch's foreach=True)"
                )
        for key in ("states", "state_dtype", "master_weights", "stochastic_rounding"):
            if group["fused"] and group[key] not in ("32bit", None, False):
                raise NotImplementedError(
                    f"{where}: fused=True with {key}={group[key]!r} is not supported: torch's "
                    "fused kernel keeps states in the parameter's dtype; leave one of them out"
                )
        check_at_least_zero(group, where, ("lr", "eps", "weight_decay"))
        check_betas(group, where)
        check_switches(group, where, ("amsgrad", "maximize"))
        check_state_dtype(group, where)

    def counts_steps(self, group: dict[str, Any]) -> bool:
        """Return True: the moments are corrected for their start at zero."""
        return True

    def state_keys(self, group: dict[str, Any]) -> tuple[str, ...]:
        """Return the two moments, and the maximum of the second with amsgrad."""
        return ("exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if group["amsgrad"] else []))

    def update_runs(self, group: dict[str, Any], runs: StepRuns, scratch: Scratch) -> None:
        """Update moments and parameters in place, those of short runs by lists."""
        keys = self.state_keys(group)
        if group["fused"]:
            division = fused_lists(runs, keys)
            for each in division.lists:
                update_fused(group, runs, each)
        elif type(self).update_run is AdamWAlgorithm.update_run and runs.skip is False:
            division = batches(runs, keys)
            for each in division.lists:
                AdamWUpdate(group, runs.step_of(each.cuts[0])).of_list(runs, each)
        else:  # the rule of a subclass holds for short runs, too
            super().update_runs(group, runs, scratch)
            return
        # Of states in another dtype than the parameter's, or too long for a list.
        for cut in division.alone:
            run = runs.run(cut)
            self.update_run(group, run, scratch)
            run.store()

    def update_run(self, group: dict[str, Any], run: Run, scratch: Scratch) -> None:
        """Update moments and parameters in place."""
        AdamWUpdate(group, run.step).of_run(run, scratch)


class AdamW(StructuredOptimizer):
    """torch.optim.AdamW for plain, replicated and sharded parameters, with its arguments and the
    bits of foreach=True, or of fused=True on the unsharded parameters.

    Args:
        params: parameters, named parameters or groups.
        lr: learning rate; a tensor of one element is read on the host at each step.
        betas: decay of the two moments.
        eps: added to the root of the second moment.
        weight_decay: decoupled: each step scales parameters by 1 - lr * weight_decay.
        amsgrad: divide by the largest second moment so far.
        maximize: ascend.
        foreach: accepted; every value gives the same bits.
        capturable: not supported.
        differentiable: not supported.
        fused: True: by torch's fused kernel, with its bits on unsharded parameters. On a CPU, other
            shards than rows and those of `vfsdp_optim.fully_shard`, such as `Shard(1)`, can differ
            from them in last bits.
        state_dtype: dtype of the moments; None is the parameter's, as in torch, or fp32 where one
            of the next arguments is used.
        states: "32bit", "8bit" (the moments of large matrices as 8-bit codes, a quarter of the
            memory), or a `Precision` for more: what stays in 32 bits, master copies, rounding by
            chance. Also a group key.
        on_nonfinite: what to do about infinite or NaN gradients. "ignore": update. "skip":
            if a rank has one, leave parameters, states and step counts as they are on all ranks;
            `skipped_steps` counts. "raise": RuntimeError on every rank, naming the parameters.
        process_group: where every rank has the parameters whole and equal gradients
            (DistributedDataParallel: `model.process_group`), those ranks. They decide together
            about infinite and NaN gradients; the update itself communicates nothing.

    Raises:
        TypeError: `params`, names in `states` or `process_group` are of a wrong type.
        ValueError: a value out of range, an unknown group key, or a complex parameter.
        NotImplementedError: `capturable` or `differentiable` is true, `fused` with states in other
            dtypes than the parameters', or a DTensor has partial sums.

    References:
        Loshchilov and Hutter 2019, arXiv:1711.05101; Reddi et al. 2018, arXiv:1904.09237 (amsgrad).
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        state_dtype: torch.dtype | None = None,
        states: StatesName | Precision = "32bit",
        on_nonfinite: OnNonfinite = "ignore",
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        algorithm = AdamWAlgorithm(**hyper_parameters(locals()))
        super().__init__(params, algorithm, on_nonfinite=on_nonfinite, process_group=process_group)
