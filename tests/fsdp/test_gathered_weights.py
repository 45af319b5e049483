"""Gathered weights: there when backward reads them, kept while they are right, never lost."""

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from lifecycle import WIDTH, Layer
from torch import Tensor, nn

import vfsdp_optim
from ranks import RankError, collectives, on_ranks, run_ranks
from sharding import MixedPrecisionPolicy, fully_shard
from sharding.fsdp.bucket import ShardedState
from sharding.fsdp.module_state import state_of


@on_ranks(2)
def test_backward_frees_weights_as_it_leaves_modules_with_forwards_to_come():
    """Of five layers, the one at hand, the one it left and the one on its way are gathered."""
    model = nn.Sequential(*(Layer() for _ in range(5)))
    for layer in model:
        fully_shard(layer, reshard_after_forward=True)
    fully_shard(model)
    buckets = [state_of(layer).bucket for layer in model]
    counts: list[int] = []

    def count(grad: Tensor) -> None:
        counts.append(sum(bucket.state is not ShardedState.SHARDED for bucket in buckets))

    def forward(x: Tensor) -> Tensor:
        for layer in model:
            x = layer(x)
            x.register_hook(count)
        return x

    most = []
    for calls in (1, 2):
        counts.clear()
        x = torch.ones(2, WIDTH, requires_grad=True)
        model(x)  # makes the model the root, and says the order
        outputs = [forward(x * (i + 1)) for i in range(calls)]
        for output in outputs:
            output.square().mean().backward()
        assert len(counts) == calls * len(buckets)
        most.append(max(counts))
    assert max(most) <= 3


@on_ranks(2)
def test_kept_weights_are_not_gathered_again_without_grad():
    """pytorch#149029, torchtune#2483, prime-rl#2515."""
    found = {}
    for how in ("default", "reshard_after_forward", "by hand"):
        model = nn.Sequential(Layer(), Layer(), Layer())
        for layer in model:
            fully_shard(layer, reshard_after_forward=None if how == "default" else False)
        fully_shard(model, reshard_after_forward=None if how == "default" else False)
        x = torch.ones(2, WIDTH)
        with torch.no_grad():
            model(x)
            if how == "by hand":
                for layer in model:
                    layer.reshard()
                    layer.unshard()
            found[how] = [len(collectives(lambda: model(x))) for _ in range(3)]  # noqa: B023
        with torch.inference_mode():
            found[how].append(len(collectives(lambda: model(x))))  # noqa: B023
    assert found == {
        "default": [6, 6, 6, 6],  # a receive and a send each
        "reshard_after_forward": [0, 0, 0, 0],
        "by hand": [0, 0, 0, 0],
    }


