"""Bucket: the parameters that one `fully_shard` call moves together, and the verbs that move them.

May touch: modules' parameter slots, a `Transport`, its `DistributedBuffer`s. Knows nothing of
hooks, of other buckets or of autograd's order: `state.py` calls the verbs at the right moments.

    unshard -> wait_for_unshard -> (compute) -> reshard
    accumulate_grad (per parameter) -> reduce_grads -> average_replicas -> wait_for_reduce
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from enum import Enum, auto

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from sharding.fsdp.buffer import DistributedBuffer, Workspace
from sharding.fsdp.forms import Form, RaggedForm
from sharding.fsdp.gathered import GatheredForms, mark_gathered
from sharding.fsdp.gradient_slots import GradientSlots
from sharding.fsdp.held_parts import HeldParts
from sharding.fsdp.parameter import (
    BucketParameter,
    PieceAddresses,
    TrainedParameters,
    check_converted_as_a_whole,
    hands_gradients_to,
    placement_in,
    prepare_reduced,
)
from sharding.fsdp.proofs import Proofs, UpdateLog, attach_log
from sharding.fsdp.reduction import Reduction, ReductionWishes, Replicas
from sharding.fsdp.slots import Slots
from sharding.fsdp.transforms import outside_of_transforms, without_grad
from sharding.planning.negotiation import BucketPlan
from sharding.transport.axes import groups_of, shard_group
from sharding.transport.collectives import Pending, PendingMean, Transport, next_tag
from sharding.transport.debug import announce, check_written, enabled


class ShardedState(Enum):
    """Which parameters a bucket's modules hold."""

    SHARDED = auto()  # sharded parameters registered, no unsharded memory
    IN_FLIGHT = auto()  # sharded parameters registered, the gather is running
    UNSHARDED = auto()  # unsharded parameters registered


