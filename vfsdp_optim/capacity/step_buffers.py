"""How much memory the buffers of a training step take at their peak. Pure integers.

Follows `Workspace`, `RootContext` and `ModuleState` event by event: which buckets are gathered at a
time, which gradient slots are borrowed when, and which scratch tensors are kept for the next.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from sharding.fsdp.buffer import FLAG_ALIGN, Workspace
from sharding.fsdp.root import MAX_REDUCTIONS_IN_FLIGHT
from sharding.planning.negotiation import BucketPlan
from sharding.transport.collectives import PAIRWISE_MAX_RANKS
from vfsdp_optim.capacity.shapes import ITEMSIZE


@dataclass(frozen=True, slots=True)
class Precision:
    """Dtypes of a step, as of torch's MixedPrecisionPolicy, by name.

    Attributes:
        param_dtype: Of the gathered parameters; None is that of the module.
        reduce_dtype: Of the gradients that are reduced; None is `param_dtype`.
    """

    param_dtype: str | None = None
    reduce_dtype: str | None = None

    def compute(self, dtype: str) -> int:
        """Bytes of an element of a gathered parameter."""
        return ITEMSIZE[self.param_dtype or dtype]

    def reduce(self, dtype: str) -> int:
        """Bytes of an element of a gradient on its way."""
        return ITEMSIZE[self.reduce_dtype or self.param_dtype or dtype]


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
        slots: Elements of the gradient slots of each reduction: segments of one dtype share one.
        reduce_itemsizes: Of the reductions.
        receives: Whether a reduction needs receive buffers as large as the slots.
        copies_received: Elements of the receive buffers of the average over copies, and the bytes
            of each: sums are of 4 bytes at least.
    """

    shard: int
    shard_grad: int
    unsharded: int
    gathered: int
    reduced: int
    replicated: int
    slots: tuple[int, ...]
    reduce_itemsizes: tuple[int, ...]
    receives: bool
    copies_received: tuple[tuple[int, int], ...] = ()


