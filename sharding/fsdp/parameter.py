"""BucketParameter: one parameter of a bucket, its two forms, and the modules that hold it.

May touch: modules' parameter slots, the sharded form. Communicates nothing.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from sharding.checkpoint.load_checks import laid_out
from sharding.fsdp.buffer import DistributedBuffer
from sharding.fsdp.forms import Form
from sharding.planning.negotiation import BucketPlan
from sharding.planning.planner import ALIGN
from sharding.tensor.placement import RaggedShard


@dataclass(slots=True)
class BucketParameter:
    """One parameter: where modules hold it, and its sharded and unsharded forms."""

    fqn: str
    sites: list[tuple[nn.Module, str]]  # several when tied
    segment: int
    index: int  # in the segment
    form: Form
    sharded: DTensor  # an nn.Parameter, over the shard
    unsharded: nn.Parameter  # view of the gathered buffer

    @property
    def local(self) -> Tensor:
        """Where the sharded parameter keeps its elements."""
        return self.sharded._local_tensor

    @property
    def piece(self) -> Tensor:
        """(n_local,), the same in the order of the buffer."""
        return self.form.piece(self.sharded)

    @property
    def kind(self) -> tuple[torch.dtype, torch.device]:
        """Dtype and device of the sharded parameter."""
        return self.local.dtype, self.local.device

    def zero_grad(self, set_to_none: bool) -> None:
        """Clear the sharded gradient, which users see."""
        if set_to_none:
            self.sharded.grad = None
        elif self.sharded.grad is not None:
            self.sharded.grad.zero_()

    def own_grad(self, buffer: DistributedBuffer) -> DTensor | None:
        """Return the sharded gradient if it is one that `grad_over` made in the last reduction."""
        grad: Any = self.sharded.grad
        mine = getattr(grad, "_of_reduction", None) == (buffer.last_reduction, self.index)
        return grad if mine else None

    def grad_over(self, buffer: DistributedBuffer) -> DTensor:
        """Return the sharded gradient, over the averaged gradients of the buffer."""
        made: Any = self.own_grad(buffer)
        if made is None:
            # The placement of the parameter itself: optimizers find them equal at once.
            made = self.form.gradient(self.sharded, buffer.local_grad_view(self.index))
            # No weak reference, with which torch could not swap it as `module.to` does.
            made._of_reduction = (buffer.last_reduction, self.index)
        return cast(DTensor, made)

    def check_user_grad(self) -> None:
        """Raise for a gradient that cannot be added to, before any rank waits for another."""
        grad, sharded = self.sharded.grad, self.sharded
        if grad is None:
            return
        alike = isinstance(grad, DTensor) and type(grad) is type(sharded.data)
        if not alike or cast(DTensor, grad).placements != sharded.placements:
            raise TypeError(
                f"{self.fqn}.grad was set to a {type(grad).__name__} of shape "
                f"{tuple(grad.shape)} in {getattr(grad, 'placements', None)!r}; expected one "
                f"laid out as its parameter: p.grad = torch.zeros_like(p); p.grad.copy_(full)"
            )

    def check_grad(self, grad: Tensor) -> None:
        """Raise for an arriving gradient that cannot be averaged over ranks."""
        if grad.layout is not torch.strided:
            raise NotImplementedError(
                f"{self.fqn} got a gradient of layout {grad.layout}; only dense gradients are "
                f"sharded: build the module with sparse=False"
            )
        if grad.requires_grad:
            raise NotImplementedError(
                f"{self.fqn} got a gradient with a graph, which averaging it over ranks would "
                f"drop: call backward() without create_graph; for penalties on gradients of inputs "
                f"use torch.autograd.grad(loss, inputs, create_graph=True)"
            )

    def take_back(self, held: Tensor) -> None:
        """Copy what a module was assigned into the sharded parameter."""
        if held.shape != self.sharded.shape:
            raise ValueError(
                f"{self.fqn} was assigned a tensor of shape {tuple(held.shape)}; its shape in "
                f"the sharded layout is {tuple(self.sharded.shape)}"
            )
        if self.sharded.is_meta:
            _materialise(self.form, self.sharded, held)
        else:
            self.sharded.copy_(laid_out(self.sharded, held.detach()))
        self.sharded.requires_grad_(held.requires_grad)


def prepare_reduced(buffer: DistributedBuffer, parameters: Sequence[BucketParameter]) -> bool:
    """Give the averaged gradients of a segment memory, and have it hold exactly what the user sees.

    Returns:
        Whether there is something to add to; else the memory is not initialised.
    """
    own = [parameter.own_grad(buffer) for parameter in parameters]
    buffer.open_reduced(next((grad._local_tensor for grad in own if grad is not None), None))
    if all(parameter.sharded.grad is None for parameter in parameters):
        return False
    buffer.proof().zero_()
    for parameter, mine in zip(parameters, own, strict=True):
        view = buffer.local_grad_view(parameter.index)
        grad = parameter.sharded.grad
        if grad is None:
            view.zero_()
            buffer.clear_flag(parameter.index)
        elif mine is None:  # set by the user
            view.copy_(parameter.form.piece(cast(DTensor, grad)))
            buffer.clear_flag(parameter.index)
    return True


def placement_in(plan: BucketPlan, i: int) -> RaggedShard:
    """Return how parameter `i` of a bucket is cut."""
    segment, index = plan.location[i]
    buffer = plan.segments[segment]
    granule = buffer.tensors[index].granule
    return RaggedShard.from_range(
        len(plan.params[i].shape),
        buffer.tensors[index].numel,
        buffer.offsets[index],
        buffer.shard_numel,
        buffer.world_size,
        granule.numel if granule.is_plain else ALIGN,  # all cuts are multiples of ALIGN
    )


class TakesGradients(Protocol):
    """What the gradients of unsharded parameters go to: a `Bucket`."""

    def accumulate_grad(self, i: int) -> None:
        """Take the gradient that parameter `i` has now."""


def hands_gradients_to(taker: TakesGradients, i: int) -> Callable[[Tensor], None]:
    """Return the hook on unsharded parameter `i`.

    Garbage collection does not see through it: a strong reference would keep the model, its memory
    and its process group for ever.
    """
    return partial(_hand_over, weakref.ref(taker), i)


def _hand_over(taker: weakref.ref[TakesGradients], i: int, _: Tensor) -> None:
    alive = taker()
    if alive is not None:
        alive.accumulate_grad(i)


class TrainedParameters:
    """Which parameters of a bucket require grad, on both of their forms."""

    def __init__(self, parameters: Sequence[BucketParameter]) -> None:
        self._parameters = parameters
        self._flags: list[bool] = []
        self.which: set[int] = set()  # as of the last `show`

    def show(self) -> None:
        """Have the gathered forms require grad where the sharded ones do."""
        flags = list(map(_SHARDED_REQUIRES_GRAD, self._parameters))
        if flags != self._flags:
            self._flags = flags
            self.which = {i for i, required in enumerate(flags) if required}
        if flags != list(map(_GATHERED_REQUIRES_GRAD, self._parameters)):  # rarely
            for parameter, required in zip(self._parameters, flags, strict=True):
                parameter.unsharded.requires_grad_(required)

    def take_back(self) -> None:
        """Have the sharded forms require grad where the gathered ones have been told to."""
        if self._flags != list(map(_GATHERED_REQUIRES_GRAD, self._parameters)):
            for i, parameter in enumerate(self._parameters):
                if parameter.unsharded.requires_grad != (i in self.which):
                    parameter.sharded.requires_grad_(parameter.unsharded.requires_grad)


class PieceAddresses:
    """Where the pieces of parameters lie: in the buffers, unless somebody has moved them."""

    def __init__(self, parameters: Sequence[BucketParameter]) -> None:
        self._parameters = parameters
        self._last = self._now()

    def note(self) -> None:
        """Remember that the pieces are where they belong."""
        self._last = self._now()

    def have_changed(self) -> bool:
        """Return whether some piece lies elsewhere, or has another dtype or device, than was
        noted."""
        return self._last != self._now()

    def _now(self) -> tuple[list[int], list[tuple[torch.dtype, torch.device]]]:
        # Empty pieces have no address: their dtype and device tell, so that ranks agree.
        pieces = list(map(_PIECE, self._parameters))
        return list(map(Tensor.data_ptr, pieces)), list(map(_KIND, pieces))


_SHARDED_REQUIRES_GRAD = attrgetter("sharded.requires_grad")
_GATHERED_REQUIRES_GRAD = attrgetter("unsharded.requires_grad")
_PIECE = attrgetter("sharded._local_tensor")
_KIND = attrgetter("dtype", "device")


def put(module: nn.Module, name: str, tensor: Tensor) -> None:
    """Have a module hold a tensor as its parameter."""
    if type(module).__setattr__ is nn.Module.__setattr__:
        module._parameters[name] = cast(nn.Parameter, tensor)
    else:  # such as nn.LSTM's, which notes its weights in a list of its own too
        setattr(module, name, tensor)


def _materialise(form: Form, sharded: DTensor, held: Tensor) -> None:
    """Give a parameter on meta memory its own range of `held`; the object stays the same."""
    mesh = sharded.device_mesh
    device = held.device if held.is_meta else torch.device(mesh.device_type)
    piece = torch.empty_like(form.piece(sharded), dtype=held.dtype, device=device)
    local = form.sharded(piece)
    local.copy_(laid_out(local, held.detach()))
    materialised = nn.Parameter(local, requires_grad=sharded.requires_grad)
    materialised.__dict__.update(sharded.__dict__)  # marks, which would be swapped too
    torch.utils.swap_tensors(sharded, materialised)


def check_converted_as_a_whole(parameters: Sequence[BucketParameter], bucket: str) -> None:
    """Prove that parameters which were of one dtype and device still are.

    Raises:
        RuntimeError: They are not; names the bucket and a parameter of each kind.
    """
    kinds: dict[tuple[torch.dtype, torch.device], str] = {}
    for parameter in parameters:
        kinds.setdefault(parameter.kind, parameter.fqn)
    if len(kinds) > 1:
        names = {f"{dtype} on {device}": fqn for (dtype, device), fqn in kinds.items()}
        raise RuntimeError(
            f"parameters of bucket {bucket!r} that were of one dtype and device are not any more: "
            f"{names}; convert the fully sharded module as a whole"
        )
