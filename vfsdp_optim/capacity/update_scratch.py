"""Working memory that an optimizer's updates keep from step to step, on each rank. Pure integers.

The optimizer keeps one tensor per purpose and dtype, as large as the largest use of it. Purposes
here are those of `vfsdp_optim`: denominators of AdamW; the numbers that 8-bit codes stand for, with
what coding and decoding them takes; inputs of matrices.
"""

from collections.abc import Iterator, Sequence

from sharding.planning.negotiation import BucketPlan
from vfsdp_optim.capacity.optimizer_facts import (
    CPU_CHUNK,
    PACKED_CHUNK,
    PACKED_CPU_CHUNK,
    QUANTIZED_BLOCK,
    algorithm_of,
    is_quantized,
    state_itemsize,
)
from vfsdp_optim.capacity.shapes import TensorShape
from vfsdp_optim.capacity.training_setup import Setup

# (purpose, bytes of an element) -> elements, by rank of the bucket's mesh.
Scratch = dict[tuple[str, int], list[int]]


def update_scratch(plan: BucketPlan, tensors: Sequence[TensorShape], setup: Setup) -> Scratch:
    """What the updates of one bucket need on each rank.

    Args:
        plan: Of the bucket.
        tensors: Its parameters, in the order of the plan.
        setup: Optimizer, states and backend.
    """
    scratch: Scratch = {}
    limit = PACKED_CPU_CHUNK if setup.backend == "gloo" else PACKED_CHUNK
    for algorithm, packed, itemsize, rank, numel in _runs(plan, tensors, setup):
        if packed and algorithm == "adamw" and setup.backend == "nccl":
            continue  # one kernel decodes, updates and encodes
        if packed:
            _need_codes(scratch, _STATES[algorithm], rank, _chunk(numel, limit), plan)
            if algorithm == "adamw":
                _need(scratch, ("", 4), rank, _chunk(numel, limit), plan)
        elif algorithm == "adamw":
            longest = CPU_CHUNK if setup.backend == "gloo" else numel
            _need(scratch, ("", itemsize), rank, _chunk(numel, longest), plan)
    for i, tensor in enumerate(tensors):
        if algorithm_of(setup.optimizer, tensor) == "muon" and is_quantized(setup.states, tensor):
            which, index = plan.location[i]
            for unit in plan.params[i].step_units:
                stop = unit.start + unit.numel
                for rank, a, b in plan.segments[which].ranges(index, unit.start, stop):
                    b = min(
                        b, a + _chunk(b - a, limit)
                    )  # decoded in pieces, of which none is longer
                    numel = _whole_blocks(b) - a // QUANTIZED_BLOCK * QUANTIZED_BLOCK
                    _need_decoded(scratch, "read momentum_buffer", rank, numel, plan)
    return scratch


_STATES = {"adamw": ("exp_avg", "exp_avg_sq"), "muon": ("momentum_buffer",)}


def _runs(
    plan: BucketPlan, tensors: Sequence[TensorShape], setup: Setup
) -> Iterator[tuple[str, bool, int, int, int]]:
    """(algorithm, whether its states are codes, their itemsize, rank, elements) of the runs.

    A run is what is updated at once: neighbours of one algorithm and format on one rank.
    """
    members = {place: i for i, place in enumerate(plan.location)}
    for which, segment in enumerate(plan.segments):
        chains: list[tuple[tuple[str, bool, int], int, int]] = []
        for index in segment.order:
            tensor = tensors[members[which, index]]
            if not tensor.numel:
                continue
            kind = (
                algorithm_of(setup.optimizer, tensor),
                is_quantized(setup.states, tensor),
                state_itemsize(setup.states, tensor),
            )
            start = segment.offsets[index]
            if chains and chains[-1][0] == kind:
                chains[-1] = kind, chains[-1][1], start + tensor.numel
            else:
                chains.append((kind, start, start + tensor.numel))
        size = segment.shard_numel
        for kind, start, stop in chains:
            for rank in range(start // size, (stop - 1) // size + 1):
                yield *kind, rank, min(stop, (rank + 1) * size) - max(start, rank * size)


def _chunk(numel: int, limit: int) -> int:
    """Elements of a piece of a run that is cut into equal ones, none above the limit."""
    return _whole_blocks(-(-numel // -(-numel // limit))) if numel > limit else numel


def _whole_blocks(numel: int) -> int:
    return -(-numel // QUANTIZED_BLOCK) * QUANTIZED_BLOCK


def _need(scratch: Scratch, key: tuple[str, int], rank: int, numel: int, plan: BucketPlan) -> None:
    most = scratch.setdefault(key, [0] * plan.segments[0].world_size)
    most[rank] = max(most[rank], numel)


def _need_decoded(scratch: Scratch, purpose: str, rank: int, numel: int, plan: BucketPlan) -> None:
    """Numbers in fp32, and the codes as indices."""
    _need(scratch, (purpose, 4), rank, numel, plan)
    _need(scratch, ("codec", 8), rank, numel, plan)


def _need_codes(
    scratch: Scratch, states: Sequence[str], rank: int, numel: int, plan: BucketPlan
) -> None:
    """The same, and what encoding takes: half of each number, and where it is above a bound."""
    numel = _whole_blocks(numel)
    for state in states:
        _need_decoded(scratch, state, rank, numel, plan)
    _need(scratch, ("codec", 4), rank, numel, plan)
    _need(scratch, ("codec", 1), rank, numel, plan)
