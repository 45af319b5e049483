"""Misuses of `fully_shard` and of what it makes of modules."""

import copy
import pickle

import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from rows import Scene, run_model, run_plain, shard_plain, sharding
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import vfsdp_optim
from sharding import FullMatrix, MixedPrecisionPolicy, fully_shard
from sharding.fsdp.arguments import ArgumentRefused
from sharding.fsdp.fsdp_module import CopyRefused
from small_models import Small, loss_of, shard


def tie_blocks(s: Scene) -> None:
    s.plain.blocks[1].up.weight = s.plain.blocks[0].up.weight
    fully_shard(s.plain.blocks[0])


def replicate_head(s: Scene) -> None:
    mesh = init_device_mesh("cpu", (2,))
    s.plain.head.weight = nn.Parameter(
        distribute_tensor(s.plain.head.weight.detach(), mesh, [Replicate()])
    )


def step_plain(s: Scene) -> None:
    s.other = vfsdp_optim.AdamW(s.plain.named_parameters())
    loss_of(s.plain, 1).backward()
    s.other.step()
    s.other.zero_grad()


def optimizer_of_plain(s: Scene) -> None:
    s.other = vfsdp_optim.AdamW(s.plain.named_parameters())


def forget_optimizer(s: Scene) -> None:
    optimizer_of_plain(s)
    fully_shard(s.plain.blocks[0])


def backward_of_plain(s: Scene) -> None:
    loss_of(s.plain, 1).backward()


def hook_on_plain(s: Scene) -> None:
    s.plain.head.weight.register_hook(lambda grad: grad)


def lazy_head(s: Scene) -> None:
    s.plain.head = nn.LazyLinear(31)


def sparse_embedding(s: Scene) -> None:
    s.plain.embedding.sparse = True


def subclass_head(s: Scene) -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    weight = s.plain.head.weight.detach()
    s.plain.head.weight = nn.Parameter(TwoTensor(weight, weight.clone()))


def on_meta(s: Scene) -> None:
    with torch.device("meta"):
        s.plain = Small()
    shard(s.plain)


def other_shape(s: Scene) -> None:
    s.model.head.weight = nn.Parameter(torch.zeros(3, 12))


def delete_head(s: Scene) -> None:
    del s.model.head.weight


def add_adapter(s: Scene) -> None:
    s.model.blocks[0].up.adapter = nn.Parameter(torch.zeros(3))


def run(s: Scene) -> None:
    with torch.no_grad():
        loss_of(s.model, 1)


def second_root(s: Scene) -> None:
    run(s)
    s.plain.blocks[0] = s.model.blocks[0]
    shard_rest(s.plain)


def shard_rest(model: nn.Module) -> None:
    fully_shard(model.blocks[1])
    fully_shard(model)


def group_without_root(s: Scene) -> None:
    fully_shard(list(s.plain.blocks))


def ignore_on_one_rank(s: Scene) -> None:
    fully_shard(s.plain, ignored_params={s.plain.head.weight} if dist.get_rank() else set())


def one_more_call_on_one_rank(s: Scene) -> None:
    mesh = DeviceMesh.from_group(dist.new_group([0, 1]), "cpu")
    if dist.get_rank():
        fully_shard(nn.Linear(3, 3), mesh=mesh)
    shard(s.plain, mesh=mesh)


def run_child(s: Scene) -> None:
    s.plain.blocks[1](torch.ones(2, 12))


