"""What a model takes on a number of ranks: padding, memory, traffic, balance.

Nothing here runs: buckets are negotiated as `fully_shard(optimizer=...)` negotiates them, and the
tensors that a step allocates are counted. Not counted: activations, the full gradient of the
parameter that autograd just finished, the allocator's own losses.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from sharding.planning.negotiation import BucketPlan, negotiate
from vfsdp_optim.capacity.matrix_work import Block, MatrixWork, matrix_work
from vfsdp_optim.capacity.optimizers import DEVICES
from vfsdp_optim.capacity.parallelism import DividedBucket, DividedModel
from vfsdp_optim.capacity.shapes import ITEMSIZE
from vfsdp_optim.capacity.step_buffers import (
    BucketBuffers,
    bucket_buffers,
    reduction_memory,
    unsharded_peak,
)
from vfsdp_optim.capacity.torch_shards import TorchShards, torch_shards
from vfsdp_optim.capacity.training_setup import Setup
from vfsdp_optim.capacity.update_scratch import Need, Needs, update_scratch


@dataclass(frozen=True, slots=True)
class PlannedBucket:
    """A bucket of a divided model and its layout."""

    divided: DividedBucket
    plan: BucketPlan

    @property
    def name(self) -> str:
        """Of its blocks."""
        return self.divided.shapes.name

    @property
    def count(self) -> int:
        """How many blocks have it."""
        return self.divided.shapes.count

    @property
    def is_root(self) -> bool:
        """Whether it holds what is outside of all blocks."""
        return self.name == "root"

    @property
    def shard_numel(self) -> int:
        """Elements of a rank's shard of one block, padding included."""
        return sum(segment.shard_numel for segment in self.plan.segments)

    @property
    def shard_bytes(self) -> int:
        """Bytes of a rank's shard of one block."""
        pairs = zip(self.plan.segments, self.plan.dtypes, strict=True)
        return sum(segment.shard_numel * ITEMSIZE[dtype] for segment, dtype in pairs)

    @property
    def lower_bound(self) -> int:
        """Elements that no shard of these segments is smaller than."""
        return sum(segment.lower_bound for segment in self.plan.segments)


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes on the rank that has most.

    Attributes:
        parameters: The shards.
        gradients: The averaged gradients of the shards.
        states: Of the optimizer.
        unsharded: Gathered parameters at the worst moment.
        communication: Gradient slots and receive buffers at the worst moment.
        exchange: Slots in which cut matrices travel, and the optimizer's scratch.
        total: All of them, on the rank where the sum is largest.
    """

    parameters: int
    gradients: int
    states: int
    unsharded: int
    communication: int
    exchange: int
    total: int


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes that cross the wire in a step, on the rank with most.

    Attributes:
        gather: Arrive in gathers of parameters, forward and backward.
        reduce: Leave in reductions of gradients.
        replicate: Leave in averages over copies (HSDP).
        exchange: Leave in the exchange of cut matrices, to owners and back.
    """

    gather: int
    reduce: int
    replicate: int
    exchange: int


@dataclass(frozen=True, slots=True)
class Capacity:
    """A model on a number of ranks.

    Attributes:
        model: What was left of it for FSDP.
        setup: What it is trained with.
        buckets: Their layouts, in forward order.
        numel: Elements of one group of shard ranks.
        padding: Elements of padding as a share of `numel`.
        bound: Padding that no layout of these segments is below.
        optimal: Whether no smaller layout is possible, for all buckets.
        memory: Bytes by kind.
        states_by_rank: Bytes of optimizer state of each shard rank.
        unit_states_by_rank: Of those, what is kept of whole units, by their owners.
        exchange_by_rank: Bytes of exchange slots and scratch of each shard rank.
        kept_communication: Bytes of communication buffers that stay between steps.
        traffic: Bytes on the wire.
        matrices: How many matrices need an owner.
        skew: Work of matrices of the busiest rank, wave by wave, over the mean; None without any.
        largest_share: The largest matrix alone, over the mean; no plan has a smaller skew.
        torch: The same under torch's FSDP2.
    """

    model: DividedModel
    setup: Setup
    buckets: tuple[PlannedBucket, ...]
    numel: int
    padding: float
    bound: float
    optimal: bool
    memory: Memory
    states_by_rank: tuple[int, ...]
    unit_states_by_rank: tuple[int, ...]
    exchange_by_rank: tuple[int, ...]
    kept_communication: int
    traffic: Traffic
    matrices: int
    skew: float | None
    largest_share: float
    torch: TorchShards


