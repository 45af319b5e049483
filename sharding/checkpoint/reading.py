"""Reading values out of the files of a checkpoint, by DCP's planner and reader.

Reads files; writes into the tensors that it is given. Communicates nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from io import BytesIO
from math import prod
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem
from torch.distributed.tensor import DTensor

from sharding.checkpoint.contents import unseal


class SafeLoadPlanner(DefaultLoadPlanner):
    """DCP's planner, which takes bytes without running what they name."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.values: dict[str, Any] = {}

    def load_bytes(self, read_item: ReadItem, value: BytesIO) -> None:
        """Keep a value that is no tensor."""
        self.values[read_item.dest_index.fqn] = unseal(value.read())


class Reader:
    """What is to be read, planned and checked before anything is.

    Args:
        path: Of the checkpoint.
        metadata: What lies where in its files.
        wanted: By flat name, the tensor to read into, or None for a value that is no tensor.

    Raises:
        ValueError: A shape differs, or a part of a tensor is in none of the files.
    """

    def __init__(self, path: Path, metadata: Metadata, wanted: Mapping[str, Tensor | None]) -> None:
        self._planner, self._reader = SafeLoadPlanner(), FileSystemReader(path)
        self._planner.set_up_planner(dict(wanted), metadata, is_coordinator=False)
        self._reader.set_up_storage_reader(metadata, False)
        self._plan = self._reader.prepare_local_plan(self._planner.create_local_plan())
        _check_covered(self._plan, wanted, path)

    def read(self) -> dict[str, Any]:
        """Fill the tensors, and return the other values."""
        self._reader.read_data(self._plan, self._planner).wait()
        return self._planner.values


def _check_covered(plan: LoadPlan, wanted: Mapping[str, Tensor | None], path: Path) -> None:
    """Raise where elements would keep what was in memory before."""
    left = {
        name: (value.to_local() if isinstance(value, DTensor) else value).numel()
        for name, value in wanted.items()
        if value is not None
    }
    for item in plan.items:
        if item.type == LoadItemType.TENSOR:
            left[item.dest_index.fqn] -= prod(item.lengths)
    if wrong := [name for name, numel in left.items() if numel]:
        raise ValueError(f"{path}: {wrong[:4]} are there in part; the checkpoint is damaged")
