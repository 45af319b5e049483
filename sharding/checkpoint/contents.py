"""What a checkpoint holds of models, optimizers and other objects, under names that all ranks know.

Reads their state dicts. Communicates nothing, and writes into nothing.

[Note: names in checkpoints]
The names are those of torch's state-dict functions, so that torch.distributed.checkpoint (DCP) and
FSDP2 can read what is saved here: `model.<parameter>`, `optimizer.state.<parameter>.<key>`,
`optimizer.param_groups.<i>.<key>`; with several, `model.<name>.<parameter>`. `extra.<name>` is what
else was given. Buffers, extra state of modules and `extra` may differ from rank to rank: those that
do are saved by each rank, by rank 0 under their name and by rank r under `<name>/rank-<r>`.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from sharding.checkpoint.names import plain_names
from sharding.checkpoint.optimizer_states import (
    named_parameters,
    names_in_groups,
    names_of_parameters,
)

KeyPath = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Sealed:
    """A value that is no tensor.

    Attributes:
        content: The bytes that torch.save makes of it.
        digest: The same for equal values, whose bytes may differ.
    """

    content: bytes
    digest: str


def seal(value: Any, what: str) -> Sealed:
    """Return the bytes of a value, which torch.load takes with `weights_only`.

    Raises:
        TypeError: They would run code, or hold a part of a tensor.
    """
    if (sharded := next(_sharded(value), None)) is not None:
        raise TypeError(
            f"{what}: expected no {type(sharded).__name__} in it, whose pieces lie on several "
            "ranks; pass its module as model=, or its optimizer as optimizer="
        )
    file = io.BytesIO()
    try:
        torch.save(value, file)
        unseal(file.getvalue())
    except Exception as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else ""
        raise TypeError(
            f"{what}: expected tensors, numbers, text, and lists, tuples and dicts of them, got "
            f"{value!r:.80}: {type(error).__name__}: {reason:.200}"
        ) from None
    return Sealed(file.getvalue(), digest_of(value))


def unseal(content: bytes) -> Any:
    """Return the value that was sealed; its tensors on the CPU."""
    return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)


def digest_of(value: Any) -> str:
    """Return a digest of tensors and plain values, however nested."""
    total = hashlib.sha256()
    for part in _bytes_of(value):
        total.update(part)
    return total.hexdigest()


def _bytes_of(value: Any) -> Iterator[bytes]:
    if isinstance(value, Tensor):
        yield f"{value.dtype} {tuple(value.shape)} ".encode()
        flat = value.detach().cpu().contiguous().reshape(-1)
        yield flat.view(torch.uint8).numpy().tobytes()
    elif isinstance(value, Mapping):
        yield f"{len(value)} of a dict ".encode()
        for key, item in value.items():
            yield from _bytes_of(key)
            yield from _bytes_of(item)
    elif isinstance(value, list | tuple):
        yield f"{len(value)} of a {type(value).__name__} ".encode()
        for item in value:
            yield from _bytes_of(item)
    elif isinstance(value, set | frozenset):
        yield f"{sorted(map(repr, value))} ".encode()
    else:
        yield f"{value!r} ".encode()


def _sharded(value: Any) -> Iterator[DTensor]:
    if isinstance(value, DTensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _sharded(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _sharded(item)


def keeps_state(value: object) -> bool:
    """Return whether an object saves and loads itself, as schedulers and data loaders do."""
    return callable(getattr(value, "state_dict", None)) and callable(
        getattr(value, "load_state_dict", None)
    )


def named_objects(given: Any, kind: type, what: str) -> dict[KeyPath, Any]:
    """Return one or several models or optimizers by where they lie in a checkpoint.

    Raises:
        TypeError: They are none.
    """
    objects: dict[KeyPath, Any] = {}
    if isinstance(given, Mapping) and not isinstance(given, nn.Module):
        objects = {(what, name): one for name, one in given.items()}
    elif given is not None:
        objects = {(what,): given}
    for path, one in objects.items():
        if not isinstance(one, kind) or not all(isinstance(name, str) and name for name in path):
            raise TypeError(
                f"{what}: expected a {kind.__name__} or a dict of them by name, got {one!r:.80}"
            )
    return objects


# -- models and optimizers -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Contents:
    """What this rank has of a checkpoint.

    Attributes:
        values: Tensors, and sealed values, by where they lie.
        own: Places of what may differ between ranks.
    """

    values: dict[KeyPath, Tensor | Sealed]
    own: frozenset[KeyPath]


def contents_of(
    models: Mapping[KeyPath, nn.Module],
    optimizers: Mapping[KeyPath, torch.optim.Optimizer],
    extra: Mapping[str, Any],
) -> Contents:
    """Return what is to be saved. See [Note: names in checkpoints]."""
    values: dict[KeyPath, Any] = {}
    own: set[KeyPath] = set()
    for place, model in models.items():
        held, parameters = model.state_dict(), {name for name, _ in named_parameters(model)}
        for name, value in zip(plain_names(list(held)), held.values(), strict=True):
            values[*place, name] = value
            if name not in parameters and not isinstance(value, DTensor):
                own.add((*place, name))
    names = names_of_parameters(models)
    for place, optimizer in optimizers.items():
        values.update(_of_optimizer(place, optimizer, names))
    for name, value in extra.items():
        whole = seal(value.state_dict() if keeps_state(value) else value, f"extra[{name!r}]")
        values["extra", name] = whole
        own.add(("extra", name))
    for place, value in values.items():
        if not isinstance(value, Tensor | Sealed):
            values[place] = seal(value, flat(place))
    return Contents(values, frozenset(own))


def _of_optimizer(
    place: KeyPath, optimizer: torch.optim.Optimizer, names: Mapping[int, Sequence[str]]
) -> Iterator[tuple[KeyPath, Any]]:
    """Return states by name of the parameter, and groups that list names."""
    saved = optimizer.state_dict()
    named = names_in_groups(optimizer, names)
    for i, (group, of_group) in enumerate(zip(saved["param_groups"], named, strict=True)):
        for number, name in zip(group["params"], of_group, strict=True):
            for key, value in saved["state"].get(number, {}).items():
                yield (*place, "state", name, key), value
        for key, value in group.items():
            yield (*place, "param_groups", i, key), of_group if key == "params" else value


# -- what ranks save for themselves ----------------------------------------------------------------


def digests(contents: Contents) -> dict[str, str]:
    """Return a digest of everything that may differ between ranks, by its flat name."""
    values = {flat(place): contents.values[place] for place in contents.own}
    return {
        name: value.digest if isinstance(value, Sealed) else digest_of(value)
        for name, value in values.items()
    }


def differing(by_rank: Sequence[Mapping[str, str]]) -> tuple[str, ...]:
    """Return the names whose digests are not the same on all ranks that have them."""
    first: dict[str, str] = {}
    apart = set()
    for of_rank in by_rank:
        for name, digest in of_rank.items():
            if first.setdefault(name, digest) != digest:
                apart.add(name)
    return tuple(sorted(apart))


def flat(place: KeyPath) -> str:
    """Return the name of a place in DCP's files.

    Example:
        >>> flat(("optimizer", "param_groups", 0, "lr"))
        'optimizer.param_groups.0.lr'
    """
    return ".".join(map(str, place))


def of_rank(place: KeyPath, rank: int) -> KeyPath:
    """Return where a rank saves for itself what differs between ranks."""
    return (*place[:-1], f"{place[-1]}/rank-{rank}") if rank else place
