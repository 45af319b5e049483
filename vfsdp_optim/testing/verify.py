"""Checks and measures optimizers on the machine it is started on; exit code 1 on a difference.

    torchrun --nproc-per-node 2 -m vfsdp_optim.testing.verify

Exactness, plan, bytes on the wire, time and memory of a step, on our shards and on torch's FSDP2,
beside torch's optimizers there, with the real backend on the real devices. Every rank also holds
the unsharded model and its states.

With a model and an optimizer of one's own:

    torchrun ... -m vfsdp_optim.testing.verify --model package.module:make --optimizer other:make

The first returns `(model, loss)`, the same weights on every rank and `loss(model)` of this rank's
batch; the second is `module -> optimizer`, called on sharded modules and on an unsharded one.
"""

import argparse
import hashlib
import importlib
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from sharding.report import layout as layout_of
from sharding.report import render_table
from sharding.transport.backends import backend_of, main_device_type, world
from vfsdp_optim.adamw import AdamW
from vfsdp_optim.algorithm import StatesName
from vfsdp_optim.groups import param_groups
from vfsdp_optim.muon import Muon
from vfsdp_optim.plan import OptimizerPlan
from vfsdp_optim.shampoo import Shampoo
from vfsdp_optim.soap import SOAP
from vfsdp_optim.testing.differences import Difference, Tolerance, compare_pieces
from vfsdp_optim.testing.programs import Step
from vfsdp_optim.testing.records import held_tensors, piece_of
from vfsdp_optim.testing.shardings import MakeOptimizer, shard_model
from vfsdp_optim.testing.trial import Subject, Trial
from vfsdp_optim.testing.wire import wire_bytes

ModelLoss = Callable[[nn.Module], Tensor]
MakeModelAndLoss = Callable[[], tuple[nn.Module, ModelLoss]]


class Residual(nn.Module):
    """A gated MLP around a skip connection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.gate, self.up = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, 3 * width)
        self.down = nn.Linear(3 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return (B, width) -> (B, width)."""
        y = self.norm(x)
        return x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))


def default_model() -> tuple[nn.Module, ModelLoss]:
    """Return a model of blocks with odd sizes, and its loss on random numbers."""
    width = 488 if torch.cuda.is_available() else 72
    blocks = (Residual(width) for _ in range(4))
    model = nn.Sequential(nn.Linear(24, width), *blocks, nn.Linear(width, 7))
    rank = dist.get_rank()
    x = torch.randn(32, 24, generator=torch.Generator().manual_seed(rank), device="cpu")

    def loss(model: nn.Module) -> Tensor:
        return model(x.to(next(model.parameters()).device)).square().mean()

    return model, loss


class _MuonAndAdamW:
    """torch.optim.Muon for the matrices, torch.optim.AdamW for the rest, as users combine them."""

    def __init__(self, module: nn.Module) -> None:
        routes = {id(p): g["algorithm"] for g in param_groups(module) for _, p in g["params"]}
        params = list(module.parameters())
        self._parts: list[torch.optim.Optimizer] = [
            torch.optim.Muon([p for p in params if routes[id(p)] == "muon"], lr=0.02),
            torch.optim.AdamW([p for p in params if routes[id(p)] == "adamw"], foreach=True),
        ]

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for part in self._parts for group in part.param_groups]

    @property
    def state(self) -> dict[Tensor, Any]:
        return {param: state for part in self._parts for param, state in part.state.items()}

    def step(self) -> None:
        for part in self._parts:
            part.step()

    def zero_grad(self) -> None:
        for part in self._parts:
            part.zero_grad()


def _adamw(module: nn.Module, states: StatesName = "32bit") -> torch.optim.Optimizer:
    return AdamW(module.named_parameters(), lr=1e-3, states=states)


def _muon(module: nn.Module, states: StatesName = "32bit") -> torch.optim.Optimizer:
    return Muon(param_groups(module, adamw=dict(lr=1e-3)), lr=0.02, states=states)


def _shampoo(module: nn.Module) -> torch.optim.Optimizer:
    groups = param_groups(module, algorithm="shampoo", adamw=dict(lr=1e-3))
    return Shampoo(groups, lr=1e-3, block_size=32, precondition_frequency=2)


def _soap(module: nn.Module) -> torch.optim.Optimizer:
    groups = param_groups(module, algorithm="soap", adamw=dict(lr=1e-3))
    return SOAP(groups, lr=1e-3, block_size=32, precondition_frequency=2)


