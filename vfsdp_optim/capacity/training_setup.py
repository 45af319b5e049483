"""What a model is trained with, as far as its layout and its memory depend on it."""

from dataclasses import dataclass
from typing import Any

from sharding.planning.negotiation import ParamSpec
from sharding.planning.structure import Blocks, Demand, FullMatrix
from vfsdp_optim.capacity.optimizers import (
    DEVICES,
    BlockOptimizer,
    Choice,
    block_optimizer,
    find_optimizer,
)
from vfsdp_optim.capacity.shapes import BucketShapes, TensorShape
from vfsdp_optim.capacity.step_buffers import StepDtypes
from vfsdp_optim.states.precision import STATES

BACKENDS = tuple(DEVICES)


@dataclass(frozen=True, slots=True)
class Granularity:
    """Which parts of parameters may not be cut, beyond what the optimizer declares.

    Attributes:
        rows: Rows that stay together; 0 for none.
        matrices: Whether every matrix stays whole.
        experts_only: Whether it holds for experts and MLPs alone.
    """

    rows: int = 0
    matrices: bool = False
    experts_only: bool = False

    @classmethod
    def parse(cls, text: str) -> "Granularity":
        """Read "element", "16", "e128" or "matrix".

        Raises:
            ValueError: `text` is none of these.
        """
        if text in ("element", "matrix"):
            return cls(matrices=text == "matrix")
        rows = text.removeprefix("e")
        if not rows.isdecimal() or int(rows) < 1:
            raise ValueError(
                f"granularity: expected 'element', a number of rows such as '16', 'e128' for "
                f"experts and MLPs alone, or 'matrix', got {text!r}"
            )
        return cls(rows=int(rows), experts_only=text.startswith("e"))

    def __str__(self) -> str:
        """Return what `parse` reads."""
        if self.matrices:
            return "matrix"
        return f"{'e' * self.experts_only}{self.rows}" if self.rows else "element"

    def demand(self, tensor: TensorShape) -> Demand | None:
        """Return what must hold where a parameter is stored."""
        if self.experts_only and tensor.kind not in ("expert", "mlp"):
            return None
        if self.matrices and tensor.matrices is not None:
            return Demand(FullMatrix.parse(tensor.matrices), "stored", "--granularity")
        if self.rows and sum(size > 1 for size in tensor.shape) > 1:
            rows = Blocks(self.rows * max(1, tensor.row_numel))
            return Demand(rows, "stored", "--granularity")
        return None


@dataclass(frozen=True, slots=True)
class Setup:
    """What is trained with.

    Attributes:
        optimizer: "adamw", "muon", "shampoo", "soap", "module:Class", an `Algorithm`, or a class of
            optimizers that takes groups. What a `MatrixAlgorithm` cannot take is left to AdamW.
        states: "32bit" (as wide as the parameter) or "8bit".
        granularity: What may not be cut.
        precision: Dtypes of compute and reduction.
        backend: "nccl" or "gloo", which need different buffers.
        resident_padding: As of `fully_shard`.

    Raises:
        ValueError: An unknown optimizer, state format or backend.
    """

    optimizer: Choice = "adamw"
    states: str = "32bit"
    granularity: Granularity = Granularity()
    precision: StepDtypes = StepDtypes()  # noqa: RUF009  (frozen)
    backend: str = "nccl"
    resident_padding: float = 0.02

    def __post_init__(self) -> None:
        """Check the attributes."""
        if not self.resident_padding >= 0:
            raise ValueError(f"resident_padding must be >= 0, got {self.resident_padding!r}.")
        find_optimizer(self.optimizer)
        for key, known in (("states", STATES), ("backend", BACKENDS)):
            if getattr(self, key) not in known:
                raise ValueError(
                    f"{key}: expected one of {', '.join(known)}, got {getattr(self, key)!r}"
                )

    def block_optimizer(self, shapes: BucketShapes, states: str | None = None) -> BlockOptimizer:
        """Return the optimizer of the parameters of one block; `states` in the place of its own."""
        choice: Any = self.optimizer  # classes are hashable, which their type does not say
        return block_optimizer(choice, states or self.states, shapes.tensors, self.backend)

    def specs(self, shapes: BucketShapes) -> list[ParamSpec]:
        """Return what the negotiation is told of the parameters of one block."""
        block = self.block_optimizer(shapes)
        specs = []
        for i, tensor in enumerate(shapes.tensors):
            own = self.granularity.demand(tensor)
            demands = (*([] if own is None else [own]), *block.demands(i))
            specs.append(
                ParamSpec(
                    tensor.name,
                    tensor.shape,
                    tensor.dtype,
                    demands,
                    block.group_key(i),
                    tensor.trainable,
                )
            )
        return specs
