"""The optimizer that a plan is for, built as users build it, on parameters without memory.

Nothing here knows a rule: groups are made as `param_groups` makes them, everything else the
optimizer, its algorithms and their state formats say themselves. So an optimizer from outside of
the package needs no entry.
"""

import importlib
import os
import sys
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from sharding.planning.structure import Demand
from vfsdp_optim.adamw import AdamW, AdamWAlgorithm
from vfsdp_optim.algorithm import Algorithm, MatrixAlgorithm
from vfsdp_optim.capacity.shapes import ONE_MATRIX, TensorShape
from vfsdp_optim.capacity.step_buffers import torch_dtype
from vfsdp_optim.muon import Muon
from vfsdp_optim.optimizer import StructuredOptimizer
from vfsdp_optim.shampoo import Shampoo
from vfsdp_optim.soap import SOAP
from vfsdp_optim.states.scratch import Scratch
from vfsdp_optim.step.member import Member
from vfsdp_optim.step.units import Job, jobs_by_ranks
from vfsdp_optim.step.working_set import make_working_set

OPTIMIZERS: Mapping[str, type[StructuredOptimizer]] = {
    "adamw": AdamW,
    "muon": Muon,
    "shampoo": Shampoo,
    "soap": SOAP,
}
"""By name on the command line; what is no matrix, and embeddings and heads, go to AdamW."""

# Dtypes on the wire, kernels and pieces of a run depend on it.
DEVICES = {"nccl": torch.device("cuda"), "gloo": torch.device("cpu")}

Choice = str | Algorithm | type[StructuredOptimizer]


def find_optimizer(choice: Choice) -> Algorithm | type[StructuredOptimizer]:
    """Return what a name stands for: one of `OPTIMIZERS`, or "module:Class".

    Raises:
        ValueError: Nothing of that name, or it is no optimizer of this library's kind.
    """
    if not isinstance(choice, str):
        found: object = choice
    elif choice in OPTIMIZERS:
        return OPTIMIZERS[choice]
    else:
        found = _imported(choice)
    if isinstance(found, type) and issubclass(found, Algorithm):
        found = found()
    known = isinstance(found, type) and issubclass(found, StructuredOptimizer)
    if not known and not isinstance(found, Algorithm):
        raise ValueError(
            f"optimizer: expected one of {', '.join(OPTIMIZERS)}, or an Algorithm or a "
            f"StructuredOptimizer as module:Class, got {choice!r}"
        )
    return found  # type: ignore[return-value]


@lru_cache(maxsize=16)
def _imported(text: str) -> object:
    module, _, name = text.partition(":")
    if not name:
        return None
    if os.getcwd() not in sys.path:  # a script's path has its own folder alone
        sys.path.insert(0, os.getcwd())
    try:
        found = getattr(importlib.import_module(module), name)
        return found() if isinstance(found, type) and issubclass(found, Algorithm) else found
    except Exception as error:
        raise ValueError(f"optimizer {text!r}: {type(error).__name__}: {error}") from error


def optimizer_name(choice: Choice) -> str:
    """Return the name of its class, for tables."""
    found = find_optimizer(choice)
    return found.__name__ if isinstance(found, type) else type(found).__name__


@dataclass(frozen=True, slots=True)
class BlockOptimizer:
    """The optimizer of the parameters of one block, none of which has memory.

    Attributes:
        optimizer: Of all that is trainable; None if nothing is.
        params: In the order of the block.
        members: By index in the block, how each is kept and updated; frozen ones are missing.
        jobs: By index in the block, one for each unit.
        device: Where it would run.
    """

    optimizer: StructuredOptimizer | None
    params: tuple[nn.Parameter, ...]
    members: Mapping[int, Member]
    jobs: Mapping[int, Sequence[Job]]
    device: torch.device

    def demands(self, i: int) -> tuple[Demand, ...]:
        """Return what it needs of parameter `i`."""
        return () if self.optimizer is None else self.optimizer.demands(self.params[i])

    def group_key(self, i: int) -> str:
        """Return the group of parameter `i`; "" for a frozen one."""
        number = None if self.optimizer is None else self.optimizer.group_of(self.params[i])
        return "" if number is None else str(number)

    def group(self, member: Member) -> dict[str, Any]:
        """Return the group of a member."""
        assert self.optimizer is not None  # who has members has an optimizer
        return self.optimizer.param_groups[member.group]

    def algorithm(self, member: Member) -> Algorithm:
        """Return the rule of a member."""
        assert self.optimizer is not None  # who has members has an optimizer
        return self.optimizer.algorithms[self.group(member)["algorithm"]]

    def state_bytes(self, i: int, numel: int) -> int:
        """Return bytes of the states of `numel` elements of parameter `i`, from a legal cut on."""
        if i not in self.members:
            return 0
        formats = self.members[i].formats
        return sum(state_format.nbytes(numel) for state_format in formats.values())

    @property
    def unit_state_bytes(self) -> int:
        """Bytes of the states that whole units have on their owners, of all of the block."""
        return sum(job.state_bytes for jobs in self.jobs.values() for job in jobs)

    def wire(self, job: Job) -> torch.dtype:
        """Return the dtype in which a unit travels."""
        return job.algorithm.wire_dtype(job.group, self.device)


