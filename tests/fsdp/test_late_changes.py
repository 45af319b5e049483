"""Ties, modules, parameters and hooks that come after `fully_shard`: right, or refused by name."""

import re
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook

from ranks import on_ranks, run_ranks
from sharding import fully_shard
from small_models import assert_weights, full, weights_of


class LM(nn.Module):
    """An embedding and a head that have the same values, as in a checkpoint of a tied model."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.embedding, self.block = nn.Embedding(12, 8), nn.Linear(8, 8)
        self.head = nn.Linear(8, 12, bias=False)
        with torch.no_grad():
            self.head.weight.copy_(self.embedding.weight)
        if tied:
            self.tie_weights()

    def tie_weights(self) -> None:
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.block(self.embedding(ids))))


def build(*, tied: bool = False) -> LM:
    torch.manual_seed(0)
    return LM(tied=tied)


def shard(lm: LM) -> LM:
    fully_shard(lm.block)
    return fully_shard(lm)


def one_bucket() -> LM:
    lm = shard(build())
    lm.tie_weights()
    return lm


def one_list() -> LM:
    lm = build()
    fully_shard([lm.embedding, lm.head])
    lm = shard(lm)
    lm.tie_weights()
    return lm


def tied_again_after_loading() -> LM:
    lm = shard(build(tied=True))
    lm.load_state_dict({k: full(v) for k, v in lm.state_dict().items()}, assign=True)
    lm.tie_weights()
    only = {k: full(v) for k, v in lm.state_dict().items() if k != "head.weight"}
    lm.load_state_dict(only, assign=True, strict=False)
    return lm


def tied_while_gathered() -> LM:
    lm = shard(build())
    lm(torch.arange(4))
    lm.tie_weights()
    return lm


def train(lm: LM, *, on_ranks: bool) -> dict[str, Tensor]:
    optimizer = torch.optim.SGD(lm.parameters(), lr=0.5, momentum=0.5)
    for step in range(3):
        ids = torch.randint(12, (4, 5), generator=torch.Generator().manual_seed(step))
        if on_ranks:
            ids = ids.tensor_split(dist.get_world_size())[dist.get_rank()]
        lm(ids).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: full(value) for name, value in lm.state_dict().items()}


@on_ranks(2)
def test_tie_after_sharding_shares_the_parameter() -> None:
    """verl#7834, torchtune#616, transformers#46707: it was untied in silence, or a copy failed."""
    expected = train(build(tied=True), on_ranks=False)
    for make in (one_bucket, one_list, tied_again_after_loading, tied_while_gathered):
        lm = make()
        assert len(list(lm.parameters())) == 3, make
        for name, weight in train(lm, on_ranks=True).items():
            torch.testing.assert_close(weight, expected[name], msg=f"{make.__name__} {name}")


def refused(act: Callable[[], object], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match="^" + re.escape(text) + "$"):
        act()


def ties_over_buckets() -> None:
    lm = build()
    fully_shard(lm.embedding)
    lm = shard(lm)
    before = weights_of(lm)
    refused(
        lm.tie_weights,
        RuntimeError,
        "head.weight of 'LM' was tied to weight of 'Embedding' after fully_shard, which cut them "
        "apart; tie before fully_shard (tie_weights()), and put both into one call, "
        "fully_shard([a, b]), or leave both to the call on the model that holds them",
    )
    assert_weights(weights_of(lm), before)
    lm(torch.arange(4))
    lm.extra = nn.Linear(8, 12, bias=False)
    lm.extra.weight = lm.embedding.weight
    refused(
        lambda: lm(torch.arange(4)),
        RuntimeError,
        "extra.weight was tied to weight after fully_shard, and its module would run with weights "
        "that nobody gathers; add and tie modules before fully_shard",
    )


def assignment_to_one_of_two() -> None:
    lm = shard(build(tied=True))
    lm.head.weight = nn.Parameter(torch.zeros(12, 8))
    refused(
        lambda: lm(torch.arange(4)),
        ValueError,
        "embedding.weight of 'root' is shared by ['Embedding.weight', 'Linear.weight'], and "
        "Linear.weight was assigned a parameter of its own; untie before fully_shard, or write "
        "values with p.copy_(values)",
    )


