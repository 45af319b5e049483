"""Tensors in what modules take and return follow the dtype policy, however they are nested."""

import collections
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from ranks import on_ranks
from sharding import MixedPrecisionPolicy, fully_shard
from sharding.fsdp.containers import leaves, map_tensors


@dataclass
class Plain:
    """A dataclass with a field that its constructor does not take."""

    y: Tensor
    more: object = None
    made: int = field(default=3, init=False)


@dataclass(frozen=True, slots=True)
class Frozen:
    """Cannot be assigned to, has no __dict__, and checks itself when it is made."""

    y: Tensor
    more: object = None

    def __post_init__(self) -> None:
        assert self.y is not None


class Named(NamedTuple):
    """A named tuple."""

    y: Tensor
    more: object = None


class ItemsAreFields(collections.OrderedDict):
    """As Hugging Face's ModelOutput: a dataclass whose fields that are not None are its items."""

    def __post_init__(self) -> None:
        for name in ("y", "more"):
            if getattr(self, name) is not None:
                self[name] = getattr(self, name)

    def __reduce__(self) -> Any:
        return type(self), (self.y, self.more)


Output = dataclass(type("Output", (ItemsAreFields,), {"__annotations__": {"y": Any, "more": Any}}))


class OwnDict(dict):
    """A class that pytree does not know."""


KINDS = {
    "dataclass": Plain,
    "frozen": Frozen,
    "named": Named,
    "dict": lambda y, more: {"y": y, "more": more},
    "own dict": lambda y, more: OwnDict(y=y, more=more),
    "ordered": lambda y, more: collections.OrderedDict(y=y, more=more),
    "list": lambda y, more: [y, more],
    "model output": Output,
}


def first_of(x: Any) -> Tensor:
    return x["y"] if isinstance(x, dict) else x[0] if isinstance(x, list) else x.y


class Echo(nn.Module):
    """Returns its input's kind around a computed tensor; notes the dtypes that arrive."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.make, self.seen = make, []

    def forward(self, x: Any, *, mask: Any = None) -> Any:
        arrived = [leaf.dtype for leaf in leaves((x, mask)) if isinstance(leaf, Tensor)]
        self.seen.append(arrived)
        y = self.linear(first_of(x).to(self.linear.weight.dtype))
        return self.make(y, (Frozen(y.detach()), {"ids": torch.arange(2)}))


def dtypes(tree: Any) -> list[torch.dtype]:
    return [leaf.dtype for leaf in leaves(tree) if isinstance(leaf, Tensor)]


@on_ranks(2)
def test_dataclasses_and_all_containers_follow_the_dtype_policy() -> None:
    """pytorch#170648: dataclass outputs kept the compute dtype, and inputs were not cast."""
    bf16, f32, i64 = torch.bfloat16, torch.float32, torch.int64
    policy = MixedPrecisionPolicy(param_dtype=bf16, output_dtype=f32)
    for name, make in KINDS.items():
        module = fully_shard(Echo(make), mp_policy=policy)
        x = torch.ones(2, 6, requires_grad=True)
        given = make(x, (Plain(torch.ones(1)), torch.arange(3)))
        mask = Frozen(torch.ones(2, dtype=torch.float64))
        out = module(given, mask=mask)
        assert module.seen == [[bf16, bf16, i64, bf16]], name
        assert dtypes(out) == [f32, f32, i64], name
        assert type(out) is type(given), name
        assert dtypes(given) == [f32, f32, i64], name
        if isinstance(out, Output):
            assert out["y"] is out.y
            assert out["more"] is out.more
        first_of(out).sum().backward()
        assert x.grad.dtype == f32, name
        assert x.grad.any(), name


def test_a_container_is_copied_only_where_a_tensor_changes() -> None:
    cache, state = [torch.ones(1)], Plain(torch.ones(2), None)
    state.more = state  # it holds itself
    tree = (cache, {"state": state, "x": torch.ones(3, dtype=torch.float64)})
    same = map_tensors(lambda x: x, tree)
    assert same is tree
    made = map_tensors(lambda x: x.float(), tree)
    assert made[0] is cache
    assert made[1]["state"] is state
    assert dtypes(made) == [torch.float32] * 3
    assert dtypes(tree)[2] is torch.float64
    packed = map_tensors(lambda x: x.double(), pack_sequence([torch.ones(3), torch.ones(2)]))
    assert isinstance(packed, PackedSequence)
    assert packed.data.dtype == torch.float64
