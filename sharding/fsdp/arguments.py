"""The checks of `fully_shard`'s arguments, and the parameters that a call takes.

May touch: nothing; reads modules, parameters, meshes and policies. All of it runs before the first
change, so that a call that raises leaves the model as it was; and it follows from what ranks share,
so that all of them raise.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from sharding.fsdp.module_state import state_of
from sharding.fsdp.originals import any_sharded, sharded_as
from sharding.fsdp.proofs import logs_of
from sharding.planning.structure import DeclaresStructure, Structure
from sharding.transport.axes import groups_of
from sharding.transport.backends import backend_of, device_types, world
from sharding.transport.waits import share_timeout

Site = tuple[nn.Module, str]


class RefusedByTorch(AssertionError):
    """For what torch's `fully_shard` raises an AssertionError: who catches that catches this."""


class ArgumentRefused(ValueError, RefusedByTorch):
    """A module or a mesh that neither of them takes."""


def class_name(module: nn.Module) -> str:
    """Return the name of a module's class as the user wrote it."""
    cls = type(module)
    if isinstance(module, torch_fsdp.FSDPModule):
        return cls.__name__.removeprefix("FSDP")
    return cls.__name__


def check_modules(modules: Sequence[nn.Module]) -> None:
    """Refuse what cannot be called, and what is sharded or wrapped already."""
    if not modules:
        raise ValueError("fully_shard got an empty list of modules; pass at least one")
    for i, module in enumerate(modules):
        if not isinstance(module, nn.Module):
            raise TypeError(f"fully_shard expects an nn.Module or a list of them, got {module!r}")
        name = class_name(module)
        containers = (nn.ModuleList, nn.ModuleDict)
        if isinstance(module, containers) and type(module).forward is nn.Module.forward:
            raise ValueError(
                f"fully_shard does not support containers that do not implement forward, such as "
                f"{name}; call it on each module inside, or pass them as one list"
            )
        if isinstance(module, (DistributedDataParallel, torch_fsdp.FullyShardedDataParallel)):
            raise ValueError(
                f"{name} averages gradients itself; call fully_shard on the module that it wraps"
            )
        if state_of(module) is not None:
            raise ArgumentRefused(
                f"{name} is fully sharded already. Each distinct composable distributed API can "
                f"only be applied to a module once. Call fully_shard once on each module"
            )
        if isinstance(module, torch_fsdp.FSDPModule):
            raise ValueError(
                f"{name} is sharded by torch's fully_shard; import fully_shard from one place"
            )
        if any(module is other for other in modules[:i]):
            raise ValueError(f"fully_shard got {name} twice in its list; pass each module once")


def check_options(dp_mesh_dims: object, mp_policy: object, offload_policy: object) -> None:
    """Refuse values of the wrong type, and valid requests that are not supported."""
    if dp_mesh_dims is not None:
        raise NotImplementedError(
            f"dp_mesh_dims={dp_mesh_dims!r} is not supported; distribute parameters over the dims "
            f"of tensor parallelism alone, and pass the data-parallel dims as mesh="
        )
    if type(offload_policy) is not OffloadPolicy:
        raise NotImplementedError(f"{offload_policy!r} is not supported; use OffloadPolicy()")
    if not isinstance(mp_policy, MixedPrecisionPolicy):
        raise TypeError(
            f"mp_policy: expected a MixedPrecisionPolicy, got {mp_policy!r}; for low precision use "
            f"MixedPrecisionPolicy(param_dtype=torch.bfloat16)"
        )
    for key in ("param_dtype", "reduce_dtype", "output_dtype"):
        dtype = getattr(mp_policy, key)
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise ValueError(f"mp_policy: {key}: expected a floating dtype or None, got {dtype!r}")


