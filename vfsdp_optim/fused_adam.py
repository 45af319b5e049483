"""One kernel of bitsandbytes for the update of AdamW with 8-bit states on CUDA.

Touches the tensors of a run; communicates nothing. Never run on a GPU by the authors: written from
the source of bitsandbytes 0.50.2, and tested with its CPU operator of the same signature.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from vfsdp_optim.states.block_codec import BLOCK, block_count
from vfsdp_optim.states.formats import BlockState
from vfsdp_optim.states.scratch import Scratch
from vfsdp_optim.states.weights import MASTER
from vfsdp_optim.step.runs import Run

_WEIGHT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Elements of a call: the kernel counts in int32.
_LONGEST = 1 << 30


def can_fuse(run: Run) -> bool:
    """Return whether the kernel can do the run; else it is decoded, updated and encoded."""
    if run.device.type != "cuda":
        return False
    moments = [state for key, state in run.states.items() if key != MASTER]
    return (
        len(moments) == 2
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
    are raised to 1 after it. It passes over elements whose gradient is not finite; their blocks are
    made NaN after it, which reaches the weights in the next step.

    Raises:
        ImportError: bitsandbytes cannot be imported; nothing of the run has changed.
        RuntimeError: tensors that the kernel would read wrongly; it does not check itself.

    References: https://github.com/bitsandbytes-foundation/bitsandbytes/blob/0.50.2/csrc/kernels.cu
        (kOptimizerStatic8bit2StateBlockwise)
    """
    _register()
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
    if not weights.is_meta:  # which has nothing to update
        _update(weights, grad, mean, square, int(run.step), lr, betas, eps)
    square.codes.clamp_(min=1)
    _spread_nonfinite(grad, (mean.absmax, square.absmax))
    for start, stop in (*run.gaps, (numel, mean.codes.numel())):
        mean.codes[start:stop] = mean.map.zero
        square.codes[start:stop] = square.map.zero
        weights[start:stop].zero_()  # eps may be 0, and the padding is 0 / 0 then
    rule.close(run.param, weights, (), scratch)


def _register() -> None:
    """Register the operator; late, because it takes seconds and CPUs do without."""
    try:
        import bitsandbytes  # noqa: F401
    except ImportError as error:
        raise ImportError(
            "8-bit states of AdamW on CUDA are updated by a kernel of bitsandbytes, which cannot "
            f"be imported ({error}); install bitsandbytes, or choose states='32bit'",
            name=error.name,
            path=error.path,
        ) from error


def _update(
    weights: Tensor,
    grad: Tensor,
    mean: BlockState,
    square: BlockState,
    step: int,
    lr: float,
    betas: tuple[float, float],
    eps: float,
) -> None:
    for start in range(0, weights.numel(), _LONGEST):
        stop = min(start + _LONGEST, weights.numel())
        m, v = mean.narrow(start, stop), square.narrow(start, stop)
        with _default_stream(weights.device):
            torch.ops.bitsandbytes.optimizer_update_8bit_blockwise(
                "adam", grad[start:stop], weights[start:stop], m.codes[: stop - start],
                v.codes[: stop - start], *betas, 0.0, 0.0, eps, step, lr, m.map.values,
                v.map.values, m.absmax, v.absmax, 0.0, 1.0, False,
            )  # fmt: skip


def _spread_nonfinite(grad: Tensor, scales: Iterable[Tensor]) -> None:
    """Make NaN of the scales of blocks whose gradient, (numel,), has an infinity or a NaN."""
    whole = grad.numel() // BLOCK
    blocks = grad[: whole * BLOCK].view(whole, BLOCK), grad[whole * BLOCK :].view(1, -1)
    ends = [x.aminmax(dim=1) for x in blocks if x.numel()]
    zeros = torch.cat([low * 0 + high * 0 for low, high in ends])  # or NaN
    for absmax in scales:
        absmax.add_(zeros)


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
    if wrong:
        raise RuntimeError(
            f"{run.members[0].fqn}: expected contiguous tensors of one device, {numel} elements "
            f"and their blocks for the 8-bit kernel, got other {', '.join(wrong)}"
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
