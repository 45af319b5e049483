"""Models built on meta, materialised and initialised after sharding: the same weights."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from dcp_checkpoints import Net, difference, full_state, make_optimizer, shard_net, take_steps
from ranks import on_ranks, run_ranks
from sharding import RaggedDTensor, RaggedShard, fully_shard
from sharding.tensor.ragged_tensor import distribute_ragged

WORLD_SIZES = [1, 2, 3]
# Kernels take another path below 16 elements, and fill in blocks above.
SHAPES = [(), (5,), (3, 5), (4, 3, 2), (37, 53), (6, 5, 3, 3)]

DRAWS: dict[str, Callable[[Tensor], Any]] = {
    "uniform_": lambda x: x.uniform_(-2, 3),
    "normal_": lambda x: x.normal_(1, 2),
    "bernoulli_": lambda x: x.bernoulli_(0.3),
    "bernoulli_ of a scalar": lambda x: x.bernoulli_(torch.tensor(0.3)),
    "bernoulli_ of a full tensor": lambda x: x.bernoulli_(
        torch.linspace(0, 1, x.numel()).view(x.shape)
    ),
    "random_": lambda x: x.random_(),
    "random_ to": lambda x: x.random_(7),
    "random_ from to": lambda x: x.random_(-3, 9),
    "exponential_": lambda x: x.exponential_(2.0),
    "cauchy_": lambda x: x.cauchy_(),
    "log_normal_": lambda x: x.log_normal_(),
    "geometric_": lambda x: x.geometric_(0.4),
    "by a generator": lambda x: x.normal_(generator=torch.Generator().manual_seed(3)),
    "nn.init.uniform_": nn.init.uniform_,
    "nn.init.normal_": nn.init.normal_,
    "nn.init.trunc_normal_": lambda x: nn.init.trunc_normal_(x, std=0.02),
    "nn.init.trunc_normal_ far": lambda x: nn.init.trunc_normal_(x, std=1.0, a=0.8, b=1.1),
    "nn.init.constant_": lambda x: nn.init.constant_(x, 0.5),
    "nn.init.ones_": nn.init.ones_,
    "nn.init.zeros_": nn.init.zeros_,
}
# These need two dims to know what flows in and out.
DRAWS_OF_MATRICES: dict[str, Callable[[Tensor], Any]] = {
    "nn.init.kaiming_uniform_": lambda x: nn.init.kaiming_uniform_(x, a=5**0.5),
    "nn.init.kaiming_normal_": lambda x: nn.init.kaiming_normal_(x, mode="fan_out"),
    "nn.init.xavier_uniform_": nn.init.xavier_uniform_,
    "nn.init.xavier_normal_": nn.init.xavier_normal_,
    "row to zero": lambda x: nn.init.normal_(x).detach()[1].fill_(0),
}
RAISE: dict[str, Callable[[Tensor], Any]] = {
    "nn.init.orthogonal_": nn.init.orthogonal_,
    "nn.init.eye_": nn.init.eye_,
    "nn.init.sparse_": lambda x: nn.init.sparse_(x, 0.1),
}


def cut(full: Tensor, mesh: Any, seed: int) -> RaggedDTensor:
    """A parameter cut anywhere; ranks may hold nothing."""
    generator = torch.Generator().manual_seed(seed)
    at = torch.randint(0, full.numel() + 1, (mesh.size() - 1,), generator=generator).sort().values
    edges = [0, *at.tolist(), full.numel()]
    units = [stop - start for start, stop in itertools.pairwise(edges)]
    placement = RaggedShard(tuple(range(full.dim())), units)
    return nn.Parameter(distribute_ragged(full, mesh, placement))


@on_ranks(*WORLD_SIZES)
def test_loading_random_values_into_shards_draws_those_of_the_whole():
    wrong = []
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for shape, dtype in itertools.product(SHAPES, (torch.float32, torch.bfloat16)):
        ops = DRAWS | (DRAWS_OF_MATRICES if len(shape) > 1 else {})
        for (name, op), seed in zip(ops.items(), itertools.count()):
            full = nn.Parameter(torch.zeros(shape, dtype=dtype))
            pieces = cut(torch.zeros(shape, dtype=dtype), mesh, seed)
            results = []
            for x in (full, pieces):
                torch.manual_seed(seed)
                with torch.no_grad():
                    op(x)
                results.append((x, torch.rand(())))
            (_, after_full), (_, after_pieces) = results
            if not torch.equal(pieces.full_tensor(), full):
                wrong.append(f"{name} {shape} {dtype}: other values")
            if not after_full.equal(after_pieces):
                wrong.append(f"{name} {shape} {dtype}: the generator is elsewhere")
    for name, op in RAISE.items():
        try:
            op(cut(torch.zeros(6, 4), mesh, 0))
            wrong.append(f"{name} returned")
        except NotImplementedError as error:
            if "aten." not in str(error) or ".full_tensor()" not in str(error):
                wrong.append(f"{name}: {error}")
    assert wrong == [], wrong


MODULES: dict[str, Callable[[], nn.Module]] = {
    "Linear": lambda: nn.Linear(30, 50),
    "Embedding": lambda: nn.Embedding(40, 24, padding_idx=3),
    "LayerNorm": lambda: nn.LayerNorm(300),
    "Conv2d": lambda: nn.Conv2d(5, 30, 3),
    "BatchNorm2d": lambda: nn.BatchNorm2d(30),
    "stack": lambda: nn.Sequential(nn.Conv1d(4, 20, 5), nn.RMSNorm(20), nn.Bilinear(20, 8, 30)),
}


def initialise(module: nn.Module) -> None:
    for part in module.modules():
        if hasattr(part, "reset_parameters"):
            part.reset_parameters()


@on_ranks(*WORLD_SIZES)
def test_loading_initial_values_after_sharding_gives_the_weights_of_before():
    """Bit for bit: `reset_parameters` as it is, on sharded parameters."""
    differing = {}
    for name, build in MODULES.items():
        torch.manual_seed(5)
        expected = full_state(nn.Sequential(build()))
        with torch.device("meta"):
            module = nn.Sequential(build())
        fully_shard(module)
        module.to_empty(device="cpu")
        torch.manual_seed(5)
        initialise(module)
        differing[name] = difference(full_state(module), expected)
    assert differing == dict.fromkeys(MODULES, "")


def run_from_meta(kind: str, optimizer_at: str, look: bool) -> dict[str, Any]:
    """Builds on meta, initialises after sharding, trains; the optimizer is built at some point."""
    with torch.device("meta"):
        net = Net()
    optimizer = make_optimizer(net, kind) if optimizer_at == "before sharding" else None
    if optimizer is None:
        shard_net(net)
    else:
        for block in net.blocks:
            fully_shard(block, optimizer=optimizer)
        fully_shard(net, optimizer=optimizer)
    if optimizer_at == "before to_empty":
        optimizer = make_optimizer(net, kind)
    if look and optimizer is not None:
        optimizer.state_dict()
    with pytest.raises(
        RuntimeError, match=r"on meta device: .*embedding\.weight.*; call module\.to_emp"
    ):
        net(torch.ones(2, dtype=torch.int64))
    net.to_empty(device="cpu")
    torch.manual_seed(7)
    initialise(net)
    net.scratch.zero_()
    nn.init.ones_(net.scale.factor)
    if optimizer_at == "after to_empty":
        optimizer = make_optimizer(net, kind)
    return train(net, optimizer)


def train(net: Net, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    assert optimizer is not None
    take_steps(net, optimizer, range(2))
    for parameter, states in optimizer.state.items():
        assert parameter.device.type == "cpu"
        for value in states.values():
            local = value.to_local() if isinstance(value, RaggedDTensor) else value
            assert value.device.type == local.device.type == "cpu"
    return full_state(net, optimizer)


def run_directly(kind: str) -> dict[str, Any]:
    torch.manual_seed(7)
    net = Net()
    torch.manual_seed(7)
    initialise(net)
    shard_net(net)
    return train(net, make_optimizer(net, kind))


def run_everywhere(kind: str, moments: list[str]) -> list[tuple[str, bool, str]]:
    """Where a run differs from that of a model that was built directly."""
    expected, wrong = run_directly(kind), []
    # torch's optimizers have no state to look at before the first step.
    for at, look in itertools.product(moments, [False, True]):
        if found := difference(run_from_meta(kind, at, look), expected):
            wrong.append((at, look, found))
    return wrong


@pytest.mark.parametrize("kind", ["torch_adamw", "adamw", "muon"])
def test_loading_nothing_on_meta_whenever_the_optimizer_is_built(kind: str) -> None:
    """Megatron-LM#6799, DeepSpeed#8438: placeholders were trained, or taken for vectors by Muon."""
    moments = ["before to_empty", "after to_empty"]
    if kind != "torch_adamw":  # which cannot follow its parameters into shards
        moments.append("before sharding")
    for world_size in (1, 3):
        for differing in run_ranks(run_everywhere, world_size, kind, moments):
            assert differing == []


