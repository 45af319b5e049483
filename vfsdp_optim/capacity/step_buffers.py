"""How much memory the buffers of a training step take at their peak.

Asks the plan of a bucket for its buffers, and lets the workspace and the queue of reductions of
`sharding.fsdp` go through a step on the meta device, where tensors take no memory. Of its own this
file knows only in which order backward ends the blocks.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sharding.fsdp.buffer import Workspace, slot_numel
from sharding.fsdp.reduction import ReductionsInFlight
from sharding.planning.negotiation import BucketPlan
from sharding.transport.collectives import is_pairwise
from vfsdp_optim.capacity.shapes import ITEMSIZE


@dataclass(frozen=True, slots=True)
class StepDtypes:
    """Dtypes of a step, as of torch's MixedPrecisionPolicy, by name.

    Attributes:
        param_dtype: Of the gathered parameters; None is that of the module.
        reduce_dtype: Of the gradients that are reduced; None is `param_dtype`.
    """

    param_dtype: str | None = None
    reduce_dtype: str | None = None

    def compute(self, dtype: str) -> int:
        """Return bytes of an element of a gathered parameter."""
        return ITEMSIZE[self.param_dtype or dtype]

    def reduce(self, dtype: str) -> torch.dtype:
        """Return the dtype of a gradient on its way."""
        return torch_dtype(self.reduce_dtype or self.param_dtype or dtype)


def torch_dtype(name: str) -> torch.dtype:
    """Return the dtype of that name."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype), name
    return dtype


@dataclass(frozen=True, slots=True)
class ReductionBuffers:
    """What one reduction of a bucket borrows on a rank.

    Attributes:
        numel: Elements of the gradient slots of all its segments.
        dtype: Of them.
        receives: Whether it needs receive buffers as large as the slots.
        copies_received: Elements of the receive buffers of the average over copies.
        copies_dtype: Of those: what is summed has 4 bytes at least.
    """

    numel: int
    dtype: torch.dtype
    receives: bool = False
    copies_received: int = 0
    copies_dtype: torch.dtype = torch.float32


@dataclass(frozen=True, slots=True)
class BucketBuffers:
    """Bytes that one rank holds and moves for one bucket.

    Attributes:
        shard: The parameters.
        shard_grad: The averaged gradients and the seen-flags.
        unsharded: The gathered parameters.
        gathered: What arrives in one gather.
        reduced: What leaves in one reduction.
        replicated: What leaves in the average over copies: by a ring, over gloo to each of them.
        reductions: What is borrowed for them.
    """

    shard: int
    shard_grad: int
    unsharded: int
    gathered: int
    reduced: int
    replicated: int
    reductions: tuple[ReductionBuffers, ...]


def bucket_buffers(
    plan: BucketPlan, precision: StepDtypes, backend: str, copies: int
) -> BucketBuffers:
    """Return the sizes of a bucket's flat tensors; see [Note: buffer lifetimes] in buffer.py.

    Args:
        plan: Of the bucket.
        precision: Of the step.
        backend: "nccl" works in place; "gloo" needs receive buffers on few ranks.
        copies: Of the shards (HSDP).
    """
    segments = list(zip(plan.segments, plan.dtypes, strict=True))
    trained = [pair for pair, trains in zip(segments, plan.trainable, strict=True) if trains]
    shard = sum(segment.shard_numel * ITEMSIZE[dtype] for segment, dtype in segments)
    reductions, reduced, replicated = [], 0, 0
    for together in plan.reductions:
        if not plan.trainable[together[0]]:  # nothing to reduce
            continue
        own = reduction_buffers(plan, together, precision, backend, copies)
        ranks = plan.segments[together[0]].world_size
        width, itemsize = own.numel // ranks, own.dtype.itemsize
        reductions.append(own)
        reduced += (ranks - 1) * width * itemsize
        if own.copies_received:
            replicated += (copies - 1) * width * own.copies_dtype.itemsize
        else:
            replicated += 2 * (copies - 1) * width * itemsize // copies
    unsharded = [(s.world_size, s.shard_numel * precision.compute(dtype)) for s, dtype in segments]
    return BucketBuffers(
        shard=shard,
        shard_grad=sum(slot_numel(segment) * ITEMSIZE[dtype] for segment, dtype in trained),
        unsharded=sum(ranks * size for ranks, size in unsharded),
        gathered=sum((ranks - 1) * size for ranks, size in unsharded),
        reduced=reduced,
        replicated=replicated,
        reductions=tuple(reductions),
    )


