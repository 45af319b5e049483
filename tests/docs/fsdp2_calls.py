"""Rows "a call of FSDP2 -> here": what a row is, and the rows of torch's own FSDP2 names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Shard


class Net(nn.Module):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 10), nn.Linear(10, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x)))

    def embed(self, x: Tensor) -> Tensor:
        """Another way into the module than `forward`."""
        return self.forward(x) * 2


class Scene:
    """What a row is tried on; `fully_shard` is torch's or ours."""

    def __init__(self, fully_shard: Callable[..., Any]) -> None:
        self.fully_shard = fully_shard
        self.x = torch.randn(4, 6, generator=torch.Generator().manual_seed(dist.get_rank()))

    def net(self) -> Net:
        """The same weights on every rank."""
        torch.manual_seed(0)
        return Net()

    def model(self, **options: Any) -> Any:
        """A net, sharded in two calls."""
        net = self.net()
        self.fully_shard(net.a, **options)
        return self.fully_shard(net, **options)

    def loss(self, model: nn.Module, scale: float = 1.0) -> Tensor:
        """A loss of this rank's own inputs."""
        return model(self.x * scale).float().square().mean()

    def trained(self, model: nn.Module) -> dict[str, Tensor]:
        """The gradients of one backward."""
        self.loss(model).backward()
        return gradients(model)

    def sharded(self, **options: Any) -> dict[str, Tensor]:
        """The gradients of a model that these arguments shard."""
        return self.trained(self.model(**options))


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Every gradient, whole."""
    return {name: full(p.grad) for name, p in model.named_parameters() if p.grad is not None}


def full(value: Any) -> Any:
    """`value` with every sharded tensor whole."""
    if isinstance(value, dict):
        return {key: full(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [full(each) for each in value]
    if isinstance(value, DTensor):
        value = value.full_tensor()
    return value.detach().clone() if isinstance(value, Tensor) else value


@dataclass(frozen=True)
class Call:
    """One row.

    Attributes:
        name: The argument, method, field or name of torch that it is about.
        call: What a user writes.
        run: Does it, and returns what is compared between torch's and ours.
        here: "same": it returns what it does with torch's. "better", "other": it works, and the
            words say how; with torch's it raises, or returns something else. "refused": it raises
            `error`, whose text the page quotes.
    """

    name: str
    call: str
    run: Callable[[Scene], Any]
    here: str = "same"
    words: str = ""
    error: type[Exception] | None = None


def refused(name: str, call: str, run: Callable[[Scene], Any], words: str = "") -> Call:
    """A row of what is valid in torch and not supported here."""
    return Call(name, call, run, "refused", words, NotImplementedError)


def _list_of_modules(scene: Scene) -> Any:
    net = scene.net()
    scene.fully_shard([net.a, net.b])
    return scene.trained(scene.fully_shard(net))


def _hsdp(scene: Scene) -> Any:
    return scene.sharded(
        mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    )


def _ignored(scene: Scene) -> Any:
    net = scene.net()
    scene.fully_shard(net, ignored_params={net.a.weight})
    return [type(net.a.weight.data) is Tensor, type(net.b.weight.data) is Tensor]


def _mixed(scene: Scene, **fields: Any) -> Any:
    model = scene.model(mp_policy=MixedPrecisionPolicy(**fields))
    output = model(scene.x)
    output.float().square().mean().backward()
    return [output, gradients(model)]


def _output_dtype(scene: Scene) -> Any:
    policy = MixedPrecisionPolicy(output_dtype=torch.float64)
    return scene.fully_shard(scene.net(), mp_policy=policy)(scene.x)


ARGUMENTS = (
    Call("module", "fully_shard(module)", Scene.sharded),
    Call("module", "fully_shard([a, b])", _list_of_modules),
    Call(
        "mesh",
        'mesh=init_device_mesh("cuda", (8,))',
        lambda s: s.sharded(mesh=init_device_mesh("cpu", (2,))),
    ),
    Call("mesh", 'mesh=init_device_mesh("cuda", (4, 8), mesh_dim_names=...)', _hsdp),
    Call(
        "reshard_after_forward",
        "reshard_after_forward=True, False, None",
        lambda s: [s.sharded(reshard_after_forward=each) for each in (True, False, None)],
    ),
    Call(
        "reshard_after_forward",
        "reshard_after_forward=2",
        lambda s: [s.sharded(reshard_after_forward=each) for each in (1, 2)],
    ),
    Call(
        "shard_placement_fn",
        "shard_placement_fn=lambda p: Shard(...)",
        lambda s: s.sharded(shard_placement_fn=lambda p: Shard(p.dim() - 1)),
        words="Cut as torch cuts, into torch's DTensors; for None the layout is planned. On "
        "another dim than 0 gathered parameters are strided views.",
    ),
    Call("mp_policy", "mp_policy=MixedPrecisionPolicy(...)", lambda s: _mixed(s), words="Below."),
    refused(
        "offload_policy",
        "offload_policy=CPUOffloadPolicy()",
        lambda s: s.sharded(offload_policy=CPUOffloadPolicy()),
    ),
    Call("ignored_params", "ignored_params={...}", _ignored),
    refused(
        "dp_mesh_dims",
        "dp_mesh_dims=",
        lambda s: s.sharded(dp_mesh_dims=("shard",)),
        "It is for parameters that are DTensors of a larger mesh.",
    ),
)

POLICIES = (
    Call(
        "param_dtype",
        "param_dtype=",
        lambda s: [each.bfloat16() for each in _mixed(s, param_dtype=torch.bfloat16)[1].values()],
        words="Over gloo, sums of 16-bit gradients are taken in fp32.",
    ),
    Call(
        "reduce_dtype",
        "reduce_dtype=",
        lambda s: _mixed(s, param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    ),
    Call("output_dtype", "output_dtype=", _output_dtype),
    Call(
        "cast_forward_inputs",
        "cast_forward_inputs=False",
        lambda s: _mixed(s, cast_forward_inputs=False),
    ),
    refused(
        "pin_memory",
        "CPUOffloadPolicy(pin_memory=False)",
        lambda s: s.sharded(offload_policy=CPUOffloadPolicy(pin_memory=False)),
    ),
)


def _unshard(scene: Scene) -> Any:
    model = scene.model()
    model.unshard()
    whole = full(model.b.weight)
    model.reshard()
    return [whole, isinstance(model.b.weight, DTensor)]


def _unshard_async(scene: Scene) -> Any:
    model = scene.model()
    model.a.unshard(async_op=True).wait()
    return full(model.a.weight)


def _iterate_again(scene: Scene) -> Any:
    model = scene.model()
    model(scene.x)  # and then something fails
    model.reset_iter_state()
    return scene.trained(model)


def _accumulate(scene: Scene, switch: Callable[[Any, bool], None], **options: Any) -> Any:
    model = scene.model(**options)
    for last in (False, True):
        switch(model, last)
        scene.loss(model, 2.0 - last).backward()
    return gradients(model)


def _sync(scene: Scene) -> Any:
    return _accumulate(scene, lambda model, last: model.set_requires_gradient_sync(last))


def _all_reduce(scene: Scene) -> Any:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    return _accumulate(scene, lambda model, last: model.set_requires_all_reduce(last), mesh=mesh)


def _last_backward(scene: Scene) -> Any:
    return _accumulate(scene, lambda model, last: model.set_is_last_backward(last))


def _after_forward(scene: Scene) -> Any:
    model = scene.model()
    model.set_reshard_after_forward(False)
    return scene.trained(model)


def _after_backward(scene: Scene) -> Any:
    return _accumulate(scene, lambda model, last: model.set_reshard_after_backward(last))


def _prefetch(scene: Scene) -> Any:
    model = scene.model()
    model.set_modules_to_forward_prefetch([model.a])
    model.set_modules_to_backward_prefetch([model.a])
    return scene.trained(model)


def _unused(scene: Scene, enable: bool) -> Any:
    model = scene.model()
    model.set_reduce_scatter_unused_params(enable)
    return scene.trained(model)


def _reduced(scene: Scene, name: str, value: Any) -> Any:
    model = scene.model()
    getattr(model, name)(value)
    return scene.trained(model)


class _Event:
    """Of a device whose work is done when it returns."""

    def wait(self, stream: object = None) -> None:
        """Return at once."""


def _divided(scene: Scene, name: str) -> Any:
    model = scene.model()
    model.set_force_sum_reduction_for_comms(True)  # gloo has nothing else in torch's
    getattr(model, name)(3.0)
    return scene.trained(model)


def _setter(name: str, *values: Any) -> Callable[[Scene], Any]:
    return lambda scene: getattr(scene.model(), name)(*values)


METHODS = (
    Call("unshard", "unshard(), reshard()", _unshard),
    Call("unshard", "unshard(async_op=True).wait()", _unshard_async),
    Call("reshard", "reshard()", _unshard),
    Call("reset_iter_state", "reset_iter_state()", _iterate_again),
    Call("set_requires_gradient_sync", "set_requires_gradient_sync(False)", _sync),
    Call("set_requires_all_reduce", "set_requires_all_reduce(False)", _all_reduce),
    Call(
        "set_is_last_backward",
        "set_is_last_backward(False)",
        _last_backward,
        words="Changes nothing: every backward ends with its reductions complete.",
    ),
    Call("set_reshard_after_forward", "set_reshard_after_forward(False)", _after_forward),
    Call("set_reshard_after_backward", "set_reshard_after_backward(False)", _after_backward),
    Call("set_modules_to_forward_prefetch", "set_modules_to_forward_prefetch([...])", _prefetch),
    Call("set_modules_to_backward_prefetch", "set_modules_to_backward_prefetch([...])", _prefetch),
    Call(
        "set_reduce_scatter_unused_params",
        "set_reduce_scatter_unused_params(True)",
        lambda s: _unused(s, True),
        words="Always so: the whole bucket is reduced.",
    ),
    refused(
        "set_reduce_scatter_unused_params",
        "set_reduce_scatter_unused_params(False)",
        lambda s: _unused(s, False),
    ),
    *(
        Call(name, f"{name}(3.0)", lambda s, name=name: _divided(s, name))  # type: ignore[misc]
        for name in ("set_gradient_divide_factor", "set_reduce_scatter_divide_factor")
    ),
    Call(
        "set_force_sum_reduction_for_comms",
        "set_force_sum_reduction_for_comms(True)",
        lambda s: _reduced(s, "set_force_sum_reduction_for_comms", True),
    ),
    Call(
        "set_all_reduce_hook",
        "set_all_reduce_hook(hook)",
        lambda s: _reduced(s, "set_all_reduce_hook", lambda reduced: reduced.mul_(2)),
        words="It gets a flat tensor for each dtype of the bucket.",
    ),
    Call(
        "set_post_optim_event",
        "set_post_optim_event(event)",
        lambda s: _reduced(s, "set_post_optim_event", _Event()),
    ),
    *(
        refused(name, f"{name}({shown})", _setter(name, *values))
        for name, shown, *values in (
            ("set_custom_all_gather", "...", None),
            ("set_custom_reduce_scatter", "...", None),
            ("set_reduce_scatter_max_input_buffers", "2", 2),
            (
                "set_separate_reduce_scatter_group",
                "",
            ),
            ("set_unshard_in_backward", "False", False),
            ("set_allocate_memory_from_process_group_for_comm", "True", True),
            ("set_symm_mem_for_comm", ""),
            ("set_keep_unsharded_storage", "True", True),
            ("set_manual_backward_finalization", "True", True),
            ("finalize_backward", ""),
        )
    ),
)


def _forward_method(scene: Scene) -> Any:
    model = scene.model()
    torch_fsdp.register_fsdp_forward_method(model, "embed")
    model.embed(scene.x).square().mean().backward()
    return gradients(model)


def _kind(scene: Scene) -> Any:
    model = scene.model()
    return [isinstance(part, FSDPModule) for part in model.modules()]


def _shared(scene: Scene) -> Any:
    model = scene.model()
    torch_fsdp.share_comm_ctx([model, model.a])
    return scene.trained(model)


NAMES = (
    Call("FSDPModule", "isinstance(module, FSDPModule)", _kind, words="Also torch's class."),
    Call("fully_shard", "fully_shard", Scene.sharded, words="Arguments above."),
    Call(
        "MixedPrecisionPolicy", "MixedPrecisionPolicy", lambda s: _mixed(s), words="Torch's class."
    ),
    Call(
        "OffloadPolicy",
        "OffloadPolicy()",
        lambda s: s.sharded(offload_policy=torch_fsdp.OffloadPolicy()),
    ),
    refused(
        "CPUOffloadPolicy",
        "CPUOffloadPolicy()",
        lambda s: s.sharded(offload_policy=CPUOffloadPolicy()),
    ),
    refused(
        "DataParallelMeshDims", "DataParallelMeshDims", lambda s: s.sharded(dp_mesh_dims=("shard",))
    ),
    Call(
        "register_fsdp_forward_method",
        "register_fsdp_forward_method(model, 'embed')",
        _forward_method,
    ),
    Call("UnshardHandle", "UnshardHandle", _unshard_async),
    Call(
        "share_comm_ctx",
        "share_comm_ctx([model, other])",
        _shared,
        words="Changes nothing: there are no streams to share.",
    ),
    Call(
        "state",
        "fully_shard.state(module)",
        lambda s: [s.fully_shard.state(part) is not None for part in s.model().modules()],
        words="Whether a call was given the module; what the state holds is private.",
    ),
)
