"""What `vfsdp plan` predicts is what ranks hold: bytes by kind, layouts, traffic, routing."""

import gc
from dataclasses import dataclass
from functools import cache
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import vfsdp_optim
from examples.gpt import GPT, GPTConfig
from panel_gram import PanelGram
from ranks import run_ranks
from sharding import MixedPrecisionPolicy, fully_shard
from sharding.fsdp.bucket import Bucket
from sharding.fsdp.buffer import Workspace
from sharding.fsdp.module_state import state_of
from sharding.planning.structure import FullMatrix
from sharding.tensor.ragged_tensor import RaggedDTensor
from sharding.transport.collectives import Transport
from sharding.transport.exchange import Exchange
from vfsdp_optim.adamw import AdamWAlgorithm
from vfsdp_optim.capacity.model_sources import module_shapes
from vfsdp_optim.capacity.optimizers import block_optimizer
from vfsdp_optim.capacity.parallelism import Parallelism, divide
from vfsdp_optim.capacity.prediction import Capacity, measure
from vfsdp_optim.capacity.shapes import ModelShapes, sort_into_buckets
from vfsdp_optim.capacity.step_buffers import StepDtypes
from vfsdp_optim.capacity.training_setup import Setup
from vfsdp_optim.optimizer import StructuredOptimizer
from vfsdp_optim.states.precision import STATES
from vfsdp_optim.states.scratch import Scratch
from vfsdp_optim.step import run_lists

CONFIG = GPTConfig(layers=4, width=96, heads=2, context=16)
TOLERANCE = 0.02


@dataclass(frozen=True)
class Case:
    """What is trained, and how; the same on every rank and in the parent."""

    optimizer: str
    states: str = "32bit"
    frozen: bool = False
    copies: int = 1
    dtype: str = "float32"
    precision: StepDtypes = StepDtypes()  # noqa: RUF009  (frozen)


def build_model(case: Case) -> nn.Module:
    """A model whose embedding and first half of every MLP may be frozen."""
    model = GPT(CONFIG).to(getattr(torch, case.dtype))
    if case.frozen:
        model.embedding.requires_grad_(False)
        for block in model.blocks:
            block.mlp.up.requires_grad_(False)
    return model


class SmallShampoo(vfsdp_optim.Shampoo):
    """Several panels of each matrix, of several blocks."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, block_size=(64, 40), **options)


class OneSidedSOAP(vfsdp_optim.SOAP):
    """No factor of the longer sides."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, max_dim=96, **options)


class GramOptimizer(StructuredOptimizer):
    """Of an algorithm from outside of the package."""

    def __init__(self, params: Any, **options: Any) -> None:
        groups = [{k: v for k, v in group.items() if k != "matrices"} for group in params]
        super().__init__(groups, PanelGram(**options), AdamWAlgorithm(**options))


WITH_UNIT_STATES = {"shampoo": SmallShampoo, "soap": OneSidedSOAP, "panel_gram": GramOptimizer}


def build_optimizer(case: Case, model: nn.Module) -> torch.optim.Optimizer:
    if case.optimizer == "muon":
        return vfsdp_optim.Muon(vfsdp_optim.param_groups(model), states=case.states)
    if case.optimizer in WITH_UNIT_STATES:
        groups = vfsdp_optim.param_groups(model, algorithm=case.optimizer)
        return WITH_UNIT_STATES[case.optimizer](groups, states=case.states)
    kept = ["embedding.weight", "head.weight"]  # what param_groups says
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    return vfsdp_optim.AdamW(named, states=vfsdp_optim.Precision(case.states, keep_32bit=kept))


def predicted(case: Case, ranks: int) -> Capacity:
    with torch.device("meta"):
        model = build_model(case)
    shapes = ModelShapes("gpt", "examples", sort_into_buckets(module_shapes(model)))
    divided = divide(shapes, Parallelism(ranks, replicate=case.copies))
    optimizer = WITH_UNIT_STATES.get(case.optimizer, case.optimizer)
    setup = Setup(optimizer, case.states, precision=case.precision, backend="gloo")
    return measure(divided, setup)