def _torch_adamw(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=1e-3, foreach=True)


# name -> ours, and what runs on FSDP2, torch's beside it: FSDP2 cuts inside blocks of 8-bit states.
VERIFIED_OPTIMIZERS: dict[str, tuple[MakeOptimizer, tuple[MakeOptimizer, ...]]] = {
    "adamw": (_adamw, (_adamw, _torch_adamw)),
    "muon": (_muon, (_muon, _MuonAndAdamW)),  # type: ignore[dict-item]
    "adamw_8bit": (partial(_adamw, states="8bit"), ()),
    "muon_8bit": (partial(_muon, states="8bit"), ()),
    "shampoo": (_shampoo, (_shampoo,)),
    "soap": (_soap, (_soap,)),
}


VERIFIED_LAYOUTS = ["ours", "fsdp2"]


@dataclass(frozen=True, slots=True)
class Row:
    """What was found out about one optimizer in one layout.

    Attributes:
        optimizer: name of its class, with torch's package before it.
        layout: "ours" or "fsdp2".
        difference: the first on this rank; empty if there is none.
        plan: hash of what every rank must agree on; empty if there is no plan.
        wire: bytes that this rank sends in one step.
        step: seconds of a training step, the median over steps, the slowest rank.
        update: seconds of the optimizer's part of it.
        held: bytes of parameters and states on this rank.
        peak: bytes of device memory at most; 0 where the device does not tell.
        unsupported: why there is no such row.
        ours: whether the optimizer is of this package, and has to run in every layout.
        for_comparison: whether it is torch's, beside ours, and may differ.
    """

    optimizer: str
    layout: str
    difference: str = ""
    plan: str = ""
    wire: float = 0.0
    step: float = 0.0
    update: float = 0.0
    held: int = 0
    peak: int = 0
    unsupported: str = ""
    ours: bool = False
    for_comparison: bool = False

    @property
    def place(self) -> str:
        """The layout as sentences name it."""
        return "our shards" if self.layout == "ours" else "FSDP2"


def examine(
    make_model: MakeModelAndLoss,
    make_optimizer: MakeOptimizer,
    layout: str,
    *,
    device: torch.device,
    steps: int,
    rounds: int,
    ours: bool = False,
    for_comparison: bool = False,
) -> Row:
    """Check one optimizer in one layout and measure its steps; on every rank."""

    def fresh() -> nn.Module:
        torch.manual_seed(0)
        return _model_and_loss(make_model)[0].to(device)

    if layout == "fsdp2":
        params = _model_and_loss(make_model)[0].named_parameters()
        scalar = next((name for name, param in params if param.dim() == 0), None)
        if scalar is not None:
            why = f"torch's fully_shard takes no 0-D parameters, such as {scalar!r}"
            return Row("", layout, unsupported=why)
    try:
        difference, name = first_local_difference(Subject(fresh, make_optimizer), layout, steps)
    except NotImplementedError as error:
        return Row("", layout, unsupported=str(error), ours=ours)
    model, loss = fresh(), _model_and_loss(make_model)[1]
    optimizer = shard_model(model, layout, make_optimizer)

    def train() -> float:
        loss(model).backward()
        start = _now(device)
        optimizer.step()
        update = _now(device) - start
        optimizer.zero_grad()
        return update

    train()  # allocates and plans
    sent, unknown = wire_bytes(train, dist.get_rank(), dist.get_world_size())
    if unknown and dist.get_rank() == 0:
        print(f"not counted in wire: {', '.join(unknown)}", file=sys.stderr)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    times = [_timed(train, device) for _ in range(rounds)]
    held = [value for _, _, value, _ in held_tensors(dict(model.named_parameters()), optimizer)]
    return Row(
        name,
        layout,
        difference,
        _plan_hash(model, optimizer) if layout == "ours" else "",
        sent,
        statistics.median(step for step, _ in times),
        statistics.median(update for _, update in times),
        sum(x.numel() * x.element_size() for x in map(_local, held)),
        torch.cuda.max_memory_allocated() if device.type == "cuda" else 0,
        ours=ours,
        for_comparison=for_comparison,
    )


def _model_and_loss(make_model: MakeModelAndLoss) -> tuple[nn.Module, ModelLoss]:
    made = make_model()
    if isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module):
        return made
    raise TypeError(f"--model: expected a function that returns (model, loss), got {made!r}")


