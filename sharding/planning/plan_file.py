"""Layouts as JSON: what `vfsdp plan --json` writes, and what `fully_shard(plan=...)` reads.

A file holds the plans of one model for several numbers of ranks. A bucket of it fits a
`fully_shard` call when it has the same parameters, by name, shape and dtype in any order, over as
many ranks, and cuts none of them where what is declared at the call forbids it.
"""

import json
import os
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from sharding.planning.granule import Granule
from sharding.planning.negotiation import BucketPlan, ParamSpec, stored_granule
from sharding.planning.planner import ALIGN, SegmentPlan, TensorSpec

PLAN_FORMAT = 1

PlanSource = str | os.PathLike[str] | Mapping[str, Any]


def bucket_to_json(plan: BucketPlan, count: int) -> dict[str, Any]:
    """Return a bucket as JSON values; `count` blocks of the model have it."""
    params = []
    for param, (which, index) in zip(plan.params, plan.location, strict=True):
        segment = plan.segments[which]
        granule = segment.tensors[index].granule
        entry: dict[str, Any] = {
            "fqn": param.fqn,
            "shape": list(param.shape),
            "dtype": param.dtype,
            "trainable": param.trainable,
            "segment": which,
            "offset": segment.offsets[index],
            "granule": granule.numel,
        }
        if granule.restart is not None:
            entry["restart"] = granule.restart
        if granule.cuts is not None:
            entry["cuts"] = list(granule.cuts)
        params.append(entry)
    segments = [
        {"dtype": dtype, "shard_numel": s.shard_numel, "lower_bound": s.lower_bound}
        for s, dtype in zip(plan.segments, plan.dtypes, strict=True)
    ]
    return {
        "bucket": plan.name,
        "count": count,
        "world_size": plan.segments[0].world_size if plan.segments else 1,
        "segments": segments,
        "params": params,
    }


def planned_bucket(
    source: PlanSource, name: str, params: Sequence[ParamSpec], world_size: int
) -> BucketPlan:
    """Return the layout that a plan has for the parameters of one `fully_shard` call.

    Args:
        source: Path of the JSON, or what `json.load` returned.
        name: Of the bucket.
        params: With the demands of this call.
        world_size: Ranks that share the bucket.

    Raises:
        ValueError: The file is no plan, or does not fit; names the first difference.
        TypeError: `source` is neither a path nor a mapping.
    """
    content, where = _load(source)
    buckets = _buckets(content, where)
    sizes = sorted({int(bucket["world_size"]) for bucket in buckets})
    if world_size not in sizes:
        raise ValueError(
            f"{where}: it is made for shards over {', '.join(map(str, sizes))} ranks, and the mesh "
            f"shards over {world_size}; make one with vfsdp plan --ranks {world_size}"
        )
    candidates = [bucket for bucket in buckets if bucket["world_size"] == world_size]
    differences = {i: _difference(b, params, name) for i, b in enumerate(candidates)}
    if all(differences.values()):
        names = {param.fqn for param in params}
        nearest = max(
            range(len(candidates)),
            key=lambda i: len(names & {p["fqn"] for p in candidates[i]["params"]}),
        )
        raise ValueError(
            f"{where}: no bucket of the plan has the parameters of {name}; of the nearest, "
            f"{candidates[nearest]['bucket']!r}, {differences[nearest]}"
        )
    fitting = next(candidates[i] for i, difference in differences.items() if not difference)
    return _rebuilt(fitting, name, params, world_size, where)


def _load(source: PlanSource) -> tuple[Mapping[str, Any], str]:
    if isinstance(source, Mapping):
        return source, "plan"
    if not isinstance(source, (str, os.PathLike)):
        raise TypeError(
            f"plan: expected the path of a file that vfsdp plan --json wrote, or what json.load "
            f"made of it, got {source!r}"
        )
    path = Path(source)
    if not path.is_file():
        raise ValueError(f"plan: no such file: {str(path)!r}; make it with vfsdp plan --json")
    return _parsed(path, path.stat().st_mtime_ns), f"plan {str(path)!r}"


@lru_cache(maxsize=4)
def _parsed(path: Path, modified: int) -> Mapping[str, Any]:
    """Return the content of a file; a model of 80 blocks asks 80 times."""
    try:
        content = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"plan {str(path)!r}: is no JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"plan {str(path)!r}: expected a JSON object, got {content!r}")
    return content


def _buckets(content: Mapping[str, Any], where: str) -> list[Mapping[str, Any]]:
    if content.get("format") != PLAN_FORMAT or not isinstance(content.get("plans"), list):
        raise ValueError(
            f"{where}: expected a plan of format {PLAN_FORMAT}, got format "
            f"{content.get('format')!r}; make it anew with vfsdp plan --json"
        )
    buckets = [bucket for plan in content["plans"] for bucket in plan.get("buckets", ())]
    for bucket in buckets:
        _check_types(bucket, _BUCKET_KEYS, f"{where}: a bucket")
        for segment in bucket["segments"]:
            _check_types(segment, _SEGMENT_KEYS, f"{where}: a segment of {bucket['bucket']!r}")
        for entry in bucket["params"]:
            _check_types(entry, _PARAM_KEYS, f"{where}: a parameter of {bucket['bucket']!r}")
    if not buckets:
        raise ValueError(f"{where}: it has no buckets")
    return buckets


_BUCKET_KEYS = {"bucket": str, "world_size": int, "segments": list, "params": list}
_SEGMENT_KEYS = {"dtype": str, "shard_numel": int, "lower_bound": int}
_PARAM_KEYS = {
    "fqn": str,
    "shape": list,
    "dtype": str,
    "trainable": bool,
    "segment": int,
    "offset": int,
    "granule": int,
}