def buckets_of(model: nn.Module) -> list[Bucket]:
    states = [state_of(module) for module in model.modules()]
    return [state.bucket for state in states if state is not None and state.bucket is not None]


def nbytes(tensors: list[Tensor]) -> int:
    """Bytes of the storages of tensors, each counted once."""
    storages = {}
    for tensor in tensors:
        local = tensor._local_tensor if isinstance(tensor, RaggedDTensor) else tensor
        storage = local.untyped_storage()
        storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())


def everywhere() -> list[Tensor]:
    gc.collect()
    return [x for x in gc.get_objects() if isinstance(x, Tensor)]


def tensors_in(*holders: Any) -> list[Tensor]:
    """The tensors that objects of the package hold, in attributes, lists and mappings."""
    found: list[Tensor] = []
    queue, seen = list(holders), set()
    while queue:
        value = queue.pop()
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple | dict) or type(value).__module__ in OURS:
            if id(value) not in seen:
                queue.extend(gc.get_referents(value))
            seen.add(id(value))
    return found


OURS = (Exchange.__module__, Scratch.__module__)


class Lent:
    """Follows what a `Workspace` lends and keeps."""

    def __init__(self) -> None:
        self.lent: dict[int, int] = {}
        self.peak = self.kept = 0
        self.borrow, self.give_back = Workspace.borrow, Workspace.give_back

    def __enter__(self) -> "Lent":
        def borrow(workspace: Workspace, *args: Any) -> Tensor:
            tensor = self.borrow(workspace, *args)
            self.lent[tensor.data_ptr()] = tensor.nbytes
            self.peak = max(self.peak, nbytes(workspace._free) + sum(self.lent.values()))
            return tensor

        def give_back(workspace: Workspace, tensors: list[Tensor]) -> None:
            for tensor in tensors:
                self.lent.pop(tensor.data_ptr())
            self.give_back(workspace, tensors)
            self.kept = nbytes(workspace._free)

        Workspace.borrow, Workspace.give_back = borrow, give_back  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        Workspace.borrow, Workspace.give_back = self.borrow, self.give_back  # type: ignore[method-assign]


class Wire:
    """Counts what gathers bring to a rank and what its reductions send."""

    def __init__(self) -> None:
        self.gathered = self.reduced = 0
        self.gather, self.reduce = Transport.all_gather_, Transport.reduce_scatter_

    def __enter__(self) -> "Wire":
        def gather(transport: Transport, buffers: Any, *args: Any) -> Any:
            self.gathered += of_others(buffers, transport)
            return self.gather(transport, buffers, *args)

        def reduce(transport: Transport, buffer: Any, *args: Any) -> Any:
            self.reduced += of_others(buffer, transport)
            return self.reduce(transport, buffer, *args)

        Transport.all_gather_, Transport.reduce_scatter_ = gather, reduce  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        Transport.all_gather_, Transport.reduce_scatter_ = self.gather, self.reduce  # type: ignore[method-assign]


