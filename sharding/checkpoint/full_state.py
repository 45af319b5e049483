"""Full checkpoints into sharded models and their optimizers.

May touch: parameters, buffers and optimizer state (through `load_state_dict`), the process group
of the model's mesh. Everything is checked on all ranks before anything is written.

[Note: sending a full state]
Rank 0 first sends an outline: the state with every tensor replaced by its shape and dtype, numbers
and other small values as they are. All ranks check the outline against their model, so that they
raise together. Then tensors are sent one by one, in the order of the outline, and each rank gets
its own range only, straight into the parameter where the dtypes agree. States of an optimizer go
into new pieces first, because only its own `load_state_dict` knows what it needs; the weights are
written after that has accepted them.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from sharding.checkpoint.model_targets import (
    Target,
    TensorOutline,
    check_model,
    is_extra_state,
    targets_of,
)
from sharding.checkpoint.names import plain_names
from sharding.checkpoint.optimizer_states import known_names, names_of_parameters, renumbered
from sharding.tensor.ragged_tensor import RaggedDTensor, distribute_ragged
from sharding.transport.agreement import check_same_on_all_ranks
from sharding.transport.axes import (
    groups_of,
    replicate_group,
    replicate_rank,
    shard_group,
    shard_rank,
)
from sharding.transport.collectives import all_to_all
from sharding.transport.waits import waiting_for


@dataclass(frozen=True, slots=True)
class _Foreign:
    """Stands for what is no full tensor."""

    kind: str


def load_full_state_dict(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    state: Mapping[str, Any] | None,
    broadcast_from_rank0: bool = False,
) -> None:
    """Load plain full tensors into a sharded model and, if given, its optimizer.

    Takes what an unsharded run saved, or `get_state_dict` with `full_state_dict=True` returned.
    All keys must fit; a tied parameter may be there under one of its names. Values are cast between
    floating dtypes as `copy_` does; optimizer states keep their dtype. Everything is checked before
    anything is written, and what is wrong raises on every rank. A collective over the model's mesh.

    torch's `set_model_state_dict(full_state_dict=True)` would cut tensors by rules that do not know
    ragged layouts and raises; this function takes its place.

    Args:
        model: Materialised: not on the meta device.
        optimizer: Of this library or of torch.
        state: Without an optimizer, the model's state dict; with one,
            `{"model": ..., "optimizer": ...}`, where the latter has "state" and "param_groups" by
            index (matched by `param_names` where both sides have them, else by position) or by the
            parameters' names in the model. Groups without `param_names` get those that were saved.
        broadcast_from_rank0: Only the first rank of the mesh has the state; on the others `state`
            is not read and may be None. Tensors are sent one at a time, to each rank its range.

    Raises:
        TypeError: `state` is no such mapping, or holds sharded tensors.
        ValueError: Keys, shapes or dtypes do not fit.
        RuntimeError: Parameters are on the meta device, or ranks were given different states.
        NotImplementedError: Parameters that are DTensors of another kind or on several meshes.
    """
    targets = targets_of(model)
    mesh = _mesh_of(targets)
    source = _with_plain_names(state if optimizer is not None else {"model": state})
    outline = _outline(source)
    if mesh is not None and broadcast_from_rank0:
        outline = _broadcast(outline, mesh)
    elif mesh is not None:
        check_same_on_all_ranks(
            "\n".join(sorted(_describe(outline))),
            groups_of(mesh),
            "the state given to load_full_state_dict (where only one rank has it, pass "
            "broadcast_from_rank0=True): it",
        )
    _check_parts(outline, ["model"] if optimizer is None else ["model", "optimizer"])
    sender = _Sender(source, mesh if broadcast_from_rank0 else None)
    check_model(outline["model"], targets)
    if optimizer is not None:
        _load_optimizer(model, optimizer, outline["optimizer"], sender)
    _write_model(model, targets, outline["model"], sender)


# -- the state -------------------------------------------------------------------------------------


def _with_plain_names(state: Any) -> Any:
    """Return the state, its model's keys without what wrappers put into them."""
    if not isinstance(state, Mapping) or not isinstance(model := state.get("model"), Mapping):
        return state
    return {**state, "model": dict(zip(plain_names(list(model)), model.values(), strict=True))}


def _outline(value: Any, *, whole: bool = False) -> Any:
    """Return the structure of a state; see [Note: sending a full state].

    Tensors in hyper-parameters and in the extra state of modules are few and small: kept.
    """
    if isinstance(value, DTensor):
        return _Foreign(f"a {type(value).__name__} placed as {value.placements!r}")
    if isinstance(value, Tensor):
        if value.layout is not torch.strided or value.is_meta:
            return _Foreign(f"a tensor of layout {value.layout} on {value.device}")
        if value.dim() and not whole:
            return TensorOutline(tuple(value.shape), value.dtype)
        return value.detach().cpu().clone()
    if isinstance(value, Mapping):
        return {
            key: _outline(item, whole=whole or key == "param_groups" or is_extra_state(key))
            for key, item in value.items()
        }
    if type(value) in (list, tuple):
        return type(value)(_outline(item, whole=whole) for item in value)
    return value


