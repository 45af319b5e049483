"""`fully_shard` and `FSDPModule`: the entry point, and what it adds to modules.

May touch: modules' classes and parameters. The same call and the same method names as
`torch.distributed.fsdp.fully_shard`; a change of the import line is enough to move here.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, TypeVar, cast

import torch
import torch.distributed.fsdp as torch_fsdp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy

from sharding.checkpoint.load_checks import check_keys
from sharding.fsdp.arguments import (
    check_modules,
    check_optimizer,
    check_options,
    check_parameters,
    checked_ignored,
    checked_mesh,
    checked_reshard,
    checked_structure,
    class_name,
    mesh_device,
    modules_of_this_call,
    parameter_at,
    parameter_sites,
    storage_device,
)
from sharding.fsdp.beginnings import Beginnings
from sharding.fsdp.bucket import Bucket
from sharding.fsdp.module_state import ModuleState, attach_state, state_of
from sharding.fsdp.originals import mark_sharded, watch_optimizers
from sharding.planning.negotiation import ParamSpec, negotiate
from sharding.planning.plan_file import PlanSource, planned_bucket
from sharding.planning.structure import DeclaresStructure, Demand, Structure
from sharding.transport.axes import shard_size
from sharding.transport.debug import checksums

StructureFn = Callable[[str, nn.Parameter], Structure | None]

_RESIDENT_PADDING = 0.02

ModuleOrList = TypeVar("ModuleOrList", nn.Module, list[nn.Module])


def fully_shard(
    module: ModuleOrList,
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
    resident_padding: float = _RESIDENT_PADDING,
    plan: PlanSource | None = None,
) -> ModuleOrList:
    """Shards the parameters of `module` over `mesh`, in place; they become one bucket.

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
        shard_placement_fn: Not supported; layouts are planned (see `structure`).
        mp_policy: Dtypes of compute, reduction and outputs.
        offload_policy: Only the default.
        ignored_params: Parameters to leave as they are.
        dp_mesh_dims: Not supported; pass the data-parallel dims of a mesh as `mesh`.
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
    check_options(
        shard_placement_fn,
        dp_mesh_dims,
        mp_policy,
        offload_policy,
        structure,
        optimizer,
        resident_padding,
    )
    mesh = checked_mesh(mesh)
    reshard = checked_reshard(reshard_after_forward, shard_size(mesh))
    ignored = checked_ignored(ignored_params)
    sites = parameter_sites(modules, ignored)
    check_parameters(sites)
    check_optimizer(optimizer)
    bucket, beginnings = None, None
    if sites:
        originals = {fqn: parameter_at(held[0]) for fqn, held in sites.items()}
        specs = [_spec(fqn, each, optimizer, structure) for fqn, each in originals.items()]
        name, ranks = ", ".join(map(class_name, modules)), shard_size(mesh)
        if plan is None:
            layout = negotiate(name, specs, ranks, resident_padding=resident_padding)
        elif resident_padding != _RESIDENT_PADDING:
            raise ValueError(
                f"resident_padding={resident_padding!r} shapes a layout, and plan= is one; make "
                f"the plan with --resident-padding {resident_padding!r}, and pass plan= alone"
            )
        else:
            layout = planned_bucket(plan, name, specs, ranks)
        bucket = Bucket(
            layout,
            list(sites.values()),
            mesh=mesh,
            mp_policy=mp_policy,
            device=storage_device(originals, mesh),
        )
        bucket.initial_values = checksums(originals)
        beginnings = Beginnings(originals, [each.local for each in bucket.parameters])
        if optimizer is not None:  # it may refuse, and then no module has changed
            sharded = [parameter.sharded for parameter in bucket.parameters]
            optimizer.rebind(dict(zip(originals.values(), sharded, strict=True)))
        bucket.slots.fill()
        bucket.originals = [weakref.ref(original) for original in originals.values()]
        watch_optimizers()
        for fqn, original in originals.items():
            mark_sharded(original, fqn)
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
        _become_fsdp(part)
    return module


# As torch's: what a call attached to a module, or None.
cast(Any, fully_shard).state = state_of


