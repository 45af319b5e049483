"""`vfsdp plan`: what a model takes on a number of ranks, before anyone rents them."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console
from rich.progress import Progress as ProgressBar
from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn

from vfsdp_optim.capacity.advice import advise, search_layouts
from vfsdp_optim.capacity.fitting import (
    DeviceMemory,
    Suggestion,
    coarsest_granule,
    suggest,
    verdicts,
)
from vfsdp_optim.capacity.model_sources import model_names, read_model
from vfsdp_optim.capacity.optimizers import OPTIMIZERS, optimizer_name
from vfsdp_optim.capacity.parallelism import Parallelism, divide
from vfsdp_optim.capacity.picture import draw
from vfsdp_optim.capacity.prediction import Capacity, measure
from vfsdp_optim.capacity.shapes import ITEMSIZE, ModelShapes
from vfsdp_optim.capacity.step_buffers import StepDtypes
from vfsdp_optim.capacity.tables import capacity_table, search_table, to_json
from vfsdp_optim.capacity.training_setup import BACKENDS, Granularity, Setup
from vfsdp_optim.states.precision import STATES

_EPILOG = """\
models: {models}

examples:
  vfsdp plan --model gpt-oss-120b --ranks 8,64,256 --optimizer muon --states 8bit --plot plan.png
  vfsdp plan --model llama3-70b --suggest --memory 80GiB
  vfsdp plan --model path/to/config.json --ranks 512 --replicate 8 --granularity e128 --suggest
  vfsdp plan --model my_package.model:build --ranks 8 --json plan.json