def _describe(outline: Any, path: str = "state") -> Iterator[str]:
    """Return lines that are the same on ranks that were given states of the same structure."""
    if isinstance(outline, Mapping):
        for key, value in outline.items():
            if is_extra_state(key):  # may be each rank's own
                yield f"{path}[{key!r}]"
            else:
                yield from _describe(value, f"{path}[{key!r}]")
    elif isinstance(outline, (list, tuple)):
        for i, value in enumerate(outline):
            yield from _describe(value, f"{path}[{i}]")
    elif isinstance(outline, (TensorOutline, _Foreign, Tensor, int, float, str, type(None))):
        yield f"{path}: {outline!r}"
    else:
        yield f"{path}: {type(outline).__name__}"


def _broadcast(outline: Any, mesh: DeviceMesh) -> Any:
    """Rank 0's outline, on all ranks; its failure to pickle raises on all, too."""
    message: list[Any] = [None]
    if _is_first(mesh):
        try:
            message = [pickle.dumps(outline)]
        except Exception as error:
            message = [f"{type(error).__name__}: {error}"]
    for group in _groups_from_first(mesh):
        with waiting_for("rank 0's list of the state to load", group):
            dist.broadcast_object_list(message, group=group, group_src=0)
    if isinstance(message[0], str):
        raise TypeError(f"state: cannot be sent from rank 0 to the others: {message[0]}")
    return pickle.loads(message[0])  # made by `dumps` above, on a rank of this job


def _check_parts(outline: Any, expected: list[str]) -> None:
    """Check the top level of a state."""
    if not isinstance(outline, Mapping) or sorted(map(str, outline)) != expected:
        got = type(outline).__name__
        if isinstance(outline, Mapping):
            got = f"keys {sorted(map(str, outline))[:4]}"
        raise TypeError(f"state: with an optimizer, expected a dict of {expected}, got {got}")
    for name, part in outline.items():
        if not isinstance(part, Mapping):
            raise TypeError(
                f"state: expected the {name}'s state dict, got {type(part).__name__}; on ranks "
                "without it, pass None with broadcast_from_rank0=True"
            )
    _refuse_foreign(outline, "state")


def _refuse_foreign(outline: Any, path: str) -> None:
    if isinstance(outline, Mapping):
        for key, value in outline.items():
            _refuse_foreign(value, f"{path}[{key!r}]")
    elif isinstance(outline, _Foreign):
        raise TypeError(
            f"{path}: expected a plain full tensor, got {outline.kind}; load sharded tensors with "
            "module.load_state_dict or torch.distributed.checkpoint"
        )


# -- the model -------------------------------------------------------------------------------------


def _mesh_of(targets: Mapping[str, Target]) -> DeviceMesh | None:
    """Return the mesh that parameters are sharded over; None if none is."""
    meshes: list[DeviceMesh] = []
    for name, target in targets.items():
        value = target.value
        if isinstance(value, RaggedDTensor):
            if value.device_mesh not in meshes:
                meshes.append(value.device_mesh)
        elif isinstance(value, DTensor):
            raise NotImplementedError(
                f"{name} is a {type(value).__name__} placed as {value.placements!r}; only "
                "parameters sharded by fully_shard of this library can be loaded"
            )
    if len(meshes) > 1:
        raise NotImplementedError(f"expected parameters on one mesh, got {meshes!r}")
    return meshes[0] if meshes else None


@torch.no_grad()
def _write_model(
    model: nn.Module, targets: Mapping[str, Target], outline: Mapping[str, Any], sender: _Sender
) -> None:
    for name, value in outline.items():
        target = targets[name].value
        if is_extra_state(name):
            owner = model.get_submodule(targets[name].key.rpartition(".")[0])
            cast(Any, owner).set_extra_state(value)
        elif isinstance(value, Tensor):  # of no dims: it came with the outline
            target.copy_(value)
        elif isinstance(target, RaggedDTensor):
            sender.scatter(("model", name), value, target, target._local_tensor)
        else:
            target.copy_(sender.broadcast(("model", name), value))


# -- the optimizer ---------------------------------------------------------------------------------


def _load_optimizer(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    outline: Mapping[str, Any],
    sender: _Sender,
) -> None:
    """Receive this rank's pieces of all states and hand them to the optimizer."""
    where = "state['optimizer']: "

    def receive(value: Any, param: Tensor, own: Any, path: tuple[Any, str]) -> Any:
        return _receive_state(value, param, own, ("optimizer", "state", *path), sender)

    names = known_names(optimizer, names_of_parameters({("model",): model}))
    optimizer.load_state_dict(renumbered(outline, optimizer, names, receive, where))


