"""FSDPModule: what `fully_shard` adds to the class of a module.

May touch: modules' classes, the states and buckets behind them. The method names are those of
`torch.distributed.fsdp.FSDPModule`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NoReturn, cast

import torch.distributed.fsdp as torch_fsdp
from torch import Tensor, nn

from sharding.checkpoint.load_checks import check_keys
from sharding.fsdp.arguments import RefusedByTorch, class_name
from sharding.fsdp.bucket import Bucket
from sharding.fsdp.module_state import ModuleState, state_of

_fsdp_classes: dict[type, type] = {}


def become_fsdp(module: nn.Module) -> None:
    """Put `FSDPModule` in front of the module's class."""
    cls = type(module)
    if cls not in _fsdp_classes:
        members = {
            "__deepcopy__": _refuse_copy,
            "__reduce_ex__": _refuse_copy,
            "__module__": cls.__module__,
        }
        _fsdp_classes[cls] = type(f"FSDP{cls.__name__}", (FSDPModule, cls), members)
    module.__class__ = _fsdp_classes[cls]


class CopyRefused(NotImplementedError, RefusedByTorch):
    """A module was to be copied after `fully_shard`."""


def _refuse_copy(self: nn.Module, memo: object) -> NoReturn:
    raise CopyRefused(
        f"FSDP does not support deepcopy: a copy of {class_name(self)} (copy, deepcopy, pickle) "
        f"would be outside of the flat buffers; copy the module before "
        f"fully_shard, or save and load its state_dict"
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
        """Complete the gather; the module then holds unsharded parameters."""
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
        """Do as the module's own; a strict one finds what is wrong before it writes.

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
        """Do as nn.Module's; always the sharded parameters, which optimizers and checkpoints know.

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
        """Do as nn.Module's; reaches the sharded parameters while gathered ones are in their
        place."""
        for bucket in self._buckets(recurse=True):
            bucket.zero_grad(set_to_none)
        super(torch_fsdp.FSDPModule, self).zero_grad(set_to_none)  # type: ignore[misc]

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather this module's bucket (not those below); with `async_op` return a handle."""
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
        """Free this module's gathered parameters (not those below)."""
        for bucket in self._buckets(recurse=False):
            bucket.reshard()

    def reset_iter_state(self) -> None:
        """Recover after an exception in forward or backward; call it on the root.

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
        """Do nothing, for compatibility: every backward ends with its reductions complete.

        torch's pipeline schedules say with it that a stage has micro-batches left.
        """
        for state in self._states(recurse=True):
            state.is_last_backward = is_last_backward

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Change the `fully_shard` argument of the same name."""
        if not isinstance(reshard_after_forward, bool):
            raise ValueError(f"reshard_after_forward must be a bool, got {reshard_after_forward!r}")
        for state in self._states(recurse):
            state.reshard_after_forward = reshard_after_forward

    def set_reshard_after_backward(
        self, reshard_after_backward: bool, *, recurse: bool = True
    ) -> None:
        """Keep parameters gathered between micro-batches if `False`; set it back before a step."""
        for bucket in self._buckets(recurse):
            bucket.reshard_after_backward = reshard_after_backward

    def set_modules_to_forward_prefetch(self, modules: list[FSDPModule]) -> None:  # type: ignore[override]
        """Return modules to gather when this one enters forward, beside the next in order."""
        self._get_fsdp_state().forward_prefetch = _states_of(modules)

    def set_modules_to_backward_prefetch(self, modules: list[FSDPModule]) -> None:  # type: ignore[override]
        """Return modules to gather when this one enters backward, beside the next in order."""
        self._get_fsdp_state().backward_prefetch = _states_of(modules)

    def set_reduce_scatter_unused_params(self, enable: bool, *, recurse: bool = True) -> None:
        """Do nothing, as it is always on: the whole bucket takes part in its reduction.

        Raises:
            NotImplementedError: `enable` is False.
        """
        if not enable:
            raise NotImplementedError("reductions always cover the whole bucket; pass True")

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Sum gradients over all ranks and divide by `factor`, from the next reduction on.

        Of this module's own bucket, not of those below; the default is the number of ranks. Every
        reduction proves that ranks have set the same.

        Raises:
            ValueError: `factor` is not a positive number.
        """
        if isinstance(factor, bool) or not isinstance(factor, (int, float)) or not factor > 0:
            raise ValueError(
                f"set_gradient_divide_factor: expected a positive number, got {factor!r}; "
                f"the number of ranks gives averages, 1 sums"
            )
        self.set_force_sum_reduction_for_comms(True)
        for bucket in self._buckets(recurse=False):
            bucket.wishes.divide_factor = float(factor)
            text = f"gradients divided by {factor!r}"
            bucket.updates.record(text, text.encode())  # the next reduction proves it

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """Return the name that `set_gradient_divide_factor` had before torch 2.8."""
        self.set_gradient_divide_factor(factor)

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Have the backend sum, where it would average; the division follows."""
        for bucket in self._buckets(recurse=False):
            sums_only = enable or bucket.wishes.divide_factor is not None
            bucket.transport.sums_only = sums_only
            if bucket.replicas is not None:
                bucket.replicas.transport.sums_only = sums_only

    def set_all_reduce_hook(
        self, hook: Callable[[Tensor], object] | None, *, stream: object = None
    ) -> None:
        """Have `hook(gradients)` run on this rank's reduced gradients, which it may write.

        Before they are set or added to `.grad`, in the order of reductions: as torch's, for a
        reduction over ranks that the mesh does not know. It gets one flat tensor for each dtype
        and each kind of structure in the bucket, padding included.

        Args:
            hook: Called once for each flat tensor; None for none.
            stream: As torch's; hooks run on the current stream, after which gradients are used.
        """
        for bucket in self._buckets(recurse=False):
            bucket.wishes.hook = hook

    def set_post_optim_event(self, event: Any) -> None:
        """Have the next forward of the root wait for `event`, on the stream that gathers run on."""
        self._get_fsdp_state().post_optim_event = event

    _OWN_TRANSPORT = "the flat buffers are communicated in place"
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
        "set_reduce_scatter_max_input_buffers",
        "two reductions are in flight at most, of large buckets one",
    )
    set_unshard_in_backward = _unsupported(
        "set_unshard_in_backward", "backward needs the parameters"
    )

    def _set_unshard_async_op(self, async_op: bool) -> None:
        """Do nothing: gathers run asynchronously, on the current stream, always."""

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
