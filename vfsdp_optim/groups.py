"""Sorts a model's parameters into Muon and AdamW groups, by module type and logical shape.

Reads types and shapes only: works on meta, sharded and wrapped models, and touches no data.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import lru_cache
from io import StringIO
from math import prod
from typing import Any

from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd

from sharding.checkpoint.names import closest_names
from sharding.fsdp.many_objects import collector_paused
from sharding.planning.structure import FullMatrix
from vfsdp_optim.adamw import AdamWAlgorithm
from vfsdp_optim.algorithm import SCHEDULE_KEYS, NamesToKeep
from vfsdp_optim.group_overrides import kept_by, overridden, token_of, unmatched
from vfsdp_optim.muon import MuonAlgorithm
from vfsdp_optim.output_heads import EMBEDDINGS, Use, output_heads, uses_of
from vfsdp_optim.shampoo import ShampooAlgorithm
from vfsdp_optim.soap import SOAPAlgorithm

_NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, _NormBase)
_HEAD, _NAMED = "output head", "named in matrices"  # reasons
_ONE_MATRIX = str(FullMatrix())
# For a transposed convolution the first axis is the input: the same map, transposed.
_CONVOLUTION = "o ... -> o (...)"
# Which keys a group may have, for algorithms of this package; others are known to their optimizer.
_KEYS = {
    rule.name: frozenset(rule().defaults).union(SCHEDULE_KEYS)
    for rule in (AdamWAlgorithm, MuonAlgorithm, ShampooAlgorithm, SOAPAlgorithm)
}
_EXAMPLES = {  # of mappings by glob
    "matrices": "{'*.conv.weight': None}",
    "overrides": "{'*norm*': {'weight_decay': 0.0}}",
}


@dataclass(frozen=True, slots=True)
class Route:
    """Where one parameter goes, and why.

    Attributes:
        fqn: its name, without what wrappers add.
        shape: global.
        algorithm: that of matrices, "adamw", or "frozen" for a parameter in no group.
        matrices: pattern of its matrices; None if it is one, or not updated as one.
        reason: the rule that decided.
        overrides: what `overrides` says of it, such as "lr=0.001"; empty if nothing.
    """

    fqn: str
    shape: tuple[int, ...]
    algorithm: str
    matrices: str | None
    reason: str
    overrides: str = ""


class ParamGroups(list[dict[str, Any]]):
    """Groups for `Muon`, and the routes they came from; prints as a table.

    A list of dicts that may be edited, split and merged like any other; the routes say what
    `param_groups` decided.

    Attributes:
        routes: one for each parameter of the model.
    """

    def __init__(self, groups: Iterable[dict[str, Any]], routes: tuple[Route, ...]) -> None:
        """See the class."""
        super().__init__(groups)
        self.routes = routes

    def table(self) -> Table:
        """Return one line for each parameter."""
        table = Table("parameter", "shape", "algorithm", "matrices", "because")
        overridden_too = any(route.overrides for route in self.routes)
        if overridden_too:
            table.add_column("overrides")
        for route in self.routes:
            shape = "x".join(map(str, route.shape))
            cells = [route.fqn, shape, route.algorithm, route.matrices or "", route.reason]
            table.add_row(*cells, *([route.overrides] if overridden_too else []))
        return table

    def __str__(self) -> str:
        """Return the table as text."""
        out = StringIO()
        Console(file=out, width=140).print(self.table())
        return out.getvalue()


@collector_paused()
def param_groups(
    model: nn.Module,
    *,
    algorithm: str = "muon",
    adamw: Mapping[str, Any] | None = None,
    muon: Mapping[str, Any] | None = None,
    matrices: Mapping[str, str | FullMatrix | None] | None = None,
    overrides: Mapping[str, Mapping[str, Any]] | None = None,
    keep_32bit: Iterable[str] = (),
) -> ParamGroups:
    """Return groups of all trainable parameters of `model`, for `Muon`, `Shampoo` or `SOAP`.

    The weights of linear layers (the Conv1D of `transformers` is one) and convolutions go to that
    algorithm. Embeddings, output heads, norms, biases, and whatever has only one dimension above 1
    go to AdamW. A head is a linear layer as wide as the vocabulary of an embedding, outside of
    repeated blocks; an embedding that shares its weight has none, nor has a table of positions. A
    parameter that several modules share is in one group once, and is an embedding if it is one
    anywhere. With states="8bit", the states of embeddings and output heads stay in 32 bits: rows of
    rare words have gradients that are mostly zero (huggingface/transformers#14819).

    Args:
        model: sharded or not, wrapped or not, on any device.
        algorithm: of matrices: the name of one that the optimizer has.
        adamw: hyper-parameters of the AdamW group; the rest are AdamW's defaults.
        muon: hyper-parameters of the groups of matrices; the rest are the optimizer's.
        matrices: for names that match a glob, the matrices in the parameter, as an einops pattern
            or a `FullMatrix`, or None for AdamW. Comes before every other rule. For example
            "e m n -> e m n" for stacked experts, "(h q d) n -> q (h d) n; q=3 h=12" for queries,
            keys and values that alternate by head, FullMatrix(row_splits=(4096, 1024, 1024)) for
            fused rows of unequal heights, "m (h d) -> h m d; h=12" for heads by columns.
        overrides: for names that match a glob, hyper-parameters that come before those of `adamw`
            and `muon`, such as {"*norm*": dict(weight_decay=0.0), "head.*": dict(lr=1e-4)}. Where
            several globs match, what the last of them says counts, key by key: write the general
            ones first. A key counts for the parameters whose algorithm has it.
        keep_32bit: names of more parameters whose states are not to be 8-bit.

    Returns:
        A list of dicts that may be edited. A group that is split keeps its keys: {**group,
        "params": some} and {**group, "params": the others}.

    Raises:
        TypeError: `model` is no module, or another argument no mapping.
        ValueError: a parameter for which no rule is sure, a glob or a name that matches no
            parameter, globs that contradict each other, a pattern that does not fit, a key in
            `overrides` that no parameter's algorithm has, or `keep_32bit` inside another argument.

    Example:
        >>> model = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 6), nn.Linear(6, 10))
        >>> groups = param_groups(model)
        >>> [(group["algorithm"], [name for name, _ in group["params"]]) for group in groups]
        [('muon', ['1.weight']), ('adamw', ['0.weight', '1.bias', '2.weight', '2.bias'])]
    """
    _check_arguments(model, adamw=adamw, muon=muon, matrices=matrices, overrides=overrides)
    uses = uses_of(model)
    chosen = _chosen(uses, matrices or {})
    heads = output_heads(model, uses, chosen)
    routes = [_route(use, chosen, heads, algorithm) for use in uses]
    kept = _kept(uses, routes, keep_32bit)
    names = {route.fqn: route.algorithm for route in routes}
    options = overridden(names, overrides or {}, _KEYS)
    groups: dict[object, dict[str, Any]] = {}
    for use, route in zip(uses, routes, strict=True):
        kind, own = route.algorithm, options.get(route.fqn, {})
        if kind == "frozen":
            continue
        group = groups.setdefault(
            (kind, route.matrices, token_of(own)),
            {
                "params": [],
                "algorithm": kind,
                **({} if kind == "adamw" else {"matrices": route.matrices}),
                **((adamw if kind == "adamw" else muon) or {}),
                **own,
            },
        )
        group["params"].append((use.fqn, use.param))
        if use.fqn in kept:
            group.setdefault("keep_32bit", NamesToKeep()).append(use.fqn)
    said = [_saying(route, options) for route in routes]
    return ParamGroups(sorted(groups.values(), key=_comes_last), tuple(said))


def _comes_last(group: dict[str, Any]) -> bool:
    return group["algorithm"] == "adamw"


def _saying(route: Route, options: Mapping[str, Mapping[str, Any]]) -> Route:
    """Return the route with what overrides say of it."""
    if route.algorithm == "frozen" or not (own := options.get(route.fqn)):
        return route
    return replace(route, overrides=" ".join(f"{key}={value}" for key, value in own.items()))


def _kept(uses: list[Use], routes: list[Route], chosen: Iterable[str]) -> set[str]:
    """Return the names of the parameters whose states stay in 32 bits.

    Embeddings and heads do whatever `matrices` says of them.
    """
    if isinstance(chosen, str) or not isinstance(chosen, Iterable):
        raise TypeError(f"keep_32bit: expected names such as ['head.weight'], got {chosen!r}")
    wanted = set(chosen)
    if unknown := sorted(wanted - {route.fqn for route in routes}):
        known = closest_names(unknown[0], [route.fqn for route in routes])
        raise ValueError(f"keep_32bit names {unknown!r}, expected some of {known}")
    vocabularies = {use.param.shape[0] for use in uses if use.is_weight(*EMBEDDINGS)}
    for use, route in zip(uses, routes, strict=True):
        named_head = (
            route.reason == _NAMED
            and route.algorithm == "adamw"
            and use.is_weight(nn.Linear)
            and use.param.shape[0] in vocabularies
        )
        if route.reason == _HEAD or named_head or use.is_weight(*EMBEDDINGS):
            wanted.add(use.fqn)
    return wanted


def _check_arguments(model: nn.Module, **mappings: object) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected an nn.Module, got {model!r}; pass the model itself")
    for name, value in mappings.items():
        if value is not None and not isinstance(value, Mapping):
            example = _EXAMPLES.get(name, "{'lr': 3e-4}")
            raise TypeError(f"{name}: expected a mapping such as {example}, got {value!r}")
        if wrong := [key for key in value or () if not isinstance(key, str)]:
            raise TypeError(f"{name}: expected text as keys, got {wrong[0]!r}")
        if name not in _EXAMPLES and (kept := kept_by(value or {})):
            raise ValueError(
                f"{name}: keep_32bit={kept!r} would replace the names of embeddings and output "
                "heads; pass it to param_groups itself, which adds them"
            )


def _chosen(
    uses: list[Use], matrices: Mapping[str, str | FullMatrix | None]
) -> dict[str, str | None]:
    """Return what `matrices` says, by name."""
    chosen: dict[str, str | None] = {}
    origin: dict[str, str] = {}
    for glob, pattern in matrices.items():
        matched = [use for use in uses if fnmatchcase(use.fqn, glob)]
        if not matched:
            raise unmatched("matrices", glob, [use.fqn for use in uses])
        text = None if pattern is None else _parsed(glob, pattern)
        for use in matched:
            if text is not None and use.param.requires_grad:
                _check_fits(use, glob, text)
            if use.fqn in chosen and chosen[use.fqn] != text:
                raise ValueError(
                    f"{use.fqn}: matrices has {origin[use.fqn]!r}: {chosen[use.fqn]!r} and "
                    f"{glob!r}: {text!r}; make the globs exclude each other"
                )
            chosen[use.fqn], origin[use.fqn] = text, glob
    return chosen


def _route(use: Use, chosen: dict[str, str | None], heads: set[str], matrices: str) -> Route:
    shape = tuple(use.param.shape)

    def to(algorithm: str, reason: str, pattern: str | None = None) -> Route:
        return Route(use.fqn, shape, algorithm, None if pattern == _ONE_MATRIX else pattern, reason)

    if not use.param.requires_grad:
        return to("frozen", "requires no gradient")
    if use.fqn in chosen:
        pattern = chosen[use.fqn]
        return to("adamw" if pattern is None else matrices, _NAMED, pattern)
    if use.is_weight(*EMBEDDINGS):
        return to("adamw", "embedding")
    if prod(shape) == max(shape, default=1):
        return to("adamw", "vector")
    if use.fqn in heads:
        return to("adamw", _HEAD)
    _, name, module = use.modules[0]
    if isinstance(module, _NORMS):
        return to("adamw", "norm")
    pattern = _known_pattern(name, module)
    if pattern is None:
        raise ValueError(_ambiguous(use, module))
    if _shortest_side(pattern, shape) == 1:
        return to("adamw", f"{type(module).__name__}, one channel a group")
    return to(matrices, type(module).__name__, pattern)


@lru_cache(maxsize=1024)
def _shortest_side(pattern: str, shape: tuple[int, ...]) -> int:
    """Return the fewest rows or columns of a matrix; equal parameters ask once."""
    units = FullMatrix.parse(pattern).units(shape)
    return min((min(unit.rows, unit.cols) for unit in units), default=1)


def _known_pattern(name: str, module: nn.Module) -> str | None:
    """Return the matrices of a parameter of torch's own modules, or None if that is not known."""
    if isinstance(module, nn.Linear) and name == "weight":
        return _ONE_MATRIX
    if name == "weight" and _is_conv1d_of_transformers(module):
        return "n m -> m n"  # (in, out)
    if isinstance(module, _ConvNd) and name == "weight":
        if module.groups == 1:
            return _CONVOLUTION
        return f"(g o) ... -> g o (...); g={module.groups}"  # the groups do not see each other
    if isinstance(module, nn.MultiheadAttention) and name.endswith("_proj_weight"):
        fused = name == "in_proj_weight"  # queries, keys and values are three matrices
        return "(k m) n -> k m n; k=3" if fused else _ONE_MATRIX
    return None


