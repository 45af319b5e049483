"""Divides a model by pipeline, tensor and expert parallelism: what is left for FSDP to shard.

Pure integers. [Note: ranks of a plan] Of all ranks, pp * tp * replicate divide the model or repeat
it; the others are the shard ranks, over which one bucket is laid out. Experts are divided over
groups of `ep` neighbouring shard ranks first, so their buckets are apart from the rest of a block,
on a mesh of shard_ranks / ep: shard rank r is number r // ep of that mesh. All the ranks that pp,
tp, ep and replicate tell apart hold equal amounts, except for the stages of a pipeline; the largest
stage is planned.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from vfsdp_optim.capacity.shapes import BucketShapes, ModelShapes, TensorShape


@dataclass(frozen=True, slots=True)
class Parallelism:
    """How many ranks there are, and what they divide besides the shards.

    Attributes:
        ranks: All of them.
        replicate: Copies of the shards (HSDP).
        tp: Ranks that divide each matrix.
        ep: Ranks that divide the experts.
        pp: Stages of the pipeline.

    Raises:
        ValueError: A number below 1, or ranks that they do not divide.
    """

    ranks: int
    replicate: int = 1
    tp: int = 1
    ep: int = 1
    pp: int = 1

    def __post_init__(self) -> None:
        """Check the attributes."""
        for key in ("ranks", "replicate", "tp", "ep", "pp"):
            if getattr(self, key) < 1:
                raise ValueError(f"{key}: expected at least 1, got {getattr(self, key)!r}")
        others = self.replicate * self.tp * self.pp
        if self.ranks % others or self.ranks // others % self.ep:
            raise ValueError(
                f"{self.ranks} ranks cannot be divided by replicate={self.replicate} * "
                f"tp={self.tp} * pp={self.pp}" + (f" * ep={self.ep}" if self.ep > 1 else "")
            )

    @property
    def shard_ranks(self) -> int:
        """Ranks that hold one copy of what is left of the model."""
        return self.ranks // (self.replicate * self.tp * self.pp)


@dataclass(frozen=True, slots=True)
class DividedBucket:
    """A bucket, and the mesh that it is laid out over.

    Attributes:
        shapes: What is left of each tensor.
        world_size: Ranks of its mesh.
        per_position: Shard ranks that have the same number in that mesh.
    """

    shapes: BucketShapes
    world_size: int
    per_position: int = 1


@dataclass(frozen=True, slots=True)
class DividedModel:
    """What is left of a model for FSDP to shard.

    Attributes:
        parallelism: By which it was divided.
        layers: The buckets of one block, block kind by block kind, in forward order; the root is
            a layer of its own and the first.
        notes: What to know of the division.
    """

    parallelism: Parallelism
    layers: tuple[tuple[DividedBucket, ...], ...]
    notes: tuple[str, ...] = ()

    @property
    def buckets(self) -> tuple[DividedBucket, ...]:
        """All of them, in forward order."""
        return tuple(bucket for layer in self.layers for bucket in layer)


def divide(model: ModelShapes, parallelism: Parallelism) -> DividedModel:
    """Return the part of the model that one group of shard ranks holds.

    Raises:
        ValueError: A tensor that cannot be divided, or whose division no rule tells.
    """
    buckets, notes = list(model.buckets), list(model.notes)
    if parallelism.pp > 1:
        buckets, note = _largest_stage(buckets, parallelism.pp)
        notes.append(note)
    if parallelism.tp > 1:
        hidden = _hidden_size(model)
        buckets = [_divide_matrices(bucket, parallelism.tp, hidden) for bucket in buckets]
    if parallelism.ep > 1 and not any(t.kind == "expert" for b in buckets for t in b.tensors):
        raise ValueError(f"ep={parallelism.ep}: the model has no experts")
    layers = tuple(_divide_experts(bucket, parallelism) for bucket in buckets)
    return DividedModel(parallelism, layers, tuple(notes))


# -- pipeline --------------------------------------------------------------------------------------


def _largest_stage(buckets: Sequence[BucketShapes], stages: int) -> tuple[list[BucketShapes], str]:
    """Return the stage with most elements; embeddings are in the first, all else of root in the
    last."""
    blocks = [bucket for bucket in buckets if bucket.name != "root"]
    total = sum(bucket.count for bucket in blocks)
    if total < stages:
        raise ValueError(f"pp={stages}: the model has only {total} blocks")
    first = [t for b in buckets if b.name == "root" for t in b.tensors if t.kind == "embedding"]
    last = [t for b in buckets if b.name == "root" for t in b.tensors if t.kind != "embedding"]
    candidates, begin = [], 0
    for stage in range(stages):
        end = begin + total // stages + (stage < total % stages)
        root = (first if stage == 0 else []) + (last if stage == stages - 1 else [])
        stage_buckets = [BucketShapes("root", 1, tuple(root))] if root else []
        position = 0
        for block in blocks:
            count = min(end, position + block.count) - max(begin, position)
            if count > 0:
                stage_buckets.append(replace(block, count=count))
            position += block.count
        candidates.append(stage_buckets)
        begin = end
    sizes = [sum(b.count * b.numel for b in candidate) for candidate in candidates]
    chosen = sizes.index(max(sizes))
    return candidates[chosen], f"stage {chosen + 1} of {stages}, the largest, is planned"


# -- tensor parallelism ----------------------------------------------------------------------------

# Which axis of a weight (rows, columns) tp divides; what is not named here is an error.
_ROWS = re.compile(
    r"(^|\.)(q|k|v|q_proj|k_proj|v_proj|q_b|q_b_proj|kv_b|kv_b_proj|gate|up|gate_proj|up_proj"
    r"|w1|w3|fc1|query|key|value|sinks)(\.|$)"
)
_COLUMNS = re.compile(r"(^|\.)(o|o_proj|down|down_proj|w2|fc2|out)(\.|$)")
_WHOLE = re.compile(
    r"norm|router|(^|\.)(q_a|kv_a|ln)|(^|\.)(mlp|block_sparse_moe)\.gate\.|shared_expert_gate"
)
_POSITIONS = re.compile(r"wpe|(^|\.)pos|position|cls")
_STACKED_IN = re.compile(r"gate_up")
_BIAS = re.compile(r"(bias|\.b)$")


def _hidden_size(model: ModelShapes) -> int | None:
    for bucket in model.buckets:
        for tensor in bucket.tensors:
            if tensor.kind in ("embedding", "head") and len(tensor.shape) == 2:
                return tensor.shape[1]
    return None


def _divide_matrices(bucket: BucketShapes, tp: int, hidden: int | None) -> BucketShapes:
    tensors = []
    for tensor in bucket.tensors:
        axis = _axis(tensor, hidden, f"tp={tp}: {bucket.name}, {tensor.name}")
        tensors.append(tensor if axis is None else _divided(tensor, axis, tp, "tp", bucket.name))
    return replace(bucket, tensors=tuple(tensors))


def _axis(tensor: TensorShape, hidden: int | None, where: str) -> int | None:
    """Return the axis that tp divides; None for what every rank holds whole."""
    name, ndim = tensor.name, len(tensor.shape)
    if tensor.kind in ("embedding", "head"):
        return None if _POSITIONS.search(name) else 0  # of the vocabulary
    if _STACKED_IN.search(name) or (tensor.kind == "expert" and ndim == 3):
        inwards = _STACKED_IN.search(name) is not None
        if _BIAS.search(name):
            return ndim - 1 if inwards else None
        # (E, in, out), else (E, out, in); where both are as large, either gives the same sizes.
        outputs = 2 if tensor.shape[1] == hidden else 1
        return outputs if inwards else (1 if tensor.shape[2] == hidden else 2)
    if _WHOLE.search(name):
        return None
    if _ROWS.search(name):
        return 0
    if _COLUMNS.search(name):
        return None if _BIAS.search(name) or ndim == 1 else 1
    if "experts" in name and _BIAS.search(name):
        return None
    raise ValueError(
        f"{where}: no rule says how tensor parallelism divides it; plan without tp, or the model "
        f"after it was divided"
    )


def _divided(tensor: TensorShape, axis: int, parts: int, by: str, bucket: str) -> TensorShape:
    if tensor.shape[axis] % parts:
        raise ValueError(
            f"{by}={parts}: {bucket}, {tensor.name} of shape {tensor.shape}: axis {axis} cannot be "
            f"divided into {parts} equal parts"
        )
    shape = list(tensor.shape)
    shape[axis] //= parts
    return replace(tensor, shape=tuple(shape))


# -- expert parallelism ----------------------------------------------------------------------------

_EXPERT_INDEX = re.compile(r"(^|\.)experts\.(\d+)\.")
_EXPERT_BIAS = re.compile(r"(^|\.)experts\.\w*bias$")


def _divide_experts(bucket: BucketShapes, parallelism: Parallelism) -> tuple[DividedBucket, ...]:
    """Return the bucket, or the bucket without its experts and the experts of one group."""
    ranks, ep = parallelism.shard_ranks, parallelism.ep
    experts = [t for t in bucket.tensors if t.kind == "expert" or _EXPERT_BIAS.search(t.name)]
    if ep == 1 or not experts:
        return (DividedBucket(bucket, ranks),)
    indices = {int(found[2]) for t in experts if (found := _EXPERT_INDEX.search(t.name))}
    if len(indices) % ep:
        raise ValueError(f"ep={ep}: {bucket.name} has {len(indices)} experts, no multiple of it")
    mine = []
    for tensor in experts:
        found = _EXPERT_INDEX.search(tensor.name)
        if found is None:  # a stack, or its biases
            mine.append(_divided(tensor, 0, ep, "ep", bucket.name))
        elif int(found[2]) < len(indices) // ep:
            mine.append(tensor)
    rest = tuple(tensor for tensor in bucket.tensors if tensor not in experts)
    stacked = BucketShapes(f"{bucket.name} experts", bucket.count, tuple(mine))
    divided = DividedBucket(stacked, ranks // ep, ep)
    if not rest:
        return (divided,)
    return DividedBucket(replace(bucket, tensors=rest), ranks), divided
