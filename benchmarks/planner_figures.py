"""Padding in percent that a study of the planner reached, on the models that the package has.

Alignment: tensors start anywhere, S is a multiple of 64 elements. A granularity `N` is N rows for
every tensor of two or more dims; `eN` is N rows for experts and MLPs, elements for all else. A row
is the last dim (of a convolution all but the first). Figures are text: their digits say how far
they were rounded or cut off.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.resources import files
from math import prod
from typing import Any

from sharding.planning.granule import Granule
from sharding.planning.planner import TensorSpec

MLP = {"gate", "up", "down", "c_fc.w", "mlp.w", "fc1.w", "fc2.w"}
RANKS = (8, 64, 128, 256, 512, 1000, 1024, 4096)

# One segment, by RANKS. A star: S is the lower bound in every bucket, or exceeds it by less than
# 0.03 %, so that no plan is better.
ONE_SEGMENT = """
gpt_oss_120b            e1    0.00* 0.01* 0.02* 0.04* 0.04* 0.03* 0.04* 0.59*
gpt_oss_120b            e16   0.02* 0.04* 0.23* 0.59* 1.32* 0.39* 2.77* 5.68*
gpt_oss_120b            e32   0.04* 0.23* 0.59* 1.32* 2.77* 3.23* 5.68* 17.3*
gpt_oss_120b            e128  0.04* 1.32* 2.77* 5.68* 5.68* 14.6* 17.3* 87*
gpt_oss_120b            1     0.00* .01* .02* .05* .05* 3.2* 5.7* 17*
gpt_oss_120b            16    .02* .05* .23* .60* 1.34* 83* 87* 273*
gpt_oss_120b            128   .05* 1.34* 2.79* 5.74* 5.82* 106* 111* 739*
deepseek_v3_perexpert   e1    0.00 0.00 0.01 0.01 0.02 0.07 0.05 0.23*
deepseek_v3_perexpert   e16   0.00 0.05 0.11 0.23 0.23 1.32 0.70 9.6*
deepseek_v3_perexpert   e128  0.02 0.23 0.70 1.65 4.41 11 12 60*
deepseek_v3_perexpert   1     0.00 0.01 0.04 0.11* 0.23* 1.85 1.24 11.8*
deepseek_v3_perexpert   16    0.00 0.23 0.70 1.94* 3.83* 16 12* 125*
deepseek_v3_perexpert   128   0.02 1.65 3.54 9.9* 17* 39* 42* 467*
deepseek_v3_fused       e1    0* 0* .01* .02* .02* .07* .05* .23*
deepseek_v3_fused       e16   0* .05* .11* .23* .23* 2.3* .70* 9.6*
deepseek_v3_fused       e128  .02* .23* .70* 3.7* 9.6* 19* 22* 60*
kimi_k2_perexpert       e1    0 0 0 .01 .01 .01 .02 .17
kimi_k2_perexpert       e16   .01 .02 .02 .02 .12 .32 .37 5.4
kimi_k2_perexpert       e128  .02 .07 .27 .48 1.1 3.7 3.1 39
kimi_k2_perexpert       1     0 0 .01 .01 .01 .03 .02 3.4
kimi_k2_perexpert       16    0 .02 .07 .18 .44 1.4 1.5 35
kimi_k2_perexpert       128   .02 .18 .49 .91 1.96 7.7 10 140
qwen3_30b_a3b_perexpert e1    0 0 0 .01 .45 .56 .95 .95
qwen3_30b_a3b_perexpert e16   0 .08 .20 .29 2.3 10 13 29
qwen3_30b_a3b_perexpert e128  .02 .40 .95 3.6 7.5 26 29 408
llama3_70b              1     .04* .36* .36* 1.2* 2.9* .5* 2.9* 9.5*
llama3_70b              16    .36* 2.9* 9.5* 9.5* 9.6* 7.2* 9.6* 329*
llama3_70b              128   2.9* 9.6* 9.6* 116* 329* 737* 755* -
llama3_8b               1     .01* .10* .84* .84* .86* 4.5* 6.7* 6.8*
llama3_8b               16    .84* 6.7* 6.8* 6.8* 7* 97* 101* 662*
llama3_8b               128   6.7* 7.0* 101* 288* 662* - - -
vit_l16                 1     .16* 2.0* 4.1* 8.3* 17* 30* 33* 36*
vit_l16                 16    4.1* 33* 34* 36* 173* 433* 446* -
gpt2_small              1     .14* 5.6* 11* 23* 23* 21* 23* 297*
gpt2_small              16    3.7* 23* 115* 297* 663* - - -
resnet50                1     .03 5.1 13 31 37 59 63 552
resnet50                16    .63 31 161 422 944 - - -
"""

# At most 1, 2 and 4 segments, by these ranks; the last is left out where it equals the second.
SEGMENT_RANKS = (64, 128, 256, 512, 1000, 1024, 4096)
SEGMENTS = """
gpt_oss_120b            e16   .04>0>0 .23>0>0 .59>0>0 1.32>.59>0 .39>.39>.39 2.77>.73>.73 5.7>5.7>5.7
gpt_oss_120b            e128  1.32>.59>0 2.77>.73>.73 5.68>.73>.73 5.68>5.68>5.68 15>3.2>3.2 17>5.7>5.7 87>41>41
gpt_oss_120b            16    .05>.05>.05 .23>.23>.23 .60>.39>.39 1.3>.92>.92 83>2.4>2.4 87>1.95>1.95 273>14>14
deepseek_v3_perexpert   e128  .23>.02 .70>.08 1.65>.22 4.4>.49 11>4.8 12>1.24 60>8.4
deepseek_v3_perexpert   128   1.65>.29>.04 3.5>.82>.17 9.9>4.3>3.1 17>6.3>3.6 39>16>10 42>18>13 467>103>82
deepseek_v3_fused       128   1.65>.29>.04 3.5>.82>.17 38>6.4>5.1 45>14>8.5 184>16>10 190>18>13 -
kimi_k2_perexpert       e128  .07>.01 .27>.01 .48>.06 1.1>.12 3.7>2.5 3.1>.28 39>5.1
llama3_70b              1     .36>.06>0 .36>.12>0 1.2>.24>0 2.9>.47>0 .5>.5>.5 2.9>.95>.01 9.5>1.9>1.9
llama3_70b              16    2.9>.95>.01 9.5>1.9>.02 9.5>1.9>1.9 9.6>5.8>5.8 7.2>7.2 9.6>9.6 329>238
llama3_8b               1     .10>.10>0 .84>.21>0 .84>.41>0 .86>.83>.01 4.5>4.5 6.7>1.7>.05 6.8>3.4
qwen3_30b_a3b_perexpert e128  .40>0 .95>0 3.6>0 7.5>4.9>.01 26>26 29>18 -
"""  # noqa: E501


def last_digit(figure: str) -> float:
    """What the last digit is worth: `figure` may be as much too small.

    >>> last_digit("5.68"), last_digit("9.6"), last_digit("87"), last_digit("0")
    (0.01, 0.1, 1.0, 0.01)
    """
    if figure.strip("0.") == "":
        return 0.01
    return 1 / 10 ** len(figure.partition(".")[2])


def one_segment() -> list[tuple[str, str, int, str, bool]]:
    """(model, granularity, ranks, figure, starred) of all cells."""
    cells = []
    for line in ONE_SEGMENT.strip().splitlines():
        model, granularity, *figures = line.split()
        for ranks, figure in zip(RANKS, figures, strict=True):
            if figure != "-":
                starred = figure.endswith("*")
                cells.append((model, granularity, ranks, figure.rstrip("*"), starred))
    return cells


def segments() -> list[tuple[str, str, int, tuple[str, ...]]]:
    """(model, granularity, ranks, figures with at most 1, 2 and 4 segments) of all cells."""
    cells = []
    for line in SEGMENTS.strip().splitlines():
        model, granularity, *figures = line.split()
        for ranks, figure in zip(SEGMENT_RANKS, figures, strict=True):
            if figure != "-":
                cells.append((model, granularity, ranks, tuple(figure.split(">"))))
    return cells


Shapes = list[tuple[str, tuple[int, ...]]]


@dataclass
class Model:
    """A shape table: (how many such buckets, names and shapes) of each kind of bucket."""

    name: str
    buckets: list[tuple[int, Shapes]]

    @classmethod
    def load(cls, name: str) -> Model:
        """Reads the table of that name; see `models`."""
        table = json.loads((files("vfsdp_optim.capacity") / "models" / f"{name}.json").read_text())
        return cls(name, [(b["count"], list(_shapes(b["tensors"]))) for b in table["buckets"]])


def _shapes(tensors: Iterable[dict[str, Any]]) -> Iterable[tuple[str, tuple[int, ...]]]:
    for tensor in tensors:
        for _ in range(tensor.get("repeat", 1)):
            if "group" in tensor:
                yield from _shapes(tensor["group"])
            else:
                yield tensor["name"], tuple(tensor["shape"])


def models() -> list[str]:
    """Names of all shape tables."""
    folder = files("vfsdp_optim.capacity") / "models"
    names = [path.name for path in folder.iterdir()]
    return sorted(name.removesuffix(".json") for name in names if name.endswith(".json"))


def granule(name: str, shape: tuple[int, ...], granularity: str) -> int:
    """Elements between the cuts of a tensor; see planner_figures.py."""
    is_mlp = name in MLP or (name.startswith("experts.") and "bias" not in name)
    if len(shape) < 2 or granularity == "element" or (granularity[0] == "e" and not is_mlp):
        return 1
    row = prod(shape[1:]) if len(shape) == 4 else shape[-1]
    return min(prod(shape), int(granularity.removeprefix("e")) * row)


def specs(shapes: Shapes, granularity: str) -> tuple[TensorSpec, ...]:
    """What the planner gets for a bucket."""
    return tuple(
        TensorSpec(f"{i}.{name}", prod(shape), Granule(granule(name, shape, granularity)))
        for i, (name, shape) in enumerate(shapes)
    )