class Bucket:
    """Flat buffers of one `fully_shard` call and their collectives.

    Args:
        plan: Where every parameter lies.
        sites: For each parameter of the plan, the (module, name) pairs that hold it.
        mesh: 1-D device mesh to shard over, or 2-D (replicate, shard).
        mp_policy: torch's policy; reductions default to the compute dtype.
        device: Where the shards live.
        cuts: The forms of parameters whose cut was given, by their place in the plan.
    """

    def __init__(
        self,
        plan: BucketPlan,
        sites: Sequence[list[tuple[nn.Module, str]]],
        *,
        mesh: DeviceMesh,
        mp_policy: MixedPrecisionPolicy,
        device: torch.device,
        cuts: Mapping[int, Form] | None = None,
    ) -> None:
        self.plan = plan
        self._cuts = cuts or {}
        self.name = plan.name
        self.prefix = ""  # of its parameters' names below the root
        self.mesh = mesh
        self.groups = groups_of(mesh)  # all that the ranks of the mesh must agree over
        self.transport = Transport(shard_group(mesh), mesh.device_type)
        self._mp_policy = mp_policy
        self.state = ShardedState.SHARDED
        self._debug = enabled()
        self.initial_values = ""  # checksums, in debug mode
        self.originals: list[weakref.ref[Tensor]] = []  # that the sharded parameters replaced
        self.unsharded_by_hand = False  # and not used in a forward since
        self.stays_gathered = False  # after forward, until what it was gathered from changes
        self.requires_gradient_sync = True
        self.reshard_after_backward = True
        self.grad_arrived: Callable[[], None] | None = None  # called after every gradient
        self.proofs = Proofs()  # one for all buckets of a root
        self.updates = UpdateLog()
        self.buffers = [
            self._make_buffer(segment, getattr(torch, dtype), device)
            for segment, dtype in enumerate(plan.dtypes)
        ]
        self._make_slots()
        self.wishes = ReductionWishes()
        self._tag = next_tag(self.transport.group)
        self.replicas = Replicas.of_mesh(mesh, len(self._slots))
        with ExitStack() as stack:
            for buffer in self.buffers:
                stack.enter_context(buffer.present())
            self.parameters = [self._make_parameter(i, held) for i, held in enumerate(sites)]
        self._places = PieceAddresses(self.parameters)
        self._trained = TrainedParameters(self.parameters)
        self.slots = Slots(self.parameters, self.name)
        self._gathered = GatheredForms(self.parameters)
        self._gathered.close()
        self._held = HeldParts(mesh)
        self._gather: Pending | None = None
        self._members: list[list[int]] = [[] for _ in self.buffers]
        for i, parameter in enumerate(self.parameters):
            self._members[parameter.segment].append(i)
        self._seen: set[int] = set()  # gradients since the last reduction
        self._reduction: Reduction | None = None

    def _announce(self, event: str) -> None:
        if self._debug:
            announce(event, self.groups)

    @property
    def _what(self) -> str:
        return f"the reduction of bucket {self.name!r}"

    def _make_buffer(
        self, segment: int, dtype: torch.dtype, device: torch.device
    ) -> DistributedBuffer:
        plan, rank = self.plan.segments[segment], self.transport.rank
        return DistributedBuffer.for_policy(plan, rank, self._mp_policy, dtype, device)

    def _make_slots(self) -> None:
        self._slots = [GradientSlots(each, self.buffers) for each in self.plan.reductions]
        self._slots_of = {segment: slots for slots in self._slots for segment in slots.segments}
        self.slot_bytes = sum(s.nbytes for s in self._slots if self.plan.trainable[s.segments[0]])

    def _make_parameter(self, i: int, sites: list[tuple[nn.Module, str]]) -> BucketParameter:
        """Copy this rank's elements of one parameter and build both of its forms."""
        spec = self.plan.params[i]
        segment, index = self.plan.location[i]
        buffer = self.buffers[segment]
        module, name = sites[0]
        original = module._parameters[name]
        if original is None:
            raise RuntimeError(f"{spec.fqn} disappeared while its bucket was built")
        form = self._cuts.get(i) or RaggedForm(self.mesh, placement_in(self.plan, i), spec.shape)
        if buffer.holds(index) and not original.is_meta:
            buffer.copy_from_full(index, form.flat(original.detach()))
        sharded = form.parameter(buffer.local_view(index), original.requires_grad)
        sharded.__dict__.update(original.__dict__)  # marks such as `no_weight_decay`
        attach_log(sharded, self.updates)
        unsharded = self._make_unsharded(i, form)
        return BucketParameter(spec.fqn, sites, segment, index, form, sharded, unsharded)

    def _make_unsharded(self, i: int, form: Form) -> nn.Parameter:
        """Parameter `i` as forward sees it; its gradients go to `accumulate_grad`."""
        segment, index = self.plan.location[i]
        unsharded = self.buffers[segment].unsharded_parameter(index, form.gathered)
        mark_gathered(unsharded, self.plan.params[i].fqn)
        if unsharded.dtype.is_floating_point or unsharded.dtype.is_complex:
            unsharded.requires_grad_(True)  # hooks can only be put on a tensor that requires grad
            unsharded.register_post_accumulate_grad_hook(hands_gradients_to(self, i))
            unsharded.requires_grad_(False)  # until it is unsharded
        return unsharded

    def describe(self) -> str:
        """Return all that ranks must agree on before the first collective, as text."""
        tags = [self._tag, *([] if self.replicas is None else self.replicas.tags)]
        order = f"tags {tags}, in the order of the group's fully_shard calls"
        return f"{self.plan.describe()}\n{order}\n{self.initial_values}"

    # -- parameters -----------------------------------------------------------------------------

    @property
    def is_meta(self) -> bool:
        """Whether the shards have no memory yet."""
        return any([buffer.device.type == "meta" for buffer in self.buffers])

    @without_grad
    def adopt(self, *, keeps_ties: bool = False) -> None:
        """Take parameters that left the flat buffers back in, values and all.

        Conversion (`module.to`), `to_empty`, `swap_tensors`, `load_state_dict(assign=True)` and
        plain assignment give a module's parameter other memory or another object. The flat buffer
        gets the values (and, where all of a segment changed, the new dtype or device), the
        parameter that optimizers know keeps its identity and is a view of the buffer again.

        Raises:
            RuntimeError: A parameter was deleted, or some but not all of one dtype were converted.
            ValueError: Another shape was assigned.
        """
        if self.state is not ShardedState.SHARDED:
            raise RuntimeError(f"the parameters of bucket {self.name!r} changed while unsharded")
        self.slots.check_present()
        self.slots.take_assigned(keeps_ties=keeps_ties)
        for slots in self._slots:
            members = [self.parameters[i] for s in slots.segments for i in self._members[s]]
            check_converted_as_a_whole(members, self.name)
        converted = [self._adopt_segment(segment) for segment in range(len(self.buffers))]
        self._places.note()
        if any(converted):
            if self._seen:
                raise RuntimeError(
                    f"bucket {self.name!r} was converted while gradients wait for their reduction; "
                    f"convert before backward, or after one that synchronises gradients"
                )
            self._make_slots()
            self.slots.refresh()

    def _adopt_segment(self, segment: int) -> bool:
        """Return whether the segment has another dtype or device than before."""
        buffer, members = self.buffers[segment], self._members[segment]
        kind = self.parameters[members[0]].kind
        pieces = [self.parameters[i].piece for i in members]
        converted = kind != (buffer.dtype, buffer.device)
        if converted:
            buffer = self.buffers[segment] = self._make_buffer(segment, *kind)
        for i, piece in zip(members, pieces, strict=True):
            parameter = self.parameters[i]
            view = buffer.local_view(parameter.index)
            if piece.data_ptr() != view.data_ptr():
                view.copy_(piece)
            parameter.sharded._local_tensor = parameter.form.local(view)
        if converted:
            with buffer.present():
                for i in members:
                    parameter = self.parameters[i]
                    parameter.unsharded = self._make_unsharded(i, parameter.form)
        return converted

    def unshard(self) -> None:
        """Start the gather of this bucket, unless it runs or is done.

        Raises:
            RuntimeError: The parameters are on the meta device.
        """
        if self.state is ShardedState.SHARDED:
            self._start_gather()

    @outside_of_transforms
    @without_grad
    def _start_gather(self) -> None:
        if not self.slots.hold(gathered=False):
            self.slots.check_present()
        if self.slots.assigned or self._places.have_changed():
            self._held.drop()
            self.adopt()
        if self.is_meta:
            raise RuntimeError(
                f"FSDP parameters should be materialized from meta device before training, but the "
                f"following were still on meta device: "
                f"{[self.prefix + p.fqn for p in self.parameters]}; call "
                f"module.to_empty(device=...) and initialise them, or load a checkpoint"
            )
        event = f"gather of bucket {self.name!r}"
        self._announce(event)
        self.proofs.record_gather(self._tag)
        if self._held:
            self._gather = self._held.gather(self.buffers, self._tag, event)
        else:
            self._gathered.note_sources()
            unsharded = [buffer.allocate_unsharded() for buffer in self.buffers]
            self._gather = self.transport.all_gather_(unsharded, self._tag, event)
        self.state = ShardedState.IN_FLIGHT

    @outside_of_transforms
    def wait_for_unshard(self) -> None:
        """Complete the gather and register the unsharded parameters."""
        self.unshard()
        if self.state is ShardedState.UNSHARDED:
            if not self.slots.hold(gathered=True):
                self.slots.show(gathered=True)
            return
        self._finish_gather()
        self._gathered.open()
        self._trained.show()
        self.slots.show(gathered=True)
        self.state = ShardedState.UNSHARDED

    @outside_of_transforms
    def reshard(self, held_by: int = 0) -> None:
        """Register the sharded parameters and free the unsharded memory.

        What was written into gathered parameters is copied back: see gathered.py.

        Args:
            held_by: How many ranks hold what was gathered until it is needed again, or 0: then the
                next gather is from the shards of all ranks.
        """
        self.unsharded_by_hand = False
        if not held_by:
            self._held.drop()
        if self.state is ShardedState.SHARDED and self.slots.hold(gathered=False):
            return
        if self._gather is not None:
            self._gather.drop(f"the gather of bucket {self.name!r}")
            self._gather = None
        if self.state is ShardedState.UNSHARDED:
            self._write_back()
            if held_by:
                self._held.keep(self.buffers, held_by)
        self.state = ShardedState.SHARDED
        self.slots.show(gathered=False)
        if not self.slots.lends_memory:
            self._gathered.close()
            for buffer in self.buffers:
                buffer.free_unsharded()

    def stage_foreign(self) -> None:
        """Have modules compute with the tensors that somebody put in place of their parameters."""
        if self.slots.borrowed:
            dtype = self._mp_policy.param_dtype
            self.slots.stage(lambda p: dtype if p.sharded.is_floating_point() else None)

    def _write_back(self) -> None:
        """Take over what was changed on the gathered forms: `requires_grad`, and values."""
        self._trained.take_back()
        written = self._gathered.written()
        for parameter in written:
            full = parameter.form.flat(parameter.unsharded.detach())
            self.buffers[parameter.segment].copy_changed(parameter.index, full)
        if written:
            self._gathered.note_sources()  # they have the same values again
        if self._debug:
            check_written({p.fqn: p.unsharded for p in written}, self.groups, self.name)

    @property
    def is_old(self) -> bool:
        """Whether what is gathered, or on its way, was written since in its sharded form."""
        kept = self.state is not ShardedState.SHARDED or bool(self._held)
        return kept and self._gathered.are_old()

    def check_is_gathered(self) -> None:
        """Raise RuntimeError if backward used weights without any hook that saw it come."""
        if self.state is not ShardedState.UNSHARDED:
            raise RuntimeError(
                f"backward went through bucket {self.name!r} before the gradient of an output of "
                f"its module, without its weights; return what the loss uses from forward, or call "
                f"set_reshard_after_forward(False) on the module"
            )

    def _finish_gather(self) -> None:
        gather, self._gather = self._gather, None
        if gather is not None:
            gather.wait(f"the gather of bucket {self.name!r}")

    # -- gradients ------------------------------------------------------------------------------

    @property
    def takes_gradients(self) -> bool:
        """Whether any parameter of the bucket is trainable."""
        return bool(self._trained.which)

    @property
    def has_gradients(self) -> bool:
        """Whether a gradient arrived that no reduction has taken yet."""
        return bool(self._seen)

    @property
    def keeps_sums(self) -> bool:
        """Whether gradients that were summed within a replica wait for the others."""
        return self.replicas is not None and self.replicas.keeps_sums

    def begin_backward(self) -> None:
        """Check what the reduction will add to.

        Raises:
            TypeError: A gradient that the user set is not laid out as its parameter.
        """
        for parameter in self.parameters:
            parameter.check_user_grad()

    def zero_grad(self, set_to_none: bool) -> None:
        """Clear the sharded gradients, which users see; not what waits for a reduction."""
        for parameter in self.parameters:
            parameter.zero_grad(set_to_none)

    def drop_gradients(self) -> None:
        """Discard gradients that no reduction has delivered yet."""
        if self._reduction is not None:
            self._reduction.drop(self.workspace, self._what)
            self._reduction = None
        if self.replicas is not None:
            self.replicas.drop()
        for parameter in self.parameters:
            parameter.unsharded.grad = None
        for slots in self._slots:
            self.workspace.give_back(slots.release())
        self._seen.clear()

    def set_workspace(self, workspace: Workspace) -> None:
        """Return the scratch memory that all buckets of one model borrow from."""
        self.workspace = workspace

    @without_grad
    def accumulate_grad(self, i: int) -> None:
        """Move an unsharded gradient into the slots; runs when autograd has accumulated it.

        The gradient is copied out and freed at once, cast to the reduce dtype: one read and one
        write, where a preset `.grad` view would be cleared, read and written again.

        Raises:
            NotImplementedError: The gradient is sparse, or has a graph of its own.
        """
        parameter = self.parameters[i]
        grad, parameter.unsharded.grad = parameter.unsharded.grad, None
        if grad is None:
            return
        self.check_is_gathered()
        parameter.check_grad(grad)
        buffer = self.buffers[parameter.segment]
        if buffer.grad_slots is None:
            self._slots_of[parameter.segment].borrow(self.workspace)
        buffer.write_grad(parameter.index, parameter.form.flat(grad), accumulate=i in self._seen)
        self._seen.add(i)
        if self.grad_arrived is not None:
            self.grad_arrived()

    @without_grad
    def reduce_grads(self, gathers: int) -> None:
        """Start the average of all gradients of the bucket, zeros for those that are missing.

        Args:
            gathers: What `proofs.gathers` was when this backward began.

        The whole bucket takes part on every rank, so that a parameter unused on some ranks cannot
        leave the others waiting (pytorch#158719).
        """
        if self._reduction is not None:
            raise RuntimeError(f"bucket {self.name!r} is reduced again before it was finished")
        event = f"reduction of bucket {self.name!r}"
        self._announce(event)
        means: list[PendingMean | None] = []
        numbers = gathers, self.updates.number & 255
        for slots in self._slots:
            if all(self._trained.which.isdisjoint(self._members[each]) for each in slots.segments):
                means.append(None)
                continue
            slots.borrow(self.workspace)
            for segment in slots.segments:
                members = self._members[segment]
                seen = {self.parameters[i].index for i in members if i in self._seen}
                self.buffers[segment].complete_slots(seen, numbers)
            means.append(slots.reduce(self.transport, self.workspace, event))
        borrowed = [slots.release() for slots in self._slots]
        self._reduction = Reduction(
            means, borrowed, self._seen, [numbers], is_first_step=self.replicas is not None
        )
        self._seen = set()

    @without_grad
    def average_replicas(self) -> None:
        """Go on to the second step of a reduction over a 2-D mesh; see reduction.py."""
        if self._reduction is None or self.replicas is None or not self._reduction.is_first_step:
            return
        step = "average over" if self.replicas.requires_all_reduce else "sum within"
        self._announce(f"{step} replicas of bucket {self.name!r}")
        self.replicas.average(self._reduction, self.workspace, self._what)

    @without_grad
    def wait_for_reduce(self) -> None:
        """Complete the average and set (or add to) the sharded gradients."""
        self.average_replicas()
        if self._reduction is None:
            return
        reduction, self._reduction = self._reduction, None
        for slots, mean in zip(self._slots, reduction.means, strict=True):
            if mean is not None:
                mean.wait(self._what)
                self.wishes.divide(mean)
                for segment, first in zip(slots.segments, slots.first_columns, strict=False):
                    self._write_sharded_grads(segment, mean, first, reduction)
        for borrowed in reduction.borrowed:
            self.workspace.give_back(borrowed)

    def _write_sharded_grads(
        self, segment: int, mean: PendingMean, first: int, reduction: Reduction
    ) -> None:
        buffer = self.buffers[segment]
        members = self._members[segment]
        present = [i for i in members if self.parameters[i].sharded.grad is not None]
        adds = prepare_reduced(buffer, [self.parameters[i] for i in members])
        self.wishes.show(mean, first, buffer.plan.shard_numel)
        mean.write_into(buffer.reduced(), first, accumulate=adds)
        buffer.zero_grad_padding()
        self.proofs.check(buffer.proof(), reduction.numbers, self._what, self.groups, self.updates)
        for i in members:
            parameter = self.parameters[i]
            if not parameter.sharded.requires_grad:
                continue
            # Only a rank that saw no gradient reads the flags: no host sync in the usual step.
            if i in reduction.seen or i in present or buffer.any_rank_saw(parameter.index):
                parameter.sharded.grad = parameter.grad_over(buffer)
                for hook in (parameter.sharded._post_accumulate_grad_hooks or {}).values():
                    hook(parameter.sharded)
        buffer.close_reduced()