def checked_mesh(mesh: DeviceMesh | None) -> DeviceMesh:
    """Return the mesh to shard over, all ranks by default; 1-D, or 2-D (replicate, shard)."""
    if not dist.is_initialized():
        raise RuntimeError(
            "fully_shard needs a process group: launch with torchrun and call "
            "torch.distributed.init_process_group() first"
        )
    if mesh is None:
        return init_device_mesh(_default_device_type(), (dist.get_world_size(),))
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(
            f"mesh: expected a DeviceMesh, got {mesh!r}; make one with "
            f"torch.distributed.init_device_mesh"
        )
    if mesh.ndim not in (1, 2):
        raise ValueError(
            f"fully_shard expects a 1D or 2D DeviceMesh but got {mesh!r}; pass the one or two "
            f"dimensions for data, mesh['shard'] or mesh['replicate', 'shard']"
        )
    if mesh.ndim == 2 and mesh.mesh_dim_names is None:
        raise ArgumentRefused(
            f"Please init the 2D mesh for HSDP with mesh_dim_names specified, got {mesh!r}; make "
            f"it with init_device_mesh(..., mesh_dim_names=('replicate', 'shard')): dim 0 "
            f"replicates, dim 1 shards"
        )
    if mesh.get_coordinate() is None:
        raise ValueError(
            f"rank {dist.get_rank()} is not in {mesh!r}; call fully_shard on the ranks of the mesh"
        )
    accelerator = torch.accelerator.current_accelerator()
    available = {"cpu"} if accelerator is None else {"cpu", accelerator.type}
    if mesh.device_type not in available:
        raise ValueError(
            f"mesh of device type {mesh.device_type!r}: this process has {sorted(available)}; "
            f"make the mesh on one of them"
        )
    for group in groups_of(mesh):
        share_timeout(group, world())
        backend_of(group, mesh.device_type)
    return mesh


def checked_reshard(reshard_after_forward: object, ranks: int) -> bool | int | None:
    """Return `reshard_after_forward`, with sizes of groups that are a whole shard axis as a
    bool."""
    given = reshard_after_forward
    if given is None or isinstance(given, bool):
        return given
    if not isinstance(given, int):
        raise ValueError(
            f"reshard_after_forward should be a bool or an int representing the group size to "
            f"reshard to, not {given!r}; or None, which keeps what backward needs first"
        )
    if given < 1 or ranks % given:
        raise ValueError(
            f"If passing reshard_after_forward as an int, it should be a factor of {ranks}, not "
            f"{given}; parameters are cut over {ranks} ranks"
        )
    return given == ranks if given in (1, ranks) else given


def _default_device_type() -> str:
    """Return the accelerator, if the default process group can reach it, else "cpu"."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or accelerator.type not in device_types(world()):
        return "cpu"
    return accelerator.type


def checked_ignored(ignored_params: Iterable[nn.Parameter] | None) -> set[nn.Parameter]:
    """Return the parameters to leave alone; some may belong to other modules."""
    ignored = list(ignored_params or ())
    for parameter in ignored:
        if not isinstance(parameter, nn.Parameter):
            raise TypeError(
                f"ignored_params: expected parameters, got {parameter!r}; pass the objects, such "
                f"as {{model.get_parameter(name)}}"
            )
    return set(ignored)


def storage_device(parameters: Mapping[str, nn.Parameter], mesh: DeviceMesh) -> torch.device:
    """Return where shards live: on the mesh's device, or on meta until the model is
    materialised."""
    names: dict[bool, str] = {}
    for fqn, parameter in parameters.items():
        names.setdefault(parameter.is_meta, fqn)
    if len(names) == 2:
        raise ValueError(
            f"{names[True]} is on the meta device and {names[False]} is not; build all of one "
            f"fully_shard call under torch.device('meta'), or none of it"
        )
    return torch.device("meta") if True in names else mesh_device(mesh)


def mesh_device(mesh: DeviceMesh) -> torch.device:
    """Return the device of a mesh that this rank uses."""
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.accelerator.current_device_index())


def parameter_sites(
    modules: Sequence[nn.Module], ignored: set[nn.Parameter]
) -> dict[str, list[Site]]:
    """Return the parameters that this call takes: fqn -> where modules hold it; tied ones have
    several."""
    sites: dict[nn.Parameter, list[Site]] = {}
    names: dict[nn.Parameter, str] = {}
    visited: set[nn.Module] = set()
    for i, module in enumerate(modules):
        prefix = f"{i}." if len(modules) > 1 else ""
        for module_name, part in modules_of_this_call(module):
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


def modules_of_this_call(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield `root` and what is below it, by name and in the order of the modules, without what an
    earlier `fully_shard` call took."""
    waiting = [("", root)]  # a stack, because recursion costs as much again as the visit
    while waiting:
        name, module = waiting.pop()
        if module is not root and state_of(module) is not None:
            continue
        yield name, module
        prefix = f"{name}." if name else ""
        children = list(module.named_children()) if module._modules else []
        waiting += [(prefix + child_name, child) for child_name, child in reversed(children)]


