"""ModuleState: the hooks that move one bucket through forward and backward.

May touch: module hooks, tensor hooks, its bucket. What concerns several buckets is in `root.py`.

[Note: when unsharded memory is freed]
That all gradients of the bucket have arrived is not enough: a node that still needs a weight may
run later. The memory is freed once the gradients of the module's inputs are known (which also lets
its reduction start, see [Note: order of collectives] in root.py), or at the end of backward. A
backward that creates a graph (gradients of inputs, for a penalty on them)
frees nothing: the backward of its graph needs the weights before any hook of a module runs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.weak import WeakTensorKeyDictionary

from sharding.checkpoint.load_checks import LoadCheck
from sharding.fsdp.asked_by_torch import AskedByTorch, register
from sharding.fsdp.beginnings import ROOT_NAME, Beginnings
from sharding.fsdp.bucket import Bucket, ShardedState
from sharding.fsdp.containers import PLAIN, leaves, map_tensors
from sharding.fsdp.input_views import InputViews
from sharding.fsdp.kept_tensors import KeptTensors
from sharding.fsdp.root import RootContext
from sharding.fsdp.transforms import in_transform, value_below
from sharding.planning.structure import DeclaresStructure


class _Forward:
    """One forward of the modules of a call, which backward enters and leaves."""

    __slots__ = ("inputs",)

    def __init__(self) -> None:
        self.inputs: InputViews | None = None  # until the forward has ended


class ModuleState(AskedByTorch):
    """The hooks of one `fully_shard` call.

    Args:
        modules: The modules of the call; a list when it was given one.
        bucket: Their bucket, or `None` if no parameter is left for this call.
        mp_policy: Casts inputs and outputs.
        reshard_after_forward: `None` means yes, but not for the root and the last bucket; a number
            of ranks, that they hold the bucket until backward.
        optimizer: What `fully_shard` was given, until the root has checked it.
        ignored: Parameters that `fully_shard` was told to leave alone.
        beginnings: What this rank was given, until the root has compared it.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        bucket: Bucket | None,
        *,
        mp_policy: MixedPrecisionPolicy,
        reshard_after_forward: bool | int | None,
        optimizer: DeclaresStructure | None = None,
        ignored: Collection[nn.Parameter] = (),
        beginnings: Beginnings | None = None,
    ) -> None:
        self.modules = tuple(modules)
        self.optimizer = optimizer
        self.ignored = ignored
        self.beginnings = beginnings
        self.bucket = bucket
        self.mp_policy = mp_policy
        self.reshard_after_forward = reshard_after_forward
        self.context: RootContext | None = None
        self.forward_prefetch: list[ModuleState] = []
        self.backward_prefetch: list[ModuleState] = []
        self.is_last_backward = True
        self.post_optim_event: Any = None  # that the next forward of the root waits for
        self._call = _Forward()  # the last one that began
        self._open: set[_Forward] = set()  # that this backward has entered and not left
        self._kept: KeptTensors | None = None
        self._announced = WeakTensorKeyDictionary()  # of what modules keep
        self._running: set[nn.Module] = set()  # modules of this call still to finish this forward
        self.open_calls = 0  # forwards that have begun and not returned, one inside the other
        self._unfinished: set[_Forward] = set()  # whose inputs still get gradients in this backward
        for module in modules:
            module.register_forward_pre_hook(self._pre_forward, prepend=True, with_kwargs=True)
            # Always: a forward that raises must not leave old weights gathered for the next one.
            module.register_forward_hook(self._post_forward, always_call=True)
            check = LoadCheck(lambda module=module: _reshard_below(module))  # type: ignore[misc]
            module.register_load_state_dict_pre_hook(check)
            if bucket is not None:
                module.register_state_dict_pre_hook(lambda *_: bucket.reshard())
                module.register_load_state_dict_post_hook(lambda *_: bucket.adopt(keeps_ties=True))

    # -- root -----------------------------------------------------------------------------------

    def lazy_init(self) -> RootContext:
        """Find all states below this one and make it their root, at the first forward.

        Modules below that ran by themselves before, each as a root of its own, join it.

        Raises:
            RuntimeError: A module below belongs to another root, or what ranks must agree on
                differs; nothing has changed then.
        """
        if self.context is not None:
            return self.context
        if len(self.modules) > 1:
            raise RuntimeError(
                f"FSDP requires a single root module but got the group "
                f"{[type(m).__name__ for m in self.modules]}: call fully_shard on the model that "
                f"holds them"
            )
        context = RootContext(self)
        self._take_in_states(context)
        return context

    @property
    def is_root(self) -> bool | None:
        """Whether it runs first; None before a first forward."""
        return None if self.context is None else self.context.root is self

    @property
    def all_states(self) -> list[ModuleState]:
        """All that share its root, the root's first; none before a first forward."""
        return [] if self.context is None else cast("list[ModuleState]", self.context.states)

    def _take_in_states(self, context: RootContext) -> None:
        """Have the states below that are new to this root join it, and check what there is now."""
        below = self._states_below()
        earlier = {n: s.context for n, s in below.items() if s.context is not context}
        for name, former in earlier.items():
            if former is not None and former.root not in below.values():
                raise RuntimeError(
                    f"{name} is below {type(former.root.modules[0]).__name__}, which is a root "
                    f"already; two roots cannot share a module: call fully_shard on what holds both"
                )
        known = list(context.states)
        for name in earlier:
            below[name].join(context, name)
        try:
            context.check(has_new_states=bool(earlier))
        except Exception:
            context.states = known
            for name, former in earlier.items():
                below[name].context = former
            raise
        for former in earlier.values():
            if former is not None:
                context.absorb(former)

    def _states_below(self) -> dict[str, ModuleState]:
        """Return this state and all below it, by the name of their first module; parents first."""
        states: dict[ModuleState, str] = {}
        for name, module in self.modules[0].named_modules():
            if (state := state_of(module)) is not None:
                states.setdefault(state, name)
        return {name: state for state, name in states.items()}

    def describe(self) -> str:
        """Return what steers the collectives of this call, as text that ranks must have in
        common."""
        ahead = [
            [state.bucket.name for state in states if state.bucket is not None]
            for states in (self.forward_prefetch, self.backward_prefetch)
        ]
        return (
            f"reshard_after_forward={self.reshard_after_forward!r}, {self.mp_policy!r}, "
            f"prefetched in forward and backward {ahead!r}"
        )

    def join(self, context: RootContext, name: str) -> None:
        """Become one of the states of a root."""
        self.context = context
        context.states.append(self)
        below = [part for module in self.modules for part in _parts(module)]
        below = [part for part in below if part not in self.modules]
        self._kept = KeptTensors(self.modules, below, self._announce_kept)
        if self.bucket is not None:
            self.bucket.name = self.bucket.slots.name = name or ROOT_NAME
            self.bucket.prefix = f"{name}." if name and len(self.modules) == 1 else ""
            self.bucket.set_workspace(context.workspace)
            # The graph of a backward may reach parameters before any module's hook.
            self.bucket.grad_arrived = context.begin_backward
            self.bucket.proofs = context.proofs

    @property
    def in_backward(self) -> bool:
        """Whether backward has entered a call of this module and not left it."""
        return bool(self._open)

    # -- forward --------------------------------------------------------------------------------

    @torch._dynamo.disable
    def _pre_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        context = self.lazy_init()
        recompute = context.in_backward  # activation checkpointing runs forward inside backward
        if not recompute and not self.open_calls:
            if context.root is self:
                if context.tree.has_changed():
                    self._take_in_states(context)
                context.begin_forward()
            elif self.bucket is not None and not self._running:
                context.begin_call(self.bucket)
        is_first = not (self.open_calls or self._running)
        self.open_calls += 1
        args, kwargs = self._cast_inputs(args, kwargs)
        if self.bucket is None:
            return args, kwargs
        if is_first:
            self._running = set(self.modules)
            self._call = _Forward()
            if self._kept is not None:
                self._kept.watch_hooked()
        self.bucket.unshard()
        if not recompute:  # the next gather is posted before this one is waited for
            context.entered(self.bucket)
            for state in self.forward_prefetch:
                if state.bucket is not None:
                    state.bucket.unshard()
        self.bucket.wait_for_unshard()
        self.bucket.stage_foreign()
        # Backward leaves the modules of a call in reverse order: the first one's inputs end it.
        return self._watch_inputs(args, kwargs, recompute) if is_first else (args, kwargs)

    def begin_forward(self) -> None:
        """Forget modules that were still to run in the last forward."""
        self._running.clear()
        event, self.post_optim_event = self.post_optim_event, None
        if event is not None:
            event.wait()
        if self.bucket is not None:
            self.bucket.stays_gathered = self.reshard_after_forward is False

    @torch._dynamo.disable
    def _post_forward(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if self.context is None:  # the root was refused before forward began
            return output
        context = self.context
        self._running.discard(module)
        self.open_calls = max(0, self.open_calls - 1)  # 0 where the hook before it raised
        watched = self._watch_outputs(output)
        is_done = not self._running and not self.open_calls
        if self.bucket is not None and is_done:
            self.bucket.slots.unstage()
            self._end_call(self._call)
        if self.bucket is not None and is_done and not self.in_backward and watched:
            if context.in_backward or self._frees_after_forward(self.bucket, context):
                self.bucket.reshard(held_by=self.held_by)
        if context.root is self and not self.open_calls and not context.in_backward:
            context.end_forward()
        if self.mp_policy.output_dtype is not None:
            output = _cast(output, self.mp_policy.output_dtype)
        return output

    @property
    def held_by(self) -> int:
        """How many ranks hold the bucket together after forward; 0 for all."""
        return (
            0 if isinstance(self.reshard_after_forward, bool) else self.reshard_after_forward or 0
        )

    def _frees_after_forward(self, bucket: Bucket, context: RootContext) -> bool:
        """Keep by default what backward needs first: it would be gathered again at once."""
        if context.keeps_weights:
            return False
        if self.reshard_after_forward is None:
            first_in_backward = context.root is self or context.is_last(bucket)
            return not (torch.is_grad_enabled() and first_in_backward)
        return bool(self.reshard_after_forward)

    def _cast_inputs(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        dtype = self.mp_policy.param_dtype
        if dtype is None or not self.mp_policy.cast_forward_inputs:
            return args, kwargs
        return _cast((args, kwargs), dtype)

    # -- backward -------------------------------------------------------------------------------

    def _watch_inputs(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], recompute: bool
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Have `_after_backward` called when the gradients of all inputs are known."""
        if not torch.is_grad_enabled() or self.bucket is None:
            return args, kwargs
        tensors = [x for x in leaves((args, kwargs)) if isinstance(x, Tensor) and x.requires_grad]
        # A call without such an input stays open until the end of backward. What is computed again
        # in backward was counted, but by reentrant checkpointing, whose forward builds no graph.
        if not (recompute and self._unfinished):
            self._unfinished.add(self._call)
        if not tensors or in_transform():
            return args, kwargs
        device = self.bucket.buffers[0].device
        views = InputViews(tensors, device, partial(self._after_backward, self._call))
        self._call.inputs = views
        return map_tensors(views.of, (args, kwargs))

    def _end_call(self, call: _Forward) -> None:
        """Let go of the inputs of a forward that has ended."""
        if call.inputs is not None:
            call.inputs.end_forward(partial(self._after_open, call))
            call.inputs = None

    def _watch_outputs(self, output: Any) -> bool:
        """Have `_before_backward` called when the first gradient of an output arrives.

        Returns:
            Whether that comes in time. Not so where an object of an unknown class may hide tensors,
            where the output is a weight itself, or in a transform: those that are gathered must
            then stay until the end of backward, which the first gradient of a parameter announces.
        """
        if not torch.is_grad_enabled():
            return True
        parts = leaves(output)
        if in_transform():  # see [Note: transforms]
            values = [value_below(leaf) for leaf in parts if isinstance(leaf, Tensor)]
            for value in values:
                if value.grad_fn is not None:
                    self._announce(value)
            return False
        trained = [leaf for leaf in parts if isinstance(leaf, Tensor) and leaf.requires_grad]
        for tensor in trained:
            if tensor.is_leaf:
                return False
            self._announce(tensor)
        if self._kept is not None:
            for tensor in self._kept.in_attributes():
                self._announce_kept(tensor)
        return bool(trained) or all(isinstance(leaf, (Tensor, *PLAIN)) for leaf in parts)

    def _announce_kept(self, tensor: Tensor) -> None:
        if tensor not in self._announced:  # else it is of an earlier forward
            self._announced[tensor] = None
            self._announce(tensor)

    def _announce(self, tensor: Tensor) -> None:
        """Have the weights gathered before the gradient of a tensor goes on through the unit."""
        before = partial(self._before_backward, self._call)
        cast(Node, tensor.grad_fn).register_prehook(before)
        # An in-place change of a view takes its node out of the graph, but not its base's.
        if tensor._base is not None and tensor._base.grad_fn is not None:
            tensor._base.grad_fn.register_prehook(before)

    @torch._dynamo.disable
    def _before_backward(self, call: _Forward, grads: tuple[Tensor, ...]) -> None:
        context = self.lazy_init()
        context.begin_backward()
        context.creates_graph |= torch.is_grad_enabled()
        self._open.add(call)
        if self.bucket is not None:
            if not self.is_last_backward:
                self._check_weights_are_reached(self.bucket)
            self.bucket.unshard()
            context.backward_reached(self.bucket)
            for state in self.backward_prefetch:
                if state.bucket is not None:
                    state.bucket.unshard()
            self.bucket.wait_for_unshard()

    def _check_weights_are_reached(self, bucket: Bucket) -> None:
        """Refuse a backward of a pipeline whose second half would miss the weights.

        Schedules that split backward ask for the gradients of a stage's inputs first. What they
        take for its weights is what the module holds then; the graph knows the gathered ones.
        """
        if bucket.state is ShardedState.UNSHARDED or bucket.reshard_after_backward:
            return
        weights = [p.unsharded for p in bucket.parameters if p.unsharded.requires_grad]
        with torch._C.DisableTorchFunctionSubclass():  # they are freed
            nodes = [torch.autograd.graph.get_gradient_edge(weight).node for weight in weights]
        if nodes and not any(map(torch._C._will_engine_execute_node, nodes)):
            raise RuntimeError(
                f"backward of bucket {bucket.name!r} was split, gradients of inputs first, after "
                f"its weights were freed: those of {bucket.parameters[0].fqn} would be lost. "
                f"Pipeline schedules that split backward (zero bubble, DualPipeV) need "
                f"fully_shard(..., reshard_after_forward=False) on every module of a stage"
            )

    def reset(self) -> None:
        """Forget an iteration that an exception ended."""
        self.end_backward()
        self._running.clear()
        self.open_calls = 0
        if self.bucket is not None:
            self.bucket.drop_gradients()
            self.bucket.slots.unstage()
            self.bucket.reshard()

    def _after_backward(self, call: _Forward) -> None:
        """Free the unsharded parameters; see [Note: when unsharded memory is freed]."""
        self._unfinished.discard(call)
        self._open.discard(call)
        if self.bucket is None:
            return
        self.bucket.check_is_gathered()
        context = self.lazy_init()
        if self._may_free(self.bucket):
            self.bucket.reshard()
        if not self._unfinished:
            context.left_backward(self.bucket)

    def _after_open(self, call: _Forward) -> None:
        """Do the same unless backward is known to have left the call already."""
        if call in self._open:
            self._after_backward(call)

    def _may_free(self, bucket: Bucket) -> bool:
        """Return whether nothing needs the weights of a bucket that backward has left."""
        kept = self._open or self.open_calls or self.lazy_init().keeps_weights
        return bucket.reshard_after_backward and not kept

    def reduce_waiting_gradients(self) -> None:
        """Reduce what backwards without sync have left, for all states below the root.

        A collective; torch's pipeline schedules call it after the last micro-batch of a stage.
        """
        self.lazy_init().reduce_waiting_gradients()

    def end_backward(self) -> None:
        """Forget which calls of this backward are still open."""
        self._open.clear()
        self._unfinished.clear()


_STATE = "_fully_shard_state"


def attach_state(module: nn.Module, state: ModuleState) -> None:
    """Remember the state on its module, out of the way of nn.Module's registries."""
    module.__dict__[_STATE] = state
    register(module, state)


def state_of(module: nn.Module) -> ModuleState | None:
    """Return the state of the `fully_shard` call that was given this module, if any."""
    return module.__dict__.get(_STATE)


def _parts(module: nn.Module) -> Iterator[nn.Module]:
    """Return a module and what is below it, down to the modules of other `fully_shard` calls."""
    yield module
    for child in module.children():
        if state_of(child) is None:
            yield from _parts(child)


def _reshard_below(module: nn.Module) -> None:
    for part in module.modules():
        state = state_of(part)
        if state is not None and state.bucket is not None:
            state.bucket.reshard()


def _cast(tree: Any, dtype: torch.dtype) -> Any:
    return map_tensors(lambda x: x.to(dtype) if x.is_floating_point() else x, tree)
