"""A whole training loop on ranks against the same loop in one process, within a tolerance.

Starts ranks. Averages of gradients over ranks sum in another order than one process does, so
nothing here is bitwise.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from vfsdp_optim.testing.differences import DifferenceError, Tolerance, first_difference, moves
from vfsdp_optim.testing.pool import RankError, run_ranks
from vfsdp_optim.testing.records import PARAM, Record, observe
from vfsdp_optim.testing.shardings import (
    LayoutChoice,
    MakeOptimizer,
    as_layouts,
    layout_text,
    shard_model,
)

BatchLoss = Callable[[nn.Module, Any], Tensor]

# Those with a forward, and a backward that averages gradients over ranks.
TRAINABLE = ("ours", "ours_hsdp", "negotiated", "fsdp2", "hsdp")


@dataclass(frozen=True, slots=True)
class Loop:
    """A training loop; the same object goes to every rank.

    Attributes:
        make_model: returns the model, the same weights in every process.
        make_optimizer: `(module) -> optimizer`.
        batches: one a step, tensors or nests of tensors whose first dim is the sample.
        loss: `(model, batch) -> mean over the samples`.
        clip: largest norm of all gradients together; None for any.
    """

    make_model: Callable[[], nn.Module]
    make_optimizer: MakeOptimizer
    batches: tuple[Any, ...]
    loss: BatchLoss
    clip: float | None


def assert_training_matches(
    make_model: Callable[[], nn.Module],
    make_optimizer: MakeOptimizer,
    batches: Sequence[Any],
    *,
    loss: BatchLoss,
    world_sizes: Sequence[int] = (2, 4),
    layouts: LayoutChoice | Sequence[LayoutChoice] = "ours",
    clip: float | None = None,
    atol: float = 1e-4,
    rtol: float = 1e-3,
    timeout: float = 60.0,
) -> None:
    """Check forward, backward, clipping and step on ranks against one process.

    Args:
        make_model: returns the model, the same weights in every process (torch's seed is 0 when it
            is called). Each block of its ModuleLists and Sequentials is sharded, then the rest.
        make_optimizer: `(module) -> optimizer`, called after sharding.
        batches: one a step, a tensor or a nest of tensors whose first dim is the sample. Ranks get
            equal parts.
        loss: `(model, batch) -> mean over the samples of the batch`.
        world_sizes: numbers of ranks.
        layouts: "ours", "ours_hsdp", "negotiated", "fsdp2", "hsdp", several of them, or "any" of
            `assert_sharded_equals_unsharded` but "ragged", which has no forward.
        clip: max_norm of `clip_grad_norm_`; None does not clip.
        atol: how far losses and parameters may be apart, absolute.
        rtol: and relative.
        timeout: seconds for the ranks of one run.

    Raises:
        DifferenceError: a loss, or else a parameter, is further apart; it names the first step.
        ValueError: a batch cannot be cut into equal parts, a layout has no forward, or no parameter
            moves by more than the tolerance: ranks that never step would pass.
        RankError: a rank raised, died or hung.
    """
    __tracebackhide__ = True
    kinds = [layout for layout in as_layouts(layouts) if layouts != "any" or layout in TRAINABLE]
    for layout in kinds:
        if layout not in TRAINABLE:
            raise ValueError(
                f"layouts: expected some of {TRAINABLE}, in which models train, or 'any', got "
                f"{layout_text(layout)}"
            )
    loop = Loop(make_model, make_optimizer, tuple(batches), loss, clip)
    for world_size in world_sizes:
        _check_batches(loop.batches, world_size)
    tolerance = Tolerance.of(False, atol, rtol)
    expected, unsharded = run_ranks(train, 1, loop, None, timeout=timeout)[0]
    _check_that_it_moves(unsharded, tolerance)
    for world_size in world_sizes:
        for layout in kinds:
            where = f"{unsharded.optimizer} on {world_size} ranks in layout {layout_text(layout)}"
            try:
                results = run_ranks(train, world_size, loop, layout, timeout=timeout)
            except RankError as error:
                error.add_note(f"this was {where}")
                raise
            _compare_losses(results[0][0], expected, tolerance, where)
            found = first_difference([record for _, record in results], unsharded, tolerance)
            if found is not None:
                raise DifferenceError(f"{where} does not train as one process does\n{found}")


def train(loop: Loop, layout: LayoutChoice | None) -> tuple[list[float], Record]:
    """Train on all ranks, or in this process where `layout` is None.

    Returns:
        The losses, averaged over ranks, and the parameters after every step; in one process also
        before the first.
    """
    torch.manual_seed(0)
    model = loop.make_model()
    rank, ranks = (0, 1) if layout is None else (dist.get_rank(), dist.get_world_size())
    if layout is None:
        optimizer = loop.make_optimizer(model)
    else:
        optimizer = shard_model(model, layout, loop.make_optimizer)
    record = Record(type(optimizer).__name__)
    params = dict(model.named_parameters())
    losses = []
    if layout is None:
        observe(record, 0, params, optimizer)  # where it starts
    for step, batch in enumerate(loop.batches, 1):
        part = pytree.tree_map_only(Tensor, lambda x: x.tensor_split(ranks)[rank], batch)
        loss = loop.loss(model, part)
        loss.backward()
        mean = loss.detach().double()
        if ranks > 1:
            dist.all_reduce(mean)
            mean /= ranks
        losses.append(float(mean))
        if loop.clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), loop.clip)
        optimizer.step()
        optimizer.zero_grad()
        observe(record, step, params, optimizer)
    # Sizes of states differ too much for one tolerance.
    record.pieces = [piece for piece in record.pieces if piece.key == PARAM]
    return losses, record


def _check_that_it_moves(record: Record, tolerance: Tolerance) -> None:
    if not moves(record, tolerance):
        raise ValueError(
            f"expected parameters that move by more than atol={tolerance.atol} and "
            f"rtol={tolerance.rtol}, or ranks that never step would pass; take a larger learning "
            "rate, more batches or a smaller tolerance"
        )


def _check_batches(batches: Sequence[Any], world_size: int) -> None:
    for i, batch in enumerate(batches):
        for x in pytree.tree_leaves(batch):
            if isinstance(x, Tensor) and (x.dim() == 0 or x.shape[0] % world_size):
                raise ValueError(
                    f"batches[{i}]: expected tensors that {world_size} ranks share evenly, got "
                    f"shape {tuple(x.shape)}"
                )


def _compare_losses(
    actual: Sequence[float], expected: Sequence[float], tolerance: Tolerance, where: str
) -> None:
    __tracebackhide__ = True
    a, b = (torch.tensor(x, dtype=torch.float64, device="cpu") for x in (actual, expected))
    wrong = tolerance.wrong(a, b)
    if wrong.any():
        step = int(wrong.nonzero()[0])
        from_step = slice(max(step - 1, 0), step + 3)
        raise DifferenceError(
            f"{where} does not train as one process does\n"
            f"first difference: the loss of step {step + 1}\n"
            f"  on ranks     {actual[step]!r}\n"
            f"  one process  {expected[step]!r}\n"
            f"  from step {max(step, 1)} on: {[round(x, 6) for x in actual[from_step]]} and "
            f"{[round(x, 6) for x in expected[from_step]]}"
        )