def _is_conv1d_of_transformers(module: nn.Module) -> bool:
    """Return whether it is a linear layer as GPT-2 has them; imports nothing to find out."""
    return any(
        cls.__name__ == "Conv1D" and cls.__module__.partition(".")[0] == "transformers"
        for cls in type(module).__mro__
    )


def _parsed(glob: str, pattern: str | FullMatrix) -> str:
    try:
        return str(FullMatrix.parse(str(pattern)))
    except ValueError as error:
        raise ValueError(f"matrices: {glob!r}: {error}") from None


def _check_fits(use: Use, glob: str, text: str) -> None:
    try:
        FullMatrix.parse(text).units(tuple(use.param.shape))
    except ValueError as error:
        raise ValueError(f"{use.fqn}, by matrices={{{glob!r}: {text!r}}}: {error}") from None


def _ambiguous(use: Use, module: nn.Module) -> str:
    patterns: Iterator[str] = iter(("m n -> m n",))
    if len(use.param.shape) > 2:
        patterns = iter(("e m n -> e m n", _CONVOLUTION))
    cures = [f"matrices={{{use.fqn!r}: {pattern!r}}}" for pattern in (*patterns, None)]
    return (
        f"{use.fqn}: no rule says how to update shape {tuple(use.param.shape)} of a "
        f"{type(module).__name__}; pass {', '.join(cures[:-1])} for Muon, or {cures[-1]} for AdamW"
    )
