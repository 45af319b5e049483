"""What a `fully_shard` call says about where parameters lie, and the layout that follows.

Touches nothing; reads parameters, meshes and what an optimizer declares. The same on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from sharding.fsdp.arguments import checked_structure
from sharding.fsdp.forms import TorchForm
from sharding.fsdp.given_cuts import PlacementFn, chunk_of, given_cut
from sharding.planning.negotiation import BucketPlan, ParamSpec, negotiate
from sharding.planning.plan_file import PlanSource, planned_bucket
from sharding.planning.structure import DeclaresStructure, Demand, Structure

StructureFn = Callable[[str, nn.Parameter], Structure | None]

RESIDENT_PADDING = 0.02


@dataclass(frozen=True, slots=True)
class LayoutWishes:
    """Those arguments of `fully_shard` that shape a bucket's layout; see there."""

    optimizer: DeclaresStructure | None
    structure: StructureFn | None
    shard_placement_fn: PlacementFn | None
    resident_padding: float
    plan: PlanSource | None

    def check(self) -> None:
        """Refuse values of the wrong type, or out of range.

        Raises:
            TypeError: One is of the wrong type.
            ValueError: The padding is negative.
        """
        if self.shard_placement_fn is not None and not callable(self.shard_placement_fn):
            raise TypeError(
                f"shard_placement_fn: expected a function parameter -> Shard or None, got "
                f"{self.shard_placement_fn!r}"
            )
        if self.structure is not None and not callable(self.structure):
            raise TypeError(
                f"structure: expected a function (fqn, parameter) -> Structure or None, got "
                f"{self.structure!r}; for one structure use lambda fqn, parameter: "
                f"{self.structure!r}"
            )
        needed = ("demands", "group_of", "rebind", "param_groups")
        if self.optimizer is not None and not all(hasattr(self.optimizer, n) for n in needed):
            raise TypeError(
                f"optimizer: expected one that declares structure ({', '.join(needed)}), such as "
                f"vfsdp_optim.AdamW, got {type(self.optimizer).__name__}; build others after "
                f"fully_shard"
            )
        padding: object = self.resident_padding
        if isinstance(padding, bool) or not isinstance(padding, int | float):
            raise TypeError(
                f"resident_padding: expected a fraction of the bucket such as 0.02, got {padding!r}"
            )
        if not padding >= 0:
            raise ValueError(
                f"resident_padding: expected a fraction of the bucket, 0 or more, got "
                f"{padding!r}; 0.02 allows 2 %, 0 pads nothing for residency"
            )

    def given_cuts(
        self, originals: Mapping[str, nn.Parameter], mesh: DeviceMesh
    ) -> dict[int, TorchForm]:
        """Return the forms of the parameters whose cut was given, by number.

        Raises:
            Exception: As `given_cut`.
        """
        found = (
            given_cut(fqn, each, mesh, self.shard_placement_fn) for fqn, each in originals.items()
        )
        return {i: cut for i, cut in enumerate(found) if cut is not None}

    def layout(
        self,
        name: str,
        originals: Mapping[str, nn.Parameter],
        cuts: Mapping[int, TorchForm],
        ranks: int,
    ) -> BucketPlan:
        """Return the layout of a bucket: planned, or as it was given.

        Args:
            name: Of the bucket.
            originals: Its parameters, by fqn.
            cuts: What `given_cuts` returned.
            ranks: That share the bucket.

        Raises:
            NotImplementedError: A plan, and cuts that were given.
            ValueError: A plan, and padding for another; a plan that does not fit; demands that
                cannot be combined.
        """
        specs = [
            self._spec_of_cut(fqn, each, cuts[i], ranks) if i in cuts else self._spec(fqn, each)
            for i, (fqn, each) in enumerate(originals.items())
        ]
        if self.plan is not None and cuts:
            raise NotImplementedError(
                f"{specs[min(cuts)].fqn} has a cut that was given, by tensor parallelism or "
                f"shard_placement_fn, and plan= has another; pass one of them"
            )
        padding = self.resident_padding
        if self.plan is None:
            return negotiate(name, specs, ranks, resident_padding=padding)
        if padding != RESIDENT_PADDING:
            raise ValueError(
                f"resident_padding={padding!r} shapes a layout, and plan= is one; make "
                f"the plan with --resident-padding {padding!r}, and pass plan= alone"
            )
        return planned_bucket(self.plan, name, specs, ranks)

    def _spec(self, fqn: str, parameter: nn.Parameter) -> ParamSpec:
        """Return all that the negotiation may know of a parameter."""
        demands: list[Demand] = []
        if (declared := self._declared(fqn, parameter)) is not None:
            demands.append(Demand(checked_structure(fqn, declared), "stored", "structure="))
        group_key = ""
        if self.optimizer is not None:
            demands.extend(self.optimizer.demands(parameter))
            number = self.optimizer.group_of(parameter)
            group_key = "" if number is None else str(number)
        shape, trainable = tuple(parameter.shape), parameter.requires_grad
        return ParamSpec(fqn, shape, _dtype_of(parameter), tuple(demands), group_key, trainable)

    def _spec_of_cut(
        self, fqn: str, parameter: nn.Parameter, cut: TorchForm, ranks: int
    ) -> ParamSpec:
        """Return the same of a parameter whose cut was given: nothing else can shape it."""
        if (declared := self._declared(fqn, parameter)) is not None:
            raise ValueError(
                f"{fqn} has a cut that was given, by tensor parallelism or shard_placement_fn, and "
                f"structure= declares {declared!r} for it; return None for one of them"
            )
        dtype, chunk = _dtype_of(parameter), chunk_of(cut, ranks)
        return ParamSpec(fqn, cut.stored, dtype, trainable=parameter.requires_grad, chunk=chunk)

    def _declared(self, fqn: str, parameter: nn.Parameter) -> Structure | None:
        return None if self.structure is None else self.structure(fqn, parameter)


def _dtype_of(parameter: nn.Parameter) -> str:
    return str(parameter.dtype).removeprefix("torch.")