def _writes(model: nn.Module) -> Iterator[tuple[str, Callable[[], object]]]:
    """Ways to change sharded weights, by name."""
    parameters = list(model.parameters())

    def step(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
        def run() -> None:
            for parameter in parameters:
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
            optimizer.zero_grad()

        return run

    for foreach in (False, True):
        yield f"AdamW foreach={foreach}", step(torch.optim.AdamW(parameters, 0.1, foreach=foreach))
    yield "AdamW fused", step(torch.optim.AdamW(parameters, 0.1, fused=True))
    for states in ("32bit", "8bit"):
        groups = vfsdp_optim.param_groups(model, adamw=dict(lr=0.1))
        yield f"Muon {states}", step(vfsdp_optim.Muon(groups, lr=0.1, states=states))
        yield f"our AdamW {states}", step(vfsdp_optim.AdamW(parameters, lr=0.1, states=states))

    def each(write: Callable[[Tensor], object]) -> Callable[[], None]:
        def run() -> None:
            with torch.no_grad():
                for parameter in parameters:
                    write(parameter)

        return run

    yield "mul_", each(lambda p: p.mul_(1.5))
    yield ".data", each(lambda p: p.data.mul_(1.5))
    yield "detach", each(lambda p: p.detach().mul_(1.5))
    yield "to_local", each(lambda p: p.to_local().mul_(1.5))
    yield "foreach", lambda: torch._foreach_mul_([p.data for p in parameters], 1.5)
    full = {name: p.full_tensor() * 1.5 for name, p in model.named_parameters()}
    yield "load_state_dict", lambda: model.load_state_dict(full)


@on_ranks(2, 3)
def test_kept_weights_are_gathered_again_after_every_way_to_write():
    """Also where a rank holds none of a parameter: ranks that gather alone would wait."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 24), nn.Tanh(), nn.Linear(24, 3, bias=False))
    plain = nn.Sequential(nn.Linear(40, 24), nn.Tanh(), nn.Linear(24, 3, bias=False))
    fully_shard(model[0], reshard_after_forward=False)
    fully_shard(model, reshard_after_forward=False)
    x, found = torch.ones(2, 40), {}
    for name, write in _writes(model):
        with torch.no_grad():
            before = model(x)
            write()
            plain.load_state_dict({k: p.full_tensor() for k, p in model.named_parameters()})
            after = model(x)
            unchanged = torch.equal(before, after)
            found[name] = float("inf") if unchanged else float((after - plain(x)).abs().max())
    assert len(found) == 13
    assert {name: error for name, error in found.items() if error > 1e-5} == {}


def written_by_hand(policy: MixedPrecisionPolicy) -> list[bool]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(5)))
    fully_shard(model, mp_policy=policy)
    before = [p.full_tensor().detach().clone() for p in model.parameters()]
    model.unshard()
    with torch.no_grad():
        model[0].weight.fill_(0.5)
        model[1].weight.data[3] = 7.0
        nn.init.zeros_(model[2].weight)
        model[3].weight.data = torch.full((8, 8), 0.25)
    model.reshard()
    after = [p.full_tensor() for p in model.parameters()]
    expected = [torch.full((8, 8), 0.5), before[1], torch.zeros(8, 8), torch.full((8, 8), 0.25)]
    expected[1][3] = 7.0
    expected.append(before[4])
    return [torch.equal(a, b) for a, b in zip(after, expected, strict=True)]


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_writes_between_unshard_and_reshard_are_kept(dtype: torch.dtype | None) -> None:
    """pytorch#137129; in low precision, what was not written keeps its fp32 values."""
    for found in run_ranks(written_by_hand, 2, MixedPrecisionPolicy(param_dtype=dtype)):
        assert found == [True] * 5


def write_different_values() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VFSDP_DEBUG", "1")
        model = fully_shard(nn.Linear(8, 8))
    model.unshard()
    with torch.no_grad():
        model.bias.fill_(float(dist.get_rank()))
    model.reshard()


def test_debug_mode_says_where_ranks_wrote_different_values() -> None:
    with pytest.raises(
        RankError, match="what was written into gathered 'root' differs between ranks"
    ):
        run_ranks(write_different_values, 2)


def message_of(function: Callable[[], object]) -> str:
    with pytest.raises((RuntimeError, NotImplementedError)) as caught:
        function()
    return str(caught.value)


class Leaks(nn.Module):
    """Gives a tensor to a list that no hook sees."""

    def __init__(self, leaked: list[Tensor]) -> None:
        super().__init__()
        self.weight, self.leaked = nn.Parameter(torch.ones(WIDTH)), leaked.append

    def forward(self, x: Tensor) -> Tensor:
        y = x + self.weight
        self.leaked(y)
        return y * 2


@on_ranks(2)
def test_uses_that_would_be_wrong_are_refused_by_name():
    """pytorch#195862, and what no hook sees of pytorch#173709."""
    found: dict[str, str] = {}
    leaked: list[Tensor] = []
    model = nn.Sequential(Leaks(leaked), Layer())
    fully_shard(model[0], reshard_after_forward=True)
    fully_shard(model)
    model(torch.ones(2, WIDTH))
    found["unseen"] = message_of(leaked[-1].sum().backward)

    model = nn.Linear(8, 8)
    fully_shard(model)
    model.unshard()
    kept = model.weight
    views = [kept.data, kept.detach()]
    copies = [kept.clone(), kept.reshape(2, 32).mul(2.0)]
    assert type(next(model.parameters())) is type(dict(model.named_parameters())["weight"])
    assert all(hasattr(p, "placements") for p in model.parameters())
    model.reshard()
    assert (kept.shape, kept.dtype, kept.requires_grad) == (torch.Size([8, 8]), torch.float32, True)
    assert repr(kept) == "FreedParameter('weight', shape=(8, 8))"
    for name, use in {
        "norm": lambda: kept.norm(),
        "mul_": lambda: kept.detach().mul_(2.0),
        "copy_": lambda: torch.empty(8, 8).copy_(kept),
        "cat": lambda: torch.cat([kept, kept]),
        "data": lambda: kept.data,
    }.items():
        assert message_of(use).startswith("weight was kept in its gathered form, whose memory"), (
            name
        )
    found["kept"] = message_of(lambda: kept.sum())
    assert {message_of(view.sum) for view in views} == {found["kept"]}
    assert repr(views[1]) == "FreedView('weight', shape=(8, 8))"
    torch.testing.assert_close(2 * copies[0].view(2, 32), copies[1])
    model.unshard()
    assert {type(view) for view in views} == {Tensor}
    torch.testing.assert_close(views[1], copies[0])
    model.reshard()

    model.unshard()
    optimizer = torch.optim.SGD([model.weight], lr=0.1)
    model.reshard()
    found["optimizer"] = message_of(optimizer.step)

    model.unshard()
    sharded = dict(model.named_parameters())["bias"]
    with torch.no_grad():
        model.bias.fill_(1.0)
        sharded.fill_(2.0)
    found["both"] = message_of(model.reshard)

    embedding = nn.Sequential(nn.Embedding(12, 8, max_norm=0.5))
    found["max_norm"] = message_of(lambda: fully_shard(embedding))
    assert type(embedding[0].weight) is nn.Parameter

    model = nn.Linear(8, 8)
    fully_shard(model)
    model.unshard()
    shared = model.weight.detach().numpy()
    found["numpy"] = message_of(model.reshard)
    del shared
    assert found == {
        "unseen": "backward went through bucket '0' before the gradient of an output of its "
        "module, without its weights; return what the loss uses from forward, or call "
        "set_reshard_after_forward(False) on the module",
        "kept": "weight was kept in its gathered form, whose memory was freed by a reshard, "
        "and used in sum; take parameters from model.named_parameters() when they are needed, "
        "or keep them gathered with set_reshard_after_forward(False)",
        "optimizer": "SGD holds weight in its gathered form, which is freed after forward: a "
        "step would train nothing; build the optimizer from model.parameters() of the module "
        "that fully_shard was given",
        "both": "bias was written in its gathered form and in its sharded one, and one would "
        "be lost; call reshard() between the two",
        "max_norm": "0.weight: Embedding(max_norm=0.5) rescales the rows that a rank looks up, "
        "which differ between ranks, in its forward; build it without max_norm and rescale the "
        "sharded parameter after each step",
        "numpy": "the gathered memory of ['weight', 'bias'] cannot be freed, as numpy() or "
        "share_memory_() shares it; share a copy, x.detach().clone()",
    }
