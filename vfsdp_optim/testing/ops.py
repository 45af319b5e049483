"""Whether an element-wise operation gives the same bits wherever a tensor is cut.

Touches one device; no process group, no ranks.
"""

import random
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from vfsdp_optim.testing.differences import DifferenceError, Tolerance, values_of
from vfsdp_optim.testing.gradients import seeded


def assert_op_cut_invariant(
    op: Callable[..., Any],
    *,
    inputs: int | Sequence[Tensor] = 1,
    numel: int = 1000,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    cuts: int = 100,
    seed: int = 0,
) -> None:
    """Check that `op` on the pieces of a tensor gives the bits of `op` on the whole.

    What an optimizer does element by element has to pass, on every kind of device, or its result
    depends on where a shard is cut. Pieces lie at all alignments in memory.

    Args:
        op: called with 1-D tensors of equal length; may write to them, and may return tensors, in
            tuples, lists and dicts too.
        inputs: the tensors, or how many standard normal ones to draw. Not written to.
        numel: elements of a drawn one.
        dtype: of drawn ones.
        device: where to run.
        cuts: how many ways to cut, each into 2 to 6 pieces.
        seed: of inputs and cuts.

    Raises:
        DifferenceError: the bits differ; it names the cut, the element and both values.

    Example:
        >>> assert_op_cut_invariant(lambda x: x.sqrt_())
    """
    __tracebackhide__ = True
    if isinstance(inputs, int):
        draws = (seeded(seed, i) for i in range(inputs))
        whole = [torch.randn(numel, generator=draw, device="cpu").to(dtype) for draw in draws]
    else:
        whole = [x.detach().reshape(-1) for x in inputs]
    whole = [x.to(device) for x in whole]
    numel = whole[0].numel()
    expected = _run(op, [x.clone() for x in whole])
    draw = random.Random(seed)
    for _ in range(cuts):
        places = sorted({0, numel, *(draw.randint(0, numel) for _ in range(draw.randint(1, 5)))})
        pieces = [
            _run(op, [_copy_at(x[start:stop], draw.randrange(16)) for x in whole])
            for start, stop in pairwise(places)
        ]
        for i, full in enumerate(expected):
            _compare(i, torch.cat([piece[i] for piece in pieces]), full, places)


def _run(op: Callable[..., Any], tensors: list[Tensor]) -> list[Tensor]:
    """Return the inputs as `op` left them, and the tensors that it returned, all with a first dim
    to put pieces together along."""
    returned = [x for x in pytree.tree_leaves(op(*tensors)) if isinstance(x, Tensor)]
    return [*tensors, *(x.reshape(1) if x.dim() == 0 else x for x in returned)]


def _copy_at(piece: Tensor, offset: int) -> Tensor:
    """Return a copy that starts some elements into its storage."""
    memory = piece.new_zeros(offset + piece.numel())
    return memory[offset:].copy_(piece)


def _compare(number: int, actual: Tensor, expected: Tensor, places: list[int]) -> None:
    __tracebackhide__ = True
    if actual.shape != expected.shape:
        raise DifferenceError(
            f"tensor {number} of the operation has {actual.numel()} elements in pieces and "
            f"{expected.numel()} as a whole: it is not element-wise"
        )
    wrong = Tolerance().wrong(actual, expected)
    if wrong.any():
        first = int(wrong.nonzero()[0])
        sharded, unsharded = values_of(actual[first], expected[first])
        raise DifferenceError(
            f"the operation depends on where its tensors are cut: tensor {number} (inputs come "
            f"first), element {first} of {expected.numel()}\n"
            f"  in pieces  {sharded}\n"
            f"  whole      {unsharded}\n"
            f"  cut at     {places[1:-1]}\n"
            f"  in all     {int(wrong.sum())} elements differ"
        )