def _receive_state(
    value: Any, param: Tensor, own: Any, where: tuple[Any, ...], sender: _Sender
) -> Any:
    """Return a saved state, cut as the optimizer's own is, or else as its parameter; numbers and
    scalars
    as they are."""
    like: Any
    if isinstance(value, Tensor) and isinstance(param, RaggedDTensor):
        if param.dim() or where[-1] == "step":  # a count, as every optimizer of torch calls it
            return value
        like = own if isinstance(own, RaggedDTensor) and own.shape == value.shape else param
        whole = value.to(like._local_tensor.device)
        return distribute_ragged(whole, like.device_mesh, like.placement)
    if not isinstance(value, TensorOutline):
        return value
    # Such as the scales of 8-bit codes, whose shape is not the parameter's.
    like = own if isinstance(own, Tensor) and own.dim() else param
    if value.shape != tuple(like.shape):
        path = "".join(f"[{key!r}]" for key in where)
        raise ValueError(
            f"state{path}: expected shape {tuple(like.shape)} of its "
            f"{'parameter' if like is param else 'state'}, got {value.shape}"
        )
    if not isinstance(like, RaggedDTensor):
        return sender.broadcast(where, value)
    start, stop = like.bounds
    piece = torch.empty(stop - start, dtype=value.dtype, device=like._local_tensor.device)
    sender.scatter(where, value, like, piece)
    return like.over(piece)


# -- transport -------------------------------------------------------------------------------------


def _is_first(mesh: DeviceMesh) -> bool:
    """Return whether this is the rank of the mesh that has the state."""
    return shard_rank(mesh) == 0 and replicate_rank(mesh) == 0


def _groups_from_first(mesh: DeviceMesh) -> list[dist.ProcessGroup]:
    """Return the groups in which the rank 0 of each sends in turn, so that all ranks of the mesh
    receive.

    The first replica first; a rank of another one takes part only in what that passes on.
    """
    shards, replicas = shard_group(mesh), replicate_group(mesh)
    of_rank = [shards] if replicate_rank(mesh) == 0 else []
    return of_rank if replicas is None else [*of_rank, replicas]


class _Sender:
    """Brings full tensors to all ranks, or takes them from where they are already.

    Args:
        source: The state, on ranks that have it.
        mesh: Its rank 0 has the state; None if every rank has.
    """

    def __init__(self, source: Any, mesh: DeviceMesh | None) -> None:
        self._source = source
        self._mesh = mesh if mesh is not None and mesh.size() > 1 else None

    def _full(self, path: tuple[Any, ...]) -> Tensor | None:
        """Return the tensor at `path` of the state; None on a rank that does not have it."""
        if self._mesh is not None and not _is_first(self._mesh):
            return None
        value = self._source
        for key in path:
            value = value[key]
        return cast(Tensor, value).detach()

    def broadcast(self, path: tuple[Any, ...], outline: TensorOutline) -> Tensor:
        """Return the full tensor, on every rank."""
        full = self._full(path)
        if self._mesh is None:
            return cast(Tensor, full)
        device = torch.device(self._mesh.device_type)
        tensor = torch.empty(outline.shape, dtype=outline.dtype, device=device)
        if full is not None:
            tensor.copy_(full)
        if tensor.numel():
            flat = tensor.view(-1).view(torch.uint8)  # a backend need not know the dtype
            for group in _groups_from_first(self._mesh):
                with waiting_for(f"rank 0's full tensor {_shown(path)}", group):
                    dist.broadcast(flat, group=group, group_src=0)
        return tensor

    def scatter(
        self, path: tuple[Any, ...], outline: TensorOutline, like: RaggedDTensor, out: Tensor
    ) -> None:
        """Fill `out`, (n_local,), with this rank's range of the full tensor.

        Args:
            path: Of the tensor in the state.
            outline: Of the full tensor.
            like: What is cut as the tensor shall be.
            out: Of any floating dtype if the tensor has one, else of the tensor's.
        """
        full = self._full(path)
        if self._mesh is None:
            start, stop = like.bounds
            out.copy_(cast(Tensor, full).reshape(-1)[start:stop])
            return
        device, width = torch.device(self._mesh.device_type), outline.dtype.itemsize
        sizes = [(stop - start) * width for start, stop in like.placement.all_bounds(like.numel())]
        if not sum(sizes):
            return
        direct = out.dtype == outline.dtype and out.device.type == device.type
        received = out if direct else torch.empty(out.numel(), dtype=outline.dtype, device=device)
        if replicate_rank(self._mesh) == 0:
            sent = received.new_empty(0)
            if full is not None:
                sent = full.reshape(-1).contiguous().to(device)
            nothing = [0] * len(sizes)
            group = shard_group(self._mesh)
            with waiting_for(f"rank 0's full tensor {_shown(path)}", group):
                all_to_all(
                    received.view(torch.uint8),
                    sent.view(torch.uint8),
                    [sizes[shard_rank(self._mesh)], *nothing[1:]],
                    nothing if full is None else sizes,
                    group,
                )
        if (replicas := replicate_group(self._mesh)) is not None and received.numel():
            with waiting_for(f"rank 0's full tensor {_shown(path)}", replicas):
                dist.broadcast(received.view(torch.uint8), group=replicas, group_src=0)
        if not direct:
            out.copy_(received)


def _shown(path: tuple[Any, ...]) -> str:
    return "".join(f"[{key!r}]" for key in path)
