"""What a model is to a planner: names, shapes and dtypes, sorted into buckets. Imports no torch.

[Note: buckets of a model]
A parameter's bucket follows from its name, as scripts that call `fully_shard` on each block do it:
what comes before the first number in "model.layers.17.mlp.up_proj.weight", and that number, names
the block; everything without a number goes to the root. Blocks of equal parameters are one bucket
with a count, so that a model of 80 layers is planned once. Inside a bucket, names are relative to
its block, as `fully_shard` sees them.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

from sharding.planning.granule import Shape

ITEMSIZE = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of an element, by name of the dtypes that parameters may have."""

ONE_MATRIX = "m n -> m n"
EXPERT_STACK = "e m n -> e m n"
CONVOLUTION = "o ... -> o (...)"

_EMBEDDING = re.compile(r"embed|^wte|\.wte|^wpe|\.wpe|^pos\b|^pos_|position|^cls\b")
_EXPERT = re.compile(r"(^|\.)experts(\.|$)")
_ROUTER = re.compile(r"router|(^|\.)(mlp|block_sparse_moe)\.gate\.|shared_expert_gate")
_MLP = re.compile(r"(^|\.)(mlp|ffn|feed_forward|shared_experts?|sh|gate|up|down|fc\d|c_fc)(\.|$|_)")
_BIAS = re.compile(r"bias$|(^|\.)b$")


@dataclass(frozen=True, slots=True)
class TensorShape:
    """One parameter.

    Attributes:
        name: Within its bucket.
        shape: Global.
        dtype: Its name, such as "bfloat16".
        kind: "embedding", "head", "vector" (at most one dimension above 1, or a bias), "expert"
            (a matrix of one expert, or a stack of all), "mlp", or "matrix" for all others.
        matrices: Einops pattern of the matrices in it; None where Muon leaves it to AdamW.
        trainable: Whether it gets gradients.
    """

    name: str
    shape: Shape
    dtype: str
    kind: str
    matrices: str | None
    trainable: bool = True

    @property
    def numel(self) -> int:
        """Elements."""
        return prod(self.shape)

    @property
    def row_numel(self) -> int:
        """Elements of a row: of the last axis, but of all axes after the first in a convolution."""
        if self.matrices not in (None, ONE_MATRIX, EXPERT_STACK):
            return prod(self.shape[1:])
        return self.shape[-1] if self.shape else 1


@dataclass(frozen=True, slots=True)
class BucketShapes:
    """Equal blocks of a model, each of which `fully_shard` moves as one bucket.

    Attributes:
        name: Of the blocks, such as "model.layers.3-60"; "root" for the rest of the model.
        count: How many blocks.
        tensors: Of one block, in the order of the source.
    """

    name: str
    count: int
    tensors: tuple[TensorShape, ...]

    @property
    def numel(self) -> int:
        """Elements of one block."""
        return sum(tensor.numel for tensor in self.tensors)


@dataclass(frozen=True, slots=True)
class ModelShapes:
    """All parameters of a model.

    Attributes:
        name: Of the model.
        source: Where the shapes come from.
        buckets: The root first, if it has parameters; then blocks in order.
        notes: What the source has and a plan leaves out.
    """

    name: str
    source: str
    buckets: tuple[BucketShapes, ...]
    notes: tuple[str, ...] = ()

    @property
    def numel(self) -> int:
        """Elements of the whole model."""
        return sum(bucket.count * bucket.numel for bucket in self.buckets)


@dataclass(frozen=True, slots=True)
class NamedShape:
    """A parameter as a source has it.

    Attributes:
        name: Fully qualified.
        shape: Global.
        dtype: Its name.
        is_embedding: Whether its module is an embedding; None where only the name is known.
        matrices: Pattern that its module implies; None where only the name is known, "" where it
            is known to have none.
        trainable: Whether it gets gradients.
    """

    name: str
    shape: Shape
    dtype: str
    is_embedding: bool | None = None
    matrices: str | None = None
    trainable: bool = True