Progress = Callable[[str], None]


def plan_buckets(
    model: DividedModel, setup: Setup, progress: Progress = lambda _: None
) -> tuple[PlannedBucket, ...]:
    """Return the layout of every bucket; equal blocks are planned once.

    Args:
        model: To lay out.
        setup: What must hold.
        progress: Called with the name of each bucket before it is planned.

    Raises:
        ValueError: Demands that cannot be combined; names the parameter.
    """
    planned = []
    for bucket in model.buckets:
        progress(f"{bucket.shapes.name} on {bucket.world_size} ranks")
        plan = negotiate(
            bucket.shapes.name,
            setup.specs(bucket.shapes),
            bucket.world_size,
            resident_padding=setup.resident_padding,
        )
        planned.append(PlannedBucket(bucket, plan))
    return tuple(planned)


def measure(model: DividedModel, setup: Setup, progress: Progress = lambda _: None) -> Capacity:
    """Plan a divided model and count what it takes.

    Raises:
        ValueError: Demands that cannot be combined; names the parameter.
    """
    planned = plan_buckets(model, setup, progress)
    progress("owners of matrices")
    works = _matrix_works(model, planned, setup)
    numel = sum(b.count * b.divided.per_position * b.divided.shapes.numel for b in planned)
    copies = model.parallelism.replicate
    buffers = {
        b.name: bucket_buffers(b.plan, setup.precision, setup.backend, copies) for b in planned
    }
    of_units = _by_rank(model, [(work.states, per) for work, per in works])
    cut = _states_by_rank(model, planned, setup)
    states = tuple(a + b for a, b in zip(cut, of_units, strict=True))
    exchange = _exchange_by_rank(model, planned, works, setup)
    root, blocks = _in_order(model, planned, buffers)
    device_type = DEVICES[setup.backend].type
    reductions = reduction_memory(root, [b for layer in blocks for b in layer], device_type)
    parameters, gradients = (
        sum(b.count * getattr(buffers[b.name], key) for b in planned)
        for key in ("shard", "shard_grad")
    )
    unsharded = unsharded_peak(
        0 if root is None else root.unsharded,
        [
            (layer[0].count, [buffers[b.name].unsharded for b in layer])
            for layer in _layers(model, planned)
        ],
    )
    fixed = parameters + gradients + unsharded + reductions.peak
    memory = Memory(
        parameters=parameters,
        gradients=gradients,
        states=max(states),
        unsharded=unsharded,
        communication=reductions.peak,
        exchange=max(exchange),
        total=fixed + max(a + b for a, b in zip(states, exchange, strict=True)),
    )
    mean = sum(w.work * per for w, per in works) / (model.parallelism.shard_ranks * copies)
    return Capacity(
        model=model,
        setup=setup,
        buckets=planned,
        numel=numel,
        padding=_padded(planned, "shard_numel") / numel - 1,
        bound=_padded(planned, "lower_bound") / numel - 1,
        optimal=all(s.optimal for b in planned for s in b.plan.segments),
        memory=memory,
        states_by_rank=states,
        unit_states_by_rank=of_units,
        exchange_by_rank=exchange,
        kept_communication=reductions.kept,
        traffic=_traffic(model, planned, buffers, works, setup),
        matrices=sum(w.matrices * per for w, per in works),
        skew=sum(w.busiest for w, _ in works) / mean if mean else None,
        largest_share=max((w.largest_cost for w, _ in works), default=0) / mean if mean else 0.0,
        torch=torch_shards(model, setup, numel),
    )


def _padded(planned: Sequence[PlannedBucket], key: str) -> int:
    """Return elements of all buffers of one group of shard ranks."""
    return sum(
        b.count * b.divided.per_position * b.divided.world_size * int(getattr(b, key))
        for b in planned
    )


