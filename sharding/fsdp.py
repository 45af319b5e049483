"""`fully_shard` and `FSDPModule`: the entry point, and every check of its arguments.

May touch: modules' classes and parameters. The same call and the same method names as
`torch.distributed.fsdp.fully_shard`; a change of the import line is enough to move here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn, TypeVar, cast

import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor

from sharding.bucket import Bucket
from sharding.debug import checksums
from sharding.negotiation import ParamSpec, negotiate
from sharding.state import ModuleState, attach_state, state_of
from sharding.structure import DeclaresStructure, Demand, Structure

StructureFn = Callable[[str, nn.Parameter], Structure | None]
Site = tuple[nn.Module, str]
# Set on the original of a sharded parameter: a later call that meets it has found a tie.
_TAKEN = "_fully_sharded_as"

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
    optimizer: DeclaresStructure | None = None,
    structure: StructureFn | None = None,
) -> ModuleOrList:
    """Shards the parameters of `module` over `mesh`, in place; they become one bucket.

    Call it on the parts of a model first (each block), then on the model: parameters that an
    earlier call took are left alone. Forward gathers a bucket's parameters into one flat buffer
    that the unsharded parameters are views of; backward averages the gradients back onto the
    shards. Sharded parameters are `RaggedDTensor`s, cut where the buffer is cut: at multiples of
    256 of their elements, or where declared structure allows.

    Args:
        module: A module, or a list of modules that share one bucket.
        mesh: 1-D device mesh; by default all ranks.
        reshard_after_forward: Free the gathered parameters between forward and backward. `None`
            means yes, except for the root and for the bucket that forward used last, which
            backward would gather again at once.
        shard_placement_fn: Not supported; layouts are planned (see `structure`).
        mp_policy: Dtypes of compute, reduction and outputs.
        offload_policy: Only the default.
        ignored_params: Parameters to leave as they are.
        optimizer: An optimizer built before sharding. What it declares shapes the layout, and its
            groups are edited in place to hold the sharded parameters.
        structure: `(fqn, parameter) -> Structure | None`, for structure that must hold in the
            stored layout, such as the blocks of a weight quantizer.

    Returns:
        `module`, whose class now derives from `FSDPModule`.

    Raises:
        ValueError: A container without a forward, a module that is sharded already, a mesh that is
            not 1-D, parameters that are DTensors, demands that cannot be combined.
        TypeError: `module` is not a module.
        NotImplementedError: A valid request of torch's `fully_shard` that is not supported here.
        RuntimeError: No process group.

    References:
        veScale-FSDP, arXiv:2602.22437; torch.distributed.fsdp.fully_shard.
    """
    modules = module if isinstance(module, list) else [module]
    _check_modules(modules)
    _refuse_unsupported(reshard_after_forward, shard_placement_fn, offload_policy)
    mesh = _checked_mesh(mesh)
    sites = _parameter_sites(modules, ignored_params or set())
    _check_parameters(sites)
    bucket = None
    if sites:
        originals = [_parameter_at(group[0]) for group in sites.values()]
        specs = [
            _spec(fqn, parameter, optimizer, structure)
            for fqn, parameter in zip(sites, originals, strict=True)
        ]
        plan = negotiate(", ".join(type(m).__name__ for m in modules), specs, mesh.size())
        bucket = Bucket(
            plan,
            list(sites.values()),
            mesh=mesh,
            mp_policy=mp_policy,
            device=_storage_device(originals, mesh),
        )
        bucket.initial_values = checksums(dict(zip(sites, originals, strict=True)))
        for fqn, original in zip(sites, originals, strict=True):
            setattr(original, _TAKEN, fqn)
        if optimizer is not None:
            sharded = [parameter.sharded for parameter in bucket.parameters]
            optimizer.rebind(dict(zip(originals, sharded, strict=True)))
    _move_buffers(modules, _mesh_device(mesh))
    state = ModuleState(
        modules,
        bucket,
        mp_policy=mp_policy,
        reshard_after_forward=cast("bool | None", reshard_after_forward),
    )
    for part in modules:
        attach_state(part, state)
        _become_fsdp(part)
    return module


def _spec(
    fqn: str,
    parameter: nn.Parameter,
    optimizer: DeclaresStructure | None,
    structure: StructureFn | None,
) -> ParamSpec:
    """Everything the negotiation may know of a parameter: logical shape, dtype and demands."""
    demands: list[Demand] = []
    if structure is not None and (declared := structure(fqn, parameter)) is not None:
        demands.append(Demand(declared, "stored", "structure="))
    group_key = ""
    if optimizer is not None:
        demands.extend(optimizer.demands(parameter))
        group_key = _group_of(parameter, optimizer)
    dtype = str(parameter.dtype).removeprefix("torch.")
    return ParamSpec(fqn, tuple(parameter.shape), dtype, tuple(demands), group_key)


def _group_of(parameter: nn.Parameter, optimizer: DeclaresStructure) -> str:
    for i, group in enumerate(optimizer.param_groups):
        if any(parameter is member for member in group["params"]):
            return str(i)
    return ""


def sharded_as(parameter: Tensor) -> str | None:
    """The fqn under which `fully_shard` took an original parameter; None if it did not."""
    return parameter.__dict__.get(_TAKEN)


# -- checks ---------------------------------------------------------------------------------------


def _check_modules(modules: Sequence[nn.Module]) -> None:
    if not modules:
        raise ValueError("fully_shard got an empty list of modules; pass at least one")
    for module in modules:
        if not isinstance(module, nn.Module):
            raise TypeError(f"fully_shard expects an nn.Module or a list of them, got {module!r}")
        if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
            raise ValueError(
                f"{type(module).__name__} has no forward for fully_shard to hook; call it on each "
                f"module inside, or pass them as one list"
            )
        if state_of(module) is not None or isinstance(module, torch_fsdp.FSDPModule):
            raise ValueError(f"{type(module).__name__} is fully sharded already")


def _refuse_unsupported(
    reshard_after_forward: bool | int | None,
    shard_placement_fn: object,
    offload_policy: OffloadPolicy,
) -> None:
    if reshard_after_forward is not None and not isinstance(reshard_after_forward, bool):
        raise NotImplementedError(
            f"reshard_after_forward={reshard_after_forward!r}: resharding to a smaller mesh is not "
            f"supported; use True, False or None"
        )
    if shard_placement_fn is not None:
        raise NotImplementedError(
            "shard_placement_fn is not supported: layouts are planned; declare what a parameter "
            "needs with structure= or optimizer="
        )
    if type(offload_policy) is not OffloadPolicy:
        raise NotImplementedError(f"{offload_policy!r} is not supported; use OffloadPolicy()")


def _checked_mesh(mesh: DeviceMesh | None) -> DeviceMesh:
    if not dist.is_initialized():
        raise RuntimeError(
            "fully_shard needs a process group: launch with torchrun and call "
            "torch.distributed.init_process_group() first"
        )
    if mesh is None:
        device_type = "cuda" if torch.cuda.is_available() else "cpu"
        return init_device_mesh(device_type, (dist.get_world_size(),))
    if mesh.ndim != 1:
        raise ValueError(
            f"fully_shard shards over a 1-D mesh, got {mesh!r}; pass one dimension, mesh['name']"
        )
    return mesh


def _storage_device(parameters: Iterable[nn.Parameter], mesh: DeviceMesh) -> torch.device:
    """Where shards live: on the mesh's device, or on meta until the model is materialised."""
    on_meta = [parameter.device.type == "meta" for parameter in parameters]
    if any(on_meta) and not all(on_meta):
        raise ValueError(
            "some parameters of one fully_shard call are on the meta device and some are not; "
            "build the whole module under torch.device('meta'), or none of it"
        )
    return torch.device("meta") if any(on_meta) else _mesh_device(mesh)