def _spec(
    fqn: str,
    parameter: nn.Parameter,
    optimizer: DeclaresStructure | None,
    structure: StructureFn | None,
) -> ParamSpec:
    """Everything the negotiation may know of a parameter: logical shape, dtype and demands."""
    demands: list[Demand] = []
    if structure is not None and (declared := structure(fqn, parameter)) is not None:
        demands.append(Demand(checked_structure(fqn, declared), "stored", "structure="))
    group_key = ""
    if optimizer is not None:
        demands.extend(optimizer.demands(parameter))
        number = optimizer.group_of(parameter)
        group_key = "" if number is None else str(number)
    dtype = str(parameter.dtype).removeprefix("torch.")
    shape, trainable = tuple(parameter.shape), parameter.requires_grad
    return ParamSpec(fqn, shape, dtype, tuple(demands), group_key, trainable)


def _move_buffers(modules: Sequence[nn.Module], device: torch.device) -> None:
    """As torch's: buffers of the modules of this call go to the mesh's device."""
    for module in modules:
        for _, part in modules_of_this_call(module, module):
            for buffer in part._buffers.values():
                if buffer is not None and buffer.device.type not in ("meta", device.type):
                    buffer.data = buffer.to(device)


# -- the module's class ---------------------------------------------------------------------------

_fsdp_classes: dict[type, type] = {}


def _become_fsdp(module: nn.Module) -> None:
    """Puts `FSDPModule` in front of the module's class."""
    cls = type(module)
    if cls not in _fsdp_classes:
        members = {
            "__deepcopy__": _refuse_copy,
            "__reduce_ex__": _refuse_copy,
            "__module__": cls.__module__,
        }
        _fsdp_classes[cls] = type(f"FSDP{cls.__name__}", (FSDPModule, cls), members)
    module.__class__ = _fsdp_classes[cls]


def _refuse_copy(self: nn.Module, memo: object) -> NoReturn:
    raise NotImplementedError(
        f"a copy of {class_name(self)} (copy, deepcopy, pickle) would be outside of the flat "
        f"buffers; copy the module before fully_shard, or save and load its state_dict"
    )


def _unsupported(name: str, why: str) -> Callable[..., NoReturn]:
    def refuse(self: FSDPModule, *args: object, **kwargs: object) -> NoReturn:
        raise NotImplementedError(f"{name} is not supported: {why}")

    refuse.__name__ = name
    refuse.__doc__ = f"Not supported: {why}."
    return refuse


class UnshardHandle(torch_fsdp.UnshardHandle):
    """Waits for an asynchronous `FSDPModule.unshard`."""

    def __init__(self, bucket: Bucket | None) -> None:
        self._bucket = bucket

    def wait(self) -> None:
        """Completes the gather; the module then holds unsharded parameters."""
        if self._bucket is not None:
            self._bucket.wait_for_unshard()
            self._bucket = None