def of_others(buffers: Tensor | list[Tensor], transport: Transport) -> int:
    """Bytes of the slots of all ranks but one."""
    each = [buffers] if isinstance(buffers, Tensor) else buffers
    return sum(buffer.nbytes - buffer.nbytes // transport.world_size for buffer in each)


def watch_unsharded(model: nn.Module) -> list[int]:
    """Bytes of gathered parameters each time a block begins forward or backward."""
    seen: list[int] = []

    def look(*_: object) -> None:
        buffers = [buffer for bucket in buckets_of(model) for buffer in bucket.buffers]
        seen.append(sum(buffer.unsharded.untyped_storage().nbytes() for buffer in buffers))

    def look_in_backward(module: nn.Module, args: object, output: Tensor) -> None:
        output.register_hook(look)

    for block in model.blocks:
        block.register_forward_pre_hook(look)
        block.register_forward_hook(look_in_backward)
    return seen


def warm_up(states: str) -> None:
    """Makes what a process keeps once for all optimizers, such as tables of codes."""
    matrix = nn.Parameter(torch.ones(64, 64))
    matrix.grad = torch.ones(64, 64)
    vfsdp_optim.AdamW([matrix], states=states).step()


def live(case: Case) -> dict[str, Any]:
    """Bytes by kind on this rank in and after the third step, and the layouts."""
    torch.manual_seed(0)
    warm_up(case.states)
    foreign = nbytes(everywhere())
    model = build_model(case)
    optimizer = build_optimizer(case, model)
    shape = (case.copies, dist.get_world_size() // case.copies)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    if case.copies == 1:
        mesh = mesh["shard"]
    dtypes = (case.precision.param_dtype, case.precision.reduce_dtype)
    policy = MixedPrecisionPolicy(*(getattr(torch, dtype) if dtype else None for dtype in dtypes))
    for part in (*model.blocks, model):
        fully_shard(part, mesh=mesh, optimizer=optimizer, mp_policy=policy)
    seen = watch_unsharded(model)
    tokens = torch.arange(32).view(2, 16)
    for _ in range(3):
        with Lent() as lent, Wire() as wire:
            model(tokens).square().mean().backward()
        # Short runs, as those of so small a model, are updated by lists, which take temporary
        # memory in place of what is planned for long ones.
        with patch.object(run_lists, "_LISTED", ()):
            optimizer.step()
        gradients = nbytes([p.grad for p in model.parameters() if p.grad is not None])
        optimizer.zero_grad()
    buffers = [buffer for bucket in buckets_of(model) for buffer in bucket.buffers]
    exchanges = [x for x in gc.get_objects() if isinstance(x, Exchange)]
    scratches = [x for x in gc.get_objects() if isinstance(x, Scratch)]
    values = [v for state in optimizer.state.values() for v in state.values()]
    return {
        "parameters": nbytes([buffer.shard for buffer in buffers]),
        "gradients": gradients,
        "states": sum(
            (v._local_tensor if isinstance(v, RaggedDTensor) else v).nbytes for v in values
        ),
        "unsharded": max(seen),
        "communication": lent.peak,
        "kept": lent.kept,
        "exchange": nbytes(tensors_in(*exchanges, *scratches)),
        "gathered": wire.gathered,
        "reduced": wire.reduced,
        "moved": sum(exchange.moved_bytes for exchange in exchanges),
        "everything": nbytes(everywhere()) - foreign,
        "layouts": {
            bucket.name or "root": [
                (segment.shard_numel, segment.offsets) for segment in bucket.plan.segments
            ]
            for bucket in buckets_of(model)
        },
    }


MIXED = Case("adamw", precision=StepDtypes("bfloat16", "float32"))
MUON = Case("muon")
CASES = [
    *(Case(name, states) for name in ("adamw", "muon") for states in STATES),
    *(Case(name, "8bit", dtype="bfloat16") for name in ("adamw", "muon", "soap")),
    Case("adamw", dtype="bfloat16"),
    Case("muon", "8bit", frozen=True),
    Case("adamw", copies=2),
    Case("muon", copies=2),
    Case("shampoo"),
    Case("panel_gram", "8bit", copies=2),
]
ON = {2: [MIXED, MUON, *CASES[1:6:2], *CASES[-3:]], 4: [MUON, *CASES]}


@cache
def trained_on(ranks: int) -> list[dict[Case, dict[str, Any]]]:
    return run_ranks(live_all, ranks, list(dict.fromkeys(ON[ranks])), timeout=240)


def live_all(cases: list[Case]) -> dict[Case, dict[str, Any]]:
    return {case: live(case) for case in cases}


@pytest.mark.parametrize(
    ("case", "ranks"), [(c, n) for n in ON for c in ON[n] if c in CASES], ids=repr
)
def test_predicted_bytes_are_those_of_live_tensors(case, ranks):
    capacity = predicted(case, ranks)
    memory = capacity.memory
    shards = capacity.model.parallelism.shard_ranks
    results = [of_rank[case] for of_rank in trained_on(ranks)]
    for shard in range(shards):
        of_copies = results[shard::shards]  # of which the one that has most is predicted
        expected = {
            "parameters": memory.parameters,
            "gradients": memory.gradients,
            "states": capacity.states_by_rank[shard],
            "unsharded": memory.unsharded,
            "communication": memory.communication,
            "kept": capacity.kept_communication,
            "exchange": capacity.exchange_by_rank[shard],
        }
        at_rest = ("parameters", "states", "kept", "exchange")  # gradients are gone
        expected["everything"] = sum(expected[kind] for kind in at_rest)
        for kind, size in expected.items():
            held = max(of_copy[kind] for of_copy in of_copies)
            assert held == pytest.approx(size, rel=TOLERANCE), (kind, shard)


def test_predicted_buffers_are_those_of_mixed_precision() -> None:
    capacity = predicted(MIXED, 2)
    for of_rank in trained_on(2):
        for kind in ("parameters", "gradients", "unsharded", "communication"):
            assert of_rank[MIXED][kind] == getattr(capacity.memory, kind), kind
        assert of_rank[MIXED]["gathered"] == capacity.traffic.gather
        assert of_rank[MIXED]["reduced"] == capacity.traffic.reduce


@pytest.mark.parametrize("ranks", [2, 4])
def test_predicted_traffic_and_layouts_are_those_of_a_step(ranks: int) -> None:
    capacity = predicted(MUON, ranks)
    layouts = [
        [(segment.shard_numel, segment.offsets) for segment in bucket.plan.segments]
        for bucket in capacity.buckets
    ]
    results = [of_rank[MUON] for of_rank in trained_on(ranks)]
    for held in results:
        assert held["gathered"] == capacity.traffic.gather
        assert held["reduced"] == capacity.traffic.reduce
        root, *blocks = sorted(held["layouts"].items(), key=lambda each: each[0] != "root")
        assert root == ("root", layouts[0])
        assert [layout for _, layout in blocks] == [layouts[1]] * CONFIG.layers
    # The bits that say who has a gradient are not predicted.
    moved = max(held["moved"] for held in results)
    assert moved == pytest.approx(capacity.traffic.exchange, rel=0.001)
    assert (ranks == 4) == (capacity.traffic.exchange > 0)  # on 4 ranks a matrix is cut


class Zoo(nn.Module):
    """Every kind of module that `param_groups` tells apart."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 12)
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {
                    "attention": nn.MultiheadAttention(12, 2),
                    "norm": nn.LayerNorm(12),
                    "mlp": nn.Linear(12, 24),
                    "back": nn.Linear(24, 12, bias=False),
                }
            )
            for _ in range(2)
        )
        self.conv = nn.Conv2d(3, 8, 3)
        self.grouped = nn.Conv1d(8, 12, 2, groups=2)
        self.depthwise = nn.Conv1d(8, 8, 3, groups=8)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.head = nn.Linear(12, 50)


def test_routes_of_parameters_are_those_of_param_groups() -> None:
    with torch.device("meta"):
        model = Zoo()
    table = {}
    algorithms = {}
    for bucket in sort_into_buckets(module_shapes(model)):
        block = block_optimizer("muon", "32bit", bucket.tensors, "gloo")
        for i, tensor in enumerate(bucket.tensors):
            table[tensor.name] = tensor
            member = block.members.get(i)
            algorithms[tensor.name] = "frozen" if member is None else block.algorithm(member).name
    routes = {
        route.fqn.removeprefix("blocks.0."): route
        for route in vfsdp_optim.param_groups(model).routes
        if not route.fqn.startswith("blocks.1.")
    }
    assert table.keys() == routes.keys()
    for name, tensor in table.items():
        assert algorithms[name] == routes[name].algorithm, name
        if routes[name].algorithm == "muon":
            matrices = (
                FullMatrix() if tensor.matrices is None else FullMatrix.parse(tensor.matrices)
            )
            assert matrices == FullMatrix.parse(routes[name].matrices or str(FullMatrix())), name