MISUSES_OF_SHARDING: dict[type[Exception], list[tuple]] = {
    TypeError: [
        ("got 3|nn.Module", lambda s: fully_shard(3)),
        ("Linear|a list", lambda s: fully_shard((s.plain.head,))),
        (
            "resident_padding: expected a fraction of the bucket such as 0.02, got '2 %'",
            sharding(resident_padding="2 %"),
        ),
        ("got 2|init_device_mesh", sharding(mesh=2)),
        ("'head.weight'|get_parameter", sharding(ignored_params={"head.weight"})),
        ("torch.bfloat16|MixedPrecisionPolicy(param_dtype=", sharding(mp_policy=torch.bfloat16)),
        (
            "SGD|after fully_shard",
            lambda s: fully_shard(s.plain, optimizer=torch.optim.SGD(s.plain.parameters())),
        ),
        ("'embedding.weight'|'rows'|RowPanels", sharding(structure=lambda fqn, p: "rows")),
        ("FullMatrix()|lambda fqn, parameter", sharding(structure=FullMatrix())),
        ("Block|[module]", lambda s: s.model.set_modules_to_backward_prefetch(s.model.blocks[0])),
    ],
    ValueError: [
        ("empty list|at least one", lambda s: fully_shard([])),
        ("ModuleList|each module inside", lambda s: fully_shard(s.plain.blocks)),
        ("Linear twice|once", lambda s: fully_shard([s.plain.head, s.plain.head])),
        ("norm.weight|inner modules first", lambda s: fully_shard(s.plain.blocks[0]), shard_plain),
        (
            "up.weight is tied to up.weight|[a, b]",
            lambda s: fully_shard(s.plain.blocks[1]),
            tie_blocks,
            "plain",
        ),
        (
            "fully_shard expects a 1D or 2D DeviceMesh but got |(1, 2, 1)|; pass the one or two "
            "dimensions for data, mesh['shard'] or mesh['replicate', 'shard']",
            lambda s: fully_shard(s.plain, mesh=init_device_mesh("cpu", (1, 2, 1))),
        ),
        (
            "set_requires_all_reduce(False): Small is not sharded over a 2-D mesh, so there are "
            "no replicas to average over later; use set_requires_gradient_sync(False), or shard "
            "over mesh['replicate', 'shard']",
            lambda s: s.model.set_requires_all_reduce(False),
        ),
        (
            "resident_padding: expected a fraction of the bucket, 0 or more, got -0.1; 0.02 "
            "allows 2 %, 0 pads nothing for residency",
            sharding(resident_padding=-0.1),
        ),
        ("resident_padding|got nan", sharding(resident_padding=float("nan"))),
        ("'meta'|one of them", lambda s: fully_shard(s.plain, mesh=DeviceMesh("meta", [0, 1]))),
        (
            "head.weight|is a DTensor over|dims of one mesh to both",
            shard_plain,
            replicate_head,
            "plain",
        ),
        (
            "blocks.0.norm.weight|embedding.weight|torch.device('meta')",
            shard_plain,
            lambda s: s.plain.blocks[0].to("meta"),
            "plain",
        ),
        (
            "If passing reshard_after_forward as an int, it should be a factor of 2, not 3; "
            "parameters are cut over 2 ranks",
            sharding(reshard_after_forward=3),
        ),
        (
            "reduce_dtype|torch.int8|floating dtype",
            sharding(mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.int8)),
        ),
        (
            "norm.weight|every call",
            lambda s: fully_shard(s.plain, optimizer=s.other),
            forget_optimizer,
        ),
        (
            "blocks.0.norm.weight|(12,)|element-wise",
            sharding(structure=lambda fqn, p: FullMatrix()),
        ),
        ("head.weight|before fully_shard", shard_plain, lazy_head, "plain"),
        (
            "Small|torch's fully_shard|one place",
            shard_plain,
            lambda s: torch_fsdp.fully_shard(s.plain),
            "plain",
        ),
        (
            "DistributedDataParallel|the module that it wraps",
            lambda s: fully_shard(DistributedDataParallel(s.plain)),
        ),
        ("embedding.weight|zero_grad()", shard_plain, backward_of_plain, "plain"),
        ("head.weight|register_post_accumulate_grad_hook", shard_plain, hook_on_plain, "plain"),
        ("Small|call fully_shard", lambda s: s.model.set_modules_to_forward_prefetch([s.plain])),
        (
            "set_gradient_divide_factor|positive number|got 0",
            lambda s: s.model.set_gradient_divide_factor(0),
        ),
        ("got 3|a bool", lambda s: s.model.set_reshard_after_forward(3)),
        ("head.weight|(3, 12)|(31, 12)", run_model, other_shape, "model"),
    ],
    ArgumentRefused: [
        ("Small|once", lambda s: fully_shard(s.model)),
        (
            "Please init the 2D mesh for HSDP with mesh_dim_names specified, got |(1, 2)|; make "
            "it with init_device_mesh(..., mesh_dim_names=('replicate', 'shard')): dim 0 "
            "replicates, dim 1 shards",
            lambda s: fully_shard(s.plain, mesh=init_device_mesh("cpu", (1, 2))),
        ),
    ],
    NotImplementedError: [
        ("shard_placement_fn|Replicate()", sharding(shard_placement_fn=lambda p: Replicate())),
        (
            "CPUOffloadPolicy|OffloadPolicy()",
            sharding(offload_policy=torch_fsdp.CPUOffloadPolicy()),
        ),
        ("embedding.weight|sparse=False", shard_plain, sparse_embedding, "plain"),
        ("head.weight|TwoTensor|ignored_params", shard_plain, subclass_head, "plain"),
        (
            "set_unshard_in_backward|needs the parameters",
            lambda s: s.model.set_unshard_in_backward(False),
        ),
        ("whole bucket|pass True", lambda s: s.model.set_reduce_scatter_unused_params(False)),
    ],
    RuntimeError: [
        (
            "embedding.weight|before the first step",
            lambda s: fully_shard(s.plain, optimizer=s.other),
            step_plain,
            "plain",
        ),
        ("Block|on the root, Small", lambda s: s.model.blocks[0].reset_iter_state(), run),
        ("embedding.weight|to_empty", run_plain, on_meta, "plain"),
        ("head.weight|deleted", run_model, delete_head, "model"),
        ("blocks.0.up.adapter|before fully_shard|ignored_params", run_model, add_adapter, "model"),
        ("blocks.0|Small|what holds both", run_plain, second_root, "plain"),
        ("Block|the model that holds them", run_child, group_without_root),
        ("ranks 0 and 1|the same arguments", run_plain, ignore_on_one_rank, "plain", True),
        (
            "ranks 0 and 1|fully_shard calls|the same calls",
            run_plain,
            one_more_call_on_one_rank,
            "plain",
            True,
        ),
    ],
    CopyRefused: [
        ("Small|before fully_shard|state_dict", lambda s: copy.deepcopy(s.model)),
        ("Block|state_dict", lambda s: pickle.dumps(s.model.blocks[0])),
    ],
}
