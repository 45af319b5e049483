"""Everything in torch that asks for an `FSDPModule` or for who sharded a module."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
from torch import Tensor, nn
from torch.distributed._composable.replicate import replicate as replicate_ddp
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.device_mesh import init_device_mesh

from ranks import run_ranks
from sharding import fully_shard

# Files of torch that name FSDPModule, the state behind it or its registry -> what holds them here.
KNOWN = {
    "_dynamo/guards.py": "only for guards that are saved (precompile), of torch's own classes",
    "distributed/_composable/__init__.py": "exports",
    "distributed/_composable/contract.py": "test_calls_that_ask",
    "distributed/_composable/fsdp/__init__.py": "exports",
    "distributed/_composable/fsdp/fully_shard.py": "exports",
    "distributed/_composable/replicate.py": "test_calls_that_ask",
    "distributed/_composable/replicate_with_fsdp.py": "test_calls_that_ask",
    "distributed/_tools/fsdp2_mem_tracker.py": "test_calls_that_ask",
    "distributed/fsdp/__init__.py": "exports",
    "distributed/fsdp/_traversal_utils.py": "FSDP1, which check_modules refuses",
    "distributed/pipelining/schedules.py": "test_pipelines.py",
    "distributed/pipelining/stage.py": "test_pipelines.py",
}
ASKS = re.compile(r"\bFSDPModule\b|fully_shard\.state\b|_get_registry\(|_get_registry\b.*import")


@pytest.mark.skipif(
    not torch.__version__.startswith(("2.13.", "2.14.")), reason="the list is of these versions"
)
def test_places_in_torch_that_ask_are_known() -> None:
    root = Path(torch.__file__).parent
    folders = ["_dynamo", "_functorch", "_inductor", "distributed", "optim", "nn", "utils"]
    asking = {
        path.relative_to(root).as_posix()
        for folder in folders
        for path in (root / folder).rglob("*.py")
        if ASKS.search(path.read_text())
    }
    inside = "distributed/fsdp/_fully_shard/"
    assert {path for path in asking if not path.startswith(inside)} <= set(KNOWN)


class Encoder(nn.Sequential):
    """A forward under another name."""

    def encode(self, x: Tensor) -> Tensor:
        return self(x)


def model_of(sharded: bool) -> Encoder:
    torch.manual_seed(0)
    model = Encoder(nn.Linear(8, 8), nn.Linear(8, 8))
    if sharded:
        fully_shard(model[0])
        fully_shard(model)
    return model


def trained(model: nn.Module, call: Callable[[Tensor], Tensor] | None = None) -> Tensor:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        (call or model)(torch.ones(2, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.cat([full(p).flatten() for p in model.parameters()])


def full(p: Tensor) -> Tensor:
    return p.full_tensor() if hasattr(p, "full_tensor") else p.detach()


def around(sharded: bool, apply: Callable[[nn.Module], object]) -> Tensor:
    """Trains a model of ours, with a layer beside it that `apply` to both is to take."""
    inner = model_of(sharded)
    both = nn.Sequential(inner, nn.Linear(8, 8))
    if sharded:
        apply(both)
    return trained(both)


def refusal(call: Callable[[], object]) -> str:
    with pytest.raises((RuntimeError, AssertionError, AttributeError)) as error:
        call()
    return f"{type(error.value).__name__}: {error.value}"


def ask() -> tuple[dict[str, Tensor], dict[str, str]]:
    """What works, as trained weights, and what is refused, as texts."""
    mesh = init_device_mesh("cpu", (2,))
    model = model_of(sharded=True)
    torch_fsdp.share_comm_ctx([model, model[0]])
    model._set_unshard_async_op(True)
    method = model_of(sharded=True)
    torch_fsdp.register_fsdp_forward_method(method, "encode")
    works = {
        "share_comm_ctx": trained(model),
        "register_fsdp_forward_method": trained(method, method.encode),
        "around replicate_ddp": around(True, replicate_ddp),
        "around replicate": around(True, lambda both: replicate(both, mesh=mesh)),
    }
    first, second, third = (model_of(sharded=True) for _ in range(3))
    refused = {
        "replicate_ddp": refusal(lambda: replicate_ddp(first)),
        "replicate": refusal(lambda: replicate(second, mesh=mesh)),
        "fully_shard": refusal(lambda: torch_fsdp.fully_shard(third, mesh=mesh)),
        "FSDPMemTracker": refusal(FSDPMemTracker(third).__enter__),
    }
    return works, refused


def test_calls_that_ask() -> None:
    """PiPPy#1105: what passes for torch's FSDPModule works there, or is refused by name."""
    expected = trained(model_of(sharded=False))
    for works, refused in run_ranks(ask, 2):
        for name, weights in works.items():
            right = around(False, lambda both: both) if name.startswith("around") else expected
            torch.testing.assert_close(weights, right, atol=1e-6, rtol=0, msg=name)
        managed = "RuntimeError: Cannot apply `replicate()` on a Module already managed by"
        assert refused["replicate_ddp"].startswith(managed)
        assert refused["replicate"].startswith(managed)
        assert "fully_shard has already been applied" in refused["fully_shard"]
        assert refused["FSDPMemTracker"] == (
            "AttributeError: '_fsdp_param_group' belongs to the state of torch's fully_shard, and "
            "this module was sharded by vfsdp_optim.fully_shard, whose state has none; for what "
            "reads it (such as FSDPMemTracker) shard with torch.distributed.fsdp.fully_shard"
        )
