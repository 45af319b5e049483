"""What a plan has to know of optimizers that this package cannot import. Pure data and integers.

`vfsdp_optim` is above this package; a test compares every number here with its optimizers.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from vfsdp_optim.capacity.shapes import ITEMSIZE, TensorShape

QUANTIZED_BLOCK = 256
"""Elements of an 8-bit state that share one fp32 scale."""

MIN_QUANTIZED_NUMEL = 4096
"""States of smaller parameters stay in 32 bits."""

MAX_EXCHANGE_BYTES = 1 << 31
"""Memory on a rank for the matrices that travel at a time; the optimizers' default."""

CPU_CHUNK = 1 << 19
"""Elements that an element-wise update on one CPU thread works on at a time."""

PACKED_CPU_CHUNK = 1 << 17
"""The same where states are 8-bit codes."""

PACKED_CHUNK = 1 << 22
"""The same on other devices."""

NEWTON_SCHULZ_STEPS = 5


@dataclass(frozen=True, slots=True)
class Algorithm:
    """An update rule.

    Attributes:
        states: How many states of the parameter's shape it keeps.
        needs_matrices: Whether its update needs whole matrices.
    """

    states: int
    needs_matrices: bool


ALGORITHMS: Mapping[str, Algorithm] = {
    "adamw": Algorithm(states=2, needs_matrices=False),
    "muon": Algorithm(states=1, needs_matrices=True),
}

OPTIMIZERS: Mapping[str, str] = {"adamw": "AdamW", "muon": "Muon"}
"""Command-line name -> class; all leave what is no matrix, and embeddings and heads, to AdamW."""

STATES = ("32bit", "8bit")


def algorithm_of(optimizer: str, tensor: TensorShape) -> str:
    """The algorithm that updates a parameter under an optimizer, or "frozen"."""
    if not tensor.trainable:
        return "frozen"
    return "muon" if optimizer == "muon" and tensor.matrices is not None else "adamw"


def is_quantized(states: str, tensor: TensorShape) -> bool:
    """Whether the states of a parameter are kept in 8 bits."""
    return (
        states == "8bit"
        and tensor.trainable
        and tensor.numel >= MIN_QUANTIZED_NUMEL
        and len(tensor.shape) >= 2
        and tensor.kind not in ("embedding", "head")
    )


def state_bytes(optimizer: str, states: str, tensor: TensorShape, local_numel: int) -> int:
    """Bytes of the states of `local_numel` consecutive elements, cut at multiples of the block."""
    if not tensor.trainable:
        return 0
    count = ALGORITHMS[algorithm_of(optimizer, tensor)].states
    if is_quantized(states, tensor):
        return count * (local_numel + 4 * -(-local_numel // QUANTIZED_BLOCK))
    return count * local_numel * state_itemsize(states, tensor)


def state_itemsize(states: str, tensor: TensorShape) -> int:
    """Bytes of an element of a state that is not quantized: the parameter's, or of fp32.

    Who asks for 8-bit states asks for better than bfloat16 where they are not.
    """
    return max(4, ITEMSIZE[tensor.dtype]) if states == "8bit" else ITEMSIZE[tensor.dtype]


def newton_schulz_cost(rows: int, cols: int) -> int:
    """Multiply-adds of one matrix: two products with the long side and one without, a step."""
    short, long = min(rows, cols), max(rows, cols)
    return NEWTON_SCHULZ_STEPS * short * short * (2 * long + short)
