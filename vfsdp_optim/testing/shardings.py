"""The layouts a model can be sharded in, and full tensors cut as a parameter is.

Touches a module's parameters and the default process group.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from sharding.fsdp.fully_shard import fully_shard
from sharding.planning.planner import ALIGN
from sharding.planning.structure import DeclaresStructure
from sharding.tensor.placement import RaggedShard
from sharding.tensor.ragged_tensor import RaggedDTensor
from sharding.transport.backends import main_device_type, world

# A name, or one placement for each parameter.
LayoutChoice = str | tuple[RaggedShard, ...]
MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]

LAYOUTS = {
    "ours": "vfsdp_optim.fully_shard",
    "ours_hsdp": "vfsdp_optim.fully_shard on a 2-D mesh",
    "negotiated": "vfsdp_optim.fully_shard(optimizer=...), shaped by what the optimizer declares",
    "ragged": "RaggedShards cut anywhere",
    "blocks": "RaggedShards cut anywhere between blocks of 256 elements",
    "fsdp2": "torch.distributed.fsdp.fully_shard on a 1-D mesh",
    "hsdp": "torch.distributed.fsdp.fully_shard on a 2-D mesh",
    "replicated": "plain parameters on every rank, as in DistributedDataParallel",
    "tp": "DTensors cut by columns and rows in turn, as by torch's parallelize_module",
    "tp_fsdp": "the same on one axis of a 2-D mesh, beside torch's fully_shard on the other",
    "ep": "DTensors of dim 0 over one axis of a 2-D mesh and dim 1 over the other, as experts",
}
# Those of DTensors that are set as they are: nothing runs a forward on them.
ON_MESHES = ("tp", "tp_fsdp", "ep")


def as_layouts(layouts: LayoutChoice | Sequence[LayoutChoice]) -> tuple[LayoutChoice, ...]:
    """Return the layouts that a user asked for.

    Raises:
        ValueError: there is no such layout.
    """
    if layouts == "any":
        return "ours", "ragged", "fsdp2", "hsdp"
    given: tuple[Any, ...] = (layouts,) if isinstance(layouts, str) else tuple(layouts)
    if given and all(isinstance(placement, RaggedShard) for placement in given):
        given = (given,)
    for layout in given or ("",):
        if isinstance(layout, str) and layout not in LAYOUTS:
            raise ValueError(
                f"layouts: expected 'any', some of {sorted(LAYOUTS)}, or one RaggedShard for each "
                f"parameter, got {layout!r}"
            )
    return given


def layout_text(layout: LayoutChoice) -> str:
    """Return a layout as a report names it."""
    return repr(layout) if isinstance(layout, str) else "drawn RaggedShards"


def shard_model(
    model: nn.Module,
    layout: LayoutChoice,
    make_optimizer: MakeOptimizer,
    first: Callable[[nn.Module], nn.Module] = lambda model: model,
) -> torch.optim.Optimizer:
    """Shard the parameters of `model` over all ranks, in place, and build its optimizer.

    Args:
        model: with plain parameters, the same on every rank.
        layout: one of `LAYOUTS`, or one placement for each parameter.
        make_optimizer: called with what `first` returns.
        first: returns the model, or a module with some of its parameters.

    Raises:
        ValueError: the layout does not fit the parameters.
        NotImplementedError: "negotiated" for an optimizer that declares no structure.
    """
    if layout == "replicated":
        return make_optimizer(first(model))
    mesh = mesh_of(layout)
    if layout == "negotiated":
        optimizer = make_optimizer(first(model))
        if not hasattr(optimizer, "demands"):
            raise NotImplementedError("it declares no structure (it has no demands())")
        _fully_shard(model, mesh, optimizer=optimizer)
        return optimizer
    if layout in ("ours", "ours_hsdp"):
        _fully_shard(model, mesh)
    elif layout in ON_MESHES:
        _distribute(model, mesh, str(layout))
    elif layout in ("fsdp2", "hsdp"):
        for block in blocks(model):
            torch_fsdp.fully_shard(block, mesh=mesh)
        torch_fsdp.fully_shard(model, mesh=mesh)
    else:
        _cut(model, mesh, layout)
    return make_optimizer(first(model))


def mesh_of(layout: LayoutChoice) -> DeviceMesh:
    """Return the mesh of all ranks that a layout uses."""
    world_size = dist.get_world_size()
    kind = main_device_type(world())
    names = {
        "hsdp": ("replicate", "shard"),
        "ours_hsdp": ("replicate", "shard"),
        "tp_fsdp": ("shard", "tensor"),
        "ep": ("expert", "shard"),
    }.get(layout if isinstance(layout, str) else "")
    if names is None:
        return init_device_mesh(kind, (world_size,))
    two = 2 if world_size % 2 == 0 else 1
    shape = (world_size // two, two) if layout == "tp_fsdp" else (two, world_size // two)
    return init_device_mesh(kind, shape, mesh_dim_names=names)


def blocks(model: nn.Module) -> Iterator[nn.Module]:
    """Yield what is sharded on its own: the elements of the outermost ModuleLists and Sequentials,
    as far as they have parameters and a forward."""
    if not isinstance(model, nn.ModuleList | nn.Sequential):
        for child in model.children():
            yield from blocks(child)
        return
    for part in model:
        if isinstance(part, nn.ModuleList | nn.ModuleDict):
            yield from blocks(part)
        elif any(True for _ in part.parameters()):
            yield part


def _fully_shard(
    model: nn.Module, mesh: DeviceMesh, optimizer: torch.optim.Optimizer | None = None
) -> None:
    declares: DeclaresStructure | None = optimizer  # type: ignore[assignment]  # checked before
    for block in blocks(model):
        fully_shard(block, mesh=mesh, optimizer=declares)
    fully_shard(model, mesh=mesh, optimizer=declares)


def _cut(model: nn.Module, mesh: DeviceMesh, layout: LayoutChoice) -> None:
    """Replace the parameters by pieces that lie side by side in one flat buffer."""
    params = list(model.parameters())
    if isinstance(layout, str):
        shapes = [tuple(param.shape) for param in params]
        unit = ALIGN if layout == "blocks" else 1
        placements = random_placements(shapes, mesh.size(), seed=0, unit=unit)
    else:
        placements = layout
    if len(placements) != len(params) or placements[0].world_size != mesh.size():
        raise ValueError(
            f"layouts: expected {len(params)} RaggedShards of {mesh.size()} ranks, got "
            f"{len(placements)} of {placements[0].world_size}"
        )
    sharded = _side_by_side([p.detach() for p in params], mesh, placements)
    _replace(model, dict(zip(params, sharded, strict=True)))


def _distribute(model: nn.Module, mesh: DeviceMesh, layout: str) -> None:
    """Replace the parameters by DTensors of torch, cut as one of `ON_MESHES` says."""
    new: dict[Tensor, Tensor] = {}
    for number, param in enumerate(model.parameters()):
        placements = _placements(tuple(param.shape), tuple(mesh.shape), layout, number)
        new[param] = distribute_tensor(param.detach(), mesh, placements, src_data_rank=None)
    _replace(model, new)


def _placements(
    shape: tuple[int, ...], sizes: tuple[int, ...], layout: str, number: int
) -> tuple[Placement, ...]:
    rows, columns, whole = Shard(0), Shard(1), Replicate()
    if len(shape) < 2:
        few = () if layout == "tp" else (rows if shape else whole,)
        return (*few, whole)
    if layout == "ep":
        return rows, columns
    if layout == "tp":
        return ((rows, columns)[number % 2],)
    if number % 2 == 0 and shape[0] % prod(sizes) == 0 and sizes[1] > 1:
        # torch's fully_shard divides the rows that tensor parallelism left.
        return _StridedShard(0, split_factor=sizes[1]), rows
    return rows, columns


def _replace(model: nn.Module, new: dict[Tensor, Tensor]) -> None:
    """Put parameters in place of others, tied ones too."""
    made = {
        old: nn.Parameter(tensor, requires_grad=old.requires_grad) for old, tensor in new.items()
    }
    for module in model.modules():
        for name, param in module._parameters.items():
            if param is not None:
                module._parameters[name] = made[param]


def _side_by_side(
    full: Sequence[Tensor], mesh: DeviceMesh, placements: Sequence[RaggedShard]
) -> list[RaggedDTensor]:
    rank = mesh.get_local_rank()
    pieces = []
    for tensor, placement in zip(full, placements, strict=True):
        start, stop = placement.bounds(rank, tensor.numel())
        pieces.append(tensor.reshape(-1)[start:stop])
    end = sum(-(-piece.numel() // ALIGN) * ALIGN for piece in pieces)
    flat = {piece.dtype: piece.new_zeros(end) for piece in pieces}
    result = []
    offset = 0
    for tensor, piece, placement in zip(full, pieces, placements, strict=True):
        local = flat[piece.dtype][offset : offset + piece.numel()].copy_(piece)
        offset += -(-piece.numel() // ALIGN) * ALIGN
        result.append(RaggedDTensor.from_local(local, mesh, placement, tensor.shape))
    return result


def random_placements(
    shapes: Sequence[Sequence[int]], world_size: int, seed: int, unit: int = 1
) -> tuple[RaggedShard, ...]:
    """Return one placement for each shape, cut anywhere between units of `unit` elements, ranks
    without elements included."""
    draw = random.Random(seed)
    placements = []
    for shape in shapes:
        end = -(-prod(shape) // unit)
        cuts = sorted(draw.randint(0, end) for _ in range(world_size - 1))
        units = [b - a for a, b in zip([0, *cuts], [*cuts, end], strict=True)]
        placements.append(RaggedShard(range(len(shape)), units, unit))
    return tuple(placements)


class GradientSetter:
    """Puts full gradients onto parameters, laid out as training would lay them out.

    Gradients of a flat buffer lie in one of their own, at the same offsets, with zero padding.

    Args:
        params: sharded or not, by name.
    """

    def __init__(self, params: dict[str, nn.Parameter]) -> None:
        self._params = params

    def set(self, full: dict[str, Tensor | None]) -> None:
        """Set the gradient of every parameter; `full` has the full ones."""
        buffers: dict[int, Tensor] = {}
        for name, param in self._params.items():
            gradient = full[name]
            if gradient is None:
                param.grad = None
                continue
            gradient = gradient.to(param.device, param.dtype)
            if isinstance(param, RaggedDTensor):
                param.grad = self._piece(gradient, param, buffers)
            else:
                param.grad = cut_like(gradient, param)

    @staticmethod
    def _piece(full: Tensor, param: RaggedDTensor, buffers: dict[int, Tensor]) -> RaggedDTensor:
        local = param._local_tensor.detach()
        storage = local.untyped_storage()
        key = storage.data_ptr()
        if key not in buffers:
            buffers[key] = local.new_zeros(storage.nbytes() // local.element_size())
        start, stop = param.bounds
        piece = buffers[key].as_strided(local.shape, (1,), local.storage_offset())
        piece.copy_(full.reshape(-1)[start:stop])
        return param.over(piece)


def cut_like(full: Tensor, param: Tensor) -> Tensor:
    """Return `full` laid out as `param` is, without communication."""
    if isinstance(param, RaggedDTensor):
        start, stop = param.bounds
        return param.over(full.reshape(-1)[start:stop].clone())
    if isinstance(param, DTensor):
        return distribute_tensor(full, param.device_mesh, param.placements, src_data_rank=None)
    return full.clone()
