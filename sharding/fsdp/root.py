"""RootContext: what the buckets of one model share around forward and backward.

May touch: autograd's engine callbacks, buckets. Every decision here depends on the order of
execution alone, which is the same on every rank.

[Note: order of collectives]
Collectives match by the order in which ranks post them, so every rank posts at the same points of
the program. Gathers are posted where a module enters forward or backward, and prefetch follows the
order of the previous iteration. Reductions are posted where backward has left all calls of a module
(not where the last gradient arrives: a parameter may be unused on some ranks), in the reverse of
the order in which modules entered forward: a bucket waits until all that entered after it have
posted theirs. What backward did not leave by then is posted at its end, in the same order.

Ranks that run modules in different orders would swap parameters of equal size unnoticed. So what
follows from the order of all gathers before this backward rides in every reduction: see
[Note: proofs in reductions] in proofs.py.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection
from functools import partial
from typing import Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from sharding.fsdp.beginnings import Beginnings, check_equal_beginnings
from sharding.fsdp.bucket import Bucket, ShardedState
from sharding.fsdp.buffer import Workspace
from sharding.fsdp.module_tree import ModuleTree
from sharding.fsdp.originals import check_hooks
from sharding.fsdp.proofs import Proofs
from sharding.fsdp.reduction import ReductionsInFlight
from sharding.planning.structure import DeclaresStructure
from sharding.transport.agreement import check_same_on_all_ranks


class StateBelow(Protocol):
    """What a root needs of the states below it."""

    modules: tuple[nn.Module, ...]
    bucket: Bucket | None
    optimizer: DeclaresStructure | None
    ignored: Collection[nn.Parameter]
    beginnings: Beginnings | None
    open_calls: int

    @property
    def in_backward(self) -> bool:
        """Whether backward has entered a call of its module and not left it."""
        ...

    def describe(self) -> str:
        """Return what steers its collectives, as text."""
        ...

    def begin_forward(self) -> None:
        """Forget modules that were still to run in the last forward."""
        ...

    def end_backward(self) -> None:
        """Forget which calls of this backward are still open."""
        ...

    def reset(self) -> None:
        """Forget an iteration that an exception ended."""
        ...


class RootContext:
    """What all states below one root share: the order of buckets, scratch memory, reductions.

    Attributes:
        root: The state whose module runs first.
        states: All states of the root, itself included.
        tree: The modules below the root, which may change.
    """

    def __init__(self, root: StateBelow) -> None:
        self.root = root
        self.states: list[StateBelow] = []
        self.tree = ModuleTree(root.modules[0])
        self.workspace = Workspace()
        # What autograd calls at the end of backward, from the first pre-backward hook until then.
        # Autograd alone holds it: it is gone when a backward has raised.
        self._at_end: weakref.ref[Callable[[], None]] | None = None
        self._in_forward = False  # whether the root's forward runs
        self._builds_graph = False  # whether it does so under autograd
        self.creates_graph = False  # whether this backward is to be differentiated again
        self._has_graph = False  # whether an earlier one was, and its graph was not walked yet
        self._order: list[Bucket] = []  # as their modules entered forward in this iteration
        self._previous_order: list[Bucket] = []  # the same, of the iteration before
        self._unreduced: list[Bucket] = []  # ran forward under autograd since their last reduction
        self._to_reduce: list[Bucket] = []  # of this backward; see [Note: order of collectives]
        self._in_flight = ReductionsInFlight()
        self._left: set[Bucket] = set()  # whose modules this backward has been through
        self.proofs = Proofs()
        self._gathers_before_backward = 0

    @property
    def buckets(self) -> list[Bucket]:
        """All buckets below the root, parents before children."""
        return [state.bucket for state in self.states if state.bucket is not None]

    @property
    def in_backward(self) -> bool:
        """Whether backward of this model runs; not so any more after one that raised."""
        return self._at_end is not None and self._at_end() is not None

    @property
    def _has_raised(self) -> bool:
        return self._at_end is not None and self._at_end() is None

    def check(self, *, has_new_states: bool) -> None:
        """Prove that all is well for ranks to train together, whenever what they train changes.

        Args:
            has_new_states: Whether states joined since the last check; then it is a collective.

        Raises:
            RuntimeError: On every rank, naming what differs between ranks, or which parameter no
                `fully_shard` call took.
        """
        if has_new_states:
            self.check_ranks_agree()
        self.check_optimizers()
        check_hooks(original for bucket in self.buckets for original in bucket.originals)
        self.tree.check(self.buckets, [p for state in self.states for p in state.ignored])

    def absorb(self, former: RootContext) -> None:
        """Take over from the root that a module below was, as long as it ran by itself."""
        if former._has_raised:
            former.reset()
        self._unreduced += [b for b in former._unreduced if b not in self._unreduced]

    @property
    def keeps_weights(self) -> bool:
        """Whether the graph of a backward needs weights at a time that no hook announces."""
        return self.creates_graph or self._has_graph

    def check_ranks_agree(self) -> None:
        """Prove once that all ranks hold the same plans (and, in debug mode, began equal).

        Raises:
            RuntimeError: On every rank, naming the first difference.
        """
        by_mesh: dict[tuple[dist.ProcessGroup, ...], list[tuple[StateBelow, Bucket]]] = {}
        for state in self.states:
            if (bucket := state.bucket) is not None:
                by_mesh.setdefault(bucket.groups, []).append((state, bucket))
        for groups, members in by_mesh.items():
            texts = [f"{bucket.describe()}\n{state.describe()}" for state, bucket in members]
            check_same_on_all_ranks("\n".join(texts), groups, "the sharding plan")
            began = [
                (bucket.name, state.beginnings, [p.piece for p in bucket.parameters])
                for state, bucket in members
                if state.beginnings is not None
            ]
            check_equal_beginnings(began, groups)
            for state, _ in members:
                state.beginnings = None

    def check_optimizers(self) -> None:
        """Prove once that optimizers passed to `fully_shard` hold nothing that no call took.

        Raises:
            RuntimeError: On every rank, naming the first parameter that is neither sharded nor
                ignored: ranks would update it by their own gradients.
        """
        ignored = {id(p) for state in self.states for p in state.ignored}
        for optimizer in {
            id(s.optimizer): s.optimizer for s in self.states if s.optimizer
        }.values():
            for g, group in enumerate(optimizer.param_groups):
                names = group.get("param_names")
                for i, parameter in enumerate(group["params"]):
                    if not isinstance(parameter, DTensor) and id(parameter) not in ignored:
                        name = names[i] if names else f"parameter {i} of param group {g}"
                        raise RuntimeError(
                            f"{name} of shape {tuple(parameter.shape)} is in the optimizer, but no "
                            f"fully_shard call took it: call fully_shard(..., optimizer=optimizer) "
                            f"on the model that holds it before the first forward, or pass it in "
                            f"ignored_params"
                        )
        for state in self.states:
            state.optimizer = None

    # -- forward --------------------------------------------------------------------------------

    def begin_forward(self) -> None:
        """Start an iteration: nothing that an optimizer may have changed stays unsharded."""
        if self._has_raised:
            self.reset()
        self.proofs.settle()
        self._in_forward = True
        self._builds_graph = torch.is_grad_enabled()
        for state in self.states:
            state.begin_forward()
            if state.bucket is not None:
                self._drop_old(state.bucket)
        self._previous_order, self._order = self._order, []

    def _drop_old(self, bucket: Bucket) -> None:
        kept = bucket.unsharded_by_hand or bucket.stays_gathered
        if bucket.is_old or (bucket.reshard_after_backward and not kept):
            bucket.reshard()

    def begin_call(self, bucket: Bucket) -> None:
        """Do the same for one module that is called while the root's forward does not run."""
        if not self._in_forward:
            self._drop_old(bucket)

    def end_forward(self) -> None:
        """Drop gathers that were started for modules that did not run."""
        self._in_forward = self._builds_graph = False
        for bucket in self.buckets:
            trains = torch.is_grad_enabled()
            if bucket.state is ShardedState.IN_FLIGHT or not (trains or bucket.stays_gathered):
                bucket.reshard()

    def is_last(self, bucket: Bucket) -> bool:
        """Return whether backward needs this one first, as far as the last iteration tells."""
        return self._in_forward and self._previous_order[-1:] == [bucket]

    def entered(self, bucket: Bucket) -> None:
        """Record the order of execution and start the gather of the bucket that comes next."""
        bucket.unsharded_by_hand = False
        is_first = bucket not in self._order  # a call later on has prefetched what follows
        if is_first:
            self._order.append(bucket)
        # Reentrant checkpointing runs forward without autograd, and once more in backward.
        if (self._builds_graph or torch.is_grad_enabled()) and bucket not in self._unreduced:
            self._unreduced.append(bucket)
        if is_first and self._in_forward:  # else nothing would drop what nobody waits for
            _prefetch(bucket, self._previous_order, step=1)

    # -- backward -------------------------------------------------------------------------------

    def begin_backward(self) -> None:
        """Queue the end of this backward; called by every pre-backward hook, acts once."""
        if self.in_backward:
            return
        if self._has_raised:
            self.reset()
        at_end = self._open_backward()
        torch.autograd.Variable._execution_engine.queue_callback(at_end)

    def reduce_waiting_gradients(self) -> None:
        """Reduce, outside of backward, what backwards without sync have left; a collective."""
        if self.in_backward:
            raise RuntimeError("gradients that wait were to be reduced while backward still runs")
        if self._has_raised:
            self.reset()
        at_end = self._open_backward()
        for bucket in self.buckets:
            for i, parameter in enumerate(bucket.parameters):
                if parameter.unsharded.grad is not None:  # assigned, where backward is split
                    bucket.accumulate_grad(i)
        at_end()

    def _open_backward(self) -> Callable[[], None]:
        """Return what must be called at the end; in `in_backward` as long as it is alive."""
        self.proofs.settle()
        at_end = partial(self._end_backward)
        self._at_end = weakref.ref(at_end)
        self.creates_graph = False
        self._to_reduce = []
        self._left.clear()
        self._gathers_before_backward = self.proofs.gathers
        for bucket in reversed(self._unreduced):
            self._join_backward(bucket)
        return at_end

    def backward_reached(self, bucket: Bucket) -> None:
        """Start the gather that backward needs next; add a graph that is walked once more."""
        if bucket not in self._unreduced:
            self._unreduced.append(bucket)
            self._join_backward(bucket)
        _prefetch(bucket, self._order, step=-1)

    def _join_backward(self, bucket: Bucket) -> None:
        bucket.begin_backward()
        if bucket.requires_gradient_sync and bucket.takes_gradients:
            self._to_reduce.append(bucket)

    def left_backward(self, bucket: Bucket) -> None:
        """Start every reduction whose turn it is; see [Note: order of collectives]."""
        self._left.add(bucket)
        while self._to_reduce and self._to_reduce[0] in self._left:
            self._start_reduction(self._to_reduce.pop(0))

    def _start_reduction(self, bucket: Bucket) -> None:
        self._in_flight.start(bucket, self._gathers_before_backward)

    def _end_backward(self) -> None:
        """Reduce what is left, wait for everything, and leave all buckets sharded."""
        while self._to_reduce:
            self._start_reduction(self._to_reduce.pop(0))
        self._in_flight.finish()
        # Reentrant checkpointing walks several graphs: parts of a gradient may come after the turn.
        for bucket in self.buckets:
            if bucket.requires_gradient_sync and bucket.has_gradients:
                self._start_reduction(bucket)
        self._in_flight.finish()
        self.workspace.release()
        self.proofs.send()
        # What waits for replicas is reduced by a later backward, also one that does not run it.
        self._unreduced = [
            b for b in self._unreduced if not b.requires_gradient_sync or b.keeps_sums
        ]
        self._at_end = None
        for state in self.states:
            state.end_backward()
            if state.bucket is None or self.creates_graph or state.open_calls:
                continue
            if state.bucket.reshard_after_backward:
                state.bucket.reshard()
        self._has_graph = self.creates_graph
        self.creates_graph = False

    def reset(self) -> None:
        """Forget an iteration that an exception ended; its gradients are lost.

        Raises nothing of its own; gathers and reductions in flight are waited for.
        """
        self._in_flight.forget()
        self._to_reduce, self._unreduced = [], []
        self._at_end = None
        self.creates_graph = self._has_graph = False
        for state in self.states:
            state.reset()


def _prefetch(bucket: Bucket, order: list[Bucket], step: int) -> None:
    """Start the gather of the bucket `step` places after `bucket` in `order`."""
    if bucket not in order:
        return
    neighbour = order.index(bucket) + step
    if not 0 <= neighbour < len(order):
        return
    # In backward, a use of weights that no hook announced is found by the gradients that they get.
    # Where none do, nothing may lie in their memory before a hook has waited for it.
    if step > 0 or order[neighbour].takes_gradients:
        order[neighbour].unshard()