def load_states_on_meta(kind: str) -> None:
    net = Net()
    optimizer = make_optimizer(net, kind)
    take_steps(net, optimizer, range(1))
    saved = optimizer.state_dict()
    with torch.device("meta"):
        other = Net()
    shard_net(other)
    optimizer = make_optimizer(other, kind)
    with pytest.raises(RuntimeError, match=r"0\.0\.weight is on the meta device; call"):
        optimizer.load_state_dict(saved)
    assert all(p.is_meta for p in other.parameters())


def test_loading_states_of_parameters_on_meta_is_refused_by_name() -> None:
    run_ranks(load_states_on_meta, 2, "muon")


def look_at_meta_without_a_piece() -> tuple[int, set[str], float]:
    with torch.device("meta"):
        net = nn.Linear(4, 4, bias=False)
    fully_shard(net)
    optimizer = make_optimizer(net, "adamw")
    assert optimizer.state[net.weight]["exp_avg"].is_meta
    net.to_empty(device="cpu")
    nn.init.ones_(net.weight)
    state = optimizer.state[net.weight]
    devices = {state[key].to_local().device.type for key in ("exp_avg", "exp_avg_sq")}
    return net.weight.to_local().numel(), devices, float(state["exp_avg"].full_tensor().sum())


def test_loading_nothing_on_meta_on_a_rank_that_holds_nothing() -> None:
    """An empty piece has no address that could tell that its parameter has left the meta device."""
    results = run_ranks(look_at_meta_without_a_piece, 2)
    assert sorted(numel for numel, _, _ in results) == [0, 16]
    assert all((devices, total) == ({"cpu"}, 0.0) for _, devices, total in results)