def sort_into_buckets(params: Iterable[NamedShape]) -> tuple[BucketShapes, ...]:
    """Return the buckets of a model; see [Note: buckets of a model].

    Example:
        >>> names = ["embed.weight", "h.0.up.weight", "h.1.up.weight"]
        >>> buckets = sort_into_buckets(NamedShape(n, (8, 4), "float32") for n in names)
        >>> [(bucket.name, bucket.count, bucket.tensors[0].name) for bucket in buckets]
        [('root', 1, 'embed.weight'), ('h.0-1', 2, 'up.weight')]
    """
    root: list[NamedShape] = []
    blocks: dict[tuple[str, int], list[tuple[str, NamedShape]]] = {}
    for param in params:
        parts = param.name.split(".")
        number = next((i for i, part in enumerate(parts[:-1]) if part.isdigit()), None)
        if number is None:
            root.append(param)
        else:
            block = ".".join(parts[:number]), int(parts[number])
            blocks.setdefault(block, []).append((".".join(parts[number + 1 :]), param))
    vocabularies = {p.shape[0] for p in root if len(p.shape) == 2 and _is_embedding(p)}
    buckets = []
    if root:
        tensors = tuple(_tensor(p.name, p, vocabularies, in_root=True) for p in root)
        buckets.append(BucketShapes("root", 1, tensors))
    alike: dict[tuple[str, tuple[TensorShape, ...]], list[int]] = {}
    for (prefix, index), members in blocks.items():
        tensors = tuple(_tensor(name, p, vocabularies, in_root=False) for name, p in members)
        alike.setdefault((prefix, tensors), []).append(index)
    for (prefix, tensors), indices in alike.items():
        name = f"{prefix}.{_ranges(indices)}" if prefix else _ranges(indices)
        buckets.append(BucketShapes(name, len(indices), tensors))
    return tuple(buckets)


def table_bucket(name: str, count: int, params: Sequence[NamedShape]) -> BucketShapes:
    """Return a bucket whose members are given, as in a shape table; "root" may hold a head."""
    in_root = name == "root"
    vocabularies = {p.shape[0] for p in params if len(p.shape) == 2 and _is_embedding(p)}
    tensors = tuple(_tensor(p.name, p, vocabularies, in_root=in_root) for p in params)
    return BucketShapes(name, count, tensors)


def _is_embedding(param: NamedShape) -> bool:
    if param.is_embedding is not None:
        return param.is_embedding
    # "patch_embed.proj" is a convolution.
    return len(param.shape) <= 3 and _EMBEDDING.search(param.name) is not None


def _tensor(name: str, param: NamedShape, vocabularies: set[int], *, in_root: bool) -> TensorShape:
    kind = _kind(param, name, vocabularies, in_root)
    pattern: str | None = None
    if kind not in ("vector", "embedding", "head"):
        pattern = param.matrices
        if pattern is None:
            pattern = ONE_MATRIX if len(param.shape) == 2 else CONVOLUTION
            if kind == "expert" and len(param.shape) == 3:
                pattern = EXPERT_STACK
    return TensorShape(name, param.shape, param.dtype, kind, pattern or None, param.trainable)


def _kind(param: NamedShape, name: str, vocabularies: set[int], in_root: bool) -> str:
    """Sort a parameter as `vfsdp_optim.param_groups` does, by name where there is no module."""
    if _is_embedding(param):
        return "embedding"
    if prod(param.shape) == max(param.shape, default=1) or _BIAS.search(name):
        return "vector"
    # A head is as wide as the vocabulary, and stands outside of the repeated blocks.
    if in_root and len(param.shape) == 2 and param.shape[0] in vocabularies:
        return "head"
    if _EXPERT.search(name):
        return "expert"
    if _ROUTER.search(name):
        return "matrix"
    return "mlp" if _MLP.search(name) else "matrix"


def _ranges(indices: Sequence[int]) -> str:
    """Return numbers as text: "0-2,5"."""
    runs: list[list[int]] = []
    for index in indices:
        if runs and index == runs[-1][1] + 1:
            runs[-1][1] = index
        else:
            runs.append([index, index])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
