"""One kernel of bitsandbytes for the update of AdamW with 8-bit states on CUDA.

Touches the tensors of a run; communicates nothing. Never run on a GPU by the authors: written from
the source of bitsandbytes 0.50.2, and tested with its CPU operator of the same signature.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from vfsdp_optim.block_codec import BLOCK, block_count
from vfsdp_optim.runs import Run
from vfsdp_optim.scratch import Scratch
from vfsdp_optim.states import BlockState
from vfsdp_optim.weights import MASTER

_WEIGHT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def can_fuse(run: Run) -> bool:
    """Return whether the kernel can do the run; else it is decoded, updated and encoded."""
    moments = [state for key, state in run.states.items() if key != MASTER]
    return (
        run.param.device.type == "cuda"
        and len(moments) == 2
        and all(isinstance(state, BlockState) for state in moments)
        and not isinstance(run.skip, Tensor)  # nothing would be left to undo it with
        and not run.members[0].weights.draws
        and run.param.dtype in _WEIGHT_DTYPES
    )


def fused_adam(
    run: Run,
    scratch: Scratch,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> None:
    """Update a run of AdamW: decay, then moments, weights, codes and scales in one kernel.

    The kernel keeps the sign rule of block_codec.py. It rounds small second moments to zero; codes
    are raised to 1 after it.

    Raises:
        RuntimeError: tensors that the kernel would read wrongly; it does not check itself.

    References: https://github.com/bitsandbytes-foundation/bitsandbytes/blob/0.50.2/csrc/kernels.cu
        (kOptimizerStatic8bit2StateBlockwise)
    """
    # Registers the operator; late, because it takes seconds.
    import bitsandbytes  # noqa: F401

    mean, square = run.states["exp_avg"], run.states["exp_avg_sq"]
    assert isinstance(mean, BlockState), "see can_fuse"
    assert isinstance(square, BlockState), "see can_fuse"
    rule, master = run.members[0].weights, run.states.get(MASTER)
    master_copy = None if master is None else master.open(scratch, MASTER)
    weights = rule.open(run.param, master_copy, scratch)
    grad, numel = run.grad.to(weights.dtype), weights.numel()
    _check(run, weights, grad, mean, square)
    if weight_decay != 0:
        weights.mul_(1 - lr * weight_decay)  # the kernel would decay after the update
    with _default_stream(weights.device):
        torch.ops.bitsandbytes.optimizer_update_8bit_blockwise(
            "adam", grad, weights, mean.codes[:numel], square.codes[:numel], *betas, 0.0, 0.0, eps,
            int(run.step), lr, mean.map.values, square.map.values, mean.absmax, square.absmax,
            0.0, 1.0, False,
        )  # fmt: skip
    square.codes.clamp_(min=1)
    for start, stop in (*run.gaps, (numel, mean.codes.numel())):
        mean.codes[start:stop] = mean.map.zero
        square.codes[start:stop] = square.map.zero
    rule.close(run.param, weights, (), scratch)


def _check(run: Run, weights: Tensor, grad: Tensor, mean: BlockState, square: BlockState) -> None:
    numel = weights.numel()
    wrong = [
        name
        for name, tensor, dtype, length in (
            ("weights", weights, weights.dtype, numel),
            ("gradient", grad, weights.dtype, numel),
            ("exp_avg.codes", mean.codes, torch.uint8, block_count(numel) * BLOCK),
            ("exp_avg_sq.codes", square.codes, torch.uint8, block_count(numel) * BLOCK),
            ("exp_avg.absmax", mean.absmax, torch.float32, block_count(numel)),
            ("exp_avg_sq.absmax", square.absmax, torch.float32, block_count(numel)),
        )
        if (tensor.dtype, tensor.numel(), tensor.device) != (dtype, length, weights.device)
        or not tensor.is_contiguous()
    ]
    if wrong or numel >= 1 << 31:
        raise RuntimeError(
            f"{run.members[0].fqn}: expected contiguous tensors of one device and length below "
            f"2^31 for the 8-bit kernel, got {numel} elements and other {', '.join(wrong)}"
        )


@contextmanager
def _default_stream(device: torch.device) -> Iterator[None]:
    """Order the work inside, which goes to the default stream whatever the current one is, between
    what the current stream has before and after (bitsandbytes#2050)."""
    if device.type != "cuda":
        yield
        return
    current, default = torch.cuda.current_stream(device), torch.cuda.default_stream(device)
    default.wait_stream(current)
    with torch.cuda.device(device):
        yield
    current.wait_stream(default)
