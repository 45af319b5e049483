"""`fully_shard`: the entry point.

May touch: modules' classes and parameters. The same call and the same method names as
`torch.distributed.fsdp.fully_shard`; a change of the import line is enough to move here.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast, overload

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy

from sharding.fsdp.arguments import (
    Site,
    check_modules,
    check_optimizer,
    check_options,
    check_parameters,
    checked_ignored,
    checked_mesh,
    checked_reshard,
    class_name,
    mesh_device,
    modules_of_this_call,
    parameter_at,
    parameter_sites,
    storage_device,
)
from sharding.fsdp.beginnings import Beginnings
from sharding.fsdp.bucket import Bucket
from sharding.fsdp.fsdp_module import FSDPModule, become_fsdp
from sharding.fsdp.given_cuts import local_of
from sharding.fsdp.many_objects import collector_paused
from sharding.fsdp.module_state import ModuleState, attach_state, state_of
from sharding.fsdp.originals import mark_sharded, watch_optimizers
from sharding.fsdp.wishes import RESIDENT_PADDING, LayoutWishes, StructureFn
from sharding.planning.plan_file import PlanSource
from sharding.planning.structure import DeclaresStructure
from sharding.transport.axes import shard_size
from sharding.transport.debug import checksums

ModuleT = TypeVar("ModuleT", bound=nn.Module)

if TYPE_CHECKING:

    class ShardedModule(FSDPModule, nn.Module):
        """What becomes of a module, whose own class stays in it: for type checkers only."""


@overload
def fully_shard(
    module: nn.Module,
    *,
    mesh: DeviceMesh | None = ...,
    reshard_after_forward: bool | int | None = ...,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = ...,
    mp_policy: MixedPrecisionPolicy = ...,
    offload_policy: OffloadPolicy = ...,
    ignored_params: set[nn.Parameter] | None = ...,
    dp_mesh_dims: Any = ...,
    optimizer: DeclaresStructure | None = ...,
    structure: StructureFn | None = ...,
    resident_padding: float = ...,
    plan: PlanSource | None = ...,
) -> ShardedModule: ...


@overload
def fully_shard(
    module: list[ModuleT],
    *,
    mesh: DeviceMesh | None = ...,
    reshard_after_forward: bool | int | None = ...,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = ...,
    mp_policy: MixedPrecisionPolicy = ...,
    offload_policy: OffloadPolicy = ...,
    ignored_params: set[nn.Parameter] | None = ...,
    dp_mesh_dims: Any = ...,
    optimizer: DeclaresStructure | None = ...,
    structure: StructureFn | None = ...,
    resident_padding: float = ...,
    plan: PlanSource | None = ...,
) -> list[ShardedModule]: ...


@collector_paused()
def fully_shard(
    module: Any,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008  (frozen)
    offload_policy: OffloadPolicy = OffloadPolicy(),  # noqa: B008  (as torch's signature)
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: Any = None,
    optimizer: DeclaresStructure | None = None,
    structure: StructureFn | None = None,
    resident_padding: float = RESIDENT_PADDING,
    plan: PlanSource | None = None,
) -> Any:
    """Shard the parameters of `module` over `mesh`, in place; they become one bucket.

    Call it on the parts of a model first (each block), then on the model: parameters that an
    earlier call took are left alone. Forward gathers a bucket's parameters into one flat buffer
    that the unsharded parameters are views of; backward averages the gradients back onto the
    shards. Sharded parameters are `RaggedDTensor`s, cut where the buffer is cut: at multiples of
    256 of their elements, or where declared structure allows.

    Args:
        module: A module, or a list of modules that share one bucket.
        mesh: 1-D device mesh to shard over; by default all ranks. Or a 2-D mesh with named dims
            (HSDP): dim 0 replicates, dim 1 shards. Forward gathers within a replica, and backward
            averages over all ranks. All ranks are to begin with the same weights, from one seed or
            from a checkpoint; samples of them are compared before the first forward.
        reshard_after_forward: Free the gathered parameters between forward and backward. `None`
            means yes, except for the root and for the bucket that forward used last, which
            backward would gather again at once. An integer n, a factor of the number of shards:
            groups of n consecutive ranks hold the gathered parameters together until backward,
            which then gathers within the group; n = 1 is `False`.
        shard_placement_fn: `parameter -> Shard | None`. A parameter with a `Shard` is cut as torch
            cuts it, and is torch's DTensor; for None its layout is planned. On another dim than 0,
            chunks are to be equal. Muon needs `Shard(0)` or None for its matrices.
        mp_policy: Dtypes of compute, reduction and outputs.
        offload_policy: Only the default.
        ignored_params: Parameters to leave as they are.
        dp_mesh_dims: Not supported; pass the data-parallel dims of a mesh as `mesh`. Parameters
            that are DTensors of tensor parallelism over its other dims are cut further as torch
            cuts them, and are torch's DTensors over all of these dims.
        optimizer: An optimizer built before sharding. What it declares shapes the layout, and its
            groups are edited in place to hold the sharded parameters.
        structure: `(fqn, parameter) -> Structure | None`, for structure that must hold in the
            stored layout, such as the blocks of a weight quantizer.
        resident_padding: Padding, as a fraction of the bucket's elements, up to which cuts are
            moved out of the units that `optimizer` wants whole in its step, so that they need not
            travel to an owner. 0 moves none. Changes where things lie, never what they become.
        plan: A layout made before, in place of one made here: the path of what `vfsdp plan --json`
            wrote, or what `json.load` made of it.

    Returns:
        `module`, whose class now derives from `FSDPModule`.

    Raises:
        ValueError: A container without a forward, a module that is sharded already, a mesh that is
            not 1-D or 2-D, parameters that are DTensors, demands that cannot be combined, a plan
            that does not fit.
        TypeError: `module` is not a module.
        NotImplementedError: A valid request of torch's `fully_shard` that is not supported here.
        RuntimeError: No process group.

    References:
        veScale-FSDP, arXiv:2602.22437; torch.distributed.fsdp.fully_shard.
    """
    modules = module if isinstance(module, list) else [module]
    check_modules(modules)
    check_options(dp_mesh_dims, mp_policy, offload_policy)
    wishes = LayoutWishes(optimizer, structure, shard_placement_fn, resident_padding, plan)
    wishes.check()
    mesh = checked_mesh(mesh)
    reshard = checked_reshard(reshard_after_forward, shard_size(mesh))
    ignored = checked_ignored(ignored_params)
    sites = parameter_sites(modules, ignored)
    check_parameters(sites)
    check_optimizer(optimizer)
    bucket, beginnings = None, None
    if sites:
        name = ", ".join(map(class_name, modules))
        bucket, beginnings = _make_bucket(name, sites, mesh, mp_policy, wishes)
    _move_buffers(modules, mesh_device(mesh))
    state = ModuleState(
        modules,
        bucket,
        mp_policy=mp_policy,
        reshard_after_forward=reshard,
        optimizer=optimizer,
        ignored=ignored,
        beginnings=beginnings,
    )
    for part in modules:
        attach_state(part, state)
        become_fsdp(part)
    return module


# As torch's: what a call attached to a module, or None.
cast(Any, fully_shard).state = state_of


def _make_bucket(
    name: str,
    sites: dict[str, list[Site]],
    mesh: DeviceMesh,
    mp_policy: MixedPrecisionPolicy,
    wishes: LayoutWishes,
) -> tuple[Bucket, Beginnings]:
    """Shard the parameters at `sites`, and have the optimizer hold the shards in their place."""
    originals = {fqn: parameter_at(held[0]) for fqn, held in sites.items()}
    cuts = wishes.given_cuts(originals, mesh)
    layout = wishes.layout(name, originals, cuts, shard_size(mesh))
    device = storage_device(originals, mesh)
    held = list(sites.values())
    bucket = Bucket(layout, held, mesh=mesh, mp_policy=mp_policy, device=device, cuts=cuts)
    given = {fqn: local_of(original) for fqn, original in originals.items()}
    bucket.initial_values = checksums(given)
    beginnings = Beginnings(given, [each.piece for each in bucket.parameters])
    if wishes.optimizer is not None:  # it may refuse, and then no module has changed
        sharded = [parameter.sharded for parameter in bucket.parameters]
        wishes.optimizer.rebind(dict(zip(originals.values(), sharded, strict=True)))
    bucket.slots.fill()
    bucket.originals = [weakref.ref(original) for original in originals.values()]
    watch_optimizers()
    for fqn, original in originals.items():
        mark_sharded(original, fqn)
    return bucket, beginnings


def _move_buffers(modules: Sequence[nn.Module], device: torch.device) -> None:
    """Do as torch's: buffers of the modules of this call go to the mesh's device."""
    for module in modules:
        for _, part in modules_of_this_call(module):
            for buffer in part._buffers.values():
                if buffer is not None and buffer.device.type not in ("meta", device.type):
                    buffer.data = buffer.to(device)