def first_local_difference(subject: Subject, layout: str, steps: int) -> tuple[str, str]:
    """Return the first difference to the unsharded run on this rank, and the optimizer's name.

    Both runs are in this process: no tensor but the one that is compared leaves its device.
    """
    sharded, plain = Trial(subject, layout), Trial(subject, None)
    found = ""
    for step in range(1, steps + 1):
        for trial in (sharded, plain):  # to the end, because other ranks take every step
            trial.do(Step(seed=step))
        found = found or _difference_of_step(sharded, plain, step)
    return found, _name(plain.optimizer)


def _name(optimizer: torch.optim.Optimizer | _MuonAndAdamW) -> str:
    kind = type(optimizer)
    if kind is _MuonAndAdamW:
        return "torch.optim.Muon + AdamW"
    packed = any(group.get("states") == "8bit" for group in optimizer.param_groups)
    of_torch = kind.__module__.startswith("torch.")
    return f"{'torch.optim.' if of_torch else ''}{kind.__name__}{' 8bit' if packed else ''}"


def _difference_of_step(sharded: Trial, plain: Trial, step: int) -> str:
    expected = {
        (name, key): (value, param)
        for name, key, value, param in held_tensors(plain.params, plain.optimizer)
    }
    for name, key, value, param in held_tensors(sharded.params, sharded.optimizer):
        what = ["it does not exist in the unsharded run"]
        if (name, key) in expected:
            full = piece_of(step, name, key, *expected.pop((name, key)))
            piece = piece_of(step, name, key, value, param)
            what = compare_pieces([(dist.get_rank(), piece)], full, Tolerance())
        if what:
            return str(Difference(f"step {step}", name, key, tuple(what)))
    for name, key in expected:
        return str(Difference(f"step {step}", name, key, ("it does not exist on shards",)))
    return ""


def _local(x: Tensor) -> Tensor:
    return x._local_tensor if hasattr(x, "_local_tensor") else x


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def _timed(train: Callable[[], float], device: torch.device) -> tuple[float, float]:
    """Return seconds of a step and of the update in it, of the slowest rank."""
    dist.barrier()
    start = _now(device)
    update = train()
    seconds = torch.tensor([_now(device) - start, update], device=device)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return float(seconds[0]), float(seconds[1])