def _mesh_device(mesh: DeviceMesh) -> torch.device:
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.accelerator.current_device_index())


def _parameter_sites(
    modules: Sequence[nn.Module], ignored: set[nn.Parameter]
) -> dict[str, list[Site]]:
    """The parameters that this call takes: fqn -> where modules hold it; tied ones have several."""
    sites: dict[nn.Parameter, list[Site]] = {}
    names: dict[nn.Parameter, str] = {}
    visited: set[nn.Module] = set()
    for i, module in enumerate(modules):
        prefix = f"{i}." if len(modules) > 1 else ""
        for module_name, part in _modules_of_this_call(module, module):
            if part in visited:
                continue
            visited.add(part)
            for name, parameter in part._parameters.items():
                if parameter is None or parameter in ignored:
                    continue
                fqn = prefix + (f"{module_name}.{name}" if module_name else name)
                names.setdefault(parameter, fqn)
                sites.setdefault(parameter, []).append((part, name))
    return {names[parameter]: held for parameter, held in sites.items()}


def _modules_of_this_call(
    module: nn.Module, root: nn.Module, name: str = ""
) -> Iterable[tuple[str, nn.Module]]:
    """`module` and what is below it, without what an earlier `fully_shard` call took."""
    if module is not root and state_of(module) is not None:
        return
    yield name, module
    for child_name, child in module.named_children():
        yield from _modules_of_this_call(
            child, root, f"{name}.{child_name}" if name else child_name
        )


