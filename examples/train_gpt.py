"""Train a byte-level GPT on Python's standard library, with the model sharded over ranks.

    python examples/train_gpt.py                       starts its ranks: one a core or CUDA device
    torchrun --nproc-per-node 4 examples/train_gpt.py  uses torchrun's
    python examples/train_gpt.py --plan                prints where every parameter lies, and leaves
    python examples/train_gpt.py --resume --ranks 3    continues the last run, here on 3 ranks
    torchrun --nproc-per-node 4 --max-restarts 3 examples/train_gpt.py --resume=auto
                                                       starts or continues, also where a rank died

It ends with bits per byte on files that were held out, beside those of models that only count
which byte follows which one or two.

Learning rates are the best of this sweep (bits per byte on held-out files; --steps 300, 2 ranks).
Beside the others, the embedding, the head and the norms are AdamW's, at AdamW's best rate.

    adamw  --lr 0.008  2.603    --lr 0.016  2.430    --lr 0.032  2.673
    muon   --lr 0.01   2.044    --lr 0.02   1.950    --lr 0.04   1.955

The same after --steps 120, for those that precondition, and the first step after which a run is as
low as AdamW's best (python benchmarks/fewer_steps.py):

    adamw    --lr 0.004  3.253    --lr 0.008  3.058    --lr 0.016  3.098    --lr 0.032  3.615
    shampoo  --lr 0.008  2.962    --lr 0.016  2.864    --lr 0.032  3.127    step 90 with 0.016
    soap     --lr 0.002  2.967    --lr 0.004  2.860    --lr 0.008  2.907    step 85 with 0.004
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.rendezvous import rendezvous
from torch.distributed.run import main as torchrun
from tqdm import tqdm

from gpt import GPT, GPTConfig, generate
from gpt_run import REPORT, Run, check, prepare
from stdlib_corpus import ByteModel, read_corpus, spread_windows, training_batch
from vfsdp_optim import (
    SOAP,
    AdamW,
    MixedPrecisionPolicy,
    Muon,
    Precision,
    Shampoo,
    fully_shard,
    layout,
    param_groups,
)

SIZES = {
    "tiny": GPTConfig(layers=2, width=32, heads=2, context=32),  # for tests
    "small": GPTConfig(layers=4, width=128, heads=4, context=128),  # for CPUs
    "base": GPTConfig(layers=12, width=768, heads=12, context=1024),  # for GPUs
}
SEQUENCES = 24  # of a batch, at least one a rank; however many ranks share it, it is the same batch
HELD_OUT_BATCHES = 40  # of SEQUENCES windows each
REPORT_EVERY = 10  # steps; reading a loss makes the host wait for the device
PROMPT = b"import os\n\n\ndef "

LEARNING_RATES = {"muon": 0.02, "adamw": 0.016, "shampoo": 0.016, "soap": 0.004}
# Of matrices: what else its constructor is told.
MATRIX_OPTIMIZERS = {
    "muon": (Muon, {}),
    "shampoo": (Shampoo, dict(block_size=128, weight_decay=0.01)),
    "soap": (SOAP, dict(block_size=128, betas=(0.9, 0.95), precondition_frequency=5)),
}


@dataclass(frozen=True, slots=True)
class World:
    """Who this process is among the ranks, and where it computes."""

    rank: int
    size: int
    device: torch.device

    def share(self, batch: Tensor) -> Tensor:
        """Returns this rank's rows of a global batch, on its device."""
        return batch[self.rank :: self.size].to(self.device)


# -- what to do ------------------------------------------------------------------------------------


