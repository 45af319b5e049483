"""Which linear layers are output heads of embeddings: by module type, shape and place in the model.

Reads types, names and shapes; touches no data.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from torch import Tensor, nn

from sharding.checkpoint.names import plain_names

EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
# A table of positions is called so by its name in the model, or by its class.
_POSITIONS = re.compile(r"posit|(?:^|_)pos(?:_?emb|_?enc|_table|$)|^w?pe$", re.IGNORECASE)


@dataclass(slots=True)
class Use:
    """A parameter and every module that has it, by its path without what wrappers add."""

    param: Tensor
    fqn: str
    modules: list[tuple[str, str, nn.Module]] = field(default_factory=list)  # (path, name, module)

    def is_weight(self, *types: type[nn.Module]) -> bool:
        """Return whether it is the weight of a module of one of these types."""
        for _, name, module in self.modules:
            if name == "weight" and isinstance(module, types):
                return True
        return False


def uses_of(model: nn.Module) -> list[Use]:
    """Return every parameter once, in order, with all modules that have it."""
    named = list(model.named_parameters())
    names = plain_names([name for name, _ in named])
    uses = {id(p): Use(p, name) for name, (_, p) in zip(names, named, strict=True)}
    modules = dict(model.named_modules())
    # Asked of the model: modules below may hold the gathered forms of what it has.
    for path, param in model.named_parameters(remove_duplicate=False):
        holder, _, name = path.rpartition(".")
        if holder in modules:  # else another path to a module that is there already
            uses[id(param)].modules.append((plain_names([holder])[0], name, modules[holder]))
    return list(uses.values())


class RepeatedBlocks:
    """The numbered modules of a model that come more than once.

    A module in a list is one of several blocks if another there is of its class, whatever is in it
    (blocks with experts and without), or if it is alone. Elsewhere, as in a sequence, and where the
    class says nothing, it is one if another has a layer of the same shape at the same place.
    """

    def __init__(self, model: nn.Module, uses: list[Use]) -> None:
        """See the class."""
        # By plain paths: what is inside a wrapper comes later, and counts.
        modules = {plain_names([path])[0]: module for path, module in model.named_modules()}
        self._in_lists: set[tuple[str, str]] = set()  # (container, number)
        for path, module in modules.items():
            if isinstance(module, nn.ModuleList | nn.ModuleDict):
                classes = {
                    name: type(modules.get(f"{path}.{name}".lstrip("."), child))
                    for name, child in module.named_children()
                    if name.isdigit()
                }
                counts = Counter(classes.values())
                self._in_lists |= {
                    (path, i)
                    for i, cls in classes.items()
                    if len(classes) == 1 or (counts[cls] > 1 and not _is_of_torch(cls))
                }
        self._alike: defaultdict[tuple[object, ...], set[str]] = defaultdict(set)
        for use in uses:
            for path, _, _ in use.modules:
                for container, number, below in _numbered(path):
                    self._alike[container, below, use.param.shape].add(number)

    def have(self, layer: Use, table: Use) -> bool:
        """Return whether a layer is in one of several blocks, wherever it is used.

        Blocks around both the layer and the table, such as models in a list, do not count.
        """
        around = {place[:2] for path, _, _ in table.modules for place in _numbered(path)}
        return all(
            any(
                (container, number) not in around
                and below
                and (
                    (container, number) in self._in_lists
                    or len(self._alike[container, below, layer.param.shape]) > 1
                )
                for container, number, below in _numbered(path)
            )
            for path, _, _ in layer.modules
        )


def _is_of_torch(cls: type) -> bool:
    return cls.__module__.startswith("torch.nn.")


def _numbered(path: str) -> Iterator[tuple[str, str, str]]:
    """Yield (path of the container, number, path below) of each numbered part of a path."""
    parts = path.split(".")
    for i, part in enumerate(parts):
        if part.isdigit():
            yield ".".join(parts[:i]), part, ".".join(parts[i + 1 :])


def output_heads(model: nn.Module, uses: list[Use], chosen: Mapping[str, str | None]) -> set[str]:
    """Return the names of the weights of untied output heads.

    A head is a linear layer as wide as the vocabulary of an embedding. Tied embeddings and tables
    of positions have none, and a layer of a repeated block is none. An embedding whose vocabulary
    is a hidden dimension too has one, unless a larger embedding is known to have it.

    Args:
        model: of the parameters.
        uses: all of them.
        chosen: by name, what the user said of some; None is AdamW, which a head of such an
            embedding is told by.

    Raises:
        ValueError: the vocabulary is a hidden dimension too, and several layers could be the head.
    """
    linear = [use for use in uses if use.is_weight(nn.Linear)]
    tables = [use for use in uses if use.is_weight(*EMBEDDINGS)]
    if not tables:
        return set()
    widths = {use.param.shape[1] for use in (*linear, *tables)}
    blocks = RepeatedBlocks(model, uses)
    heads: set[str] = set()
    settled, unsure = 0, []  # the largest vocabulary whose head is known
    for table in tables:
        rows = table.param.shape[0]
        if _is_tied(table):
            settled = max(settled, rows)
        elif not _is_of_positions(table):
            wide = [use for use in linear if use.param.shape[0] == rows]
            outside = [use for use in wide if not blocks.have(use, table)]
            if rows in widths or len(outside) < len(wide):
                unsure.append((table, outside))
            elif outside:
                settled = max(settled, rows)
                heads |= {use.fqn for use in outside if use.fqn not in chosen}
    for table, outside in unsure:
        named = any(use.fqn in chosen and chosen[use.fqn] is None for use in outside)
        if named or settled > table.param.shape[0]:
            continue
        left = [use.fqn for use in outside if use.fqn not in chosen]
        if len(left) > 1 and any(use.param.requires_grad for use in outside):
            raise ValueError(
                f"{', '.join(left)}: each could be the output head of {table.fqn}, because the "
                f"vocabulary {table.param.shape[0]} is a hidden dimension too; say which is not, "
                f"such as matrices={{{left[0]!r}: 'm n -> m n'}}, or which is, such as "
                f"matrices={{{left[-1]!r}: None}}"
            )
        heads |= set(left)
    return heads


def _is_tied(table: Use) -> bool:
    return any(not isinstance(module, EMBEDDINGS) for _, _, module in table.modules)


def _is_of_positions(table: Use) -> bool:
    path, _, module = table.modules[0]
    last = [part for part in path.split(".") if not part.isdigit()][-1:]
    return any(_POSITIONS.search(name) for name in (*last, type(module).__name__))
