"""What to change when a model takes too much on a number of ranks. Pure integers."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TypeVar

from sharding.planning.negotiation import negotiate
from vfsdp_optim.capacity.parallelism import DividedModel, Parallelism, divide
from vfsdp_optim.capacity.prediction import Capacity, PlannedBucket, Progress, plan_buckets
from vfsdp_optim.capacity.shapes import ModelShapes
from vfsdp_optim.capacity.training_setup import Granularity, Setup

T = TypeVar("T")

TOLERATED = 0.02  # padding, the share up to which a layout is not worth a word
NOTICED = 0.001  # padding that is mentioned where a request of the user's can avoid it
UNEVEN = 1.25  # skew from which the busiest rank is worth one

GRANULES = ("element", "e16", "16", "e128", "128", "matrix")


def advise(model: ModelShapes, capacity: Capacity) -> tuple[str, ...]:
    """Return sentences on padding, groups, ranks that hold nothing, segments and balance."""
    return tuple(_sentences(model, capacity))


def _sentences(model: ModelShapes, capacity: Capacity) -> Iterator[str]:
    if capacity.padding > TOLERATED:
        yield from _on_padding(model, capacity)
    for bucket in capacity.buckets:
        yield from _on_segments(bucket, capacity.setup)
    for bucket in capacity.buckets:
        yield from _on_residency(bucket)
    if capacity.skew is not None and capacity.skew > UNEVEN:
        yield _on_skew(capacity)


def _on_padding(model: ModelShapes, capacity: Capacity) -> Iterator[str]:
    worst = max(capacity.buckets, key=lambda b: b.count * b.divided.per_position * _padding(b))
    ranks, empty = worst.divided.world_size, _empty_ranks(worst)
    held = f", of which {empty} hold nothing" if empty else ""
    share = _padding(worst) / max(1, worst.divided.shapes.numel)
    yield (
        f"granule too coarse: {worst.name} pads {share:.1%} on {ranks} ranks{held}, because "
        f"{_coarsest(worst)}"
    )
    setup = capacity.setup
    finer = (
        (total_padding(plan_buckets(capacity.model, replace(setup, granularity=g))), g)
        for g in _finer(setup.granularity)
    )
    if (found := _first_tolerated(finer)) is not None and found[0] < capacity.padding:
        yield f"finer granule: --granularity {found[1]} pads {found[0]:.2%}"
    parallelism = capacity.model.parallelism
    groups = (
        (total_padding(plan_buckets(regroup(model, parallelism, group), setup)), group)
        for group in group_sizes(parallelism)[1:]
    )
    if (smaller := _first_tolerated(groups)) is not None and smaller[0] < capacity.padding:
        padding, group = smaller
        copies = parallelism.shard_ranks // group
        yield (
            f"HSDP groups of {group}: --replicate {copies * parallelism.replicate} pads "
            f"{padding:.2%}, and each rank holds {copies} times as much"
        )


def _first_tolerated(options: Iterable[tuple[float, T]]) -> tuple[float, T] | None:
    """Return the first option that pads little enough, else the one that pads least."""
    best: tuple[float, T] | None = None
    for padding, option in options:
        if padding <= TOLERATED:
            return padding, option
        if best is None or padding < best[0]:
            best = padding, option
    return best


def _on_segments(bucket: PlannedBucket, setup: Setup) -> Iterator[str]:
    """Return what it gains that tensors of one kind lie in several segments."""
    plan = bucket.plan
    if len(plan.segments) == len(set(zip(plan.dtypes, plan.trainable, strict=True))):
        return
    whole = negotiate(
        bucket.name,
        plan.params,
        bucket.divided.world_size,
        resident_padding=setup.resident_padding,
        segment_gain=float("inf"),
    )
    matrices = sum(unit.numel for param in plan.params for unit in param.step_units)
    more = (whole.owned_numel - plan.owned_numel) / max(1, matrices)
    travel = f", and {more:.0%} more of its matrices would travel" if more > 0 else ""
    yield (
        f"segments: {bucket.name} moves in {len(plan.segments)} segments of one coalesced call and "
        f"pads {plan.padding_ratio:.2%}; in one segment it would pad {whole.padding_ratio:.2%}"
        f"{travel}"
    )


def _on_residency(bucket: PlannedBucket) -> Iterator[str]:
    """Return what it costs that matrices need not travel."""
    plan = bucket.plan
    if plan.padding_ratio < NOTICED or not any(param.step_units for param in plan.params):
        return
    even = negotiate(bucket.name, plan.params, bucket.divided.world_size, resident_padding=0)
    if plan.padding_ratio - even.padding_ratio > NOTICED:
        spared = (even.owned_numel - plan.owned_numel) / max(1, even.owned_numel)
        yield (
            f"residency: {bucket.name} pads {plan.padding_ratio:.2%}, so that {spared:.0%} less of "
            f"its matrices travel; --resident-padding 0 pads {even.padding_ratio:.2%}"
        )


def _on_skew(capacity: Capacity) -> str:
    skew, largest = capacity.skew or 0.0, capacity.largest_share
    if largest > 0.8 * skew:
        return (
            f"matrix work: the busiest rank works {skew:.2f} times the mean, because the largest "
            f"of {capacity.matrices:,} matrices alone is {largest:.2f} times the mean: no more "
            f"than {int(capacity.model.parallelism.shard_ranks / largest)} ranks have work"
        )
    return (
        f"matrix work: the busiest rank works {skew:.2f} times the mean, because the matrices of "
        f"a mesh, wave by wave, cannot be dealt more evenly"
    )


def _padding(bucket: PlannedBucket) -> int:
    return sum(segment.padding for segment in bucket.plan.segments)


def total_padding(planned: tuple[PlannedBucket, ...]) -> float:
    """Return elements of padding of all buckets as a share of the parameters."""
    blocks = [(b.count * b.divided.per_position, b) for b in planned]
    numel = sum(count * b.divided.shapes.numel for count, b in blocks)
    return sum(count * _padding(b) for count, b in blocks) / numel


def _empty_ranks(bucket: PlannedBucket) -> int:
    """Return the ranks whose shard of every segment is padding alone."""
    used = 0
    for segment in bucket.plan.segments:
        ends = (o + t.numel for o, t in zip(segment.offsets, segment.tensors, strict=True))
        used = max(used, -(-max(ends, default=0) // segment.shard_numel))
    return bucket.divided.world_size - used


def _coarsest(bucket: PlannedBucket) -> str:
    """Why a bucket pads: the tensor that must be cut and may be cut most rarely."""
    found = [
        (t.granule.numel or t.numel, t.fqn)
        for segment in bucket.plan.segments
        for t in segment.tensors
        if t.numel > segment.shard_numel
    ]
    if not found:
        return "the largest tensors do not fill its shards evenly"
    granule, fqn = max(found)
    return f"{fqn} may be cut every {granule:,} elements only"


def _finer(than: Granularity) -> Iterator[Granularity]:
    """Return what can be offered to someone who asked for `than`, coarsest first."""
    rows = 1024 if than.matrices else than.rows // 2
    while rows:
        yield Granularity(rows, experts_only=than.experts_only)
        rows //= 2
    if than != Granularity():
        yield Granularity()


# -- search ----------------------------------------------------------------------------------------


def group_sizes(parallelism: Parallelism) -> list[int]:
    """Return numbers of shard ranks to try: all, and what remains of them with more copies."""
    ranks, ep = parallelism.shard_ranks, parallelism.ep
    return [
        ranks // copies
        for copies in range(1, ranks + 1)
        if ranks % copies == 0 and ranks // copies % ep == 0 and ranks // copies >= min(8, ranks)
    ]


def regroup(model: ModelShapes, parallelism: Parallelism, group: int) -> DividedModel:
    """Return the model over groups of `group` shard ranks, of the same number of ranks."""
    copies = parallelism.shard_ranks // group
    return divide(model, replace(parallelism, replicate=parallelism.replicate * copies))


def search_layouts(
    model: ModelShapes, parallelism: Parallelism, setup: Setup, progress: Progress = lambda _: None
) -> dict[tuple[int, str], tuple[float, int]]:
    """Return padding, and bytes of parameters, for group sizes and granules.

    Returns:
        (group size, granularity) -> (padding as a share, bytes of a rank's shards).
    """
    found = {}
    for group in group_sizes(parallelism)[:8]:
        divided = regroup(model, parallelism, group)
        for text in GRANULES:
            progress(f"groups of {group}, granules of {text}")
            chosen = replace(setup, granularity=Granularity.parse(text))
            planned = plan_buckets(divided, chosen)
            size = sum(b.count * b.shard_bytes for b in planned)
            found[group, text] = total_padding(planned), size
    return found