@lru_cache(maxsize=64)
def block_optimizer(
    choice: Hashable, states: str, tensors: tuple[TensorShape, ...], backend: str
) -> BlockOptimizer:
    """Build the optimizer of a block.

    Args:
        choice: Which; a `Choice`, see `find_optimizer`.
        states: "32bit" or "8bit".
        tensors: The parameters.
        backend: Says where it would run.

    Raises:
        ValueError: It cannot treat a parameter; names it.
    """
    params = tuple(
        nn.Parameter(
            torch.empty(t.shape, dtype=torch_dtype(t.dtype), device="meta"),
            requires_grad=t.trainable,
        )
        for t in tensors
    )
    device = DEVICES[backend]
    found = find_optimizer(choice)  # type: ignore[arg-type]
    groups = _groups(found, states, tensors, params)
    if not groups:
        return BlockOptimizer(None, params, {}, {}, device)
    optimizer = _made(found, groups)
    members = _members(optimizer)
    for member in members:
        member.device = device
        member.owners = ()  # which are chosen among the ranks of a plan
    units = jobs_by_ranks(members, optimizer.param_groups, optimizer.algorithms, Scratch())
    places = {id(param): i for i, param in enumerate(params)}
    jobs: dict[int, list[Job]] = {}
    for job in (job for each in units.values() for job in each):
        jobs.setdefault(places[id(job.member.param)], []).append(job)
    return BlockOptimizer(
        optimizer, params, {places[id(m.param)]: m for m in members}, jobs, device
    )


def _members(optimizer: StructuredOptimizer) -> list[Member]:
    working = make_working_set(
        optimizer.param_groups,
        optimizer.algorithms,
        None,
        optimizer.max_exchange_bytes,
        Scratch(),
        {},
        lambda param: True,
    )
    return working.members


def _made(
    found: Algorithm | type[StructuredOptimizer], groups: list[dict[str, Any]]
) -> StructuredOptimizer:
    if isinstance(found, Algorithm):
        return StructuredOptimizer(groups, found)
    return found(groups)  # type: ignore[call-arg]


@lru_cache(maxsize=16)
def main_algorithm(found: Hashable) -> Algorithm:
    """Return the algorithm of groups that name none."""
    if isinstance(found, Algorithm):
        return found
    assert isinstance(found, type)  # see `find_optimizer`
    probe = nn.Parameter(torch.empty(2, 2, device="meta"))
    return next(iter(_made(found, [{"params": [("probe", probe)]}]).algorithms.values()))


def _groups(
    found: Algorithm | type[StructuredOptimizer],
    states: str,
    tensors: Sequence[TensorShape],
    params: Sequence[Tensor],
) -> list[dict[str, Any]]:
    """Return the groups as `param_groups` makes them, with what they have of `keep_32bit`."""
    main = main_algorithm(found)  # type: ignore[arg-type]
    groups: dict[tuple[bool, str | None], dict[str, Any]] = {}
    for tensor, param in zip(tensors, params, strict=True):
        if not tensor.trainable:
            continue
        beside = isinstance(main, MatrixAlgorithm) and tensor.matrices is None
        pattern = None
        if not beside and "matrices" in main.defaults and tensor.matrices != ONE_MATRIX:
            pattern = tensor.matrices
        group = groups.setdefault((beside, pattern), {"params": [], "states": states})
        group["params"].append((tensor.name, param))
        if beside:
            group["algorithm"] = _ADAMW
        elif pattern is not None:
            group["matrices"] = pattern
        if tensor.kind in ("embedding", "head"):
            group["keep_32bit"] = [*group.get("keep_32bit", ()), tensor.name]
    return [groups[key] for key in sorted(groups, key=lambda key: key[0])]


_ADAMW = AdamWAlgorithm()
