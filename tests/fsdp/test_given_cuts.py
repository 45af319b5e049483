"""Parameters cut as torch cuts them: tensor parallelism before, and `shard_placement_fn`."""

import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.fsdp as torch_fsdp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import vfsdp_optim
from ranks import on_ranks, run_ranks
from sharding import FullMatrix, fully_shard, layout


class Net(nn.Module):
    """Three layers."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 12), nn.Linear(12, 8, bias=False)
        self.n = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.n(self.b(torch.tanh(self.a(x))))


def columns(p: nn.Parameter) -> Shard:
    return Shard(-1 if p.dim() == 2 else 0)


FUNCTIONS: dict[str, Any] = {
    "columns": columns,
    "some": lambda p: Shard(0) if p.dim() == 2 else None,
}


def mesh_of(*names: str) -> Any:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=names)


def sharded(shard: Callable[..., Any], kind: str, meta: bool = False, **options: Any) -> Net:
    torch.manual_seed(0)
    with torch.device("meta" if meta else "cpu"):
        net = Net()
    if kind == "tensor parallel":
        mesh = mesh_of("data", "tensor")
        plan = {
            "a": ColwiseParallel(),
            "b": RowwiseParallel(),
            "n": ColwiseParallel(output_layouts=Replicate()),
        }
        parallelize_module(net, mesh["tensor"], plan)
        options["mesh"] = mesh["data"]
    elif kind == "hsdp":
        options.update(mesh=mesh_of("replicate", "shard"), shard_placement_fn=columns)
    elif kind != "some" or shard is fully_shard:
        options["shard_placement_fn"] = FUNCTIONS[kind]
    shard(net.a, **options)
    return shard(net, **options)


def trained(net: Net, kind: str, optimizer: torch.optim.Optimizer, how: str = "") -> list[Tensor]:
    """Losses, gradients and weights."""
    rank = dist.get_rank() // 2 if kind == "tensor parallel" else dist.get_rank()
    found = []
    for step in range(2):
        x = torch.randn(3, 8, generator=torch.Generator().manual_seed(step + 10 * rank))
        x = x.to(net.a.weight.dtype if how == "converted" else x.dtype)
        if how == "accumulates":
            net.set_requires_gradient_sync(False)
            net(x * 3).square().mean().backward()
            net.set_requires_gradient_sync(True)
        loss = net(x).float().square().mean()
        loss.backward()
        if how == "clips" and kind != "some":
            norm = torch.nn.utils.clip_grad_norm_(net.parameters(), 0.01)
            found.append(norm.full_tensor())
        gradients = [p.grad.full_tensor() for p in net.parameters() if p.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
        found += [loss.detach(), *gradients]
    return found + [p.full_tensor().detach() for p in net.parameters()]


def saved_and_loaded(
    net: Net, kind: str, optimizer: Any, other: Callable[..., Any]
) -> list[Tensor]:
    """Go on with what DCP saved of the other implementation."""
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    both = sharded(other, kind)
    theirs = torch.optim.AdamW(both.parameters(), 0.01, foreach=False)
    get = dcp.state_dict.get_optimizer_state_dict
    dcp.save({"m": net.state_dict(), "o": get(net, optimizer)}, checkpoint_id=folder[0])
    state = {"m": both.state_dict(), "o": get(both, theirs)}
    dcp.load(state, checkpoint_id=folder[0])
    both.load_state_dict(state["m"])
    dcp.state_dict.set_optimizer_state_dict(both, theirs, state["o"])
    return trained(both, kind, theirs)


def run(shard: Callable[..., Any], kind: str, how: str) -> list[Tensor]:
    options: dict[str, Any] = {}
    if how == "bf16":
        options["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    net = sharded(shard, kind, meta=how == "meta", **options)
    if how == "meta":
        net.to_empty(device="cpu")
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.fill_(0.1)
    if how == "converted":
        net.to(torch.float64)
    if how == "frozen":
        net.b.weight.requires_grad_(False)
    if how == "loads":
        state = {k: v * 0.5 for k, v in Net().state_dict().items()}  # the same on all ranks
        if shard is not fully_shard:
            held = net.state_dict()
            state = {
                k: distribute_tensor(v, held[k].device_mesh, held[k].placements)
                for k, v in state.items()
            }
        net.load_state_dict(state)
    ours = {"ours": vfsdp_optim.AdamW, "8bit": vfsdp_optim.AdamW}.get(how)
    if ours is not None:
        optimizer: Any = ours(
            net.parameters(), lr=0.01, states="8bit" if how == "8bit" else "32bit"
        )
    else:
        optimizer = torch.optim.AdamW(net.parameters(), 0.01, foreach=False)
    if shard is fully_shard:
        assert len(layout(net).buckets) == 2
    found = trained(net, kind, optimizer, how)
    if how == "saved":
        other = torch_fsdp.fully_shard if shard is fully_shard else fully_shard
        found += saved_and_loaded(net, kind, optimizer, other)
    return found


ALL = "bf16 accumulates meta converted frozen clips loads ours 8bit saved"
OF_TWO = "accumulates clips ours saved"  # the other dim is torch's
HOWS = {"columns": ALL, "tensor parallel": OF_TWO, "some": "loads saved", "hsdp": "plain"}


def check(kind: str) -> None:
    for how in HOWS[kind].split():
        torch.manual_seed(7)
        ours = run(fully_shard, kind, how)
        torch.manual_seed(7)
        theirs = run(torch_fsdp.fully_shard, kind, how)
        for found, expected in zip(ours, theirs, strict=True):
            torch.testing.assert_close(
                found, expected, atol=1e-5, rtol=1e-4, msg=lambda text, how=how: f"{how}: {text}"
            )
    pairs = zip(
        sharded(fully_shard, kind).named_parameters(),
        sharded(torch_fsdp.fully_shard, kind).named_parameters(),
        strict=True,
    )
    for (name, found), (_, expected) in pairs:
        if kind != "some" or found.dim() == 2:
            assert found.placements == expected.placements, name
            assert found.to_local().shape == expected.to_local().shape, name


@pytest.mark.parametrize("kind", list(HOWS))
def test_given_cuts_train_load_and_save_as_with_torch(kind: str) -> None:
    run_ranks(check, 4 if kind in ("hsdp", "tensor parallel") else 2, kind, timeout=120)


@on_ranks(2)
def test_errors_name_the_parameter() -> None:
    for given, error, text in (
        (lambda p: Shard(1), AssertionError, "Shard dim 1 is invalid for 1D tensor"),
        (lambda p: Shard(p.dim() - 1), NotImplementedError, "weight: FSDP does not support uneven"),
        (lambda p: Replicate(), NotImplementedError, r"weight: shard_placement_fn returned Replic"),
    ):
        net = nn.Sequential(nn.Linear(16, 16), nn.Linear(7, 16))
        with pytest.raises(error, match=text):
            fully_shard(net, shard_placement_fn=given)
        assert type(net) is nn.Sequential
    net = nn.Linear(4, 4)
    with pytest.raises(ValueError, match=r"weight has a cut that was given.*structure= declares"):
        fully_shard(net, shard_placement_fn=lambda p: Shard(0), structure=lambda *_: FullMatrix())
    mesh = init_device_mesh("cpu", (2,))
    net = parallelize_module(nn.Linear(4, 4), mesh, ColwiseParallel())
    with pytest.raises(
        ValueError, match=r"weight is a DTensor over .* pass dims of one mesh to both"
    ):
        fully_shard(net, mesh=init_device_mesh("cpu", (2,)))
    net = nn.Sequential(nn.Linear(4, 4))
    fully_shard(net, shard_placement_fn=lambda p: Shard(0))
    with pytest.raises(ValueError, match="inner modules first"):
        fully_shard(net[0])
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "tensor"))
    net = parallelize_module(nn.Linear(4, 4), mesh["tensor"], ColwiseParallel())
    fully_shard(net, mesh=mesh["data"]).unshard()
    kept = net.weight
    assert kept.shape == (4, 4)
    net.reshard()
    with pytest.raises(RuntimeError, match=r"^weight was kept in its gathered form.* in sum; take"):
        kept.sum()
