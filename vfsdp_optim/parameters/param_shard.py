"""How a parameter lies on this rank and on all others, whatever kind of tensor it is.

Reads layouts and hands out local tensors. Communicates in `Ranks.group`, once for a mesh of several
axes that does not cover the world, and where a loaded value has another layout.

[Note: kinds of parameters]
Plain: this rank has all of it. With a process group of replicas so has every rank of the group, and
matrices are divided over them. RaggedDTensor: a range of the flattened parameter, a view of a flat
buffer. DTensor of torch: a range too where leading rows are cut (`Shard(0)`) or nothing is
(`Replicate`), on meshes of any number of axes; ranks that differ on a replicated axis alone hold
copies. Where axes cut other dims too (tensor and expert parallelism), or torch's strided shards
divide the pieces of later axes, every shard is a box: it has no `bounds`. Of any other DTensor only
the elements on this rank are known, which is all that an element-wise update needs: no matrices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

from sharding.planning.boxes import Boxes, Range, parts_by_shard
from sharding.planning.cuts import PieceRuns, held_parts
from sharding.planning.holders import Grid
from sharding.tensor.ragged_tensor import RaggedDTensor
from sharding.transport.backends import main_device_type
from vfsdp_optim.parameters.tiles import tiles_of

# Groups made for meshes of several axes: default group -> global ranks -> group.
_groups: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], dist.ProcessGroup]]
_groups = WeakKeyDictionary()
_ids_of_meshes: WeakKeyDictionary[DeviceMesh, tuple[int, ...]] = WeakKeyDictionary()
_lines: WeakKeyDictionary[dist.ProcessGroup, DeviceMesh] = WeakKeyDictionary()


@dataclass(frozen=True, slots=True)
class Ranks:
    """The ranks that hold a parameter together; equal if they are the same ranks.

    Attributes:
        ids: global ranks, ascending; rank i of `group` is ids[i].
        device_type: where the group communicates.
        origin: the process group, or the mesh that has it.
    """

    ids: tuple[int, ...]
    device_type: str = field(compare=False)
    origin: dist.ProcessGroup | DeviceMesh = field(compare=False, repr=False)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ids)

    @staticmethod
    def of_mesh(mesh: DeviceMesh) -> Ranks:
        """Return the ranks of a mesh.

        Raises:
            NotImplementedError: they do not ascend.
        """
        ids = _ids_of_meshes.get(mesh)
        if ids is None:
            ids = tuple(mesh.mesh.flatten().tolist())
            if list(ids) != sorted(ids):
                raise NotImplementedError(
                    f"expected a mesh whose ranks ascend, got {mesh!r}; torch's process groups "
                    "sort them"
                )
            _ids_of_meshes[mesh] = ids
        return Ranks(ids, mesh.device_type, mesh)

    @staticmethod
    def of_group(group: dist.ProcessGroup) -> Ranks:
        """Return the ranks of a process group.

        Raises:
            TypeError: it is none.
            ValueError: this rank is not in it.
        """
        if group is dist.GroupMember.NON_GROUP_MEMBER:
            raise ValueError(
                "process_group: this rank is not in it; pass the group of the ranks that have a "
                "copy of the parameters, such as model.process_group of DistributedDataParallel"
            )
        if not isinstance(group, dist.ProcessGroup):
            raise TypeError(
                f"process_group: expected a torch.distributed.ProcessGroup, got {group!r}; pass "
                "model.process_group of DistributedDataParallel, or mesh.get_group() of a mesh"
            )
        ids = tuple(dist.get_process_group_ranks(group))
        return Ranks(ids, main_device_type(group), group)

    def group(self) -> dist.ProcessGroup:
        """Return the process group of exactly these ranks.

        For a mesh of several axes that covers only a part of the world this is a collective of its
        ranks, and of no other, the first time.
        """
        if not isinstance(self.origin, DeviceMesh):
            return self.origin
        if self.origin.ndim == 1:
            return self.origin.get_group()
        world = dist.group.WORLD
        if world is None:
            raise RuntimeError("the default process group was destroyed; build a new optimizer")
        if self.size == dist.get_world_size():
            return world
        made = _groups.setdefault(world, {})
        if self.ids not in made:
            made[self.ids] = dist.new_group(
                list(self.ids),
                backend=dist.get_backend_config(self.origin.get_group(0)),
                use_local_synchronization=True,
                group_desc="replicas and shards of an optimizer",
            )
        return made[self.ids]

    def mesh(self) -> DeviceMesh:
        """Return these ranks as a mesh of one axis; communicates as `group` does."""
        if isinstance(self.origin, DeviceMesh) and self.origin.ndim == 1:
            return self.origin
        group = self.group()
        if group not in _lines:
            _lines[group] = DeviceMesh.from_group(group, self.device_type)
        return _lines[group]

    def __deepcopy__(self, memo: dict[int, Any]) -> Ranks:
        """Return itself: a copy of an optimizer is on the same ranks."""
        return self


@dataclass(frozen=True, slots=True, eq=False)
class ParamShard:
    """What this rank holds of one parameter, and what every other one does.

    Attributes:
        param: what the user passed.
        ranks: those that hold it; None where only this process is known to.
        grid: `ranks` as copies and shards; None without them, and where shards are unknown.
        all_bounds: by shard, its range of the flattened parameter; they tile it. None where shards
            are no ranges.
        bounds: of this rank.
        runs: the sizes of the ranges, and of how many shards in a row; () where there are none.
        boxes: what shards are that are no ranges; None where they are, and where they are unknown.
        shard: of this rank; 0 where shards are unknown.
    """

    param: Tensor
    ranks: Ranks | None
    grid: Grid | None
    all_bounds: Sequence[Range] | None
    bounds: Range | None
    runs: PieceRuns
    boxes: Boxes | None = None
    shard: int = 0

    @staticmethod
    def of(param: Tensor, fqn: str, replicas: Ranks | None = None) -> ParamShard:
        """Read the layout of a parameter.

        Args:
            param: of any kind.
            fqn: names it in errors.
            replicas: that hold a copy each of every plain parameter.

        Raises:
            NotImplementedError: partial sums, pieces of other sizes than the placements say, or a
                mesh whose ranks do not ascend.
            ValueError: this rank is not in the mesh of the parameter.
        """
        if not isinstance(param, DTensor):
            whole = (0, param.numel())
            grid = None if replicas is None else Grid(1, replicas.size)
            return ParamShard(param, replicas, grid, (whole,), whole, ((param.numel(), 1),))
        mesh, placements = param.device_mesh, param.placements
        coordinate = mesh.get_coordinate()
        if coordinate is None:
            raise ValueError(
                f"{fqn}: this rank is not in the mesh of the parameter, {mesh!r}; give an "
                "optimizer the parameters that the rank holds a part of"
            )
        if any(placement.is_partial() for placement in placements):
            raise NotImplementedError(
                f"{fqn}: a parameter with placements {placements} is a sum over ranks, which no "
                "update can be applied to; redistribute it to Replicate() or Shard(0)"
            )
        try:
            ranks = Ranks.of_mesh(mesh)
        except NotImplementedError as error:
            raise NotImplementedError(f"{fqn}: {error}") from None
        tiles = tiles_of(placements, mesh.shape, tuple(coordinate), param.shape)
        if tiles is None:
            return ParamShard(param, ranks, None, None, None, ())
        if param._local_tensor.numel() != tiles.numel:
            raise NotImplementedError(
                f"{fqn}: expected {tiles.numel} elements on this rank for placements "
                f"{placements} of shape {tuple(param.shape)} (cut as torch.chunk does), got "
                f"{param._local_tensor.numel()}; shard the model with vfsdp_optim.fully_shard"
            )
        grid, all_bounds, shard = tiles.grid, tiles.all_bounds, tiles.shard
        bounds = None if all_bounds is None else all_bounds[shard]
        return ParamShard(param, ranks, grid, all_bounds, bounds, tiles.runs, tiles.boxes, shard)

    def check_has_units(self, fqn: str) -> None:
        """Check that it is known which ranks hold what of a unit.

        Raises:
            NotImplementedError: it is not.
        """
        if self.all_bounds is None and self.boxes is None:
            raise NotImplementedError(
                f"{fqn}: matrices of a parameter with placements {_placed(self.param)} on "
                f"{self._mesh!r} are not supported, because it is not known which rank holds which "
                "elements of them; shard it by Replicate(), Shard(dim) or RaggedShard on "
                "neighbouring axes (strided shards where sizes divide evenly), or put it into a "
                'group with algorithm="adamw"'
            )

    def check_has_ranges(self, fqn: str) -> tuple[Sequence[Range], Range]:
        """Return `all_bounds` and `bounds`, by which elements have an index.

        Raises:
            NotImplementedError: shards are no ranges.
        """
        if self.all_bounds is None or self.bounds is None:
            raise NotImplementedError(
                f"{fqn}: 8-bit states, rounding by chance and qk_clip of a parameter with "
                f"placements {_placed(self.param)} on {self._mesh!r} are not supported, because "
                "its pieces are no ranges of rows; shard it by Shard(0) or Replicate(), as torch's "
                "fully_shard does, or with vfsdp_optim.fully_shard, or name it in keep_32bit"
            )
        return self.all_bounds, self.bounds

    @property
    def _mesh(self) -> DeviceMesh | None:
        return self.param.device_mesh if isinstance(self.param, DTensor) else None

    def held_parts(self, start: int, numel: int) -> list[tuple[int, int, int]]:
        """Return (shard, start, stop) of what shards hold of a run of the flattened parameter, in
        the order in which a run is put together; no empty ones, shards ascending."""
        if self.boxes is None:
            return held_parts(self.runs, start, start + numel)
        held, begin = [], 0
        for part in parts_by_shard(self.boxes, start, numel):
            held.append((part.shard, begin, begin + part.numel))
            begin += part.numel
        return held

    def local_part(self, start: int, numel: int) -> Range:
        """Return (start, numel) of this rank's elements of a run, among its own."""
        if self.boxes is None:
            first, last = self.bounds or (0, 0)
            low = min(max(start, first), last)
            return low - first, max(min(start + numel, last), low) - low
        for part in parts_by_shard(self.boxes, start, numel):
            if part.shard == self.shard:
                return part.start, part.numel
        return 0, 0

    @property
    def in_flat_buffer(self) -> bool:
        """Whether the local elements may lie next to those of other parameters."""
        return isinstance(self.param, RaggedDTensor)

    @property
    def tensor(self) -> Tensor:
        """The tensor that holds the elements of this rank, in its own shape and strides."""
        return local_tensor(self.param)

    def data_ptr(self) -> int:
        """Return the address of the elements on this rank."""
        param = self.param
        return (param._local_tensor if isinstance(param, DTensor) else param).data_ptr()

    @property
    def text(self) -> str:
        """What owners and waves follow from, the same on every rank of `ranks`."""
        return f"{tuple(self.param.shape)} {self.param.dtype} {_placed(self.param)} {self.grid!r}"

    def view(self, state: Tensor) -> Tensor:
        """Return a view of the 1-D `state` as users see it: laid out as the parameter."""
        param = self.param
        if isinstance(param, RaggedDTensor):
            return param.over(state)
        local = state.view(self.tensor.shape)
        if not isinstance(param, DTensor):
            return local
        stride = torch.empty(param.shape, device="meta").stride()
        return DTensor.from_local(
            local, param.device_mesh, param.placements, shape=param.shape, stride=stride
        )

    def gradient(self, fqn: str) -> Tensor | None:
        """Return the local elements of the gradient, contiguous and shaped as they are, or None.

        Raises:
            RuntimeError: the gradient is sparse.
            TypeError: it is not laid out as the parameter is.
        """
        grad, param = self.param.grad, self.param
        if grad is None:
            return None
        # The usual case first: this runs for every parameter in every step.
        if isinstance(grad, RaggedDTensor) and isinstance(param, RaggedDTensor):
            if grad._spec.placements == param._spec.placements:
                return grad._local_tensor
        if isinstance(param, DTensor):
            placed = grad.placements if isinstance(grad, DTensor) else None
            if placed != param.placements or not isinstance(grad, DTensor):
                raise TypeError(
                    f"{fqn}: expected a gradient laid out as its parameter, in "
                    f"{_placed(param)}, got a {type(grad).__name__} in {placed!r}; set one "
                    "with p.grad = torch.zeros_like(p); p.grad.copy_(full_gradient)"
                )
            grad = grad._local_tensor
            if isinstance(grad, AsyncCollectiveTensor):
                grad = grad.wait()
        if grad.layout is not torch.strided:
            raise RuntimeError(
                f"{fqn}: sparse gradients are not supported; use torch.optim.SparseAdam"
            )
        return grad.contiguous()

    def values(self, value: Any, what: str) -> Tensor:
        """Return the elements of a loaded state that belong to this rank, 1-D.

        Args:
            value: a full tensor of the parameter's shape, or (for a sharded parameter) a DTensor on
                the same mesh. Another layout than the parameter's makes this a collective.
            what: names the state in errors.

        Raises:
            TypeError: it is no tensor.
            ValueError: it has another shape than the parameter.
            NotImplementedError: it is a DTensor that cannot be laid out as the parameter is.
        """
        if not isinstance(value, Tensor):
            raise TypeError(f"{what}: expected a tensor, got {value!r}")
        if value.shape != self.param.shape:
            raise ValueError(
                f"{what}: expected shape {tuple(self.param.shape)}, got {tuple(value.shape)}; "
                "it was made for another parameter"
            )
        value = value.detach()
        if isinstance(value, DTensor):
            return self._laid_out(value, what)
        if self.bounds is not None:
            start, stop = self.bounds
            return value.reshape(-1)[start:stop]
        if self.boxes is not None:
            box = self.boxes.box(self.shard)
            return value[tuple(slice(*indices) for indices in box)].reshape(-1)
        if isinstance(self.param, DTensor) and _is_cut_by_chunks(self.param.placements):
            mesh, placements = self.param.device_mesh, self.param.placements
            cut = distribute_tensor(value, mesh, placements, src_data_rank=None)
            return cut._local_tensor.reshape(-1)
        raise NotImplementedError(
            f"{what}: a full tensor cannot be cut for placements {_placed(self.param)}; load it "
            "through torch.distributed.checkpoint"
        )

    def _laid_out(self, value: DTensor, what: str) -> Tensor:
        param = self.param
        if isinstance(param, DTensor) and value.device_mesh == param.device_mesh:
            to_buffer = self.in_flat_buffer and not isinstance(value, RaggedDTensor)
            if value.placements != param.placements and not to_buffer:
                value = value.redistribute(placements=param.placements)
            if value.placements == param.placements:
                return local_tensor(value).reshape(-1)
        raise NotImplementedError(
            f"{what}: got a {type(value).__name__} with placements {value.placements} for a "
            f"{type(param).__name__} in {_placed(param)}; load it through "
            "torch.distributed.checkpoint, or pass value.full_tensor()"
        )


def local_tensor(tensor: Tensor) -> Tensor:
    """Return the elements on this rank, a view outside of autograd."""
    return (tensor._local_tensor if isinstance(tensor, DTensor) else tensor).detach()


def _placed(tensor: Tensor) -> str:
    """Return the placements of a tensor as text."""
    return repr(tensor.placements) if isinstance(tensor, DTensor) else "no placements"


def _is_cut_by_chunks(placements: Sequence[Placement]) -> bool:
    return all(placement.is_replicate() or type(placement) is Shard for placement in placements)