def _by_rank(model: DividedModel, parts: Sequence[tuple[Sequence[int], int]]) -> tuple[int, ...]:
    """Sum over meshes by shard rank; see [Note: ranks of a plan]."""
    ranks = model.parallelism.shard_ranks
    return tuple(sum(values[rank // per] for values, per in parts) for rank in range(ranks))


def _layers(
    model: DividedModel, planned: Sequence[PlannedBucket]
) -> list[tuple[PlannedBucket, ...]]:
    """Return the buckets of each kind of block, without the root."""
    rest = iter(planned)
    layers = [tuple(next(rest) for _ in layer) for layer in model.layers]
    return [layer for layer in layers if not layer[0].is_root]


def _in_order(
    model: DividedModel, planned: Sequence[PlannedBucket], buffers: dict[str, BucketBuffers]
) -> tuple[BucketBuffers | None, list[list[BucketBuffers]]]:
    """Return the root's buffers and those of every block, in forward order."""
    root = next((buffers[b.name] for b in planned if b.is_root), None)
    blocks = []
    for layer in _layers(model, planned):
        blocks += [[buffers[b.name] for b in layer]] * layer[0].count
    return root, blocks


def _matrix_works(
    model: DividedModel, planned: Sequence[PlannedBucket], setup: Setup
) -> list[tuple[MatrixWork, int]]:
    """Return the matrix part on each mesh, and how many shard ranks share a position of it."""
    meshes: dict[tuple[int, int], list[Block]] = {}
    for bucket in planned:
        mesh = bucket.divided.world_size, bucket.divided.per_position
        optimizer = setup.block_optimizer(bucket.divided.shapes)
        meshes.setdefault(mesh, []).append(Block(bucket.plan, optimizer, bucket.count))
    return [
        (matrix_work(own, size, model.parallelism.replicate, wire), per)
        for (size, per), own in meshes.items()
        for wire in {wire: None for block in own for wire in block.wires()}
    ]


def _states_by_rank(
    model: DividedModel, planned: Sequence[PlannedBucket], setup: Setup
) -> tuple[int, ...]:
    """Return bytes of the states that are cut as their parameters are."""
    parts = []
    for bucket in planned:
        held = [0] * bucket.divided.world_size
        optimizer = setup.block_optimizer(bucket.divided.shapes)
        for i, (which, index) in enumerate(bucket.plan.location):
            for rank, start, stop in bucket.plan.segments[which].ranges(index):
                held[rank] += bucket.count * optimizer.state_bytes(i, stop - start)
        parts.append((held, bucket.divided.per_position))
    return _by_rank(model, parts)


def _exchange_by_rank(
    model: DividedModel,
    planned: Sequence[PlannedBucket],
    works: Sequence[tuple[MatrixWork, int]],
    setup: Setup,
) -> tuple[int, ...]:
    """Return slots of the exchange, and the scratch of both kinds of updates."""
    ranks = model.parallelism.shard_ranks
    scratch: Needs = {}
    kinds: list[tuple[Mapping[Need, Sequence[int]], int]] = [
        (work.scratch, per) for work, per in works
    ]
    for bucket in planned:
        own = update_scratch(bucket.plan, setup.block_optimizer(bucket.divided.shapes))
        kinds.append((own, bucket.divided.per_position))
    for needs, per in kinds:
        for need, values in needs.items():
            most = scratch.setdefault(need, [0] * ranks)
            for rank in range(ranks):
                most[rank] = max(most[rank], values[rank // per])
    slots = _by_rank(model, [(work.slots, per) for work, per in works])
    return tuple(
        slots[rank] + sum(dtype.itemsize * most[rank] for (_, dtype), most in scratch.items())
        for rank in range(ranks)
    )


def _traffic(
    model: DividedModel,
    planned: Sequence[PlannedBucket],
    buffers: dict[str, BucketBuffers],
    works: Sequence[tuple[MatrixWork, int]],
    setup: Setup,
) -> Traffic:
    # By default the root, and the block that forward used last, stay gathered until backward.
    gathers = {b.name: b.count if b.is_root else 2 * b.count for b in planned}
    if not planned[-1].is_root:
        gathers[planned[-1].name] -= 1
    moved = _by_rank(model, [(w.moved, per) for w, per in works])
    return Traffic(
        gather=sum(gathers[name] * own.gathered for name, own in buffers.items()),
        reduce=sum(b.count * buffers[b.name].reduced for b in planned),
        replicate=sum(b.count * buffers[b.name].replicated for b in planned),
        exchange=max(moved),
    )
