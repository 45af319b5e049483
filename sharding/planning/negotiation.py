"""Turns the demands on all parameters of a bucket into its layout. Decides; never communicates.

[Note: residency]
`stored` demands always hold: they are combined into the granule of the parameter. `step` demands
hold unit by unit in one of two ways. A unit that lies whole on a rank is *resident*: its update
moves nothing. The others are *owned*: an exchange brings them to one rank while a step lasts.

With few ranks most units are resident by luck: a bucket has `world_size - 1` inner boundaries. A
boundary that cuts a unit can be pushed out of it by raising the parameter's granule to the unit,
which costs padding. So we plan with the stored demands, then raise what moves most, and keep what
moves less within the tolerated padding. Each attempt is a plan; their number is bounded.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from hashlib import blake2b
from math import prod

from sharding.planning.granule import Granule, Shape
from sharding.planning.planner import SegmentPlan, TensorSpec
from sharding.planning.segments import SEGMENT_GAIN, least_total_shard, plan_segments
from sharding.planning.structure import Blocks, Demand, Unit

DEFAULT_BLOCK = 256
"""Elements that stay together when nothing is declared: 8-bit states never need a new layout."""

_ATTEMPTS = 16  # plans of a bucket that the search for residency may look at


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """What the negotiation knows of a parameter.

    Attributes:
        fqn: Its name.
        shape: Its global shape.
        dtype: Of the parameter.
        demands: Structures declared by optimizers, state formats and users.
        group_key: Parameters of one key are laid side by side where that costs nothing.
        trainable: Whether it requires a gradient. Parameters of one segment have one dtype, and
            frozen ones are not with trainable ones: a segment without gradients is never reduced.
        chunk: Elements that each rank holds, in a segment of its own, where the cut was given; None
            where it is planned.
    """

    fqn: str
    shape: Shape
    dtype: str
    demands: tuple[Demand, ...] = ()
    group_key: str = ""
    trainable: bool = True
    chunk: int | None = None

    @property
    def numel(self) -> int:
        """Elements of the parameter."""
        return prod(self.shape)

    @property
    def step_units(self) -> tuple[Unit, ...]:
        """Units of all its `step` demands, in the order of the demands."""
        return tuple(
            unit
            for demand in self.demands
            if demand.when == "step"
            for unit in demand.structure.units(self.shape)
        )


@dataclass(frozen=True, slots=True)
class BucketPlan:
    """The layout of one bucket.

    Attributes:
        name: Of the bucket.
        params: In the order given.
        segments: One or a few per dtype, and for trainable and frozen parameters, by first
            appearance; see [Note: segments by granule] in segments.py.
        dtypes: Of the segments.
        trainable: Of the segments, as `fully_shard` found them.
        location: `location[i]` is (segment, index in the segment) of `params[i]`.
    """

    name: str
    params: tuple[ParamSpec, ...]
    segments: tuple[SegmentPlan, ...]
    dtypes: tuple[str, ...]
    trainable: tuple[bool, ...]
    location: tuple[tuple[int, int], ...]

    @property
    def reductions(self) -> tuple[tuple[int, ...], ...]:
        """Segments that are reduced together: of one dtype, all trainable or all frozen."""
        together: dict[tuple[str, bool], list[int]] = {}
        for segment, kind in enumerate(zip(self.dtypes, self.trainable, strict=True)):
            together.setdefault(kind, []).append(segment)
        return tuple(map(tuple, together.values()))

    @property
    def padding_ratio(self) -> float:
        """Elements of the buffers that belong to no parameter, as a fraction of those that do."""
        numel = sum(segment.numel for segment in self.segments)
        return sum(segment.padding for segment in self.segments) / numel if numel else 0.0

    @property
    def owned_numel(self) -> int:
        """Elements of all units that are not resident: what travels to owners in a step."""
        return sum(map(self.owned_numel_of, range(len(self.params))))

    def owned_numel_of(self, i: int) -> int:
        """Return elements of the units of `params[i]` that are not resident."""
        which, index = self.location[i]
        if self.segments[which].is_whole(index):  # as most are: at most a tensor is cut a rank
            return 0
        units = self.params[i].step_units
        verdicts = self.unit_verdicts(i)
        return sum(u.numel for u, resident in zip(units, verdicts, strict=True) if not resident)

    def moved_numel_of(self, i: int) -> int:
        """Return elements of `params[i]` that travel to the rank that holds most of their unit."""
        return sum(
            unit.numel - max(stop - start for _, start, stop in held)
            for unit, held in zip(self.params[i].step_units, self._held_parts(i), strict=True)
        )

    def unit_verdicts(self, i: int) -> tuple[bool, ...]:
        """Return whether each of `params[i].step_units` is resident."""
        return tuple(len(held) == 1 for held in self._held_parts(i))

    def _held_parts(self, i: int) -> Iterator[tuple[tuple[int, int, int], ...]]:
        """Yield who holds what of each of `params[i].step_units`, as `SegmentPlan.ranges` does."""
        which, index = self.location[i]
        for unit in self.params[i].step_units:
            yield self.segments[which].ranges(index, unit.start, unit.start + unit.numel)

    def describe(self) -> str:
        """Return the whole plan as text, one fact a line: equal plans have equal text, and only
        they."""
        lines = [f"bucket {self.name!r}: {len(self.params)} parameters"]
        members = {place: i for i, place in enumerate(self.location)}
        for which, (segment, dtype) in enumerate(zip(self.segments, self.dtypes, strict=True)):
            lines.append(
                f"segment {which}: dtype={dtype} trainable={self.trainable[which]} "
                f"world_size={segment.world_size} "
                f"shard_numel={segment.shard_numel} lower_bound={segment.lower_bound}"
            )
            for index in segment.order:
                i = members[which, index]
                param, verdicts = self.params[i], self.unit_verdicts(i)
                demands = "; ".join(f"{d.when} {d.structure!r} by {d.by}" for d in param.demands)
                lines.append(
                    f"  {segment.offsets[index]}: {param.fqn} shape={tuple(param.shape)} "
                    f"{_text(segment.tensors[index].granule)} group={param.group_key!r} "
                    f"resident={sum(verdicts)}/{len(verdicts)} demands=[{demands}]"
                )
        return "\n".join(lines)

    def digest(self) -> str:
        """Return a hash of `describe()`, to compare plans between ranks."""
        return blake2b(self.describe().encode(), digest_size=16).hexdigest()


def negotiate(
    name: str,
    params: Iterable[ParamSpec],
    world_size: int,
    *,
    resident_padding: float = 0.02,
    segment_gain: float = SEGMENT_GAIN,
) -> BucketPlan:
    """Lay out one bucket. Same arguments, same plan, on every rank. See [Note: residency].

    Args:
        name: Of the bucket, for tables and errors.
        params: In module order.
        world_size: Ranks that share the bucket.
        resident_padding: Padding, as a fraction of the bucket's elements, up to which granules are
            raised for residency. If the stored demands alone need more, raising may not add to it.
            0 raises none, also where it would cost nothing.
        segment_gain: Parameters of one kind are laid out in up to four segments when that saves
            more padding than this fraction of their elements.

    Raises:
        ValueError: Demands of a parameter do not fit its shape or each other, two parameters have
            one name, or an argument is out of range.

    Example:
        >>> from sharding.planning.structure import FullMatrix
        >>> muon = (Demand(FullMatrix(), "step", "muon"),)
        >>> shapes = {"q": (64, 64), "k": (32, 64), "v": (32, 64), "o": (64, 64), "norm": (64,)}
        >>> params = [
        ...     ParamSpec(name, shape, "float32", muon if len(shape) == 2 else ())
        ...     for name, shape in shapes.items()
        ... ]
        >>> plan = negotiate("attention", params, 4, resident_padding=0.1)
        >>> [plan.unit_verdicts(i) for i in range(5)]
        [(False,), (True,), (True,), (False,), ()]
    """
    params = tuple(params)
    if world_size < 1:
        raise ValueError(f"bucket {name!r}: world_size must be >= 1, got {world_size!r}.")
    if not resident_padding >= 0:
        raise ValueError(f"resident_padding must be >= 0, got {resident_padding!r}.")
    repeated = [fqn for fqn, count in Counter(p.fqn for p in params).items() if count > 1]
    if repeated:
        raise ValueError(
            f"bucket {name!r} has several parameters named {', '.join(map(repr, repeated))}. "
            "Give each parameter once, under one name."
        )
    plan = _negotiated(params, world_size, resident_padding, segment_gain)
    return replace(plan, name=name)


@lru_cache(maxsize=64)
def _negotiated(
    params: tuple[ParamSpec, ...], world_size: int, resident_padding: float, segment_gain: float
) -> BucketPlan:
    """Return the plan of a bucket without a name: equal layers are negotiated once."""
    if any(param.chunk is not None for param in params):
        rest = tuple(param for param in params if param.chunk is None)
        planned = _negotiated(rest, world_size, resident_padding, segment_gain)
        return _with_given_cuts(planned, params, world_size)
    stored = tuple(stored_granule(param) for param in params)
    raised = tuple(map(_raised_granule, params, stored))
    # Names are left out, so that layers whose parameters have others are laid out once, too.
    unnamed = tuple(replace(param, fqn=str(i)) for i, param in enumerate(params))
    layout = _Placing(world_size, segment_gain)
    granules = _choose_granules(unnamed, stored, raised, layout, resident_padding)
    return layout.plan("", params, granules)


def _with_given_cuts(
    planned: BucketPlan, params: tuple[ParamSpec, ...], world_size: int
) -> BucketPlan:
    """Return the plan of some of `params`, with a segment for each of the others."""
    segments, dtypes = list(planned.segments), list(planned.dtypes)
    trainable, places = list(planned.trainable), iter(planned.location)
    location = []
    for param in params:
        if param.chunk is None:
            location.append(next(places))
            continue
        tensor = _tensor(param, Granule(param.chunk))
        location.append((len(segments), 0))
        segments.append(
            SegmentPlan((tensor,), world_size, param.chunk, (0,), (0,), param.chunk, "bound")
        )
        dtypes.append(param.dtype)
        trainable.append(param.trainable)
    return BucketPlan(
        planned.name, params, tuple(segments), tuple(dtypes), tuple(trainable), tuple(location)
    )


def stored_granule(param: ParamSpec) -> Granule:
    """Return the cuts that the default block and all `stored` demands of a parameter allow."""
    default = Demand(Blocks(max(1, min(DEFAULT_BLOCK, param.numel))), "stored", "fully_shard")
    granule = default.structure.granule(param.shape)
    taken = [default]
    for demand in param.demands:
        try:
            own = demand.structure.granule(param.shape)
            # A step demand without units has nothing that could travel to an owner.
            if demand.when == "step" and demand.structure.units(param.shape):
                continue
        except ValueError as error:
            raise ValueError(f"{param.fqn} (demand by {demand.by}): {error}") from error
        try:
            granule = granule.combine(own)
        except ValueError as error:
            others = ", ".join(f"{other.structure!r} by {other.by}" for other in taken)
            raise ValueError(
                f"{param.fqn} of shape {tuple(param.shape)}: {demand.structure!r} by {demand.by} "
                f"cannot be stored together with {others}: {error} Drop one of them, or demand "
                f"it with when='step', so that it only holds during the update."
            ) from error
        taken.append(demand)
    return granule


def _raised_granule(param: ParamSpec, stored: Granule) -> Granule:
    """Return the stored granule, raised so that every unit lies whole on a rank where that can
    be."""
    granule = stored
    for demand in param.demands:
        if demand.when == "step" and demand.structure.units(param.shape):
            try:
                granule = granule.combine(demand.structure.granule(param.shape))
            except ValueError:
                return Granule(max(1, param.numel))  # no common cut: the whole parameter
    return granule


@lru_cache(maxsize=1024)
def _choose_granules(
    params: tuple[ParamSpec, ...],
    stored: tuple[Granule, ...],
    raised: tuple[Granule, ...],
    layout: "_Placing",
    resident_padding: float,
) -> tuple[Granule, ...]:
    """Return the granule of each parameter: stored or raised. See [Note: residency]."""
    can_rise = [i for i in range(len(params)) if raised[i] != stored[i]]
    base = layout.plan("", params, stored)
    best, best_granules = base, stored
    if not can_rise or not base.owned_numel or not resident_padding:
        return best_granules
    tolerated = max(resident_padding, base.padding_ratio)
    attempts = _ATTEMPTS

    def attempt(risen: set[int]) -> BucketPlan | None:
        """Return the plan with these granules raised, if it pads little enough; remembers the
        best."""
        nonlocal attempts, best, best_granules
        attempts -= 1
        granules = tuple(raised[i] if i in risen else stored[i] for i in range(len(params)))
        if layout.least_padding(params, granules) > tolerated:
            return None
        plan = layout.plan("", params, granules)
        if plan.padding_ratio > tolerated:
            return None
        if plan.owned_numel < best.owned_numel:
            best, best_granules = plan, granules
        return plan

    if attempt(set(can_rise)) is not None and not best.owned_numel:
        return best_granules
    risen: set[int] = set()
    refused: set[int] = set()
    current = base
    while attempts > 0:
        moved = {i: current.owned_numel_of(i) for i in can_rise if i not in risen | refused}
        chosen = max(moved, key=moved.__getitem__, default=None)
        if chosen is None or not moved[chosen]:
            break
        plan = attempt(risen | {chosen})
        if plan is None:
            refused.add(chosen)
        else:
            risen.add(chosen)
            current = plan
    return best_granules


@dataclass(frozen=True, slots=True)
class _Placing:
    """Where the parameters of a bucket lie for given granules."""

    world_size: int
    segment_gain: float

    def plan(
        self, name: str, params: tuple[ParamSpec, ...], granules: tuple[Granule, ...]
    ) -> BucketPlan:
        segments: list[SegmentPlan] = []
        kinds: list[tuple[str, bool]] = []
        location = [(0, 0)] * len(params)
        for kind, of_kind in _by_kind(params).items():
            tensors = tuple(_tensor(params[i], granules[i]) for i in of_kind)
            for members, segment in plan_segments(tensors, self.world_size, gain=self.segment_gain):
                for index, member in enumerate(members):
                    location[of_kind[member]] = len(segments), index
                segments.append(segment)
                kinds.append(kind)
        dtypes, trainable = tuple(d for d, _ in kinds), tuple(t for _, t in kinds)
        return BucketPlan(name, params, tuple(segments), dtypes, trainable, tuple(location))

    def least_padding(self, params: tuple[ParamSpec, ...], granules: tuple[Granule, ...]) -> float:
        """Return a padding ratio that no plan with these granules is below; far cheaper than a
        plan."""
        shard = sum(
            least_total_shard([_tensor(params[i], granules[i]) for i in of_kind], self.world_size)
            for of_kind in _by_kind(params).values()
        )
        numel = sum(param.numel for param in params)
        return self.world_size * shard / max(1, numel) - 1


def _by_kind(params: tuple[ParamSpec, ...]) -> dict[tuple[str, bool], list[int]]:
    """Return indices of the parameters of each (dtype, trainable), by first appearance."""
    by_kind: dict[tuple[str, bool], list[int]] = {}
    for i, param in enumerate(params):
        by_kind.setdefault((param.dtype, param.trainable), []).append(i)
    return by_kind


def _tensor(param: ParamSpec, granule: Granule) -> TensorSpec:
    return TensorSpec(param.fqn, param.numel, granule, param.group_key)


def _text(granule: Granule) -> str:
    restart = "" if granule.restart is None else f" restart={granule.restart}"
    cuts = "" if granule.cuts is None else f" cuts={','.join(map(str, granule.cuts))}"
    return f"granule={granule.numel}{restart}{cuts}"