def _parameter_at(site: Site) -> nn.Parameter:
    module, name = site
    parameter = module._parameters[name]
    if parameter is None:
        raise RuntimeError(f"{type(module).__name__}.{name} disappeared during fully_shard")
    return parameter


def _check_parameters(sites: dict[str, list[Site]]) -> None:
    for fqn, held in sites.items():
        parameter = _parameter_at(held[0])
        if (other := sharded_as(parameter)) is not None:
            raise ValueError(
                f"{fqn} is tied to {other} of an earlier fully_shard call, which would untie them; "
                f"put the modules that share it into one call, fully_shard([a, b]), or leave both "
                f"to the call on the model that holds them"
            )
        if isinstance(parameter, DTensor):
            raise ValueError(
                f"{fqn} is a {type(parameter).__name__} with placements {parameter.placements!r} "
                f"already; tensor parallelism is not supported: shard plain parameters"
            )


def _move_buffers(modules: Sequence[nn.Module], device: torch.device) -> None:
    """As torch's: buffers of the modules of this call go to the mesh's device."""
    for module in modules:
        for _, part in _modules_of_this_call(module, module):
            for buffer in part._buffers.values():
                if buffer is not None and buffer.device.type not in ("meta", device.type):
                    buffer.data = buffer.to(device)


# -- the module's class ---------------------------------------------------------------------------

_fsdp_classes: dict[type, type] = {}


def _become_fsdp(module: nn.Module) -> None:
    """Puts `FSDPModule` in front of the module's class."""
    cls = type(module)
    if cls not in _fsdp_classes:
        members = {"__deepcopy__": _refuse_deepcopy, "__module__": cls.__module__}
        _fsdp_classes[cls] = type(f"FSDP{cls.__name__}", (FSDPModule, cls), members)
    module.__class__ = _fsdp_classes[cls]


def _refuse_deepcopy(self: nn.Module, memo: object) -> NoReturn:
    raise NotImplementedError(
        f"deepcopy of {type(self).__name__} would leave the copy outside of the buffers; copy the "
        f"module before fully_shard, or save and load its state_dict"
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

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gathers this module's bucket (not those below); with `async_op` returns a handle."""
        bucket = self._get_fsdp_state().bucket
        if bucket is not None:
            bucket.unshard()
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
        if state.lazy_init().root is not state:
            raise RuntimeError("reset_iter_state must be called on the root module")
        state.lazy_init().reset()

    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, *, recurse: bool = True
    ) -> None:
        """Without sync, backward accumulates unsharded gradients and communicates nothing."""
        for bucket in self._buckets(recurse):
            bucket.requires_gradient_sync = requires_gradient_sync

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Accepted for compatibility; every backward ends with its reductions complete."""

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

    _ONE_AXIS = "there is no replicate axis to reduce over"
    _OWN_TRANSPORT = "the flat buffers are communicated in place"
    set_requires_all_reduce = _unsupported("set_requires_all_reduce", _ONE_AXIS)
    set_all_reduce_hook = _unsupported("set_all_reduce_hook", _ONE_AXIS)
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
    set_reduce_scatter_divide_factor = set_gradient_divide_factor
    set_force_sum_reduction_for_comms = _unsupported(
        "set_force_sum_reduction_for_comms", "gradients are averaged"
    )
    set_unshard_in_backward = _unsupported(
        "set_unshard_in_backward", "backward needs the parameters"
    )


def _states_of(modules: Iterable[nn.Module | FSDPModule]) -> list[ModuleState]:
    for module in modules:
        if not isinstance(module, FSDPModule):
            raise ValueError(f"expected fully sharded modules, got {type(module).__name__}")
    return [cast(FSDPModule, module)._get_fsdp_state() for module in modules]
