"""The lifecycle of buckets around forward and backward: hooks, the root, prefetch, reduce order.

May touch: module hooks, autograd's engine callbacks, buckets. Every decision here depends on the
order of execution alone, which is the same on every rank.

[Note: order of collectives]
Ranks must post collectives in the same order (or, over gloo, wait for them in an order that cannot
form a cycle). Gathers are posted in the order of execution and of prefetch, and prefetch follows
the order of the previous iteration. Reductions are posted in the reverse of the forward order: a
bucket whose gradients are complete waits until all buckets that entered forward after it have
posted theirs. What is not complete when backward ends (parameters unused on this rank) is posted
then, in the same order.

[Note: when unsharded memory is freed]
"All gradients of the bucket have arrived" lets its reduction start, but a node that still needs a
weight may run later. The memory is freed once the gradients of the module's inputs are known, or at
the end of backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from sharding.bucket import Bucket, ShardedState
from sharding.buffer import Workspace
from sharding.collectives import check_same_on_all_ranks

MAX_REDUCTIONS_IN_FLIGHT = 2


class RootContext:
    """What all states below one root share: the order of buckets, scratch memory, reductions.

    Attributes:
        root: The state whose module runs first.
        states: All states of the root, itself included.
    """

    def __init__(self, root: ModuleState) -> None:
        self.root = root
        self.states: list[ModuleState] = []
        self.workspace = Workspace()
        self._in_backward = False  # from the first pre-backward hook until the end of backward
        self._builds_graph = False  # whether the root's forward runs under autograd
        self._order: list[Bucket] = []  # as their modules entered forward in this iteration
        self._previous_order: list[Bucket] = []  # the same, of the iteration before
        self._unreduced: list[Bucket] = []  # ran forward under autograd since their last reduction
        self._to_reduce: list[Bucket] = []  # of this backward; see [Note: order of collectives]
        self._in_flight: list[Bucket] = []

    @property
    def buckets(self) -> list[Bucket]:
        """All buckets below the root, parents before children."""
        return [state.bucket for state in self.states if state.bucket is not None]

    @property
    def in_backward(self) -> bool:
        """Whether backward of this model runs; not so any more after one that raised."""
        return self._in_backward and torch._C._current_graph_task_id() != -1

    def check_ranks_agree(self) -> None:
        """Proves once that all ranks hold the same plans (and, in debug mode, began equal).

        Raises:
            RuntimeError: On every rank, naming the first difference.
        """
        by_group: dict[dist.ProcessGroup, list[str]] = {}
        for bucket in self.buckets:
            text = f"{bucket.plan.describe()}\n{bucket.initial_values}"
            by_group.setdefault(bucket.group, []).append(text)
        for group, texts in by_group.items():
            check_same_on_all_ranks("\n".join(texts), group, "the sharding plan")

    # -- forward --------------------------------------------------------------------------------

    def begin_forward(self) -> None:
        """Starts an iteration: nothing that an optimizer may have changed stays unsharded."""
        if self._in_backward:  # the last backward raised
            self.reset()
        self._builds_graph = torch.is_grad_enabled()
        for bucket in self.buckets:
            if bucket.reshard_after_backward:
                bucket.reshard()
        self._previous_order, self._order = self._order, []

    def end_forward(self) -> None:
        """Drops gathers that were started for modules that did not run."""
        self._builds_graph = False
        for bucket in self.buckets:
            if bucket.state is ShardedState.IN_FLIGHT or not torch.is_grad_enabled():
                bucket.reshard()

    def is_last(self, bucket: Bucket) -> bool:
        """Whether no bucket enters forward after this one, as far as the last iteration tells."""
        return bool(self._previous_order) and self._previous_order[-1] is bucket

    def entered(self, bucket: Bucket) -> None:
        """Records the order of execution and starts the gather of the bucket that comes next."""
        if bucket not in self._order:
            self._order.append(bucket)
        # Reentrant checkpointing runs forward without autograd, and once more in backward.
        if (self._builds_graph or torch.is_grad_enabled()) and bucket not in self._unreduced:
            self._unreduced.append(bucket)
        _prefetch(bucket, self._previous_order, step=1)

    # -- backward -------------------------------------------------------------------------------

    def begin_backward(self) -> None:
        """Queues the end of this backward; called by every pre-backward hook, acts once."""
        if self.in_backward:
            return
        if self._in_backward:  # the last backward raised
            self.reset()
        self._in_backward = True
        self._to_reduce = []
        for bucket in reversed(self._unreduced):
            self._join_backward(bucket)
        torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)

    def backward_reached(self, bucket: Bucket) -> None:
        """Starts the gather that backward needs next; adds a graph that is walked once more."""
        if bucket not in self._unreduced:
            self._unreduced.append(bucket)
            self._join_backward(bucket)
        _prefetch(bucket, self._order, step=-1)

    def _join_backward(self, bucket: Bucket) -> None:
        bucket.begin_backward()
        if bucket.requires_gradient_sync and bucket.takes_gradients:
            self._to_reduce.append(bucket)

    def gradient_arrived(self, bucket: Bucket) -> None:
        """Starts every reduction whose turn it is; see [Note: order of collectives]."""
        while self._to_reduce and self._to_reduce[0].all_gradients_arrived:
            self._start_reduction(self._to_reduce.pop(0))

    def _start_reduction(self, bucket: Bucket) -> None:
        while len(self._in_flight) >= MAX_REDUCTIONS_IN_FLIGHT:
            self._in_flight.pop(0).wait_for_reduce()
        bucket.reduce_grads()
        self._in_flight.append(bucket)

    def _end_backward(self) -> None:
        """Reduces what is left, waits for everything, and leaves all buckets sharded."""
        while self._to_reduce:
            self._start_reduction(self._to_reduce.pop(0))
        self._finish_reductions()
        # Reentrant checkpointing walks several graphs: parts of a gradient may come after the turn.
        for bucket in self.buckets:
            if bucket.requires_gradient_sync and bucket.has_gradients:
                self._start_reduction(bucket)
        self._finish_reductions()
        self._unreduced = [b for b in self._unreduced if not b.requires_gradient_sync]
        self._in_backward = False
        for state in self.states:
            state.in_backward = False
        for bucket in self.buckets:
            if bucket.reshard_after_backward:
                bucket.reshard()

    def _finish_reductions(self) -> None:
        for bucket in self._in_flight:
            bucket.wait_for_reduce()
        self._in_flight.clear()

    def reset(self) -> None:
        """Forgets an iteration that an exception ended; its gradients are lost.

        Raises nothing of its own; gathers and reductions in flight are waited for.
        """
        self._finish_reductions()
        self._to_reduce, self._unreduced = [], []
        self._in_backward = False
        for state in self.states:
            state.reset()


def _prefetch(bucket: Bucket, order: list[Bucket], step: int) -> None:
    """Starts the gather of the bucket `step` places after `bucket` in `order`."""
    if bucket in order:
        neighbour = order.index(bucket) + step
        if 0 <= neighbour < len(order):
            order[neighbour].unshard()


class _InputGradients(torch.autograd.Function):
    """Identity whose backward tells that the gradients of a module's inputs are known."""

    @staticmethod
    def forward(ctx: Any, done: Callable[[], None], *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.done = done
        return inputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ctx.done()
        return (None, *grads)


class ModuleState:
    """The hooks of one `fully_shard` call.

    Args:
        modules: The modules of the call; a list when it was given one.
        bucket: Their bucket, or `None` if no parameter is left for this call.
        mp_policy: Casts inputs and outputs.
        reshard_after_forward: `None` means yes, but not for the root and the last bucket.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        bucket: Bucket | None,
        *,
        mp_policy: MixedPrecisionPolicy,
        reshard_after_forward: bool | None,
    ) -> None:
        self.modules = tuple(modules)
        self.bucket = bucket
        self.mp_policy = mp_policy
        self.reshard_after_forward = reshard_after_forward
        self.context: RootContext | None = None
        self.forward_prefetch: list[ModuleState] = []
        self.backward_prefetch: list[ModuleState] = []
        self.in_backward = False
        self._running: set[nn.Module] = set()  # modules of this call still to finish this forward
        for module in modules:
            module.register_forward_pre_hook(self._pre_forward, prepend=True, with_kwargs=True)
            module.register_forward_hook(self._post_forward)
            if bucket is not None:
                module.register_state_dict_pre_hook(lambda *_: bucket.reshard())
                module.register_load_state_dict_pre_hook(lambda *_: bucket.reshard())
                module.register_load_state_dict_post_hook(lambda *_: bucket.adopt())

    # -- root -----------------------------------------------------------------------------------

    def lazy_init(self) -> RootContext:
        """Finds all states below this one and makes it their root, at the first forward.

        Raises:
            RuntimeError: A module below was run by itself before; its root would be lost.
        """
        if self.context is not None:
            return self.context
        if len(self.modules) > 1:
            raise RuntimeError(
                f"the first fully sharded module to run must be a single root, got the group "
                f"{[type(m).__name__ for m in self.modules]}: call fully_shard on the model that "
                f"holds them"
            )
        context = RootContext(self)
        seen: set[int] = set()
        for name, module in self.modules[0].named_modules():
            state = state_of(module)
            if state is None or id(state) in seen:
                continue
            seen.add(id(state))
            if state.context is not None:
                raise RuntimeError(
                    f"{name} ran a forward by itself before its root did; run the root module first"
                )
            state.join(context, name)
        context.check_ranks_agree()
        if self.reshard_after_forward is None:
            self.reshard_after_forward = False  # backward would gather it again at once
        return context

    def join(self, context: RootContext, name: str) -> None:
        """Becomes one of the states of a root."""
        self.context = context
        context.states.append(self)
        if self.bucket is not None:
            self.bucket.name = name
            self.bucket.set_workspace(context.workspace)
            self.bucket.grad_ready = context.gradient_arrived

    # -- forward --------------------------------------------------------------------------------

    @torch._dynamo.disable
    def _pre_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        context = self.lazy_init()
        recompute = context.in_backward  # activation checkpointing runs forward inside backward
        if not recompute and context.root is self:
            context.begin_forward()
        args, kwargs = self._cast_inputs(args, kwargs)
        if self.bucket is None:
            return args, kwargs
        if not self._running:
            self._running = set(self.modules)
        self.bucket.wait_for_unshard()
        if not recompute:
            context.entered(self.bucket)
            for state in self.forward_prefetch:
                if state.bucket is not None:
                    state.bucket.unshard()
        return self._watch_inputs(args, kwargs)

    @torch._dynamo.disable
    def _post_forward(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        context = self.lazy_init()
        self._running.discard(module)
        if self.bucket is not None and not self._running and not self.in_backward:
            if context.in_backward or self._frees_after_forward(self.bucket, context):
                self.bucket.reshard()
        self._watch_outputs(output)
        if context.root is self and not context.in_backward:
            context.end_forward()
        if self.mp_policy.output_dtype is not None:
            output = _cast(output, self.mp_policy.output_dtype)
        return output

    def _frees_after_forward(self, bucket: Bucket, context: RootContext) -> bool:
        """By default what backward needs first stays: it would be gathered again at once."""
        if self.reshard_after_forward is None:
            return not (torch.is_grad_enabled() and context.is_last(bucket))
        return self.reshard_after_forward

    def _cast_inputs(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        dtype = self.mp_policy.param_dtype
        if dtype is None or not self.mp_policy.cast_forward_inputs:
            return args, kwargs
        return _cast((args, kwargs), dtype)

    # -- backward -------------------------------------------------------------------------------

    def _watch_inputs(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Has `_after_backward` called when the gradients of all inputs are known."""
        if not torch.is_grad_enabled():
            return args, kwargs
        leaves, spec = tree_flatten((args, kwargs))
        tensors = {i: x for i, x in enumerate(leaves) if isinstance(x, Tensor) and x.requires_grad}
        if not tensors:
            return args, kwargs
        watched = _InputGradients.apply(self._after_backward, *tensors.values())
        for i, tensor in zip(tensors, watched, strict=True):
            leaves[i] = tensor
        return tree_unflatten(leaves, spec)

    def _watch_outputs(self, output: Any) -> None:
        """Has `_before_backward` called when the first gradient of an output arrives."""
        if not torch.is_grad_enabled():
            return
        for tensor in tree_flatten(output)[0]:
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(self._before_backward)

    @torch._dynamo.disable
    def _before_backward(self, grad: Tensor) -> Tensor:
        context = self.lazy_init()
        context.begin_backward()
        self.in_backward = True
        if self.bucket is not None:
            self.bucket.wait_for_unshard()
            context.backward_reached(self.bucket)
            for state in self.backward_prefetch:
                if state.bucket is not None:
                    state.bucket.unshard()
        return grad

    def reset(self) -> None:
        """Forgets an iteration that an exception ended."""
        self.in_backward = False
        self._running.clear()
        if self.bucket is not None:
            self.bucket.drop_gradients()
            self.bucket.reshard()

    def _after_backward(self) -> None:
        """Frees the unsharded parameters; see [Note: when unsharded memory is freed]."""
        self.in_backward = False
        if self.bucket is not None and self.bucket.reshard_after_backward:
            self.bucket.reshard()


_STATE = "_fully_shard_state"


def attach_state(module: nn.Module, state: ModuleState) -> None:
    """Remembers the state on its module, out of the way of nn.Module's registries."""
    module.__dict__[_STATE] = state


def state_of(module: nn.Module) -> ModuleState | None:
    """The state of the `fully_shard` call that was given this module, if any."""
    return module.__dict__.get(_STATE)


def _cast(tree: Any, dtype: torch.dtype) -> Any:
    def cast(x: Tensor) -> Tensor:
        return x.to(dtype) if x.is_floating_point() else x

    return tree_map_only(Tensor, cast, tree)
