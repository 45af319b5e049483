"""Models in layouts of torch and on replicas, and full tensors in and out of them."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from sharding.tensor.ragged_tensor import RaggedDTensor, distribute_ragged
from vfsdp_optim import Muon, fully_shard


def full_tensors(shapes: list[tuple[int, ...]], seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in shapes]


class Matrices(nn.Module):
    """Parameters without a forward."""

    def __init__(self, shapes: list[tuple[int, ...]]) -> None:
        super().__init__()
        self.ws = nn.ParameterList(full_tensors(shapes, 0))


def on_fsdp2(model: nn.Module) -> nn.Module:
    return torch_fsdp.fully_shard(model)


def on_hsdp(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("r", "s"))
    return torch_fsdp.fully_shard(model, mesh=mesh)


def on_our_hsdp(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("r", "s"))
    return fully_shard(model, mesh=mesh)


def in_boxes(model: nn.Module) -> nn.Module:
    """Rows over one axis of a mesh and columns over the other."""
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2))
    for module in model.modules():
        for name, param in list(module._parameters.items()):
            placements = [Shard(0), Shard(1) if param.dim() > 1 else Replicate()]
            cut = distribute_tensor(param.detach(), mesh, placements, src_data_rank=None)
            module._parameters[name] = nn.Parameter(cut)
    return model


def replicated(model: nn.Module) -> nn.Module:
    return model


LAYOUTS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "fsdp2": on_fsdp2,
    "hsdp": on_hsdp,
    "ours_hsdp": on_our_hsdp,
    "boxes": in_boxes,
    "replicated": replicated,
}


def cut_like(full: Tensor, param: Tensor) -> Tensor:
    if not isinstance(param, DTensor):
        return full.clone()
    if isinstance(param, RaggedDTensor):
        return distribute_ragged(full, param.device_mesh, param.placement)
    return distribute_tensor(full, param.device_mesh, param.placements, src_data_rank=None)


def step(optimizer: torch.optim.Optimizer, seed: int) -> None:
    params = [p for group in optimizer.param_groups for p in group["params"]]
    gradients = full_tensors([tuple(p.shape) for p in params], seed)
    for param, gradient in zip(params, gradients, strict=True):
        param.grad = cut_like(gradient.to(param.dtype), param)
    optimizer.step()


def full(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def muon_of(layout: str, shapes: list[tuple[int, ...]], **options: Any) -> Muon:
    model = LAYOUTS[layout](Matrices(shapes))
    if layout == "replicated":
        options["process_group"] = dist.group.WORLD
    return Muon(list(model.named_parameters()), lr=0.1, **options)
