"""What users get wrong, as rows: the misuse, the error, what its message names and how it cures.

Every row works on a fresh `Scene`. A row that must change something first, which is allowed, does
it in `before`; `spoils` says whether that leaves one of the models of no further use.
"""

import copy
import pickle
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import vfsdp_optim
from sharding import FullMatrix, MixedPrecisionPolicy, RaggedDTensor, RaggedShard, fully_shard
from sharding.loading import load_full_state_dict
from small_models import Block, Small, build, loss_of, make_optimizer, shard


class Scene:
    """A sharded model with its optimizer, and an equal model that is not sharded yet."""

    def __init__(self) -> None:
        self.model, self.plain = shard(build()), build()
        self.optimizer = make_optimizer("muon", self.model)

    @property
    def head(self) -> RaggedDTensor:
        """A sharded parameter, 31 x 12."""
        return self.model.get_parameter("head.weight")

    def train(self) -> None:
        """One step of the sharded model."""
        loss_of(self.model, 1).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def nothing(scene: Scene) -> None:
    """What most rows need before."""


@dataclass(frozen=True)
class Misuse:
    """One row of the table."""

    name: str
    misuse: Callable[[Scene], object]
    error: type[Exception]
    words: tuple[str, ...]  # the parameter or value, and the cure
    before: Callable[[Scene], object] = nothing
    spoils: str = ""  # "model" or "plain"


# -- preparations ---------------------------------------------------------------------------------


def tie_blocks(s: Scene) -> None:
    s.plain.blocks[1].up.weight = s.plain.blocks[0].up.weight
    fully_shard(s.plain.blocks[0])


def replicate_head(s: Scene) -> None:
    mesh = init_device_mesh("cpu", (2,))
    s.plain.head.weight = nn.Parameter(
        distribute_tensor(s.plain.head.weight.detach(), mesh, [Replicate()])
    )


def step_plain(s: Scene) -> None:
    s.optimizer = vfsdp_optim.AdamW(s.plain.named_parameters())
    loss_of(s.plain, 1).backward()
    s.optimizer.step()
    s.optimizer.zero_grad()


def optimizer_of_plain(s: Scene) -> None:
    s.optimizer = vfsdp_optim.AdamW(s.plain.named_parameters())


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


def second_root(s: Scene) -> None:
    loss_of(s.model, 1)
    s.plain.blocks[0] = s.model.blocks[0]
    shard_rest(s.plain)


def shard_rest(model: nn.Module) -> None:
    fully_shard(model.blocks[1])
    fully_shard(model)


def group_without_root(s: Scene) -> None:
    fully_shard(list(s.plain.blocks))


def shard_late(s: Scene) -> None:
    optimizer_of_plain(s)
    shard(s.plain)
    loss_of(s.plain, 1).backward()


def shard_late_of_torch(s: Scene) -> None:
    s.optimizer = torch.optim.AdamW(s.plain.parameters())
    shard(s.plain)
    loss_of(s.plain, 1).backward()


def gradient_cut_otherwise(s: Scene) -> None:
    halves = RaggedShard.from_range(2, s.head.numel(), 0, s.head.numel() // 2, 2)
    s.head.grad = s.head.detach().redistribute(placements=[halves])


def plain_gradient(s: Scene) -> None:
    s.head.grad = torch.zeros(31, 12)


def ignore_on_one_rank(s: Scene) -> None:
    fully_shard(s.plain, ignored_params={s.plain.head.weight} if dist.get_rank() else set())


def one_more_call_on_one_rank(s: Scene) -> None:
    if dist.get_rank():
        fully_shard(nn.Linear(3, 3))
    shard(s.plain)


def options_of_one_rank(s: Scene) -> None:
    groups = vfsdp_optim.param_groups(s.model)
    s.optimizer = vfsdp_optim.Muon(groups, ns_steps=4 + dist.get_rank())
    loss_of(s.model, 1).backward()


# -- misuses that take more than an expression ----------------------------------------------------


def load_wrong_shape(s: Scene) -> None:
    state = {name: torch.zeros(value.shape) for name, value in s.model.state_dict().items()}
    s.model.load_state_dict({**state, "head.weight": torch.zeros(3, 12)})


def load_incomplete(s: Scene) -> None:
    state = {name: torch.zeros(value.shape) for name, value in s.model.state_dict().items()}
    del state["head.weight"]
    load_full_state_dict(s.model, state=state)


def load_optimizer_state_of_wrong_shape(s: Scene) -> None:
    state = s.optimizer.state_dict()
    first = {**state["state"][0], "momentum_buffer": torch.zeros(3, 3)}
    s.optimizer.load_state_dict({**state, "state": {**state["state"], 0: first}})


def load_state_of_adamw(s: Scene) -> None:
    state = s.optimizer.state_dict()
    groups = [{**state["param_groups"][0], "algorithm": "adamw"}, *state["param_groups"][1:]]
    s.optimizer.load_state_dict({**state, "param_groups": groups})


def clip_with_a_foreign_tensor(s: Scene) -> None:
    mesh = init_device_mesh("cpu", (2,))
    foreign = nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)]))
    s.head.grad, foreign.grad = torch.zeros_like(s.head), foreign.detach().clone()
    nn.utils.clip_grad_norm_([s.head, foreign], 1.0)


def keep_graph_of_gradients(s: Scene) -> None:
    loss_of(s.model, 1).backward(create_graph=True)


def muon_group(s: Scene, **options: object) -> vfsdp_optim.Muon:
    return vfsdp_optim.Muon([{"params": [("head.weight", s.head)], **options}])


BF16 = torch.bfloat16
MISUSES = [
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
    Misuse("sharded_twice", lambda s: fully_shard(s.model), ValueError, ("Small", "once")),
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
        "mesh_of_two_dimensions",
        lambda s: fully_shard(s.plain, mesh=init_device_mesh("cpu", (1, 2))),
        ValueError,
        ("(1, 2)", "mesh['name']"),
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
        NotImplementedError,
        ("reshard_after_forward=3", "True, False or None"),
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
        lambda s: fully_shard(s.plain, mp_policy=BF16),
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
        lambda s: fully_shard(s.plain, optimizer=s.optimizer),
        RuntimeError,
        ("embedding.weight", "before the first step"),
        before=step_plain,
        spoils="plain",
    ),
    Misuse(
        "optimizer_forgotten_in_one_call",
        lambda s: fully_shard(s.plain, optimizer=s.optimizer),
        ValueError,
        ("norm.weight", "every call"),
        before=forget_optimizer,
    ),
    Misuse(
        "structure_that_is_none",
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
]
