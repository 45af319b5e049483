"""RaggedDTensor: the DTensor that users see as parameter, gradient and optimizer state.

Touches local tensors, the mesh's process group (when a tensor changes its layout) and the hooks of
torch.distributed.checkpoint. torch itself is not patched: the class has its own dispatch.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed import _state_dict_utils
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement

from sharding.tensor.gradient_hooks import GradientHooks
from sharding.tensor.local_ops import LOCAL_OPS, check_row_major, refusal, wrap
from sharding.tensor.moves import Tiling, chunks, exchange, gather
from sharding.tensor.permuted import PERMUTATIONS, unpermuted
from sharding.tensor.placement import Box, RaggedShard, boxes, placement_from_runs
from sharding.tensor.random_ops import RANDOM_OPS
from sharding.tensor.reductions import REDUCTIONS
from sharding.tensor.specs import shared_spec
from sharding.transport.axes import placements_on, shard_rank, shard_size

# [Note: full state dicts of torch]
# set_model_state_dict and its kin hand full tensors to `distribute_tensor`, whose error shows the
# placement and with it the cure (`RaggedShard.__format__`), or, when rank 0 alone has them, to this
# function. It takes every placement that it does not know for a replicated one, copies the full
# tensor over the pieces that happen to have its shape, fails on the ranks where it does not fit,
# and leaves the others waiting. Of a tensor it asks, in this order, the class, `device_mesh`,
# `placements`, `is_meta` and `to_local()`, all of which others ask too, and of a placement only
# whether it is a `Shard`; there is no hook, no option and no registry of placements. What would
# refuse without a look at the caller refuses others as well: a class that is no DTensor, pieces
# that no full tensor can be copied into (`to_local()` is what optimizers and checkpoints write to),
# placements that cannot be iterated. Meshes are the user's, shared with tensors of torch; and the
# copy is an op on plain tensors, which our dispatch does not see.
_CUTS_FULL_STATE = getattr(
    getattr(_state_dict_utils, "_distribute_tensors", None), "__code__", None
)

_NO_MEMORY = (
    "a RaggedDTensor has no memory of its own, only a flat piece of each rank; use "
    "x.full_tensor(), or to save a model get_model_state_dict(model, "
    "options=StateDictOptions(full_state_dict=True, cpu_offload=True))"
)

_HANDLERS = {**LOCAL_OPS, **PERMUTATIONS, **RANDOM_OPS, **REDUCTIONS}
# The places of the arguments that an op writes.
_WRITTEN = {
    func: places
    for func in _HANDLERS
    if (
        places := [
            (i, arg.name)
            for i, arg in enumerate(func._schema.arguments)
            if arg.alias_info is not None and arg.alias_info.is_write
        ]
    )
}


class RaggedDTensor(GradientHooks):
    """A tensor whose flattened form is cut over the ranks of a mesh as a `RaggedShard` says.

    `shape`, `stride()` and `numel()` are those of the full tensor; `_local_tensor` is this rank's
    flat 1-D piece, usually a view of a bucket's buffer, and may be empty. On a 2-D mesh, dim 0
    replicates and dim 1 cuts: `placements` are `(Replicate(), RaggedShard)`, and collectives stay
    within a replica. Ops run by an allow-list: what is not in it raises and says what to call; see
    [Note: allow-list] in local_ops.py.

    Made by `from_local` or `distribute_ragged`. Does not check that ranks agree.
    """

    @staticmethod
    def from_local(  # type: ignore[override]  # the layout cannot be inferred, so it is required
        local: Tensor,
        mesh: DeviceMesh,
        placement: RaggedShard,
        shape: Sequence[int],
        *,
        requires_grad: bool = False,
    ) -> RaggedDTensor:
        """Wrap this rank's piece; copy and communicate nothing.

        Args:
            local: (n,) contiguous, this rank's range of the flattened tensor. Not differentiated.
            mesh: 1-D, or 2-D (replicate, shard); its last dim has the placement's ranks.
            placement: How the flattened tensor is cut.
            shape: Of the full tensor.
            requires_grad: Of the result, a leaf.

        Raises:
            ValueError: The placement does not fit shape or mesh, or `local` is not the piece that
                this rank holds.
        """
        spec, numel = shared_spec(mesh, placement, tuple(shape), local.dtype)
        if local.shape != (numel,) or not local.is_contiguous() or local.requires_grad:
            raise ValueError(
                f"expected a contiguous tensor of {numel} elements that does not require grad as "
                f"the piece of rank {shard_rank(mesh)} of {placement!r}, got shape "
                f"{tuple(local.shape)}, strides {local.stride()}, {local.requires_grad=}"
            )
        # DTensor.__init__ does nothing but costs as much as __new__.
        made = RaggedDTensor.__new__(RaggedDTensor, local, spec, requires_grad=requires_grad)
        return cast(RaggedDTensor, made)

    def over(self, local: Tensor) -> RaggedDTensor:
        """Return another tensor that is laid out as this one, as a parameter's states are.

        Args:
            local: (n,) contiguous, of any dtype: this rank's piece of it. Not differentiated.

        Raises:
            ValueError: `local` is not as this rank's piece of this tensor.
        """
        if (
            local.shape != self._local_tensor.shape
            or not local.is_contiguous()
            or local.requires_grad
        ):
            raise ValueError(
                f"expected a contiguous tensor that does not require grad, of shape "
                f"{tuple(self._local_tensor.shape)} as this rank's piece is, got shape "
                f"{tuple(local.shape)}, strides {local.stride()}, {local.requires_grad=}"
            )
        return cast(RaggedDTensor, wrap(RaggedDTensor, local, self._spec))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: torch._ops.OpOverload,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run `func` on the pieces. See [Note: allow-list] in local_ops.py.

        Raises:
            NotImplementedError: The op is not in the list, or its arguments are not cut alike.
        """
        handler = _HANDLERS.get(func)
        if handler is None:
            raise refusal(func, "the op is not supported on a RaggedDTensor")
        result = handler(RaggedDTensor, func, args, kwargs or {})
        if func in _WRITTEN:
            _note_writes(func, args, kwargs or {})
        return result

    @property
    def device_mesh(self) -> DeviceMesh:
        """The mesh that the tensor is cut over: 1-D, or 2-D (replicate, shard).

        Raises:
            NotImplementedError: Asked for by torch's function that cuts full states from rank 0.
        """
        # See [Note: full state dicts of torch].
        if sys._getframe(1).f_code is _CUTS_FULL_STATE:
            raise NotImplementedError(
                f"StateDictOptions(broadcast_from_rank0=True) cannot load into {self.placement!r}: "
                "torch would cut full tensors by rules of its own, so nothing was written; call "
                "load_full_state_dict(model, optimizer, state=..., broadcast_from_rank0=...)"
            )
        return self._spec.mesh

    @property
    def placement(self) -> RaggedShard:
        """How the flattened tensor is cut; the last element of `placements`."""
        placement = self._spec.placements[-1]
        if not isinstance(placement, RaggedShard):
            raise RuntimeError(f"expected a RaggedShard, got {placement!r}")
        return placement

    @property
    def bounds(self) -> tuple[int, int]:
        """This rank's range `(start, stop)` of the flattened tensor."""
        return self.placement.bounds(shard_rank(self._spec.mesh), self.numel())

    def to_local(self, *, grad_placements: Sequence[Placement] | None = None) -> Tensor:
        """Return this rank's flat 1-D piece, differentiable where this tensor is; not a copy.

        Raises:
            NotImplementedError: `grad_placements` ask for gradients that are placed otherwise.
        """
        if grad_placements is not None and tuple(grad_placements) != self.placements:
            raise NotImplementedError(
                f"expected grad_placements={self.placements!r}, got {grad_placements!r}"
            )
        if torch.is_grad_enabled() and self.requires_grad:
            return _ToLocal.apply(self)
        return self._local_tensor

    def full_tensor(self, *, grad_placements: Sequence[Placement] | None = None) -> Tensor:
        """Return the full tensor on every rank, a copy; differentiable. A collective.

        The gradient is taken to be the same on all ranks, as torch's DTensor does.

        Raises:
            NotImplementedError: `grad_placements` is not None or all `Replicate()`.
        """
        replicated = [Replicate()] * self._spec.mesh.ndim
        if grad_placements is not None and list(grad_placements) != replicated:
            raise NotImplementedError(
                f"expected grad_placements={replicated!r}, got {grad_placements!r}"
            )
        return unpermuted(_Move.apply(self, None), self)

    def redistribute(
        self,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
        *,
        async_op: bool = False,
        forward_dtype: torch.dtype | None = None,
        backward_dtype: torch.dtype | None = None,
    ) -> DTensor:
        """Return the same tensor in another layout of the same mesh; differentiable. A collective.

        Args:
            device_mesh: None, or the mesh of this tensor.
            placements: One of `[Replicate()]`, `[Shard(0)]`, `[RaggedShard(...)]`; on a 2-D mesh
                with a `Replicate()` before it, since replicas stay what they are.
            async_op: Not supported.
            forward_dtype: Not supported.
            backward_dtype: Not supported.

        Returns:
            A RaggedDTensor, or for the first two placements torch's DTensor.

        Raises:
            NotImplementedError: Another placement, mesh or option is asked for.
            ValueError: The RaggedShard does not fit this tensor.
        """
        if (
            device_mesh not in (None, self.device_mesh)
            or async_op
            or forward_dtype
            or backward_dtype
        ):
            raise NotImplementedError(
                f"expected the mesh {self.device_mesh!r} and no options, got {device_mesh!r}, "
                f"{async_op=}, {forward_dtype=}, {backward_dtype=}"
            )
        mesh, target = self._spec.mesh, self._on_shard_axis(placements)
        if not isinstance(target, Replicate):
            check_row_major("redistribute", self)
        if isinstance(target, RaggedShard):
            if target == self.placement:
                return self
            target.check_shape(self.shape)
            layout = placements_on(mesh, target)
            spec = DTensorSpec(mesh, layout, tensor_meta=self._spec.tensor_meta)
            return _FromLocal.apply(_Move.apply(self, target.all_bounds(self.numel())), spec)
        if isinstance(target, Replicate):
            local = self.full_tensor()
        elif type(target) is Shard and self.dim() and target.dim in (0, -self.dim()):
            rows = chunks(self.shape[0], shard_size(mesh))
            row_numel = prod(self.shape[1:])
            bounds = [(start * row_numel, stop * row_numel) for start, stop in rows]
            start, stop = rows[shard_rank(mesh)]
            local = _Move.apply(self, bounds).view(stop - start, *self.shape[1:])
            target = Shard(0)
        else:
            lead = "Replicate(), " * (mesh.ndim - 1)
            raise NotImplementedError(
                f"expected [{lead}Replicate()], [{lead}Shard(0)] or [{lead}RaggedShard(...)] for a "
                f"tensor of shape {tuple(self.shape)}, got {placements!r}; for other placements "
                "distribute x.full_tensor()"
            )
        return DTensor.from_local(
            local, mesh, placements_on(mesh, target), shape=self.shape, stride=self.stride()
        )

    def _on_shard_axis(self, placements: Sequence[Placement] | None) -> Placement | None:
        """Return what `placements` ask for on the shard axis; None if they would not keep
        replicas."""
        given = tuple(placements or ())
        if len(given) != len(self.placements) or given[:-1] != self.placements[:-1]:
            return None
        return given[-1]

    def data_ptr(self) -> int:
        """Return 0: it has no memory of its own, its piece has (`to_local().data_ptr()`)."""
        # torch's method returns the byte offset of the piece in its buffer; where that is not 0,
        # pickling and deepcopy take it for an address.
        return 0

    @property
    def data(self) -> Tensor:
        """This tensor outside of autograd, over the same local piece."""
        return super().data

    @data.setter
    def data(self, value: Tensor) -> None:
        # torch's setter would change the shell and leave the local piece as it is.
        raise RuntimeError(
            "cannot assign to .data of a RaggedDTensor: its piece is a view of a flat buffer; "
            "use x.data.copy_(value)"
        )

    def storage(self) -> Any:
        """Raise: safetensors asks for it, and would write nothing or the wrong bytes."""
        raise RuntimeError(f"storage(): {_NO_MEMORY}")

    def numpy(self, *, force: bool = False) -> Any:
        """Raise: an array would be of this rank's piece only."""
        raise RuntimeError(f"numpy(): {_NO_MEMORY}")

    def tolist(self) -> Any:
        """Raise: a list would be of this rank's piece only."""
        raise RuntimeError(f"tolist(): {_NO_MEMORY}")

    def share_memory_(self) -> RaggedDTensor:
        """Move the storage of the local piece to shared memory, in place."""
        # torch's method crashes the process on a tensor that has no memory of its own.
        self._local_tensor.share_memory_()
        return self

    def __create_write_items__(self, fqn: str, object: object) -> list[WriteItem]:
        """Return what this rank saves: one item per box of its range, none when it holds
        nothing."""
        properties = TensorProperties.create_from_tensor(self._local_tensor)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.shape),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """Return the boxes of this rank's range, from the layout alone."""
        return [
            ChunkStorageMetadata(offsets=torch.Size(box.offsets), sizes=torch.Size(box.sizes))
            for box in self._boxes()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        """Return the view of the local tensor that is the box at `index.offset`.

        Raises:
            ValueError: This rank has no box there.
        """
        for box in self._boxes():
            if index.offset is None or tuple(index.offset) == box.offsets:
                start = box.flat_start - self.bounds[0]
                return self._local_tensor[start : start + box.numel].view(box.sizes)
        raise ValueError(
            f"{index.fqn}: expected the offset of one of {self._boxes()!r}, got {index.offset!r}"
        )

    def _boxes(self) -> list[Box]:
        check_row_major("a checkpoint", self)
        if self.numel() == 0 and shard_rank(self._spec.mesh) == 0:
            # A tensor without any chunk would be missing from the checkpoint.
            return [Box((0,) * self.dim(), tuple(self.shape), 0)]
        return boxes(*self.bounds, self.shape)

    def __reduce_ex__(self, proto: object) -> Any:
        """Pickle this rank's piece alone: `torch.save` keeps all that a view is a part of."""
        local = self._local_tensor
        shared = local.is_shared() and local.device.type == "cpu"  # by share_memory_()
        if local.is_meta or shared or local.untyped_storage().nbytes() <= local.nbytes:
            return super().__reduce_ex__(proto)
        alone = RaggedDTensor(local.detach().clone(), self._spec, requires_grad=self.requires_grad)
        alone.__dict__.update(self.__dict__)  # whether it is a Parameter, and what users put there
        return alone.__reduce_ex__(proto)

    def __repr__(self) -> str:  # type: ignore[override]
        """Return the layout and this rank's piece; communicates nothing."""
        return (
            f"RaggedDTensor(shape={tuple(self.shape)}, placement={self.placement!r}, "
            f"local_tensor={self._local_tensor!r})"
        )

    @staticmethod
    def __tensor_unflatten__(
        inner_tensors: dict[str, Any],
        flatten_spec: tuple[Any, ...],
        outer_size: torch.Size,
        outer_stride: tuple[int, ...],
    ) -> RaggedDTensor:
        """Rebuild the class, where torch's own method would make a plain DTensor of the piece."""
        placements, meta, _, requires_grad = flatten_spec
        meta = TensorMeta(outer_size, outer_stride, meta.dtype)
        spec = DTensorSpec(inner_tensors["device_mesh"], placements, tensor_meta=meta)
        return RaggedDTensor(inner_tensors["_local_tensor"], spec, requires_grad=requires_grad)


# What torch.load(weights_only=True) may build: constructors that run no code of a file.
torch.serialization.add_safe_globals([RaggedDTensor, RaggedShard, placement_from_runs])


def distribute_ragged(
    full: Tensor, mesh: DeviceMesh, placement: RaggedShard, *, requires_grad: bool = False
) -> RaggedDTensor:
    """Return a RaggedDTensor with this rank's range of `full`, copied; communicates nothing.

    Args:
        full: The full tensor, the same on all ranks.
        mesh: 1-D, or 2-D (replicate, shard); its last dim has the placement's ranks.
        placement: How the flattened tensor is cut.
        requires_grad: Of the result, a leaf.

    Raises:
        ValueError: The placement does not fit the tensor or the mesh.
    """
    placement.check_shape(full.shape)
    start, stop = placement.bounds(shard_rank(mesh), full.numel())
    local = full.detach().reshape(-1)[start:stop].clone()
    return RaggedDTensor.from_local(local, mesh, placement, full.shape, requires_grad=requires_grad)


def _note_writes(
    func: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> None:
    """Count an in-place change of each piece that `func` wrote, as torch does above dispatch.

    There it counts for the tensor at hand only, which may be `x.data`, and not for lists.
    """
    pieces: list[Tensor] = []
    for place, name in _WRITTEN[func]:
        arg = args[place] if place < len(args) else kwargs.get(name)
        tensors = arg if isinstance(arg, (list, tuple)) else [arg]
        pieces += [x._local_tensor for x in tensors if isinstance(x, RaggedDTensor)]
    torch.autograd.graph.increment_version(pieces)


class _ToLocal(torch.autograd.Function):
    """The local tensor of a RaggedDTensor; its gradient gets the same layout."""

    @staticmethod
    def forward(ctx: Any, x: RaggedDTensor) -> Tensor:
        ctx.spec = x._spec
        return x._local_tensor.view_as(x._local_tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> DTensor:
        return wrap(RaggedDTensor, grad.contiguous(), ctx.spec)


class _FromLocal(torch.autograd.Function):
    """A RaggedDTensor over a local tensor; the gradient of its pieces is theirs."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, spec: DTensorSpec) -> DTensor:
        return wrap(RaggedDTensor, local.view_as(local), spec)

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> tuple[Tensor, None]:
        return grad._local_tensor, None


class _Move(torch.autograd.Function):
    """The flat elements of a RaggedDTensor at other bounds; all of them for None."""

    @staticmethod
    def forward(ctx: Any, x: RaggedDTensor, target: Tiling | None) -> Tensor:
        ctx.spec, ctx.target = x._spec, target
        ctx.source = x.placement.all_bounds(x.numel())
        local = x._local_tensor.to(x.device_mesh.device_type)
        if target is None:
            return gather(local, ctx.source, x.device_mesh)
        return exchange(local, ctx.source, target, x.device_mesh)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[DTensor, None]:
        if ctx.target is None:
            start, stop = ctx.source[shard_rank(ctx.spec.mesh)]
            local = grad[start:stop].clone(memory_format=torch.contiguous_format)
        else:
            local = exchange(grad.contiguous(), ctx.target, ctx.source, ctx.spec.mesh)
        return wrap(RaggedDTensor, local, ctx.spec), None
