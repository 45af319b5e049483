"""Loading: all ranks read their parts of one checkpoint, and hand them on when all fits.

May touch: models, optimizers and other objects through their `load_state_dict`, and the process
group of `messages`. Whatever can be checked is checked on all ranks before the first of them is
given anything. Values are read into new memory on the host, as large as this rank's part.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from sharding.checkpoint.contents import KeyPath, flat, keeps_state, named_objects, of_rank
from sharding.checkpoint.messages import Messages
from sharding.checkpoint.model_targets import (
    TensorOutline,
    check_model,
    is_extra_state,
    memory_like,
    state_for,
    targets_of,
)
from sharding.checkpoint.optimizer_states import known_names, names_of_parameters, renumbered
from sharding.checkpoint.reading import Reader
from sharding.checkpoint.safetensors_files import load_safetensors, tensors_on_all_ranks
from sharding.checkpoint.saving import settle
from sharding.checkpoint.step_folders import misfits, step_folders
from sharding.checkpoint.verification import VerifiedCheckpoint, whole_checkpoint


def latest(folder: str | os.PathLike[str]) -> int | None:
    """Return the step of the checkpoint that was saved last; None where there is none.

    Looks at names, sizes and manifests, and reads no data: `load` may find it damaged, and take an
    older one. On many ranks, let `load` decide: it raises FileNotFoundError on all of them where
    there is nothing to load. Communicates nothing.
    """
    path = Path(folder)
    for each in step_folders(path):
        if each.manifest is not None and not misfits(path / each.name, each.manifest.files):
            return each.step
    return None


def load(
    folder: str | os.PathLike[str],
    *,
    model: nn.Module | Mapping[str, nn.Module] | None = None,
    optimizer: torch.optim.Optimizer | Mapping[str, torch.optim.Optimizer] | None = None,
    extra: MutableMapping[str, Any] | None = None,
    step: int | None = None,
) -> int:
    """Load the checkpoint that was saved last and is whole; every rank calls it.

    Sizes and digests of all files are verified before one is read; where they do not fit, the
    checkpoint saved before it is loaded, with a warning that says so. They protect from damage, not
    from who may write into the folder; no file can make Python call what it names.

    Any number of ranks, and any layout, load what any other has saved, each its part.

    A model also loads from safetensors, as Hugging Face lays them out (a file, or an index and its
    files), under the names that it has there: each rank reads its part. They have no digests.

    Args:
        folder: As given to `save`; or a folder with `model.safetensors` or its index, or one file.
        model: As given to `save`, or None to leave it as it is; on the device where it shall be.
        optimizer: The same. Its parameters are found by their names in the models.
        extra: What to load of what `save` was given. Objects with `load_state_dict` get their
            state; other values are put into this dict, whatever was there. What each rank saved
            for itself loads on the same number of ranks only.
        step: Of the checkpoint; None for the last that is whole.

    Returns:
        The step of the checkpoint; 0 for safetensors.

    Raises:
        FileNotFoundError: There is no checkpoint, or not all ranks see its files.
        ValueError: None is whole, or what it holds does not fit what is to be loaded.
        TypeError: An argument is of another type.
        RuntimeError: The model is on the meta device, or something went wrong on another rank.
    """
    settle()
    messages = Messages()

    def arguments() -> tuple[dict[KeyPath, Any], dict[KeyPath, Any]]:
        if extra is not None and not isinstance(extra, MutableMapping):
            raise TypeError(f"extra: expected a dict, got {extra!r:.80}")
        return (
            named_objects(model, nn.Module, "model"),
            named_objects(optimizer, torch.optim.Optimizer, "optimizer"),
        )

    models, optimizers = messages.agree(arguments, "load a checkpoint")
    tensors = tensors_on_all_ranks(messages, Path(folder))
    if tensors is not None:
        one = messages.agree(
            lambda: _one_model(models, optimizers, extra, step), "load safetensors"
        )
        load_safetensors(messages, one, tensors, str(folder))
        return 0
    whole = whole_checkpoint(messages, Path(folder), step)
    source = _Source.of(whole, messages)
    loading = _Loading(source, models, optimizers, extra if extra is not None else {})
    reader = messages.agree(loading.plan, f"load {whole.path}")
    messages.agree(reader.read, f"read {whole.path}")
    messages.agree(loading.hand_on, f"load {whole.path}")
    return whole.manifest.step


def _one_model(
    models: Mapping[KeyPath, nn.Module],
    optimizers: Mapping[KeyPath, torch.optim.Optimizer],
    extra: Mapping[str, Any] | None,
    step: int | None,
) -> nn.Module:
    if list(models) != [("model",)] or optimizers or extra or step is not None:
        raise ValueError("a folder of safetensors holds one model: pass model= alone")
    return models["model",]


# -- what lies where -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Source:
    """A checkpoint as one rank sees it.

    Attributes:
        whole: The checkpoint.
        names: By place, the flat name of what this rank loads from there.
        lost: Places of what each rank saved for itself, on another number of ranks.
    """

    whole: VerifiedCheckpoint
    names: Mapping[KeyPath, str]
    lost: frozenset[KeyPath]

    @staticmethod
    def of(whole: VerifiedCheckpoint, messages: Messages) -> _Source:
        """Return what a rank loads: of what each rank saved for itself, its own."""
        manifest, places = whole.manifest, whole.metadata.planner_data
        names = {place: name for name, place in places.items()}
        lost = set()
        for base in [place for place in names if flat(place) in manifest.apart]:
            each = [of_rank(base, rank) for rank in range(manifest.ranks)]
            saved = {place: names.pop(place) for place in each if place in names}
            first = next(iter(saved.values()))
            if manifest.ranks == messages.size:
                names[base] = saved.get(each[messages.rank], first)
            else:
                lost.add(base)
                names[base] = first
        return _Source(whole, names, frozenset(lost))

    def under(self, prefix: KeyPath) -> dict[KeyPath, str]:
        """Return the rest of the places that begin so, with their flat names."""
        n = len(prefix)
        return {p[n:]: name for p, name in self.names.items() if p[:n] == prefix and len(p) > n}

    def outline(self, name: str) -> TensorOutline | None:
        """Return what tensor has a flat name; None where it is no tensor."""
        entry = self.whole.metadata.state_dict_metadata[name]
        if not isinstance(entry, TensorStorageMetadata):
            return None
        return TensorOutline(tuple(entry.size), entry.properties.dtype)

    def read(self, wanted: Mapping[str, Tensor | None]) -> dict[str, Any]:
        """Return values at once: what is needed to know what else to read."""
        return Reader(self.whole.path, self.whole.metadata, wanted).read()


@dataclass(frozen=True, slots=True)
class _SavedTensor:
    """Stands for a tensor in a checkpoint."""

    name: str
    outline: TensorOutline


# -- from there to the objects ---------------------------------------------------------------------


class _Loading:
    """What is loaded into the objects of one call."""

    def __init__(
        self,
        source: _Source,
        models: Mapping[KeyPath, nn.Module],
        optimizers: Mapping[KeyPath, torch.optim.Optimizer],
        extra: MutableMapping[str, Any],
    ) -> None:
        self._source = source
        self._models, self._optimizers, self._extra = models, optimizers, extra
        self._wanted: dict[str, Tensor | None] = {}
        self._deliveries: list[Callable[[], None]] = []

    def plan(self) -> Reader:
        """Return what to read, after all that is known without reading it was checked."""
        names = names_of_parameters(self._models)
        for place, optimizer in self._optimizers.items():
            self._plan_optimizer(place, optimizer, names)
        for place, model in self._models.items():
            self._plan_model(place, model)
        self._plan_extra()
        return Reader(self._source.whole.path, self._source.whole.metadata, self._wanted)

    def hand_on(self) -> None:
        """Give everything that was read to the objects."""
        for deliver in self._deliveries:
            deliver()

    def _entries(self, place: KeyPath) -> dict[KeyPath, str]:
        """Return what is saved of a model or optimizer."""
        entries = self._source.under(place)
        if not entries:
            there = sorted({flat(p[:1]) for p in self._source.names})
            several = sorted({str(p[1]) for p in self._source.names if p[0] == place[0]})
            held = f"{place[0]} {several[:6]}" if several else f"{there}"
            raise ValueError(f"{self._source.whole.path} has no {flat(place)!r}, only {held}")
        return entries

    def _plan_model(self, place: KeyPath, model: nn.Module) -> None:
        targets = targets_of(model)
        where = f"{self._source.whole.path}: {flat(place)}"
        saved: dict[str, dict[KeyPath, str]] = {}
        for (name, *rest), flat_name in self._entries(place).items():
            saved.setdefault(str(name), {})[tuple(rest)] = flat_name
        check_model(
            {name: self._outline_of(parts) for name, parts in saved.items()}, targets, where
        )
        values: dict[str, Any] = {}
        for name, parts in saved.items():
            if is_extra_state(name):
                values[name] = self._read_now(parts)
            else:
                outline = self._source.outline(parts[()])
                assert outline is not None, "checked above"
                values[name] = self._wanted[parts[()]] = memory_like(targets[name].value, outline)
        state = state_for(targets, values)
        self._warn_of_lost(place)
        self._deliveries.append(lambda: _load_model(model, state))

    def _outline_of(self, parts: Mapping[KeyPath, str]) -> Any:
        return self._source.outline(parts[()]) if () in parts else parts

    def _warn_of_lost(self, place: KeyPath) -> None:
        lost = [flat(p) for p in self._source.lost if p[: len(place)] == place]
        if lost:
            ranks = self._source.whole.manifest.ranks
            warnings.warn(
                f"{sorted(lost)[:4]} differed between the {ranks} ranks that saved them; all ranks "
                "load those of rank 0",
                stacklevel=2,
            )

    def _plan_optimizer(
        self,
        place: KeyPath,
        optimizer: torch.optim.Optimizer,
        names: Mapping[int, list[str]],
    ) -> None:
        entries = self._entries(place)
        values: dict[str, Any] = {}
        now: dict[str, Tensor | None] = {}
        for rest, name in entries.items():
            outline = self._source.outline(name)
            if outline is None:
                now[name] = None
            elif rest[0] == "param_groups":
                now[name] = values[name] = memory_like(None, outline)
            else:
                values[name] = _SavedTensor(name, outline)
        values.update(self._source.read(now))
        saved = _optimizer_state((rest, values[name]) for rest, name in entries.items())
        state = renumbered(
            saved,
            optimizer,
            known_names(optimizer, names),
            self._receive,
            f"{self._source.whole.path}: {flat(place)}: ",
        )
        self._deliveries.append(lambda: optimizer.load_state_dict(state))

    def _receive(self, value: Any, param: Tensor, own: Any, path: tuple[Any, str]) -> Any:
        """Return memory for a saved state, cut as the optimizer's own, or else as its parameter."""
        if not isinstance(value, _SavedTensor):
            return value
        shape = value.outline.shape
        like = own if isinstance(own, Tensor) and tuple(own.shape) == shape else param
        if not shape and path[1] == "step":  # a count, as every optimizer of torch calls it
            like = own
        return self._wanted.setdefault(value.name, memory_like(like, value.outline))

    def _plan_extra(self) -> None:
        manifest = self._source.whole.manifest
        for name, given in self._extra.items():
            place = ("extra", name)
            if place not in self._source.names:
                there = sorted(str(p[1]) for p in self._source.names if p[0] == "extra")
                raise ValueError(f"extra[{name!r}]: the checkpoint has only {there}")
            if place in self._source.lost:
                raise ValueError(
                    f"extra[{name!r}]: each of {manifest.ranks} ranks saved its own, which another "
                    "number of ranks cannot load; leave it out of extra, and set it anew"
                )
            value = self._read_now({(): self._source.names[place]})
            self._deliveries.append(lambda n=name, g=given, v=value: self._put(n, g, v))  # type: ignore[misc]

    def _put(self, name: str, given: Any, value: Any) -> None:
        if keeps_state(given):
            given.load_state_dict(value)
        else:
            self._extra[name] = value

    def _read_now(self, parts: Mapping[KeyPath, str]) -> Any:
        """Return a value that is no tensor, or that DCP has saved in parts."""
        outlines = {name: self._source.outline(name) for name in parts.values()}
        wanted = {n: None if o is None else memory_like(None, o) for n, o in outlines.items()}
        values: dict[str, Any] = {**wanted, **self._source.read(wanted)}
        return _nested({rest: values[name] for rest, name in parts.items()})


def _load_model(model: nn.Module, state: dict[str, Any]) -> None:
    model.load_state_dict(state)


def _nested(values: Mapping[KeyPath, Any]) -> Any:
    """Return dicts of what lies below; the value itself where it lies here."""
    if () in values:
        return values[()]
    below: dict[Any, dict[KeyPath, Any]] = {}
    for (key, *rest), value in values.items():
        below.setdefault(key, {})[tuple(rest)] = value
    parts = {key: _nested(each) for key, each in below.items()}
    if parts and all(isinstance(key, int) for key in parts):
        return [parts[key] for key in sorted(parts)]
    return parts


def _optimizer_state(values: Iterator[tuple[KeyPath, Any]]) -> dict[str, Any]:
    """Return a state dict as an optimizer's, with names or numbers for parameters."""
    saved = {"state": {}, "param_groups": [], **_nested(dict(values))}
    names = [name for group in saved["param_groups"] for name in group["params"]]
    if names and all(isinstance(name, str) and name.isdecimal() for name in names):
        saved["state"] = {int(name): state for name, state in saved["state"].items()}
        for group in saved["param_groups"]:
            group["params"] = [int(name) for name in group["params"]]
    return saved