def bucket_buffers(
    plan: BucketPlan, precision: Precision, backend: str, copies: int
) -> BucketBuffers:
    """The sizes of a bucket's flat tensors; see [Note: buffer lifetimes] in buffer.py.

    Args:
        plan: Of the bucket.
        precision: Of the step.
        backend: "nccl" works in place; "gloo" needs receive buffers on few ranks.
        copies: Of the shards (HSDP).
    """
    pairwise = backend == "gloo" and 1 < copies <= PAIRWISE_MAX_RANKS
    copies_received: list[tuple[int, int]] = []
    shard = shard_grad = unsharded = gathered = reduced = replicated = 0
    slots: dict[str, int] = {}
    world_size = 1
    for i, (segment, dtype) in enumerate(zip(plan.segments, plan.dtypes, strict=True)):
        world_size = segment.world_size
        flags = -(-(len(segment.tensors) + 1) // FLAG_ALIGN) * FLAG_ALIGN
        slot = segment.shard_numel + flags
        compute, reduce = precision.compute(dtype), precision.reduce(dtype)
        shard += segment.shard_numel * ITEMSIZE[dtype]
        unsharded += world_size * segment.shard_numel * compute
        gathered += (world_size - 1) * segment.shard_numel * compute
        if not plan.trainable[i]:  # nothing to reduce
            continue
        shard_grad += slot * ITEMSIZE[dtype]
        reduced += (world_size - 1) * slot * reduce
        if pairwise:
            itemsize = max(4, reduce) if world_size > 1 else reduce
            copies_received.append((copies * slot, itemsize))
            replicated += (copies - 1) * slot * itemsize
        else:
            replicated += 2 * (copies - 1) * slot * reduce // copies
        slots[dtype] = slots.get(dtype, 0) + world_size * slot
    receives = backend == "gloo" and 1 < world_size <= PAIRWISE_MAX_RANKS
    return BucketBuffers(
        shard=shard,
        shard_grad=shard_grad,
        unsharded=unsharded,
        gathered=gathered,
        reduced=reduced,
        replicated=replicated,
        slots=tuple(slots.values()),
        reduce_itemsizes=tuple(map(precision.reduce, slots)),
        receives=receives,
        copies_received=tuple(copies_received),
    )


def unsharded_peak(root: int, blocks: Sequence[tuple[int, Sequence[int]]]) -> int:
    """Bytes of gathered parameters at the worst moment.

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


class _Pool:
    """`Workspace` by sizes: what is borrowed and what is kept."""

    def __init__(self) -> None:
        self._free: list[tuple[int, int]] = []  # (numel, itemsize), least recently used first
        self.held = 0
        self.peak = 0

    def borrow(self, numel: int, itemsize: int) -> tuple[int, int]:
        fitting = [
            (size, i)
            for i, (size, its) in enumerate(self._free)
            if numel <= size <= 2 * numel and its == itemsize
        ]
        if fitting:
            return self._free.pop(min(fitting)[1])
        self.held += numel * itemsize
        self.peak = max(self.peak, self.held)
        return numel, itemsize

    def give_back(self, tensors: list[tuple[int, int]]) -> None:
        self._free.extend(tensors)
        dropped = self._free[: max(0, len(self._free) - Workspace.MAX_KEPT)]
        del self._free[: len(dropped)]
        self.held -= sum(numel * itemsize for numel, itemsize in dropped)


@dataclass(frozen=True, slots=True)
class ReductionMemory:
    """Bytes of gradient slots and receive buffers: at the peak, and kept between steps."""

    peak: int
    kept: int


def reduction_memory(
    root: BucketBuffers | None, blocks: Sequence[BucketBuffers]
) -> ReductionMemory:
    """The memory of the reductions of a step.

    Backward ends the blocks in reverse order. The root's slots are in use all the time: the final
    norm and the head get their gradients first, the embedding last.

    Args:
        root: The root's bucket.
        blocks: All others in forward order, equal ones repeated.
    """
    pool = _Pool()
    for _ in range(3):  # what a step finds depends on the one before
        pool.peak = pool.held
        root_slots = [] if root is None else _borrow_slots(pool, root)
        in_flight: list[_InFlight] = []
        for bucket in reversed(blocks):
            _start(pool, bucket, _borrow_slots(pool, bucket), in_flight)
        if root is not None:
            _start(pool, root, root_slots, in_flight)
        for reduction in in_flight:
            reduction.average(pool)
        for reduction in in_flight:
            pool.give_back(reduction.borrowed)
    return ReductionMemory(pool.peak, pool.held)


@dataclass(slots=True)
class _InFlight:
    """A reduction: what it borrowed, and what its average over copies is still to borrow."""

    borrowed: list[tuple[int, int]]
    second_step: tuple[tuple[int, int], ...]

    def average(self, pool: _Pool) -> None:
        self.borrowed += [pool.borrow(*size) for size in self.second_step]
        self.second_step = ()


def _borrow_slots(pool: _Pool, bucket: BucketBuffers) -> list[tuple[int, int]]:
    return [
        pool.borrow(numel, itemsize)
        for numel, itemsize in zip(bucket.slots, bucket.reduce_itemsizes, strict=True)
    ]


def _start(
    pool: _Pool,
    bucket: BucketBuffers,
    slots: list[tuple[int, int]],
    in_flight: list[_InFlight],
) -> None:
    while len(in_flight) >= MAX_REDUCTIONS_IN_FLIGHT:
        oldest = in_flight.pop(0)
        oldest.average(pool)
        pool.give_back(oldest.borrowed)
    received = _borrow_slots(pool, bucket) if bucket.receives else []
    for earlier in in_flight:
        earlier.average(pool)
    in_flight.append(_InFlight(slots + received, bucket.copies_received))