class FSDPModule(torch_fsdp.FSDPModule):
    """What `fully_shard` adds to a module's class; passes torch's `isinstance` checks.

    Every public method of torch's class is defined here: it works, or says why it does not.
    """

    _orig_cls_mro_index = 3  # FSDP<Orig>, FSDPModule, torch's FSDPModule, Orig

    def _get_fsdp_state(self) -> ModuleState:  # type: ignore[override]
        state = state_of(cast(nn.Module, self))
        if state is None:
            raise RuntimeError(f"{type(self).__name__} lost its fully_shard state")
        return state

    def _states(self, recurse: bool) -> list[ModuleState]:
        modules = cast(nn.Module, self).modules() if recurse else [cast(nn.Module, self)]
        return [state for module in modules if (state := state_of(module)) is not None]

    def _buckets(self, recurse: bool) -> list[Bucket]:
        return [s.bucket for s in self._states(recurse) if s.bucket is not None]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> FSDPModule:
        """Conversion: `.to()`, `.to_empty()`, `.half()`; the results go into the flat buffers."""
        for bucket in self._buckets(recurse):
            bucket.reshard()
        super(torch_fsdp.FSDPModule, self)._apply(fn, recurse)  # type: ignore[misc]
        for bucket in self._buckets(recurse=False):
            bucket.adopt()
        return self

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """As the module's own; a strict one finds what is wrong before it writes.

        Values may be plain full tensors or DTensors in any layout (then this is a collective).
        """
        load = super(torch_fsdp.FSDPModule, self).load_state_dict  # type: ignore[misc]
        strict = args[0] if args else kwargs.get("strict", True)
        as_torch = load.__func__ is nn.Module.load_state_dict and isinstance(state_dict, Mapping)
        if strict and as_torch:
            check_keys(cast(nn.Module, self), state_dict)
        return load(state_dict, *args, **kwargs)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """As nn.Module's; always the sharded parameters, which optimizers and checkpoints know.

        Only between the micro-batches of a pipeline, what the modules hold: schedules that split
        backward look for the weights of a stage in the graph.
        """
        states = [s for s in self._states(recurse) if s.is_last_backward]
        buckets = [s.bucket for s in states if s.bucket is not None]
        sharded = {id(p.unsharded): p.sharded for b in buckets for p in b.parameters}
        own: Any = super(torch_fsdp.FSDPModule, self)
        for name, parameter in own.named_parameters(prefix, recurse, remove_duplicate):
            yield name, sharded.get(id(parameter), parameter)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As nn.Module's; reaches the sharded parameters while gathered ones are in their place."""
        for bucket in self._buckets(recurse=True):
            bucket.zero_grad(set_to_none)
        super(torch_fsdp.FSDPModule, self).zero_grad(set_to_none)  # type: ignore[misc]

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gathers this module's bucket (not those below); with `async_op` returns a handle."""
        state = self._get_fsdp_state()
        bucket = state.bucket
        if bucket is not None:
            if len(state.modules) == 1:  # what is computed outside of a forward has a root, too
                state.lazy_init()
            bucket.unshard()
            bucket.unsharded_by_hand = True
        handle = UnshardHandle(bucket)
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Frees this module's gathered parameters (not those below)."""
        for bucket in self._buckets(recurse=False):
            bucket.reshard()

    def reset_iter_state(self) -> None:
        """Recovers after an exception in forward or backward; call it on the root.

        Raises:
            RuntimeError: This module is not the root.
        """
        state = self._get_fsdp_state()
        if state.context is None:  # nothing has run yet, and who is the root is not decided
            return
        if state.context.root is not state:
            root = class_name(state.context.root.modules[0])
            raise RuntimeError(
                f"reset_iter_state was called on {class_name(cast(nn.Module, self))}, which is "
                f"below a root; call it on the root, {root}"
            )
        state.context.reset()

    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, *, recurse: bool = True
    ) -> None:
        """Without sync, backward accumulates unsharded gradients and communicates nothing."""
        for bucket in self._buckets(recurse):
            bucket.requires_gradient_sync = requires_gradient_sync
            if bucket.replicas is not None:
                bucket.replicas.requires_all_reduce = requires_gradient_sync

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Without it, backward sums gradients within each replica of a 2-D mesh and keeps the sums.

        They are in no `.grad` until a backward with it has averaged them over all ranks, with its
        own. `set_requires_gradient_sync` sets this too.

        Raises:
            ValueError: It is switched off and no module here is sharded over a 2-D mesh.
        """
        replicas = [b.replicas for b in self._buckets(recurse) if b.replicas is not None]
        if not replicas and not requires_all_reduce:
            raise ValueError(
                f"set_requires_all_reduce(False): {class_name(cast(nn.Module, self))} is not "
                f"sharded over a 2-D mesh, so there are no replicas to average over later; use "
                f"set_requires_gradient_sync(False), or shard over mesh['replicate', 'shard']"
            )
        for each in replicas:
            each.requires_all_reduce = requires_all_reduce

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Accepted for compatibility; every backward ends with its reductions complete.

        torch's pipeline schedules say with it that a stage has micro-batches left.
        """
        for state in self._states(recurse=True):
            state.is_last_backward = is_last_backward

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Changes the `fully_shard` argument of the same name."""
        if not isinstance(reshard_after_forward, bool):
            raise ValueError(f"reshard_after_forward must be a bool, got {reshard_after_forward!r}")
        for state in self._states(recurse):
            state.reshard_after_forward = reshard_after_forward

    def set_reshard_after_backward(
        self, reshard_after_backward: bool, *, recurse: bool = True
    ) -> None:
        """`False` keeps parameters gathered between micro-batches; set it back before a step."""
        for bucket in self._buckets(recurse):
            bucket.reshard_after_backward = reshard_after_backward

    def set_modules_to_forward_prefetch(self, modules: list[FSDPModule]) -> None:  # type: ignore[override]
        """Modules to gather when this one enters forward, beside the next in order."""
        self._get_fsdp_state().forward_prefetch = _states_of(modules)

    def set_modules_to_backward_prefetch(self, modules: list[FSDPModule]) -> None:  # type: ignore[override]
        """Modules to gather when this one enters backward, beside the next in order."""
        self._get_fsdp_state().backward_prefetch = _states_of(modules)

    def set_reduce_scatter_unused_params(self, enable: bool, *, recurse: bool = True) -> None:
        """Always on: the whole bucket takes part in its reduction.

        Raises:
            NotImplementedError: `enable` is False.
        """
        if not enable:
            raise NotImplementedError("reductions always cover the whole bucket; pass True")

    _OWN_TRANSPORT = "the flat buffers are communicated in place"
    set_all_reduce_hook = _unsupported(
        "set_all_reduce_hook",
        "gradients are averaged over both dims of a 2-D mesh; a "
        "register_post_accumulate_grad_hook of a parameter sees the averages",
    )
    set_custom_all_gather = _unsupported("set_custom_all_gather", _OWN_TRANSPORT)
    set_custom_reduce_scatter = _unsupported("set_custom_reduce_scatter", _OWN_TRANSPORT)
    set_separate_reduce_scatter_group = _unsupported(
        "set_separate_reduce_scatter_group", _OWN_TRANSPORT
    )
    set_symm_mem_for_comm = _unsupported("set_symm_mem_for_comm", _OWN_TRANSPORT)
    set_allocate_memory_from_process_group_for_comm = _unsupported(
        "set_allocate_memory_from_process_group_for_comm", _OWN_TRANSPORT
    )
    set_reduce_scatter_max_input_buffers = _unsupported(
        "set_reduce_scatter_max_input_buffers", "two reductions are in flight at most"
    )
    set_post_optim_event = _unsupported(
        "set_post_optim_event", "gathers are ordered after the current stream"
    )
    set_gradient_divide_factor = _unsupported(
        "set_gradient_divide_factor", "gradients are averaged; scale the loss instead"
    )
    set_reduce_scatter_divide_factor = _unsupported(
        "set_reduce_scatter_divide_factor", "gradients are averaged; scale the loss instead"
    )
    set_force_sum_reduction_for_comms = _unsupported(
        "set_force_sum_reduction_for_comms", "gradients are averaged"
    )
    set_unshard_in_backward = _unsupported(
        "set_unshard_in_backward", "backward needs the parameters"
    )

    def _set_unshard_async_op(self, async_op: bool) -> None:
        """Accepted for torch's sake; gathers run asynchronously, on the current stream, always."""

    # From torch 2.15 on:
    set_keep_unsharded_storage = _unsupported(
        "set_keep_unsharded_storage",
        "the memory of gathered parameters is freed with them; set_reshard_after_forward(False) "
        "and set_reshard_after_backward(False) keep both",
    )
    _ENDS_ITSELF = (
        "every backward ends with its reductions complete; set_requires_gradient_sync(False) "
        "leaves them to a later backward"
    )
    set_manual_backward_finalization = _unsupported(
        "set_manual_backward_finalization", _ENDS_ITSELF
    )
    finalize_backward = _unsupported("finalize_backward", _ENDS_ITSELF)


def _states_of(modules: Iterable[nn.Module | FSDPModule]) -> list[ModuleState]:
    if isinstance(modules, nn.Module) and not isinstance(modules, nn.ModuleList):
        raise TypeError(f"expected a list of modules, got {class_name(modules)}; pass [module]")
    for module in modules:
        if not isinstance(module, FSDPModule):
            raise ValueError(
                f"expected fully sharded modules, got {type(module).__name__}; call fully_shard on "
                f"it first"
            )
    return [cast(FSDPModule, module)._get_fsdp_state() for module in modules]