def parameter_at(site: Site) -> nn.Parameter:
    """Return the parameter that a module holds under a name."""
    module, name = site
    parameter = module._parameters[name]
    if parameter is None:
        raise RuntimeError(f"{type(module).__name__}.{name} disappeared during fully_shard")
    return parameter


def check_parameters(sites: dict[str, list[Site]]) -> None:
    """Refuse parameters that are sharded or tied elsewhere, or that a flat buffer cannot hold."""
    for fqn, held in sites.items():
        parameter = parameter_at(held[0])
        if (other := sharded_as(parameter)) is not None:
            raise ValueError(
                f"{fqn} is tied to {other} of an earlier fully_shard call, which would untie them; "
                f"put the modules that share it into one call, fully_shard([a, b]), or leave both "
                f"to the call on the model that holds them"
            )
        if logs_of([parameter]):
            raise ValueError(
                f"{fqn} was sharded by an earlier fully_shard call on a module around this one; "
                f"call fully_shard on the inner modules first, then on what holds them"
            )
        if is_lazy(parameter):
            raise ValueError(
                f"{fqn} has no shape yet; run the module once before fully_shard, or build it with "
                f"its sizes"
            )
        if is_traceable_wrapper_subclass(parameter) and type(parameter.data) is not DTensor:
            raise NotImplementedError(
                f"{fqn} is a {type(parameter).__name__}, whose data a flat buffer cannot hold; "
                f"shard plain parameters, or pass it in ignored_params"
            )
        if parameter.grad is not None:
            raise ValueError(
                f"{fqn} has a gradient, of this rank alone, that would be lost; call "
                f"zero_grad() before fully_shard"
            )
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise ValueError(
                f"{fqn} has hooks on its gradient, which would never run again; register them on "
                f"the sharded parameter, with register_post_accumulate_grad_hook"
            )
        _check_embedding(fqn, held)


def _check_embedding(fqn: str, held: Sequence[Site]) -> None:
    for module, _ in held:
        if not isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            continue
        if module.max_norm is not None:
            raise NotImplementedError(
                f"{fqn}: {type(module).__name__}(max_norm={module.max_norm}) rescales the rows "
                f"that a rank looks up, which differ between ranks, in its forward; build it "
                f"without max_norm and rescale the sharded parameter after each step"
            )
        if module.sparse:
            raise NotImplementedError(
                f"{fqn} would get sparse gradients, which are not supported; build "
                f"{type(module).__name__} with sparse=False"
            )


def check_optimizer(optimizer: DeclaresStructure | None) -> None:
    """Refuse an optimizer that holds what an earlier call sharded without telling it."""
    for group in optimizer.param_groups if optimizer is not None else ():
        for parameter in group["params"] if any_sharded(group["params"]) else ():
            if (fqn := sharded_as(parameter)) is not None:
                raise ValueError(
                    f"optimizer: {fqn} was sharded by an earlier fully_shard call that did not get "
                    f"this optimizer; pass optimizer= to every call, or build it afterwards"
                )


def checked_structure(fqn: str, declared: object) -> Structure:
    """Return what a `structure=` function returned for a parameter."""
    if not isinstance(declared, Structure):
        raise TypeError(
            f"structure({fqn!r}, ...) returned {declared!r}; expected a Structure such as "
            f"RowPanels(8) or FullMatrix(), or None"
        )
    return declared
