"""Misuses of sharded tensors, optimizers, gradients and checkpoints."""

import torch
import torch.distributed as dist
from rows import Misuse, Scene
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.distributed.tensor.placement_types import Placement

import vfsdp_optim
from sharding import RaggedDTensor, RaggedShard
from sharding.checkpoint.full_state import load_full_state_dict
from small_models import loss_of, shard

S0 = Shard(0)


def shard_late(s: Scene) -> None:
    s.other = vfsdp_optim.AdamW(s.plain.named_parameters())
    shard(s.plain)
    loss_of(s.plain, 1).backward()


def shard_late_of_torch(s: Scene) -> None:
    s.other = torch.optim.AdamW(s.plain.parameters())
    shard(s.plain)
    loss_of(s.plain, 1).backward()


def gradient_cut_otherwise(s: Scene) -> None:
    halves = RaggedShard.from_range(2, s.head.numel(), 0, s.head.numel() // 2, 2)
    s.head.grad = s.head.detach().redistribute(placements=[halves])


def plain_gradient(s: Scene) -> None:
    s.head.grad = torch.zeros(31, 12)


def options_of_one_rank(s: Scene) -> None:
    groups = vfsdp_optim.param_groups(s.model)
    s.other = vfsdp_optim.Muon(groups, ns_steps=4 + dist.get_rank())
    loss_of(s.model, 1).backward()


def rule_of_one_rank(s: Scene) -> None:
    choice = "skip" if dist.get_rank() == 0 else "ignore"
    s.other = vfsdp_optim.AdamW(s.model.named_parameters(), on_nonfinite=choice)
    loss_of(s.model, 1).backward()


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


def foreign_parameter(placement: Placement = S0) -> nn.Parameter:
    mesh = init_device_mesh("cpu", (2,))
    return nn.Parameter(DTensor.from_local(torch.ones(4, 4), mesh, [placement]))


def replicas_of_shards(s: Scene) -> None:
    s.other = vfsdp_optim.AdamW(s.model.named_parameters(), process_group=dist.group.WORLD)
    loss_of(s.model, 1).backward()


def set_gradients_of_zeros(s: Scene) -> None:
    for p in s.model.parameters():
        p.grad = torch.zeros_like(p)


def clip_with_foreign_tensors(s: Scene) -> None:
    foreign, plain = foreign_parameter(), nn.Parameter(torch.ones(3))
    foreign.grad, plain.grad = foreign.detach().clone(), torch.ones(3)
    nn.utils.clip_grad_norm_([*s.model.parameters(), foreign, plain], 1.0)


def keep_graph_of_gradients(s: Scene) -> None:
    loss_of(s.model, 1).backward(create_graph=True)


def muon_group(s: Scene, **options: object) -> vfsdp_optim.Muon:
    return vfsdp_optim.Muon([{"params": [("head.weight", s.head)], **options}])


MISUSES_OF_TRAINING = [
    # -- sharded tensors
    Misuse(
        "matmul",
        lambda s: s.head @ torch.ones(12, 2),
        NotImplementedError,
        ("aten.mm", "full_tensor()"),
    ),
    Misuse(
        "cat",
        lambda s: torch.cat([s.head, s.head]),
        NotImplementedError,
        ("aten.cat", "full_tensor()"),
    ),
    Misuse(
        "transpose",
        lambda s: s.head.T,
        NotImplementedError,
        ("aten.permute", "full_tensor()"),
    ),
    Misuse(
        "two_layouts",
        lambda s: s.head + s.model.embedding.weight,
        NotImplementedError,
        ("aten.add", "cut alike", "redistribute"),
    ),
    Misuse(
        "assigned_data",
        lambda s: setattr(s.head, "data", torch.zeros(31, 12)),
        RuntimeError,
        (".data", "copy_(value)"),
    ),
    Misuse(
        "cut_by_columns",
        lambda s: s.head.redistribute(placements=[Shard(1)]),
        NotImplementedError,
        ("Shard(dim=1)", "full_tensor()"),
    ),
    Misuse(
        "copy_of_another_shape",
        lambda s: s.head.detach().copy_(torch.zeros(3, 12)),
        NotImplementedError,
        ("(3, 12)", "full shape"),
    ),
    Misuse(
        "piece_of_another_size",
        lambda s: RaggedDTensor.from_local(
            torch.zeros(3), s.head.device_mesh, s.head.placement, s.head.shape
        ),
        ValueError,
        ("(3,)", "the piece of rank"),
    ),
    # -- optimizers
    Misuse(
        "muon_of_vectors",
        lambda s: vfsdp_optim.Muon(s.model.named_parameters()),
        ValueError,
        ("norm.weight", "(12,)", "param_groups(model)", 'algorithm="adamw"'),
    ),
    Misuse(
        "muon_of_stacked_matrices",
        lambda s: vfsdp_optim.Muon([("experts", nn.Parameter(torch.zeros(2, 3, 4)))]),
        ValueError,
        ("experts", "(2, 3, 4)", "`matrices`"),
    ),
    Misuse(
        "algorithm_that_does_not_exist",
        lambda s: muon_group(s, algorithm="sgd"),
        ValueError,
        ("'sgd'", "'adamw', 'muon'"),
    ),
    Misuse(
        "option_of_another_algorithm",
        lambda s: muon_group(s, amsgrad=True),
        ValueError,
        ("'amsgrad'", "it has"),
    ),
    Misuse(
        "momentum_for_adamw",
        lambda s: vfsdp_optim.Muon(
            vfsdp_optim.param_groups(s.model, adamw={"lr": 1e-3, "momentum": 0.9})
        ),
        ValueError,
        ("'adamw'", "'momentum'", "it has"),
    ),
    Misuse(
        "negative_learning_rate",
        lambda s: muon_group(s, lr=-0.1),
        ValueError,
        ("param group 0", "lr", ">= 0", "-0.1"),
    ),
    Misuse(
        "learning_rate_as_text",
        lambda s: muon_group(s, lr="0.1"),
        ValueError,
        ("param group 0", "lr", "'0.1'"),
    ),
    Misuse(
        "parameter_in_two_groups",
        lambda s: vfsdp_optim.AdamW([{"params": [s.head]}, {"params": [s.head]}]),
        ValueError,
        ("more than one parameter group",),
    ),
    Misuse(
        "fused_adamw",
        lambda s: vfsdp_optim.AdamW([s.head], fused=True),
        NotImplementedError,
        ("fused=True", "leave it out"),
    ),
    Misuse(
        "columns_for_muon",
        lambda s: vfsdp_optim.Muon([("layer.weight", foreign_parameter(Shard(1)))]),
        NotImplementedError,
        ("layer.weight", "Shard(dim=1)", "vfsdp_optim.fully_shard", 'algorithm="adamw"'),
    ),
    Misuse(
        "partial_sums_as_parameter",
        lambda s: vfsdp_optim.AdamW([("layer.weight", foreign_parameter(Partial()))]),
        NotImplementedError,
        ("layer.weight", "Partial", "Replicate()"),
    ),
    Misuse(
        "process_group_for_shards",
        lambda s: s.other.step(),
        RuntimeError,
        ("process_group", "leave it out"),
        before=replicas_of_shards,
    ),
    Misuse(
        "pattern_that_matches_nothing",
        lambda s: vfsdp_optim.param_groups(s.model, matrices={"layers.*": None}),
        ValueError,
        ("'layers.*'", "head.weight"),
    ),
    Misuse(
        "patterns_that_contradict",
        lambda s: vfsdp_optim.param_groups(
            s.model, matrices={"head.*": None, "*d.weight": "m n -> m n"}
        ),
        ValueError,
        ("head.weight", "'head.*'", "exclude each other"),
    ),
    Misuse(
        "pattern_that_does_not_fit",
        lambda s: vfsdp_optim.param_groups(s.model, matrices={"head.weight": "e m n -> e m n"}),
        ValueError,
        ("head.weight", "(31, 12)"),
    ),
    Misuse(
        "parameter_without_a_rule",
        lambda s: vfsdp_optim.param_groups(nn.LSTM(4, 4)),
        ValueError,
        ("weight_ih_l0", "LSTM", "matrices={'weight_ih_l0': None} for AdamW"),
    ),
    Misuse(
        "groups_of_parameters",
        lambda s: vfsdp_optim.param_groups(s.model.parameters()),
        TypeError,
        ("generator", "the model itself"),
    ),
    Misuse(
        "groups_with_a_number",
        lambda s: vfsdp_optim.param_groups(s.model, adamw=3e-4),
        TypeError,
        ("adamw", "0.0003", "{'lr': 3e-4}"),
    ),
    Misuse(
        "sharded_after_the_optimizer_was_built",
        lambda s: s.other.step(),
        RuntimeError,
        ("embedding.weight", "after fully_shard", "optimizer="),
        before=shard_late,
    ),
    Misuse(
        "sharded_after_torch_s_optimizer_was_built",
        lambda s: s.other.step(),
        RuntimeError,
        ("AdamW", "embedding.weight", "after fully_shard"),
        before=shard_late_of_torch,
    ),
    Misuse(
        "optimizer_that_differs_on_one_rank",
        lambda s: s.other.step(),
        RuntimeError,
        ("ranks 0 and 1", "ns_steps", "the same arguments"),
        before=options_of_one_rank,
        alone=True,
    ),
    Misuse(
        "nonfinite_rule_that_differs_on_one_rank",  # the rank with a rule would wait for the others
        lambda s: s.other.step(),
        RuntimeError,
        ("ranks 0 and 1", "on_nonfinite=skip", "the same arguments"),
        before=rule_of_one_rank,
        alone=True,
    ),
    # -- gradients
    Misuse(
        "step_with_a_gradient_cut_otherwise",
        lambda s: s.other.step(),
        TypeError,
        ("head.weight", "RaggedShard", "zeros_like(p)"),
        before=gradient_cut_otherwise,
    ),
    Misuse(
        "backward_onto_a_plain_gradient",
        lambda s: loss_of(s.model, 1).backward(),
        TypeError,
        ("head.weight", "(31, 12)", "zeros_like(p)"),
        before=plain_gradient,
    ),
    Misuse(
        "gradients_of_gradients",
        keep_graph_of_gradients,
        NotImplementedError,
        (".weight", "torch.autograd.grad"),
    ),
    Misuse(
        "clipping_with_foreign_and_plain_tensors",
        clip_with_foreign_tensors,
        RuntimeError,
        ("mixed torch.Tensor and DTensor",),
        before=set_gradients_of_zeros,
    ),
    # -- checkpoints
    Misuse(
        "weights_of_another_shape",
        load_wrong_shape,
        RuntimeError,
        ("head.weight", "(3, 12)", "nothing was written"),
    ),
    Misuse(
        "incomplete_weights",
        load_incomplete,
        ValueError,
        ("head.weight",),
    ),
    Misuse(
        "weights_in_a_dict_of_parts_without_an_optimizer",
        lambda s: load_full_state_dict(s.model, state={"model": {}}),
        ValueError,
        ("unexpected ['model']", "state is the model's alone"),
    ),
    Misuse(
        "optimizer_state_of_another_shape",
        load_optimizer_state_of_wrong_shape,
        ValueError,
        (".weight.momentum_buffer", "(3, 3)", "another parameter"),
    ),
    Misuse(
        "optimizer_state_of_another_algorithm",
        load_state_of_adamw,
        ValueError,
        ("param group 0", "algorithm='adamw'", "the saved value"),
    ),
]
