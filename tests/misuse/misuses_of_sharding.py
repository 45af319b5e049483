"""Misuses of `fully_shard` and of what it makes of modules."""

import copy
import pickle

import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from rows import Misuse, Scene
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
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


MISUSES_OF_SHARDING = [
    # -- fully_shard
    Misuse("a_number", lambda s: fully_shard(3), TypeError, ("got 3", "nn.Module")),
    Misuse("a_tuple", lambda s: fully_shard((s.plain.head,)), TypeError, ("Linear", "a list")),
    Misuse("empty_list", lambda s: fully_shard([]), ValueError, ("empty list", "at least one")),
    Misuse(
        "module_list",
        lambda s: fully_shard(s.plain.blocks),
        ValueError,
        ("ModuleList", "each module inside"),
    ),
    Misuse("sharded_twice", lambda s: fully_shard(s.model), ArgumentRefused, ("Small", "once")),
    Misuse(
        "twice_in_one_list",
        lambda s: fully_shard([s.plain.head, s.plain.head]),
        ValueError,
        ("Linear twice", "once"),
    ),
    Misuse(
        "parent_before_child",
        lambda s: fully_shard(s.plain.blocks[0]),
        ValueError,
        ("norm.weight", "inner modules first"),
        before=lambda s: fully_shard(s.plain),
    ),
    Misuse(
        "tie_across_calls",
        lambda s: fully_shard(s.plain.blocks[1]),
        ValueError,
        ("up.weight is tied to up.weight", "[a, b]"),
        before=tie_blocks,
        spoils="plain",
    ),
    Misuse(
        "mesh_of_two_unnamed_dimensions",
        lambda s: fully_shard(s.plain, mesh=init_device_mesh("cpu", (1, 2))),
        ArgumentRefused,
        ("(1, 2)", "mesh_dim_names", "dim 0 replicates", "dim 1 shards"),
    ),
    Misuse(
        "mesh_of_three_dimensions",
        lambda s: fully_shard(s.plain, mesh=init_device_mesh("cpu", (1, 2, 1))),
        ValueError,
        ("1D or 2D", "(1, 2, 1)", "mesh['replicate', 'shard']"),
    ),
    Misuse(
        "all_reduce_without_replicas",
        lambda s: s.model.set_requires_all_reduce(False),
        ValueError,
        ("set_requires_all_reduce(False)", "Small", "set_requires_gradient_sync(False)"),
    ),
    Misuse(
        "padding_as_a_text",
        lambda s: fully_shard(s.plain, resident_padding="2 %"),
        TypeError,
        ("resident_padding", "'2 %'", "0.02"),
    ),
    Misuse(
        "negative_padding",
        lambda s: fully_shard(s.plain, resident_padding=-0.1),
        ValueError,
        ("resident_padding", "0 or more", "got -0.1"),
    ),
    Misuse(
        "no_padding_at_all",
        lambda s: fully_shard(s.plain, resident_padding=float("nan")),
        ValueError,
        ("resident_padding", "got nan"),
    ),
    Misuse(
        "mesh_as_a_number",
        lambda s: fully_shard(s.plain, mesh=2),
        TypeError,
        ("got 2", "init_device_mesh"),
    ),
    Misuse(
        "mesh_of_a_missing_device",
        lambda s: fully_shard(s.plain, mesh=DeviceMesh("meta", [0, 1])),
        ValueError,
        ("'meta'", "one of them"),
    ),
    Misuse(
        "parameter_of_a_tensor_parallel_model",
        lambda s: fully_shard(s.plain),
        ValueError,
        ("head.weight", "Replicate()", "shard plain parameters"),
        before=replicate_head,
        spoils="plain",
    ),
    Misuse(
        "half_on_meta",
        lambda s: fully_shard(s.plain),
        ValueError,
        ("blocks.0.norm.weight", "embedding.weight", "torch.device('meta')"),
        before=lambda s: s.plain.blocks[0].to("meta"),
        spoils="plain",
    ),
    Misuse(
        "resharding_to_three_ranks",
        lambda s: fully_shard(s.plain, reshard_after_forward=3),
        ValueError,
        ("reshard_after_forward", "factor of 2, not 3"),
    ),
    Misuse(
        "placement_function",
        lambda s: fully_shard(s.plain, shard_placement_fn=lambda p: Shard(0)),
        NotImplementedError,
        ("shard_placement_fn", "structure="),
    ),
    Misuse(
        "offloading",
        lambda s: fully_shard(s.plain, offload_policy=torch_fsdp.CPUOffloadPolicy()),
        NotImplementedError,
        ("CPUOffloadPolicy", "OffloadPolicy()"),
    ),
    Misuse(
        "ignored_names",
        lambda s: fully_shard(s.plain, ignored_params={"head.weight"}),
        TypeError,
        ("'head.weight'", "get_parameter"),
    ),
    Misuse(
        "precision_as_a_dtype",
        lambda s: fully_shard(s.plain, mp_policy=torch.bfloat16),
        TypeError,
        ("torch.bfloat16", "MixedPrecisionPolicy(param_dtype="),
    ),
    Misuse(
        "precision_of_integers",
        lambda s: fully_shard(s.plain, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.int8)),
        ValueError,
        ("reduce_dtype", "torch.int8", "floating dtype"),
    ),
    Misuse(
        "optimizer_of_torch",
        lambda s: fully_shard(s.plain, optimizer=torch.optim.SGD(s.plain.parameters())),
        TypeError,
        ("SGD", "after fully_shard"),
    ),
    Misuse(
        "optimizer_that_has_stepped",
        lambda s: fully_shard(s.plain, optimizer=s.other),
        RuntimeError,
        ("embedding.weight", "before the first step"),
        before=step_plain,
        spoils="plain",
    ),
    Misuse(
        "optimizer_forgotten_in_one_call",
        lambda s: fully_shard(s.plain, optimizer=s.other),
        ValueError,
        ("norm.weight", "every call"),
        before=forget_optimizer,
    ),
    Misuse(
        "structure_of_the_wrong_type",
        lambda s: fully_shard(s.plain, structure=lambda fqn, p: "rows"),
        TypeError,
        ("'embedding.weight'", "'rows'", "RowPanels"),
    ),
    Misuse(
        "structure_for_all",
        lambda s: fully_shard(s.plain, structure=FullMatrix()),
        TypeError,
        ("FullMatrix()", "lambda fqn, parameter"),
    ),
    Misuse(
        "structure_that_does_not_fit",
        lambda s: fully_shard(s.plain, structure=lambda fqn, p: FullMatrix()),
        ValueError,
        ("blocks.0.norm.weight", "(12,)", "element-wise"),
    ),
    Misuse(
        "sparse_gradients",
        lambda s: fully_shard(s.plain),
        NotImplementedError,
        ("embedding.weight", "sparse=False"),
        before=sparse_embedding,
        spoils="plain",
    ),
    Misuse(
        "parameter_without_a_shape",
        lambda s: fully_shard(s.plain),
        ValueError,
        ("head.weight", "before fully_shard"),
        before=lazy_head,
        spoils="plain",
    ),
    Misuse(
        "parameter_of_another_class",
        lambda s: fully_shard(s.plain),
        NotImplementedError,
        ("head.weight", "TwoTensor", "ignored_params"),
        before=subclass_head,
        spoils="plain",
    ),
    Misuse(
        "sharded_by_torch",
        lambda s: fully_shard(s.plain),
        ValueError,
        ("Small", "torch's fully_shard", "one place"),
        before=lambda s: torch_fsdp.fully_shard(s.plain),
        spoils="plain",
    ),
    Misuse(
        "wrapped_by_ddp",
        lambda s: fully_shard(DistributedDataParallel(s.plain)),
        ValueError,
        ("DistributedDataParallel", "the module that it wraps"),
    ),
    Misuse(
        "gradients_from_before",
        lambda s: fully_shard(s.plain),
        ValueError,
        ("embedding.weight", "zero_grad()"),
        before=backward_of_plain,
        spoils="plain",
    ),
    Misuse(
        "gradient_hooks_from_before",
        lambda s: fully_shard(s.plain),
        ValueError,
        ("head.weight", "register_post_accumulate_grad_hook"),
        before=hook_on_plain,
        spoils="plain",
    ),
    # -- modules that are sharded
    Misuse(
        "prefetch_of_an_unsharded_module",
        lambda s: s.model.set_modules_to_forward_prefetch([s.plain]),
        ValueError,
        ("Small", "call fully_shard"),
    ),
    Misuse(
        "prefetch_of_one_module",
        lambda s: s.model.set_modules_to_backward_prefetch(s.model.blocks[0]),
        TypeError,
        ("Block", "[module]"),
    ),
    Misuse(
        "unsupported_method",
        lambda s: s.model.set_unshard_in_backward(False),
        NotImplementedError,
        ("set_unshard_in_backward", "needs the parameters"),
    ),
    Misuse(
        "gradients_divided_by_nothing",
        lambda s: s.model.set_gradient_divide_factor(0),
        ValueError,
        ("set_gradient_divide_factor", "positive number", "got 0"),
    ),
    Misuse(
        "unused_parameters_left_out",
        lambda s: s.model.set_reduce_scatter_unused_params(False),
        NotImplementedError,
        ("whole bucket", "pass True"),
    ),
    Misuse(
        "reset_below_the_root",
        lambda s: s.model.blocks[0].reset_iter_state(),
        RuntimeError,
        ("Block", "on the root, Small"),
        before=run,
    ),
    Misuse(
        "deepcopy_of_a_module",
        lambda s: copy.deepcopy(s.model),
        CopyRefused,
        ("Small", "before fully_shard", "state_dict"),
    ),
    Misuse(
        "pickle_of_a_module",
        lambda s: pickle.dumps(s.model.blocks[0]),
        CopyRefused,
        ("Block", "state_dict"),
    ),
    Misuse(
        "resharding_later_to_three_ranks",
        lambda s: s.model.set_reshard_after_forward(3),
        ValueError,
        ("got 3", "a bool"),
    ),
    Misuse(
        "forward_on_meta",
        lambda s: loss_of(s.plain, 1),
        RuntimeError,
        ("embedding.weight", "to_empty"),
        before=on_meta,
        spoils="plain",
    ),
    Misuse(
        "parameter_of_another_shape",
        lambda s: loss_of(s.model, 1),
        ValueError,
        ("head.weight", "(3, 12)", "(31, 12)"),
        before=other_shape,
        spoils="model",
    ),
    Misuse(
        "parameter_deleted",
        lambda s: loss_of(s.model, 1),
        RuntimeError,
        ("head.weight", "deleted"),
        before=delete_head,
        spoils="model",
    ),
    Misuse(
        "parameter_added",
        lambda s: loss_of(s.model, 1),
        RuntimeError,
        ("blocks.0.up.adapter", "before fully_shard", "ignored_params"),
        before=add_adapter,
        spoils="model",
    ),
    Misuse(
        "module_of_two_roots",
        lambda s: loss_of(s.plain, 1),
        RuntimeError,
        ("blocks.0", "Small", "what holds both"),
        before=second_root,
        spoils="plain",
    ),
    Misuse(
        "group_without_a_root",
        run_child,
        RuntimeError,
        ("Block", "the model that holds them"),
        before=group_without_root,
    ),
    # -- ranks that differ
    Misuse(
        "ignored_on_one_rank",
        lambda s: loss_of(s.plain, 1),
        RuntimeError,
        ("ranks 0 and 1", "the same arguments"),
        before=ignore_on_one_rank,
        spoils="plain",
        alone=True,
    ),
    Misuse(
        "one_more_call_on_one_rank",
        lambda s: loss_of(s.plain, 1),
        RuntimeError,
        ("ranks 0 and 1", "fully_shard calls", "the same calls"),
        before=one_more_call_on_one_rank,
        spoils="plain",
        alone=True,
    ),
]
