"""Misuses of sharded tensors, optimizers, gradients and checkpoints."""

import torch
import torch.distributed as dist
from rows import Scene, step
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

import vfsdp_optim
from sharding import RaggedDTensor, RaggedShard
from sharding.checkpoint.full_state import load_full_state_dict
from small_models import loss_of, shard

S0 = Shard(0)
UNEVEN = _StridedShard(0, split_factor=3)  # of pieces that no other axis has cut


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


MISUSES_OF_TRAINING: dict[type[Exception], list[tuple]] = {
    NotImplementedError: [
        ("aten.mm|full_tensor()", lambda s: s.head @ torch.ones(12, 2)),
        ("aten.cat|full_tensor()", lambda s: torch.cat([s.head, s.head])),
        ("aten.select|transposed view|full_tensor()", lambda s: s.head.T[0]),
        ("aten.add|cut alike|redistribute", lambda s: s.head + s.model.embedding.weight),
        ("Shard(dim=1)|full_tensor()", lambda s: s.head.redistribute(placements=[Shard(1)])),
        ("(3, 12)|full shape", lambda s: s.head.detach().copy_(torch.zeros(3, 12))),
        (
            "fused=True|states='8bit'|leave one of them out",
            lambda s: vfsdp_optim.AdamW([s.head], fused=True, states="8bit"),
        ),
        (
            'layer.weight|StridedShard|strided shards where sizes divide evenly|algorithm="adamw"',
            lambda s: vfsdp_optim.Muon([("layer.weight", foreign_parameter(UNEVEN))]),
        ),
        (
            "layer.weight|Partial|Replicate()",
            lambda s: vfsdp_optim.AdamW([("layer.weight", foreign_parameter(Partial()))]),
        ),
        (".weight|torch.autograd.grad", keep_graph_of_gradients),
    ],
    RuntimeError: [
        (".data|copy_(value)", lambda s: setattr(s.head, "data", torch.zeros(31, 12))),
        ("process_group|leave it out", step, replicas_of_shards),
        ("embedding.weight|after fully_shard|optimizer=", step, shard_late),
        ("AdamW|embedding.weight|after fully_shard", step, shard_late_of_torch),
        ("ranks 0 and 1|ns_steps|the same arguments", step, options_of_one_rank, "", True),
        ("ranks 0 and 1|on_nonfinite=skip|the same arguments", step, rule_of_one_rank, "", True),
        ("mixed torch.Tensor and DTensor", clip_with_foreign_tensors, set_gradients_of_zeros),
        ("head.weight|(3, 12)|nothing was written", load_wrong_shape),
    ],
    ValueError: [
        (
            "(3,)|the piece of rank",
            lambda s: RaggedDTensor.from_local(
                torch.zeros(3), s.head.device_mesh, s.head.placement, s.head.shape
            ),
        ),
        (
            'norm.weight|(12,)|param_groups(model)|algorithm="adamw"',
            lambda s: vfsdp_optim.Muon(s.model.named_parameters()),
        ),
        (
            "experts|(2, 3, 4)|`matrices`",
            lambda s: vfsdp_optim.Muon([("experts", nn.Parameter(torch.zeros(2, 3, 4)))]),
        ),
        ("'sgd'|'adamw', 'muon'", lambda s: muon_group(s, algorithm="sgd")),
        ("'amsgrad'|it has", lambda s: muon_group(s, amsgrad=True)),
        (
            "'adamw'|'momentum'|it has",
            lambda s: vfsdp_optim.Muon(
                vfsdp_optim.param_groups(s.model, adamw={"lr": 0.001, "momentum": 0.9})
            ),
        ),
        ("param group 0|lr|>= 0|-0.1", lambda s: muon_group(s, lr=-0.1)),
        ("param group 0|lr|'0.1'", lambda s: muon_group(s, lr="0.1")),
        (
            "more than one parameter group",
            lambda s: vfsdp_optim.AdamW([{"params": [s.head]}, {"params": [s.head]}]),
        ),
        (
            "'layers.*'|none of 12|'blocks.*.up.weight' (2)",
            lambda s: vfsdp_optim.param_groups(s.model, matrices={"layers.*": None}),
        ),
        (
            "head.weight|'head.*'|exclude each other",
            lambda s: vfsdp_optim.param_groups(
                s.model, matrices={"head.*": None, "*d.weight": "m n -> m n"}
            ),
        ),
        (
            "head.weight|(31, 12)",
            lambda s: vfsdp_optim.param_groups(s.model, matrices={"head.weight": "e m n -> e m n"}),
        ),
        (
            "weight_ih_l0|LSTM|matrices={'weight_ih_l0': None} for AdamW",
            lambda s: vfsdp_optim.param_groups(nn.LSTM(4, 4)),
        ),
        ("head.weight", load_incomplete),
        (
            "unexpected ['model']|state is the model's alone",
            lambda s: load_full_state_dict(s.model, state={"model": {}}),
        ),
        (".weight.momentum_buffer|(3, 3)|another parameter", load_optimizer_state_of_wrong_shape),
        ("param group 0|algorithm='adamw'|the saved value", load_state_of_adamw),
    ],
    TypeError: [
        ("generator|the model itself", lambda s: vfsdp_optim.param_groups(s.model.parameters())),
        ("adamw|0.0003|{'lr': 3e-4}", lambda s: vfsdp_optim.param_groups(s.model, adamw=0.0003)),
        ("head.weight|RaggedShard|zeros_like(p)", step, gradient_cut_otherwise),
        ("head.weight|laid out as its parameter, in|got a Tensor", step, plain_gradient),
        (
            "head.weight.grad was set to a RaggedDTensor|p.grad.copy_(full)",
            lambda s: loss_of(s.model, 1).backward(),
            gradient_cut_otherwise,
        ),
        (
            "head.weight|(31, 12)|zeros_like(p)",
            lambda s: loss_of(s.model, 1).backward(),
            plain_gradient,
        ),
    ],
}