def _plan_hash(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    make_plan = getattr(optimizer, "plan", None)
    plan = make_plan() if callable(make_plan) else ""
    shared = plan.of_all_ranks() if isinstance(plan, OptimizerPlan) else plan
    text = layout_of(model).to_json() + str(shared)
    return hashlib.blake2b(text.encode(), digest_size=4).hexdigest()


def table(rows: Sequence[Sequence[Row]]) -> str:
    """Return the rows of all ranks, a list for each rank, as one table."""
    headers = [
        "optimizer", "layout", "equals unsharded", "plan", "sent MB/step", "ms/step",
        "ms/update", "held MB", "peak MB",
    ]  # fmt: skip
    lines = []
    for of_ranks in zip(*rows, strict=True):
        first = of_ranks[0]
        if first.unsupported:
            lines.append([first.optimizer or "-", first.layout, "not supported", *["-"] * 6])
            continue
        exact = not any(row.difference for row in of_ranks)
        plans = {row.plan for row in of_ranks}
        lines.append(
            [
                first.optimizer,
                first.layout,
                "yes" if exact else "no",
                first.plan if len(plans) == 1 else "differs",
                f"{max(row.wire for row in of_ranks) / 1e6:.3f}",
                f"{first.step * 1e3:.2f}",
                f"{first.update * 1e3:.2f}",
                f"{max(row.held for row in of_ranks) / 1e6:.2f}",
                f"{max(row.peak for row in of_ranks) / 1e6:.1f}" if first.peak else "-",
            ]
        )
    kind = main_device_type(world())
    backend = backend_of(world(), kind)
    device = "cpu" if kind == "cpu" else torch.cuda.get_device_name()
    title = f"{len(rows)} ranks, {backend}, {device}, torch {torch.__version__}"
    return render_table(title, headers, lines, left=2)


def failures(rows: Sequence[Sequence[Row]]) -> list[str]:
    """Return what must not be: differences, plans that ranks do not share."""
    found = []
    for of_ranks in zip(*rows, strict=True):
        first = of_ranks[0]
        if first.unsupported and first.ours:
            found.append(f"{first.place} are not supported: {first.unsupported}")
        if len({row.plan for row in of_ranks}) > 1:
            found.append(f"{first.optimizer}: the plans of the ranks differ")
        different = [(rank, row.difference) for rank, row in enumerate(of_ranks) if row.difference]
        if different and not first.for_comparison:
            rank, text = different[0]
            found.append(f"{first.optimizer} on {first.place}, seen by rank {rank}:\n{text}")
    return found


def _compared(rows: Sequence[Sequence[Row]]) -> list[str]:
    """Return the names of the optimizers that had to be equal."""
    names = [row.optimizer for row in rows[0] if not row.unsupported and not row.for_comparison]
    return list(dict.fromkeys(names))


def notes(rows: Sequence[Sequence[Row]]) -> list[str]:
    """Return what is no failure but good to know."""
    found = []
    for of_ranks in zip(*rows, strict=True):
        first = of_ranks[0]
        if first.unsupported and not first.ours:
            found.append(f"{first.layout}: {first.unsupported}")
        text = next((row.difference for row in of_ranks if row.difference), "")
        if text and first.for_comparison:
            found.append(f"{first.optimizer} on FSDP2, for comparison:\n{text}")
    return list(dict.fromkeys(found))


def named_factory(path: str, *others: str) -> Any:
    """Return what `module:name` names; the working directory is searched too.

    Args:
        path: the text.
        others: what could have stood there instead, for the message.

    Raises:
        SystemExit: it is no such text, or there is no such module or name.
    """
    module, separator, name = path.partition(":")
    if not separator:
        raise SystemExit(f"expected {' or '.join([*others, 'module:function'])}, got {path!r}")
    sys.path.insert(0, os.getcwd())
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise SystemExit(f"{path!r}: {error}") from error


def _positive(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a positive number, got {text}")
    return int(text)


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(
        prog="torchrun ... -m vfsdp_optim.testing.verify",
        description=(__doc__ or "").split("\n")[0],
    )
    parser.add_argument(
        "--model", metavar="MODULE:FUNCTION", help="returns (model, loss); default: a small one"
    )
    parser.add_argument(
        "--optimizer",
        nargs="+",
        default=["adamw", "muon"],
        metavar="NAME",
        help=f"{', '.join(VERIFIED_OPTIMIZERS)}, or MODULE:FUNCTION (default: adamw muon)",
    )
    parser.add_argument("--layout", choices=VERIFIED_LAYOUTS, nargs="+", default=VERIFIED_LAYOUTS)
    parser.add_argument("--steps", type=_positive, default=3, help="steps that are compared")
    parser.add_argument("--rounds", type=_positive, default=10, help="steps that are timed")
    parser.add_argument("--backend", help="gloo: on CPUs (default: nccl where there are GPUs)")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run on every rank; return the exit code."""
    arguments = parse_arguments(argv)
    if not dist.is_torchelastic_launched():
        print(f"start it with torchrun:\n{(__doc__ or '').splitlines()[2]}", file=sys.stderr)
        return 2
    device = torch.device("cpu")
    if torch.cuda.is_available() and arguments.backend not in ("gloo", "cpu:gloo"):
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group(arguments.backend or "nccl", device_id=device)
    else:
        dist.init_process_group(arguments.backend or "gloo")
    make_model = named_factory(arguments.model) if arguments.model else default_model
    mine: list[Row] = []
    for name in arguments.optimizer:
        if name in VERIFIED_OPTIMIZERS:
            ours, on_fsdp2 = VERIFIED_OPTIMIZERS[name]
        else:
            ours = named_factory(name, *VERIFIED_OPTIMIZERS)
            on_fsdp2 = (ours,)
        for layout, make in [("ours", ours), *(("fsdp2", make) for make in on_fsdp2)]:
            if layout not in arguments.layout:
                continue
            mine.append(
                examine(
                    make_model,
                    make,
                    layout,
                    device=device,
                    steps=arguments.steps,
                    rounds=arguments.rounds,
                    ours=name in VERIFIED_OPTIMIZERS and make is ours,
                    for_comparison=make is not ours,
                )
            )
    rows: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(rows, mine)
    wrong, compared = failures(rows), _compared(rows)
    if dist.get_rank() == 0:
        print(table(rows))
        print("\n\n".join([*notes(rows), *wrong]))
        equal = f"equal, bit by bit: {', '.join(compared)}" if compared else "nothing was compared"
        print("DIFFERENT" if wrong else equal)
    dist.destroy_process_group()
    return 0 if compared and not wrong else 1


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: where a thread of gloo lets go of a tensor while Python ends, the process aborts
    # (pytorch#190489), and the exit code says something else.
    os._exit(code)