def reduction_buffers(
    plan: BucketPlan, together: Sequence[int], precision: StepDtypes, backend: str, copies: int
) -> ReductionBuffers:
    """Return what the reduction of the segments `together` borrows; other arguments as above."""
    ranks = plan.segments[together[0]].world_size
    width = sum(slot_numel(plan.segments[segment]) for segment in together)
    dtype = precision.reduce(plan.dtypes[together[0]])
    return ReductionBuffers(
        numel=ranks * width,
        dtype=dtype,
        receives=is_pairwise(backend, ranks),
        copies_received=copies * width if is_pairwise(backend, copies) else 0,
        copies_dtype=torch.promote_types(dtype, torch.float32) if ranks > 1 else dtype,
    )


def unsharded_peak(root: int, blocks: Sequence[tuple[int, Sequence[int]]]) -> int:
    """Return bytes of gathered parameters at the worst moment.

    The root stays gathered, and so does the block that runs; of its neighbour the next bucket is on
    its way.

    Args:
        root: Bytes of the root's bucket.
        blocks: In forward order: how many blocks of a kind, and the bytes of its buckets.

    Example:
        >>> unsharded_peak(10, [(1, [5]), (3, [2, 7])])
        26
    """
    most = 0
    for i, (count, sizes) in enumerate(blocks):
        most = max(most, sum(sizes))
        neighbours = ([sizes] if count > 1 else []) + [other for _, other in blocks[i + 1 : i + 2]]
        for other in neighbours:
            most = max(most, sum(sizes) + max(other), sum(other) + max(sizes))
    return root + most


@dataclass(frozen=True, slots=True)
class ReductionMemory:
    """Bytes of gradient slots and receive buffers: at the peak, and kept between steps."""

    peak: int
    kept: int


def reduction_memory(
    root: BucketBuffers | None, blocks: Sequence[BucketBuffers], device_type: str
) -> ReductionMemory:
    """Return the memory of the reductions of a step.

    Backward ends the blocks in reverse order. The root's slots are in use all the time: the final
    norm and the head get their gradients first, the embedding last.

    Args:
        root: The root's bucket.
        blocks: All others in forward order, equal ones repeated.
        device_type: Where the step runs.
    """
    lender = _Lender(device_type)
    for _ in range(3):  # what a step finds depends on the one before
        lender.peak = lender.held
        in_flight = ReductionsInFlight()
        last = None if root is None else _Reducing(lender, root)
        for bucket in reversed(blocks):
            in_flight.start(_Reducing(lender, bucket), order=0)
        if last is not None:
            in_flight.start(last, order=0)
        in_flight.finish()
        lender.end_backward()
    return ReductionMemory(lender.peak, lender.held)


class _Lender:
    """A `Workspace` on the meta device, and the bytes that are alive."""

    def __init__(self, device_type: str) -> None:
        self._workspace = Workspace()
        self._device_type = device_type
        self._lent = 0
        self.peak = 0

    @property
    def held(self) -> int:
        """Bytes, borrowed or not."""
        return self._lent + self._workspace.kept_bytes

    def borrow(self, numel: int, dtype: torch.dtype) -> Tensor:
        tensor = self._workspace.borrow(numel, dtype, torch.device("meta"))
        self._lent += tensor.nbytes
        self.peak = max(self.peak, self.held)
        return tensor

    def give_back(self, tensors: Sequence[Tensor]) -> None:
        self._lent -= sum(tensor.nbytes for tensor in tensors)
        self._workspace.give_back(tensors)

    def end_backward(self) -> None:
        """Free what the device's workspace does not keep."""
        self._workspace.release(self._device_type)


class _Reducing:
    """A bucket in backward: borrows its slots, then what `Bucket` borrows for its reductions."""

    def __init__(self, lender: _Lender, buffers: BucketBuffers) -> None:
        self._lender, self._reductions = lender, buffers.reductions
        self._averages = True
        self._borrowed = [lender.borrow(each.numel, each.dtype) for each in self._reductions]
        self.slot_bytes = sum(each.numel * each.dtype.itemsize for each in self._reductions)

    def reduce_grads(self, order: int) -> None:
        """Borrow receive buffers."""
        self._borrowed += [
            self._lender.borrow(each.numel, each.dtype)
            for each in self._reductions
            if each.receives
        ]

    def average_replicas(self) -> None:
        """Borrow those of the second step, once."""
        if self._averages:
            self._borrowed += [
                self._lender.borrow(each.copies_received, each.copies_dtype)
                for each in self._reductions
                if each.copies_received
            ]
        self._averages = False

    def wait_for_reduce(self) -> None:
        """Give everything back."""
        self.average_replicas()
        self._lender.give_back(self._borrowed)
        self._borrowed = []
