"""Shampoo as it runs elsewhere on FSDP2: how far from the unsharded update it ends.

Gradients are those of an unsharded run of a small network, recorded, and the same for everybody.
The widespread default, preconditioning whatever rows a rank has, is ours on parameters that are
these rows. facebookresearch's own is in no package index; where it is installed, it runs beside.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from itertools import pairwise

import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor

import vfsdp_optim
from muon_step import Shape, model_of, set_gradients, sharded, total
from turns import Row, ratios, take_turns

MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]

INSTALLED = find_spec("distributed_shampoo") is not None
MISSING = (
    "facebookresearch's Shampoo: not installed. It is in no package index; pip install a clone of "
    "github.com/facebookresearch/optimizers, and it runs beside."
)
WIDTHS = (32, 96, 64, 16)
STEPS = 10
OPTIONS = {"lr": 0.01, "betas": (0.9, 0.95), "precondition_frequency": 1}


def facebooks(
    parameters: Sequence[nn.Parameter],
    *,
    cut: bool,
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.95),
    block: int = 1024,
    precondition_frequency: int = 10,
) -> torch.optim.Optimizer:
    """facebookresearch's, with Adam grafting; on parameters that are `cut`, as it does unasked."""
    import distributed_shampoo as theirs  # is in no package index

    config = theirs.FullyShardDistributedConfig if cut else theirs.SingleDeviceDistributedConfig
    return theirs.DistributedShampoo(
        parameters,
        lr=lr,
        betas=betas,
        epsilon=1e-12,
        max_preconditioner_dim=block,
        precondition_frequency=precondition_frequency,
        grafting_config=theirs.AdamPreconditionerConfig(beta2=betas[1], epsilon=1e-8),
        distributed_config=config(target_parameter_dimensionality=2),
    )


def network() -> nn.Sequential:
    """Three layers, the same on every rank."""
    torch.manual_seed(0)
    first, second, third = (nn.Linear(a, b, bias=False) for a, b in pairwise(WIDTHS))
    return nn.Sequential(first, nn.Tanh(), second, nn.Tanh(), third)


def recorded(make: MakeOptimizer) -> list[list[Tensor]]:
    """The gradients of every step of an unsharded run."""
    model, generator = network(), torch.Generator().manual_seed(1)
    parameters = list(model.parameters())
    optimizer = make(parameters)
    grads = []
    for _ in range(STEPS):
        x = torch.randn(64, WIDTHS[0], generator=generator)
        optimizer.zero_grad()
        (model(x) - x[:, : WIDTHS[-1]].sin()).square().mean().backward()
        grads.append([p.grad.clone() for p in parameters])
        optimizer.step()
    return grads


def updates(
    parameters: list[nn.Parameter],
    make: MakeOptimizer,
    grads: list[list[Tensor]],
    mesh: DeviceMesh | None = None,
) -> list[Tensor]:
    """What all steps add to each parameter, whole; `mesh` is that of torch's shards."""
    optimizer, start = make(parameters), [whole(p) for p in parameters]
    for of_step in grads:
        for p, grad in zip(parameters, of_step, strict=True):
            if mesh is not None:
                p.grad = distribute_tensor(grad, mesh, p.placements)
            else:
                p.grad = torch.zeros_like(p)
                p.grad.copy_(grad)
        optimizer.step()
    return [whole(p) - before for p, before in zip(parameters, start, strict=True)]


def whole(x: Tensor) -> Tensor:
    """All elements of a parameter."""
    return (x.full_tensor() if isinstance(x, DTensor) else x).detach().clone()


def distance(found: list[Tensor], expected: list[Tensor]) -> float:
    """Norm of the difference of updates over the norm of those expected, over all ranks."""
    pairs = list(zip(found, expected, strict=True))
    wrong = total(sum(float((a - b).square().sum()) for a, b in pairs))
    return (wrong / total(sum(float(b.square().sum()) for _, b in pairs))) ** 0.5


def distances(name: str, mesh: DeviceMesh) -> list[tuple[str, float]]:
    """How far updates on shards are from the unsharded ones, relative to these."""

    def ours(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return getattr(vfsdp_optim, name)(parameters, **OPTIONS)

    def rows(tensors: list[Tensor]) -> list[Tensor]:
        return [x.detach().chunk(mesh.size())[dist.get_rank()].clone() for x in tensors]

    def weights(shard: Callable[..., nn.Module] | None) -> list[nn.Parameter]:
        model = network()
        return list((model if shard is None else shard(model, mesh=mesh)).parameters())

    grads = recorded(ours)
    expected = updates(weights(None), ours, grads)
    on_ours = updates(weights(vfsdp_optim.fully_shard), ours, grads)
    on_torchs = updates(weights(torch_fsdp.fully_shard), ours, grads, mesh)
    local = [nn.Parameter(x) for x in rows(weights(None))]
    found = [
        ("ours, on our shards", distance(on_ours, expected)),
        ("ours, on FSDP2", distance(on_torchs, expected)),
        (
            "each rank its own rows",
            distance(updates(local, ours, list(map(rows, grads))), rows(expected)),
        ),
    ]
    if INSTALLED and name == "Shampoo":
        make = partial(facebooks, **OPTIONS)
        theirs = updates(weights(torch_fsdp.fully_shard), partial(make, cut=True), grads, mesh)
        alone = updates(weights(None), partial(make, cut=False), grads)
        found.append(("facebookresearch's, on FSDP2", distance(theirs, alone)))
    return found


def time_ratio(shapes: Sequence[Shape], mesh: DeviceMesh, rounds: int) -> Row:
    """Time of a step of facebookresearch's on FSDP2 over ours on our shards, in equal blocks."""
    model = torch_fsdp.fully_shard(model_of(shapes), mesh=mesh)
    set_gradients(model.parameters(), mesh)
    theirs = facebooks(list(model.parameters()), cut=True, block=256)
    ours = sharded(shapes, mesh, "Shampoo", block_size=256)
    times = take_turns({"theirs": theirs.step, "ours": ours.step}, rounds, "facebookresearch", 10)
    return ratios(times["theirs"], times["ours"])