def test_tie_that_cannot_be_kept_is_refused_by_name() -> None:
    run_ranks(ties_over_buckets, 2)
    run_ranks(assignment_to_one_of_two, 2)


def insert_past_registration(lm: LM) -> None:
    lm.layers.insert(0, nn.Linear(8, 8))


def fill_an_empty_slot(lm: LM) -> None:
    lm.head.bias = nn.Parameter(torch.zeros(12))


def unfreeze_what_was_left_out(lm: LM) -> None:
    lm.adapter = nn.Linear(8, 8).requires_grad_(False)
    lm(torch.arange(4))
    lm.adapter.weight.requires_grad_()


LATE = {
    "layers.0.weight": insert_past_registration,
    "head.bias": fill_an_empty_slot,
    "adapter.weight": unfreeze_what_was_left_out,
    "embedding.weight": lambda lm: setattr(lm, "embedding", nn.Embedding(12, 8)),
    "scale": lambda lm: lm.register_parameter("scale", nn.Parameter(torch.ones(()))),
}


@on_ranks(2)
def test_parameter_that_comes_after_the_first_forward_is_refused_or_sharded() -> None:
    """torchtune#2714, transformers#40382: it was never checked, and ranks drifted apart."""
    for fqn, change in LATE.items():
        lm = build()
        lm.layers = nn.ModuleList([nn.Identity()])
        shard(lm)
        lm(torch.arange(4)).sum().backward()
        change(lm)
        for _ in range(2):
            refused(
                lambda lm=lm: lm(torch.arange(4)),
                RuntimeError,
                f"{fqn} was added after fully_shard: every rank would train its own; add "
                f"parameters before fully_shard, or pass it in ignored_params",
            )
    lm = shard(build())
    plain = build()
    for model in (lm, plain):
        model(torch.arange(4)).sum().backward()
        model.zero_grad()
        torch.manual_seed(1)
        model.block = nn.Sequential(model.block, nn.Linear(8, 8))
    fully_shard(lm.block[1])
    for model in (lm, plain):
        model(torch.arange(4)).square().sum().backward()
    for (name, p), q in zip(lm.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(full(p.grad), q.grad, msg=name)


@on_ranks(2)
def test_hook_that_would_never_run_is_refused_with_its_cure() -> None:
    """torchrec#4268, wandb#9866: hooks of sharded parameters never ran."""
    original = build()
    kept = original.block.weight
    lm = shard(original)
    p = lm.block.weight
    cure = (
        " of a sharded parameter of shape (8, 8) would never run: its gradient is averaged outside "
        "of autograd; use p.register_post_accumulate_grad_hook(hook), where p.grad is the average "
        "and may be changed in place, or a hook on the module"
    )
    node = "a hook on the AccumulateGrad node (p.{0}(p).grad_fn)"
    for what, act in {
        "register_hook": lambda: p.register_hook(print),
        node.format("view_as"): lambda: register_multi_grad_hook([p], print),
        node.format("expand_as"): lambda: p.expand_as(p),
    }.items():
        refused(act, NotImplementedError, what + cure)
    (p * 2).register_hook(lambda grad: grad)  # what is computed from it takes hooks
    handle = kept.register_hook(print)
    refused(
        lambda: lm(torch.arange(4)),
        RuntimeError,
        "weight: hooks on its gradient were put on the original, which fully_shard has replaced, "
        "and would never run; put them on the sharded parameter, with "
        "register_post_accumulate_grad_hook",
    )
    handle.remove()
    mask = torch.zeros_like(p)
    p.register_post_accumulate_grad_hook(lambda p: p.grad.mul_(mask))
    lm(torch.arange(4)).square().sum().backward()
    assert not full(p.grad).any()
    assert full(lm.head.weight.grad).any()


@on_ranks(2)
def test_unshard_before_the_first_forward_trains() -> None:
    """pytorch#114299: weights used outside of forward; our own message recommends `unshard()`."""
    lm, plain = shard(build()), build()
    ids = torch.arange(4)
    for each in (lm.block, lm):
        each.unshard()
    lm.forward(ids).square().mean().backward()
    plain(ids).square().mean().backward()
    for (name, p), q in zip(lm.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(full(p.grad), q.grad, msg=name)