def _check_types(values: Any, keys: Mapping[str, type], where: str) -> None:
    for key, kind in keys.items():
        if not isinstance(values, dict) or not isinstance(values.get(key), kind):
            got = values.get(key) if isinstance(values, dict) else values
            raise ValueError(f"{where}: {key}: expected a {kind.__name__}, got {got!r}")


def _difference(bucket: Mapping[str, Any], params: Sequence[ParamSpec], name: str) -> str:
    """Return what a bucket of a plan has otherwise than a call; "" if nothing."""
    planned = {entry["fqn"]: entry for entry in bucket["params"]}
    for param in params:
        entry = planned.get(param.fqn)
        if entry is None:
            return f"{param.fqn} is in {name} and not in the plan"
        shape = tuple(entry["shape"])
        if shape != tuple(param.shape):
            return f"{param.fqn} has shape {shape} in the plan and {tuple(param.shape)} in {name}"
        if entry["dtype"] != param.dtype:
            return f"{param.fqn} is {entry['dtype']} in the plan and {param.dtype} in {name}"
        if entry["trainable"] != param.trainable:
            planned_as, now = (
                ("frozen", "trainable") if param.trainable else ("trainable", "frozen")
            )
            return f"{param.fqn} is {planned_as} in the plan and {now} in {name}"
    extra = [fqn for fqn in planned if fqn not in {param.fqn for param in params}]
    return f"{extra[0]} is in the plan and not in {name}" if extra else ""


def _rebuilt(
    bucket: Mapping[str, Any],
    name: str,
    params: Sequence[ParamSpec],
    world_size: int,
    where: str,
) -> BucketPlan:
    """Return the plan of a bucket that has the right parameters."""
    entries = {entry["fqn"]: entry for entry in bucket["params"]}
    members: list[list[ParamSpec]] = [[] for _ in bucket["segments"]]
    location = []
    for param in params:
        which = entries[param.fqn]["segment"]
        if not 0 <= which < len(members):
            raise ValueError(f"{where}: {param.fqn}: there is no segment {which!r}")
        location.append((which, len(members[which])))
        members[which].append(param)
    segments = []
    for segment, own in zip(bucket["segments"], members, strict=True):
        at = f"{where}, bucket {bucket['bucket']!r}"
        for param in own:
            if param.dtype != segment["dtype"]:
                raise ValueError(f"{at}: {param.fqn} is in a segment of {segment['dtype']}")
            if param.trainable != own[0].trainable:
                raise ValueError(
                    f"{at}: {param.fqn} shares a segment with {own[0].fqn}, and one of them is "
                    f"frozen; make the plan anew"
                )
        segments.append(_segment(segment, own, entries, world_size, at))
    dtypes = tuple(segment["dtype"] for segment in bucket["segments"])
    trainable = tuple(all(param.trainable for param in own) for own in members)
    return BucketPlan(name, tuple(params), tuple(segments), dtypes, trainable, tuple(location))


def _segment(
    segment: Mapping[str, Any],
    params: Sequence[ParamSpec],
    entries: Mapping[str, Any],
    world_size: int,
    where: str,
) -> SegmentPlan:
    shard = segment["shard_numel"]
    if shard < 1 or shard % ALIGN:
        raise ValueError(
            f"{where}: shard_numel: expected a positive multiple of {ALIGN}, got {shard!r}"
        )
    tensors, offsets = [], []
    for param in params:
        entry = entries[param.fqn]
        cuts, restart = entry.get("cuts"), entry.get("restart")
        granule = Granule(entry["granule"], restart, None if cuts is None else tuple(cuts))
        tensors.append(TensorSpec(param.fqn, param.numel, granule, param.group_key))
        offsets.append(entry["offset"])
        _check_cuts(param, granule, offsets[-1], shard, where)
    order = sorted(range(len(tensors)), key=lambda i: (tensors[i].numel > 0, offsets[i]))
    end = 0
    for i in order:
        if not tensors[i].numel:
            continue
        if offsets[i] % ALIGN or offsets[i] < end:
            raise ValueError(
                f"{where}: {tensors[i].fqn} starts at {offsets[i]!r}; expected a multiple of "
                f"{ALIGN} from {end} on"
            )
        end = offsets[i] + tensors[i].numel
    if end > world_size * shard:
        raise ValueError(f"{where}: {world_size} shards of {shard} do not hold {end} elements")
    return SegmentPlan(
        tensors=tuple(tensors),
        world_size=world_size,
        shard_numel=shard,
        order=tuple(order),
        offsets=tuple(offsets),
        lower_bound=segment["lower_bound"],
    )


def _check_cuts(param: ParamSpec, planned: Granule, offset: int, shard: int, where: str) -> None:
    """Refuse a layout that cuts a parameter where this call does not allow it."""
    demanded = stored_granule(param)
    first = (offset // shard + 1) * shard - offset
    for cut in range(first, param.numel, shard):
        if not demanded.allows(cut):
            by = "; ".join(
                f"{d.structure!r} by {d.by}" for d in param.demands if d.when == "stored"
            )
            raise ValueError(
                f"{where}: {param.fqn} is cut at element {cut}, which {by or 'blocks of 256'} "
                f"does not allow; make the plan with the same optimizer and granularity"
            )
        if not planned.allows(cut):
            raise ValueError(
                f"{where}: {param.fqn} is cut at element {cut}, against its own {planned!r}"
            )