The last one's file is what fully_shard(block, plan="plan.json") takes.
"""


def _numbers(text: str) -> list[int]:
    try:
        return list(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"expected numbers of ranks such as 8,64, got {text!r}"
        ) from None


def _dtype(text: str) -> str:
    return {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}.get(text, text)


def _optimizer(text: str) -> str:
    return text if ":" in text else text.lower()


_FLAGS: dict[str, dict[str, Any]] = {
    "--model": dict(
        required=True,
        help="name of a table; path of a table, of a Hugging Face config.json, of a safetensors "
        "file or index (header alone), or of a folder with one; or module:function that returns "
        "an nn.Module",
    ),
    "--ranks": dict(
        type=_numbers,
        help="numbers of ranks, as in 8,64,1024; --suggest --memory finds the fewest without it",
    ),
    "--memory": dict(
        help="of a device, as in 80GiB: says whether a rank fits, with a fifth of it left for "
        "activations"
    ),
    "--replicate": dict(type=int, default=1, help="copies of the shards (HSDP)"),
    "--tp": dict(type=int, default=1, help="ranks that divide each matrix first"),
    "--ep": dict(type=int, default=1, help="ranks that divide the experts first"),
    "--pp": dict(type=int, default=1, help="stages of a pipeline; the largest is planned"),
    "--optimizer": dict(
        type=_optimizer,
        default="adamw",
        help=f"{', '.join(OPTIMIZERS)}, or module:Class of an Algorithm or an optimizer of your "
        "own; what is no matrix is left to AdamW where it needs matrices (%(default)s)",
    ),
    "--states": dict(
        help=f"{' or '.join(STATES)}; 32bit, the default, is as wide as the parameters; --suggest "
        "without --ranks tries both",
    ),
    "--dtype": dict(type=_dtype, help="of the parameters; by default the model's"),
    "--param-dtype": dict(
        type=_dtype, help="of MixedPrecisionPolicy: what is gathered; default: --dtype"
    ),
    "--reduce-dtype": dict(
        type=_dtype, help="of MixedPrecisionPolicy: gradients; default: --param-dtype"
    ),
    "--granularity": dict(
        default="element",
        help="what may not be cut: 'element' (as fully_shard does it, blocks of 256 elements), "
        "rows of every matrix such as '16', of experts and MLPs alone such as 'e128', or 'matrix' "
        "for whole matrices",
    ),
    "--resident-padding": dict(
        type=float,
        default=0.02,
        help="of fully_shard: padding up to which matrices are kept whole on a rank (%(default)s)",
    ),
    "--experts": dict(
        help="'separate' or 'fused' experts of a config.json; by default as in the checkpoints"
    ),
    "--backend": dict(default="nccl", help=f"{' or '.join(BACKENDS)} (%(default)s)"),
    "--suggest": dict(
        action="store_true",
        help="search HSDP group sizes and granules; with --memory, ranks and states too",
    ),
    "--json": dict(
        nargs="?",
        const="-",
        metavar="FILE",
        help="the plans as JSON: into a file, or in place of the table",
    ),
    "--plot": dict(metavar="FILE", help="draw all ranks' buffers into a .png or .svg"),
}


class _OneLineParser(argparse.ArgumentParser):
    """Reports what is wrong in one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code: 0, or 2 for input that cannot be planned."""
    parser = _parser()
    args = parser.parse_args(arguments)
    try:
        _plan(args)
        sys.stdout.flush()
    except BrokenPipeError:  # whoever reads has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except ValueError as error:
        line = " ".join(str(error).split())
        print(f"vfsdp plan: error: {line}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = _OneLineParser(prog="vfsdp", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    plan = commands.add_parser(
        "plan",
        description=__doc__,
        epilog=_EPILOG.format(models=", ".join(model_names())),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = plan.add_argument
    for flag, options in _FLAGS.items():
        add(flag, **options)
    return parser


def _plan(args: argparse.Namespace) -> None:
    memory = None if args.memory is None else DeviceMemory.parse(args.memory)
    if args.ranks is None and (memory is None or not args.suggest):
        raise ValueError(
            "ranks: expected numbers of ranks such as --ranks 8,64, or --suggest --memory 80GiB, "
            "which find the fewest"
        )
    setup = _setup(args)
    divided = args.replicate, args.tp, args.ep, args.pp
    parallelisms = [Parallelism(ranks, *divided) for ranks in args.ranks or (prod(divided),)]
    if args.experts not in (None, "separate", "fused"):
        raise ValueError(f"experts: expected 'separate' or 'fused', got {args.experts!r}")
    model = read_model(args.model, dtype=args.dtype, experts=args.experts)
    suggestion = None
    with _ProgressLine() as progress:
        if args.ranks is None and memory is not None:
            setups = [replace(setup, states=s) for s in STATES if args.states in (None, s)]
            suggestion = suggest(model, parallelisms[0], setups, memory, progress.tell)
            setup = suggestion.capacity.setup
            parallelisms = [suggestion.capacity.model.parallelism]
        capacities = [measure(divide(model, p), setup, progress.tell) for p in parallelisms]
        advice = [advise(model, capacity) for capacity in capacities]
        found = [
            search_layouts(model, parallelism, setup, progress.tell)
            for parallelism in (parallelisms if args.suggest else ())
        ]
    title = _title(model, setup)
    if args.plot is not None:
        draw(capacities, Path(args.plot), title)
    if args.json is not None:
        text = json.dumps(to_json(model, capacities, advice, found), indent=1)
        if args.json == "-":
            print(text)
            return
        _write(Path(args.json), text)
    _print(title, model, capacities, advice)
    console = Console(width=200, soft_wrap=True)
    for parallelism, table in zip(parallelisms, found, strict=False):
        console.print(search_table(parallelism, table))
    if memory is not None:
        others = () if suggestion is None else suggestion.others
        for sentence in verdicts([*capacities, *others], memory):
            console.print(sentence, highlight=False)
    if suggestion is not None:
        console.print(_recommended(suggestion, coarsest_granule(found[0])), highlight=False)


def _recommended(suggestion: Suggestion, granule: str | None) -> str:
    """Return what to pass, in words of this command line."""
    parallelism = suggestion.capacity.model.parallelism
    text = (
        f"suggested: --ranks {parallelism.ranks} --states {suggestion.capacity.setup.states} "
        f"--replicate {parallelism.replicate}"
    )
    if granule is not None:
        text += f" --granularity {granule}"
    copies = parallelism.shard_ranks // suggestion.smallest_group
    if copies > 1:
        text += f"; HSDP groups of {suggestion.smallest_group} fit too (--replicate "
        text += f"{copies * parallelism.replicate}), and gather over fewer ranks"
    return text


def _setup(args: argparse.Namespace) -> Setup:
    for key in ("dtype", "param_dtype", "reduce_dtype"):
        if getattr(args, key) not in (None, *ITEMSIZE):
            raise ValueError(
                f"{key}: expected one of {', '.join(ITEMSIZE)}, got {getattr(args, key)!r}"
            )
    precision = StepDtypes(args.param_dtype, args.reduce_dtype)
    granularity = Granularity.parse(args.granularity)
    return Setup(
        args.optimizer,
        args.states or STATES[0],
        granularity,
        precision,
        args.backend,
        args.resident_padding,
    )


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text + "\n")
    except OSError as error:
        raise ValueError(f"json: cannot write {str(path)!r}: {error.strerror}") from None


def _title(model: ModelShapes, setup: Setup) -> str:
    return (
        f"{model.name}: {model.numel / 1e9:,.2f} billion parameters, "
        f"{optimizer_name(setup.optimizer)}, {setup.states} states, granularity {setup.granularity}"
    )


def _print(
    title: str,
    model: ModelShapes,
    capacities: Sequence[Capacity],
    advice: Sequence[tuple[str, ...]],
) -> None:
    console = Console(width=200, soft_wrap=True)
    console.print(capacity_table(title, capacities))
    for capacity, sentences in zip(capacities, advice, strict=True):
        for sentence in sentences:
            console.print(f"{capacity.model.parallelism.ranks} ranks: {sentence}", highlight=False)
    for note in dict.fromkeys(note for c in capacities for note in c.model.notes):
        console.print(f"note: {note}", highlight=False)
    console.print(f"shapes: {model.source}", highlight=False)


class _ProgressLine:
    """A line on stderr that says what is planned, while it takes."""

    def __enter__(self) -> _ProgressLine:
        console = Console(stderr=True)
        self._bar = ProgressBar(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._bar.start()
        self._task = self._bar.add_task("reading", total=None)
        return self

    def tell(self, what: str) -> None:
        """Say what comes next."""
        self._bar.update(self._task, description=f"planning {what}")

    def __exit__(self, *_: object) -> None:
        self._bar.stop()


if __name__ == "__main__":
    sys.exit(main())