def parse_arguments() -> argparse.Namespace:
    """Reads the command line, and refuses early what cannot work."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    option = parser.add_argument
    option("--optimizer", choices=LEARNING_RATES, default="muon")
    option("--states", choices=("32bit", "8bit"), default="32bit", help="(default: 32bit)")
    option("--lr", type=float, help=f"peak learning rate (default: {LEARNING_RATES})")
    option("--steps", type=int, default=800, help="(default: 800)")
    option("--size", choices=SIZES, default="small", help="of the model (default: small)")
    option(
        "--dtype", choices=("fp32", "bf16"), default="fp32", help="to compute in; shards are fp32"
    )
    option("--ranks", type=int, help="(default: CUDA devices, or cores but at least 2)")
    option("--seed", type=int, default=0, help="of weights and data (default: 0)")
    option("--checkpoint", type=Path, metavar="DIR", help="(default: runs/OPTIMIZER)")
    option("--save-every", type=int, default=100, metavar="STEPS", help="(default: 100)")
    option(
        "--resume",
        nargs="?",
        const="yes",
        choices=("yes", "auto"),
        help="continue the run in DIR; with =auto, start it where there is none",
    )
    option("--plan", action="store_true", help="print the layout and leave")
    args = parser.parse_args()
    args.checkpoint = args.checkpoint or Path("runs") / args.optimizer
    for name in ("steps", "save_every", "ranks"):
        if (value := getattr(args, name)) is not None and value < 1:
            parser.error(f"expected --{name.replace('_', '-')} of at least 1, got {value!r}")
    if args.ranks is not None and args.ranks > SEQUENCES:
        parser.error(f"expected at most {SEQUENCES} --ranks, got {args.ranks!r}: start fewer")
    if not args.plan:
        try:
            check(args.checkpoint, settings(args), args.resume)
        except (OSError, ValueError) as error:
            parser.error(str(error))
    return args


def settings(args: argparse.Namespace) -> dict[str, str | int]:
    """Returns the options that a resumed run shares with the one that was saved."""
    return {name: getattr(args, name) for name in ("size", "optimizer", "states", "seed")}


# -- ranks -----------------------------------------------------------------------------------------


def cores() -> int:
    """Returns how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def start_ranks(count: int | None) -> None:
    """Runs this script under torchrun, which forwards signals and ends all ranks when one fails."""
    if count is None:
        count = min(torch.cuda.device_count() or max(cores(), 2), SEQUENCES)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # else torchrun warns that it does this
    torchrun(["--standalone", "--nproc-per-node", str(count), __file__, *sys.argv[1:]])


