"""The in-place random ops that a RaggedDTensor runs, so that `nn.init` works on shards.

Touches local tensors and random generators; communicates nothing.

[Note: random numbers]
Every rank draws the full tensor and keeps its own range. Where all ranks seed alike, a parameter
initialised after sharding has bit for bit the values it would have had before, at any world size:
kernels fill a tensor in an order that depends on its size, so a draw of the piece alone would not
do. Ranks that hold nothing draw too, which keeps the generators in step. A rank that seeds
otherwise contributes its own draw to its own range. The price is the memory of one full tensor
while it is drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.distributed.tensor import DTensor

from sharding.tensor.local_ops import Handler, check_row_major, describe, overloads_of, refusal
from sharding.transport.axes import shard_rank

_NAMES = "bernoulli_ cauchy_ exponential_ geometric_ log_normal_ normal_ random_ uniform_"


def _draw(
    cls: type[DTensor], func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]
) -> DTensor:
    """Fill the tensor from this rank's generator; see [Note: random numbers]."""
    target, *rest = args
    others = [arg for arg in (*rest, *kwargs.values()) if isinstance(arg, Tensor)]
    if not isinstance(target, cls) or any(isinstance(arg, DTensor) for arg in others):
        raise refusal(func, f"expected one sharded tensor, the target, got {others!r} beside it")
    if any(arg.dim() and arg.shape != target.shape for arg in others):
        raise refusal(func, f"expected parameters of the shape of {describe(target)}")
    check_row_major(func, target)
    local = target._local_tensor
    full = torch.empty(target.shape, dtype=local.dtype, device=local.device)
    func(full, *rest, **kwargs)
    placement, rank = target._spec.placements[-1], shard_rank(target._spec.mesh)
    start, stop = placement.bounds(rank, target.numel())  # type: ignore[attr-defined]
    local.copy_(full.view(-1)[start:stop])
    return target


RANDOM_OPS: dict[OpOverload, Handler] = dict.fromkeys(
    overloads_of(_NAMES.split(), "default float from to Tensor"), _draw
)
