"""Rows "a call of FSDP2 -> here": what of torch people use around `fully_shard`."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint.state_dict as dcp_state
from fsdp2_calls import Call, Net, Scene, full, gradients, refused
from torch import Tensor, nn
from torch.distributed._composable import checkpoint as composable_checkpoint
from torch.distributed._composable import replicate
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

WHOLE = dcp_state.StateDictOptions(full_state_dict=True)
BROADCAST = dcp_state.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
Optimizer = Callable[..., torch.optim.Optimizer]


def stepped(scene: Scene, make: Optimizer = torch.optim.AdamW, steps: int = 2) -> Any:
    """A model and its optimizer after a few steps."""
    model = scene.model()
    optimizer = make(model.parameters(), lr=0.05)
    for _ in range(steps):
        scene.loss(model).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def weights(model: nn.Module) -> Any:
    """Every weight, whole."""
    return full(dict(model.named_parameters()))


def _optimizer(make: Optimizer) -> Callable[[Scene], Any]:
    return lambda scene: weights(stepped(scene, make)[0])


def _redistributed(scene: Scene) -> Any:
    weight = scene.model().a.weight
    return [weight.redistribute(placements=[Replicate()]).to_local(), weight.full_tensor()]


def _listed_while_gathered(scene: Scene) -> Any:
    model = scene.model()
    model.unshard()
    return [isinstance(p, DTensor) for p in model.parameters()]


def _materialised(scene: Scene) -> Any:
    with torch.device("meta"):
        model = scene.model()
    model.to_empty(device="cpu")
    for p in model.parameters():
        nn.init.constant_(p, 0.25)
    return scene.trained(model)


def _converted(scene: Scene) -> Any:
    model = scene.model().to(torch.float64)
    model(scene.x.double()).square().mean().backward()
    return gradients(model)


def _seeded(scene: Scene) -> Any:
    model = scene.model()
    torch.manual_seed(3)
    nn.init.normal_(model.a.weight)
    return [full(model.a.weight).std() > 0.5, model.a.weight.shape]


def _frozen(scene: Scene) -> Any:
    net = scene.net()
    net.a.requires_grad_(False)
    scene.fully_shard(net.a)
    return scene.trained(scene.fully_shard(net))


def _clipped(scene: Scene) -> Any:
    model = scene.model()
    scene.loss(model).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    return [norm, gradients(model)]


def _norm_kind(scene: Scene) -> Any:
    model = scene.model()
    scene.loss(model).backward()
    return isinstance(nn.utils.clip_grad_norm_(model.parameters(), 1.0), DTensor)


def _clipped_in_two(scene: Scene) -> Any:
    model = scene.model()
    scene.loss(model).backward()
    norm = nn.utils.get_total_norm([p.grad for p in model.parameters()])
    nn.utils.clip_grads_with_norm_(model.parameters(), 0.01, norm)
    return gradients(model)


def _step_in_backward(scene: Scene) -> Any:
    model = scene.model()
    for p in model.parameters():
        optimizer = torch.optim.SGD([p], lr=0.1)
        p.register_post_accumulate_grad_hook(partial(_step_of_one, optimizer))
    scene.loss(model).backward()
    return weights(model)


def _step_of_one(optimizer: torch.optim.Optimizer, parameter: Tensor) -> None:
    optimizer.step()
    optimizer.zero_grad()


def _scaled(scene: Scene) -> Any:
    model = scene.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(scene.loss(model)).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    return weights(model)


class Recomputes(Net):
    """Its first layer runs again in backward."""

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(checkpoint(self.a, x, use_reentrant=False)))


def _checkpointed(scene: Scene) -> Any:
    torch.manual_seed(0)
    net = Recomputes()
    scene.fully_shard(net.a)
    return scene.trained(scene.fully_shard(net))


def _wrapped(scene: Scene) -> Any:
    net = scene.net()
    apply_activation_checkpointing(net, check_fn=lambda module: module is net.a)
    scene.fully_shard(net.a)
    gradient = scene.trained(scene.fully_shard(net))
    return {name.replace("_checkpoint_wrapped_module.", ""): g for name, g in gradient.items()}


def _composable(scene: Scene) -> Any:
    net = scene.net()
    composable_checkpoint(net.a)
    scene.fully_shard(net.a)
    return scene.trained(scene.fully_shard(net))


def _compiled(scene: Scene) -> Any:
    net = scene.net()
    net.a.compile(backend="aot_eager")
    scene.fully_shard(net.a)
    return scene.trained(scene.fully_shard(net))


def _autocast(scene: Scene) -> Any:
    model = scene.model()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = scene.loss(model)
    loss.backward()
    return gradients(model)


def _evaluated(scene: Scene) -> Any:
    model = scene.model().eval()
    with torch.no_grad():
        return model(scene.x)


def _copied(scene: Scene) -> Any:
    return copy.deepcopy(scene.model())


def _tensor_parallel(scene: Scene) -> Any:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "tensor"))
    net = scene.net()
    parallelize_module(net, mesh["tensor"], {"a": ColwiseParallel(output_layouts=Replicate())})
    return scene.trained(scene.fully_shard(net, mesh=mesh["data"]))


def _penalised(scene: Scene) -> Any:
    model = scene.model()
    (scene.loss(model) + 0.1 * model.a.weight.square().sum()).backward()
    return gradients(model)


def _jacobian_product(scene: Scene) -> Any:
    return list(torch.func.jvp(scene.model(), (scene.x,), (torch.ones_like(scene.x),)))


def _functional(scene: Scene) -> Any:
    model = scene.model()
    with torch.no_grad():
        others = {name: p.detach() * 2 for name, p in model.named_parameters()}
        output = torch.func.functional_call(model, others, (scene.x,))
    return [output, weights(model)]


def _functional_whole(scene: Scene) -> Any:
    model, others = scene.model(), {"b.bias": torch.ones(6, requires_grad=True)}
    torch.func.functional_call(model, others, (scene.x,)).sum().backward()
    return [weights(model), others["b.bias"].grad]


def _replicated(scene: Scene) -> Any:
    net = scene.net()
    scene.fully_shard(net.a)
    return scene.trained(replicate(net))


def _pipelined(scene: Scene) -> Any:
    """One stage a rank."""
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (2, 1), mesh_dim_names=("pp", "dp"))
    stage = scene.fully_shard(scene.net(), mesh=mesh["dp"])
    pipe = PipelineStage(stage, rank, 2, torch.device("cpu"), group=mesh["pp"].get_group())
    schedule = Schedule1F1B(pipe, n_microbatches=2, loss_fn=nn.functional.mse_loss)
    schedule.step(*(() if rank else (scene.x,)), **({"target": scene.x} if rank else {}))
    return gradients(stage)


def _state_dict(scene: Scene) -> Any:
    return full(stepped(scene)[0].state_dict())


def _load_sharded(scene: Scene) -> Any:
    state, model = stepped(scene)[0].state_dict(), scene.model()
    model.load_state_dict(state)
    return weights(model)


def _load_whole(scene: Scene) -> Any:
    model = scene.model()
    model.load_state_dict({name: torch.ones_like(p) for name, p in scene.net().named_parameters()})
    return weights(model)


def _get_whole(scene: Scene) -> Any:
    model, optimizer = stepped(scene)
    state = dcp_state.get_optimizer_state_dict(model, optimizer, options=WHOLE)["state"]
    return [dcp_state.get_model_state_dict(model, options=WHOLE), state]


def _set_whole(scene: Scene, options: dcp_state.StateDictOptions) -> Any:
    model = scene.model()
    state: dict[str, Any] = {name: p * 2 for name, p in scene.net().state_dict().items()}
    if options.broadcast_from_rank0 and dist.get_rank() > 0:
        state = {}
    dcp_state.set_model_state_dict(model, state, options=options)
    return weights(model)


def _set_optimizer(scene: Scene) -> Any:
    model, optimizer = stepped(scene)
    state = dcp_state.get_optimizer_state_dict(model, optimizer)
    other, fresh = stepped(scene, steps=0)
    dcp_state.set_optimizer_state_dict(other, fresh, state)
    return full(list(dcp_state.get_optimizer_state_dict(other, fresh)["state"].values()))


def _saved(scene: Scene) -> Any:
    folders = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folders)
    model, optimizer = stepped(scene)
    parts = dict(
        zip(("model", "optimizer"), dcp_state.get_state_dict(model, optimizer), strict=True)
    )
    dcp.save(parts, checkpoint_id=folders[0])
    other, fresh = stepped(scene, steps=1)
    parts = dict(zip(("model", "optimizer"), dcp_state.get_state_dict(other, fresh), strict=True))
    dcp.load(parts, checkpoint_id=folders[0])
    dcp_state.set_state_dict(
        other, fresh, model_state_dict=parts["model"], optim_state_dict=parts["optimizer"]
    )
    return [weights(other), full(parts["optimizer"]["state"])]


def _distributed(scene: Scene) -> Any:
    model = scene.model()
    state = {
        name: distribute_tensor(torch.ones(p.shape), p.device_mesh, p.placements)
        for name, p in model.named_parameters()
    }
    model.load_state_dict(state, assign=True)
    return weights(model)


CLIENTS = (
    Call("DTensor", "p.full_tensor(), p.redistribute(...)", _redistributed),
    Call(
        "DTensor",
        "p.placements",
        lambda s: isinstance(s.model().a.weight.placements[0], Shard),
        "other",
        "`RaggedShard`: a bucket is cut, so that a rank may hold nothing of a parameter, or part "
        "of a row; `to_local()` is that piece.",
    ),
    Call(
        "parameters",
        "model.unshard(), model.parameters()",
        _listed_while_gathered,
        "other",
        "`model.parameters()` are always the sharded ones; `module.weight` is the gathered one.",
    ),
    Call("meta", 'torch.device("meta"), to_empty(), nn.init', _materialised),
    Call(
        "nn.init",
        "nn.init.normal_(p)",
        _seeded,
        words="Here with the same values at every number of ranks.",
    ),
    Call("to", "model.to(dtype)", _converted),
    Call("frozen", "requires_grad_(False) of some", _frozen),
    *(
        Call("optim", f"torch.optim.{make.__name__}", _optimizer(make))
        for make in (torch.optim.AdamW, torch.optim.SGD)
    ),
    Call(
        "optim", "torch.optim.AdamW(fused=True)", _optimizer(partial(torch.optim.AdamW, fused=True))
    ),
    Call("hook", "p.register_post_accumulate_grad_hook(...)", _step_in_backward),
    Call("clip", "clip_grad_norm_(model.parameters(), ...)", _clipped),
    Call(
        "clip",
        "clip_grad_norm_(...).full_tensor()",
        _norm_kind,
        "other",
        "The norm is a plain tensor, the same on every rank: leave `.full_tensor()` out. Plain and "
        "sharded parameters may be clipped together.",
    ),
    Call("clip", "get_total_norm(), clip_grads_with_norm_()", _clipped_in_two),
    Call("scaler", 'torch.amp.GradScaler("cpu")', _scaled),
    Call("autocast", "torch.autocast(...)", _autocast),
    Call("eval", "torch.no_grad()", _evaluated),
    Call("checkpoint", "torch.utils.checkpoint.checkpoint(...)", _checkpointed),
    Call("checkpoint", "apply_activation_checkpointing(...)", _wrapped),
    Call("checkpoint", "composable checkpoint(module)", _composable),
    Call("compile", "module.compile()", _compiled),
    Call(
        "penalty",
        "loss + p.square().sum()",
        _penalised,
        "better",
        "Reductions give plain tensors; torch refuses to add a DTensor to one.",
    ),
    Call("func", "torch.func.jvp(model, ...)", _jacobian_product),
    Call("func", "torch.func.functional_call(model, sharded, ...)", _functional),
    Call(
        "func",
        "torch.func.functional_call(model, whole tensors, ...)",
        _functional_whole,
        "better",
        "They are used, and get their gradients; torch raises.",
    ),
    Call("replicate", "composable replicate(model) around sharded modules", _replicated),
    Call("pipelining", "PipelineStage, Schedule1F1B", _pipelined),
    refused("copy", "copy.deepcopy(model), pickle", _copied, "By torch, too."),
    Call(
        "tensor parallel",
        "parallelize_module(...) before",
        _tensor_parallel,
        words="Cut further as torch cuts, into torch's DTensors over both meshes.",
    ),
    Call("state_dict", "model.state_dict()", _state_dict),
    Call("state_dict", "model.load_state_dict(sharded)", _load_sharded),
    Call(
        "state_dict",
        "model.load_state_dict(whole tensors)",
        _load_whole,
        "better",
        "Each rank takes its part; torch raises.",
    ),
    Call("state_dict", "get_model_state_dict, get_optimizer_state_dict", _get_whole),
    Call("state_dict", "set_optimizer_state_dict", _set_optimizer),
    Call(
        "state_dict",
        "set_model_state_dict(full_state_dict=True)",
        partial(_set_whole, options=WHOLE),
        "refused",
        error=RuntimeError,
    ),
    refused(
        "state_dict",
        "set_model_state_dict(broadcast_from_rank0=True)",
        partial(_set_whole, options=BROADCAST),
    ),
    Call(
        "state_dict",
        "distribute_tensor(whole, p.device_mesh, p.placements)",
        _distributed,
        "refused",
        error=RuntimeError,
    ),
    Call("dcp", "dcp.save, dcp.load", _saved),
)