def join_ranks(requested: int | None) -> World:
    """Joins the ranks that torchrun started: on CUDA devices with NCCL, or on cores with gloo.

    Raises:
        RuntimeError: There are more ranks than CUDA devices, or than sequences in a batch, or
            other than requested.
    """
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    local_rank, local_size = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    if requested not in (None, size):
        raise RuntimeError(
            f"expected --ranks {size}, as torchrun started, got {requested!r}: omit it"
        )
    if size > SEQUENCES:
        raise RuntimeError(
            f"expected at most {SEQUENCES} ranks, one a sequence, got {size!r}: start fewer"
        )
    if not torch.cuda.is_available():
        torch.set_num_threads(max(1, cores() // local_size))
        dist.init_process_group("gloo", **meeting_point())
        return World(rank, size, torch.device("cpu"))
    if local_size > torch.cuda.device_count():
        raise RuntimeError(
            f"expected at most {torch.cuda.device_count()} ranks, one a CUDA device, "
            f"got {local_size!r}: start fewer, or set CUDA_VISIBLE_DEVICES= for CPU ranks"
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device, **meeting_point())
    return World(rank, size, device)


def meeting_point() -> dict[str, Any]:
    """Returns where ranks meet: after a restart, not where ranks of before left their addresses."""
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # pytorch#135712
    if restarts == "0":
        return {}
    store, rank, size = next(rendezvous("env://"))
    return dict(store=dist.PrefixStore(restarts, store), rank=rank, world_size=size)


# -- training --------------------------------------------------------------------------------------


def build(args: argparse.Namespace, world: World) -> Run:
    """Returns a sharded model and its optimizer, before the first step."""
    torch.manual_seed(args.seed)  # the same weights on every rank
    with world.device:
        model = GPT(SIZES[args.size])
    mesh = init_device_mesh(world.device.type, (world.size,))
    policy = MixedPrecisionPolicy()
    if args.dtype == "bf16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)

    lr = LEARNING_RATES[args.optimizer] if args.lr is None else args.lr
    adamw = dict(betas=(0.9, 0.95), weight_decay=0.01)
    if args.optimizer == "adamw":
        kept = ["embedding.weight", "head.weight"]
        optimizer = AdamW(
            model.named_parameters(), lr=lr, states=Precision(args.states, keep_32bit=kept), **adamw
        )
        return Run(model, optimizer)
    # Hidden matrices are the optimizer's; embedding, head and the gains of norms are AdamW's.
    of_adamw = dict(lr=LEARNING_RATES["adamw"], **adamw)
    groups = param_groups(model, algorithm=args.optimizer, adamw=of_adamw)
    make_optimizer, options = MATRIX_OPTIMIZERS[args.optimizer]
    return Run(model, make_optimizer(groups, lr=lr, states=args.states, **options))


def schedule(step: int, steps: int) -> float:
    """Returns the factor on learning rates: up for 1/20 of the steps, flat, down to 0 from 1/2."""
    return min(1.0, 20 * (step + 1) / steps, 2 * (steps - step) / steps)


def share_of_loss(model: nn.Module, batch: Tensor, world: World) -> Tensor:
    """Returns this rank's part of the loss of a (B, T + 1) global batch; the parts add up.

    Dividing by the bytes of the whole batch weighs every byte alike, also where some ranks have a
    sequence more than others.
    """
    tokens = world.share(batch)  # (B / ranks, T + 1)
    logits = model(tokens[:, :-1])  # (B / ranks, T, V)
    losses = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")
    return losses / batch[:, 1:].numel()


def take_step(
    run: Run, peaks: list[float], text: Tensor, args: argparse.Namespace, world: World
) -> None:
    """Takes the next step: batch and rates, up to `peaks` of the groups, follow from its number."""
    for group, peak in zip(run.optimizer.param_groups, peaks, strict=True):
        group["lr"] = peak * schedule(run.step, args.steps)
    context = SIZES[args.size].context
    batch = training_batch(text, step=run.step, seed=args.seed, sequences=SEQUENCES, length=context)
    loss = share_of_loss(run.model, batch, world)
    # Gradients are averaged over ranks, while these losses add up to the mean.
    (loss * world.size).backward()
    run.optimizer.step()
    run.optimizer.zero_grad()
    loss = loss.detach()
    dist.all_reduce(loss)
    run.losses.append(loss)


def train(run: Run, text: Tensor, args: argparse.Namespace, world: World) -> None:
    """Takes the steps that are left; saves every --save-every steps and at the end.

    Raises:
        RuntimeError: The loss is no longer finite, or the launcher died without ending its ranks.
    """
    context = SIZES[args.size].context
    launcher = os.getppid()
    peaks = [group["lr"] for group in run.optimizer.param_groups]
    if args.resume:
        try:
            run.load(args.checkpoint)
        except FileNotFoundError:  # on every rank
            if args.resume != "auto":
                raise
    if world.rank == 0:
        prepare(args.checkpoint, settings(args), resumed=run.step > 0)
    saving = None
    bar = tqdm(
        total=args.steps * SEQUENCES * context,
        initial=run.step * SEQUENCES * context,
        unit=" tokens",
        unit_scale=True,
        mininterval=0.2 if sys.stderr.isatty() else 30,
        disable=world.rank != 0,
    )
    while run.step < args.steps:
        if os.getppid() != launcher:  # else these ranks would write beside those that resume
            raise RuntimeError(f"expected launcher {launcher} to live, it is gone: use --resume")
        take_step(run, peaks, text, args, world)
        if run.step % REPORT_EVERY == 0 or run.step == args.steps:
            show_progress(bar, run)
        bar.update(SEQUENCES * context)
        if run.step % args.save_every == 0 or run.step == args.steps:
            saving = run.save(args.checkpoint)
    if saving is not None:
        saving.result()
    bar.close()


def show_progress(bar: tqdm, run: Run) -> None:
    """Puts the step and the last loss into the bar.

    Raises:
        RuntimeError: The loss is not finite. Every rank has the same loss, so every rank raises.
    """
    loss = run.losses[-1].item()
    if not math.isfinite(loss):
        raise RuntimeError(f"expected a finite loss, got {loss!r} at step {run.step}: lower --lr")
    bar.set_postfix(step=run.step, bits_per_byte=f"{loss / math.log(2):.3f}", refresh=False)


@torch.no_grad()
def held_out_bits(model: nn.Module, windows: Tensor, world: World) -> float:
    """Returns bits a byte over (N, T + 1) windows, N a multiple of SEQUENCES."""
    batches = windows.split(SEQUENCES)
    total = torch.zeros((), device=world.device)
    for batch in batches:
        total += share_of_loss(model, batch, world)
    dist.all_reduce(total)
    return total.item() / len(batches) / math.log(2)


# -- report ----------------------------------------------------------------------------------------


def sample(model: nn.Module, context: int, device: torch.device) -> str:
    """Returns text that the model wrote after PROMPT. Every rank calls it."""
    prompt = torch.frombuffer(bytearray(PROMPT), dtype=torch.uint8).long().to(device)
    written = generate(model, prompt, 300, context=context)
    return bytes(written.tolist()).decode(errors="replace")


def draw_losses(path: Path, losses: list[float], byte_models: dict[str, float]) -> None:
    """Draws the loss of each step, bits a byte, and a line a byte model."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(losses, linewidth=0.8, label="GPT, training batch")
    for i, (name, bits) in enumerate(byte_models.items()):
        axes.axhline(bits, color=f"C{i + 1}", linestyle="--", label=f"{name}, held out")
    axes.set(xlabel="step", ylabel="bits per byte", ylim=(0, 8))
    axes.legend()
    figure.savefig(path, dpi=120)


def write_report(run: Run, bits: dict[str, float], text: str, directory: Path) -> None:
    """Prints held-out bits a byte and a sample; writes both and the losses beside the checkpoints.

    Args:
        run: After its last step.
        bits: Held-out bits a byte of each byte model, and of the GPT under "GPT".
        text: What the model wrote.
        directory: Where `report.json` and `loss.png` go.
    """
    losses = [loss.item() / math.log(2) for loss in run.losses]
    byte_models = {name: value for name, value in bits.items() if name != "GPT"}
    draw_losses(directory / "loss.png", losses, byte_models)
    report = {"held_out_bits": bits, "losses": losses, "sample": text}
    (directory / REPORT).write_text(json.dumps(report))
    print(f"\na sample\n{text}\n\nbits per byte on held-out files")
    for name, value in bits.items():
        print(f"  {name:<20} {value:.3f}")
    print(f"loss curve and report: {directory}/loss.png, {REPORT}")


def describe(run: Run, args: argparse.Namespace, world: World) -> str:
    """Returns the layout as a table and the run in a line; with --plan the optimizer's plan too."""
    parameters = sum(parameter.numel() for parameter in run.model.parameters())
    rates = {group["algorithm"]: group["lr"] for group in run.optimizer.param_groups}
    line = (
        f"{parameters:,} parameters on {world.size} x {world.device.type}, {args.dtype}; "
        f"{args.steps} steps of {SEQUENCES} x {SIZES[args.size].context} bytes; "
        f"peak learning rates: {', '.join(f'{name} {lr}' for name, lr in rates.items())}"
    )
    tables = [layout(run.model), run.optimizer.plan()] if args.plan else [layout(run.model)]
    return "\n".join(map(str, [*tables, line]))


def main() -> None:
    """Starts ranks if there are none; each of them builds, trains, measures, reports."""
    args = parse_arguments()
    if not dist.is_torchelastic_launched():
        start_ranks(args.ranks)
        return
    world = join_ranks(args.ranks)
    run = build(args, world)
    description = describe(run, args, world)
    if world.rank == 0:
        print(description, flush=True)
    if not args.plan:
        train_and_report(run, args, world)
    dist.barrier()  # else gloo's threads may abort the exit of a rank (pytorch#190489)
    dist.destroy_process_group()


def train_and_report(run: Run, args: argparse.Namespace, world: World) -> None:
    """Trains to the last step, then measures and reports on rank 0."""
    corpus, context = read_corpus(), SIZES[args.size].context
    train(run, corpus.training, args, world)
    count = HELD_OUT_BATCHES * SEQUENCES
    windows = spread_windows(corpus.held_out, count=count, length=context)
    bits = {"GPT": held_out_bits(run.model, windows, world)}
    text = sample(run.model, context, world.device)
    if world.rank == 0:
        for order in (2, 1):
            byte_model = ByteModel(corpus.training, order=order)
            bits[f"order-{order} byte model"] = byte_model.bits(windows)
        write_report(run, bits, text, args.checkpoint)


if __name__ == "__main__":
    main()
