"""Public model families on the meta device, from model_families.txt, which says its format."""

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn


def _families() -> dict[str, tuple[int, str, dict[str, str | None]]]:
    """Return by family its vocabulary, its modules, and what `matrices` has to say."""
    found: dict[str, tuple[int, str, dict[str, str | None]]] = {}
    text = Path(__file__).with_suffix(".txt").read_text()
    for part in text.partition("\n== ")[2].split("\n== "):
        title, *lines = part.splitlines()
        name, _, vocabulary = title.rpartition(" ")
        rules = (line[2:].partition(": ") for line in lines if line.startswith("? "))
        matrices = {glob: None if pattern == "adamw" else pattern for glob, _, pattern in rules}
        modules = "\n".join(line for line in lines if not line.startswith("? "))
        found[name] = int(vocabulary), modules, matrices
    return found


FAMILIES = _families()


class Own(nn.Module):
    """A module that torch does not have."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape))


class Conv1D(Own):
    """The linear layer of transformers' GPT-2, by its name."""


Conv1D.__module__ = "transformers.pytorch_utils"


class Parent(nn.Module):
    """Whatever has modules and bare parameters."""


def family(name: str, vocabulary: int | None = None, layers: int = 2) -> nn.Module:
    """Return a model on the meta device, with another vocabulary perhaps."""
    published, text, _ = FAMILIES[name]
    root: dict[str, object] = {}
    ties: list[tuple[str, str]] = []
    with torch.device("meta"):
        for line in _expanded(text, layers):
            path, kind, value = line.split()
            if kind == "=":
                ties.append((path, value))
            else:
                rows = published if vocabulary is None else vocabulary
                shape = [rows if size == "V" else int(size) for size in value.split("x")]
                _put(root, path, _leaf(kind, shape))
        for path, other in ties:
            weight = _get(root, other).weight
            # As an embedding where the module is one of the tied encoders.
            tied: nn.Module = nn.Linear(*weight.shape[::-1], bias=False)
            if path.endswith("embed_tokens"):
                tied = nn.Embedding(*weight.shape)
            tied.weight = weight
            _put(root, path, tied)
        return _module(root)


def _expanded(text: str, layers: int) -> Iterator[str]:
    for line in text.splitlines():
        if "*" in line:
            lines = [line.replace("*", str(i), 1) for i in range(layers)]
            yield from _expanded("\n".join(lines), layers)
        elif line.strip():
            yield line


def _leaf(kind: str, shape: list[int]) -> nn.Module | Tensor:
    if kind in "LB":
        return nn.Linear(shape[1], shape[0], bias=kind == "B")
    if kind in "CD":
        convolution = {3: nn.Conv1d, 4: nn.Conv2d}[len(shape)]
        groups = shape[0] if kind == "D" else 1
        return convolution(shape[1] * groups, shape[0], tuple(shape[2:]), groups=groups)
    if kind == "P!":
        return nn.Parameter(torch.empty(shape))
    return {"E": nn.Embedding, "N": nn.LayerNorm, "P": Own, "T": Conv1D}[kind](*shape)


def _put(tree: dict, path: str, leaf: object) -> None:
    *above, last = path.split(".")
    for part in above:
        tree = tree.setdefault(part, {})
    tree[last] = leaf


def _get(tree: dict, path: str) -> nn.Module:
    for part in path.split("."):
        tree = tree[part]
    return tree  # type: ignore[return-value]


def _module(tree: dict) -> nn.Module:
    children = {k: _module(v) if isinstance(v, dict) else v for k, v in tree.items()}
    if all(name.isdigit() for name in children):
        return nn.ModuleList(children.values())
    parent = Parent()
    for name, child in children.items():
        setattr(parent, name, child)
    return parent
