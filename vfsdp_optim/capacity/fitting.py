"""On how many ranks a model fits into the memory of a device, and how. Pure integers."""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from vfsdp_optim.capacity.advice import TOLERATED, group_sizes, regroup
from vfsdp_optim.capacity.parallelism import Parallelism, divide
from vfsdp_optim.capacity.prediction import Capacity, Progress, measure
from vfsdp_optim.capacity.shapes import ModelShapes
from vfsdp_optim.capacity.tables import bytes_text
from vfsdp_optim.capacity.training_setup import Setup

RANKS = tuple(8 << i for i in range(8))  # tried where none are given
SPARE = 0.2  # of the memory of a device: for activations, and what an allocator loses
_UNITS = {"MB": 10**6, "GB": 10**9, "MiB": 1 << 20, "GiB": 1 << 30}


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """The memory of one device.

    Attributes:
        nbytes: all of it.
        text: the same, as errors and verdicts say it.
    """

    nbytes: int
    text: str

    @staticmethod
    def parse(text: str) -> "DeviceMemory":
        """Read "80GiB", "80 GB" or "80", which is in GiB.

        Raises:
            ValueError: it is none of these.
        """
        found = re.fullmatch(r"(\d{1,6}(?:\.\d{1,3})?) ?(MB|GB|MiB|GiB)?", text.strip())
        if found is None or not float(found[1]):
            raise ValueError(f"memory: expected a size such as 80GiB or 80GB, got {text!r}")
        unit = found[2] or "GiB"
        return DeviceMemory(int(float(found[1]) * _UNITS[unit]), f"{found[1]} {unit}")

    def fits(self, capacity: Capacity) -> bool:
        """Return whether a rank needs no more than what activations leave."""
        return capacity.memory.total <= self.nbytes * (1 - SPARE)


@dataclass(frozen=True, slots=True)
class Suggestion:
    """What to train a model on.

    Attributes:
        capacity: on the fewest ranks on which it fits; the first of those with equally many.
        smallest_group: shard ranks of the smallest HSDP groups that fit too.
        others: with other formats of states, on the fewest ranks on which each fits.
    """

    capacity: Capacity
    smallest_group: int
    others: tuple[Capacity, ...]


def suggest(
    model: ModelShapes,
    parallelism: Parallelism,
    setups: Sequence[Setup],
    memory: DeviceMemory,
    progress: Progress = lambda _: None,
) -> Suggestion:
    """Return the fewest ranks, of 8 to 1,024, on which a model fits.

    Args:
        model: whole.
        parallelism: its `ranks` are replaced.
        setups: that differ in the format of states; the first is preferred.
        memory: of a device.
        progress: is told what is planned.

    Raises:
        ValueError: it fits on none, with what it takes on the most.
    """
    fitting = [_first(model, parallelism, setup, memory, progress) for setup in setups]
    found = [capacity for capacity in fitting if memory.fits(capacity)]
    if not found:
        least = min(fitting, key=lambda capacity: capacity.memory.total)
        usable = bytes_text(int(memory.nbytes * (1 - SPARE)))
        raise ValueError(
            f"memory: on {least.model.parallelism.ranks:,} ranks, with {least.setup.states} "
            f"states, a rank takes {bytes_text(least.memory.total)}, and {1 - SPARE:.0%} of "
            f"{memory.text} is {usable}; pass --tp, --pp or --states 8bit, or more memory"
        )
    best = min(found, key=lambda capacity: capacity.model.parallelism.ranks)
    groups = _fitting_groups(model, best, memory, progress)
    return Suggestion(best, min(groups), tuple(c for c in found if c is not best))


def _first(
    model: ModelShapes,
    parallelism: Parallelism,
    setup: Setup,
    memory: DeviceMemory,
    progress: Progress,
) -> Capacity:
    """Return the capacity on the fewest ranks that fit, or on the most of all."""
    divided = parallelism.replicate * parallelism.tp * parallelism.ep * parallelism.pp
    capacity = None
    for ranks in RANKS:
        if ranks % divided:
            continue
        each = replace(parallelism, ranks=ranks)
        progress(f"{ranks} ranks, {setup.states} states")
        capacity = measure(divide(model, each), setup)
        if memory.fits(capacity):
            break
    if capacity is None:
        raise ValueError(
            f"ranks: none of {', '.join(map(str, RANKS))} is divided by --replicate, --tp, --ep "
            "and --pp; pass --ranks"
        )
    return capacity


def _fitting_groups(
    model: ModelShapes, best: Capacity, memory: DeviceMemory, progress: Progress
) -> Iterator[int]:
    parallelism = best.model.parallelism
    yield parallelism.shard_ranks
    for group in group_sizes(parallelism)[1:]:
        progress(f"groups of {group}")
        if not memory.fits(measure(regroup(model, parallelism, group), best.setup)):
            return  # smaller groups take more
        yield group


def coarsest_granule(found: dict[tuple[int, str], tuple[float, int]]) -> str | None:
    """Return the coarsest granule of `search_layouts` that pads little in its largest groups."""
    largest = max(group for group, _ in found)
    fine = [t for (group, t), (pad, _) in found.items() if group == largest and pad <= TOLERATED]
    return fine[-1] if fine else None


def verdicts(capacities: Iterable[Capacity], memory: DeviceMemory) -> Iterator[str]:
    """Yield one sentence for each: whether it fits, and what is left for activations."""
    for capacity in capacities:
        total, ranks = capacity.memory.total, capacity.model.parallelism.ranks
        head = f"{ranks:,} ranks, {capacity.setup.states} states"
        left = memory.nbytes - total
        if memory.fits(capacity):
            yield f"{head}: fits {memory.text}, {bytes_text(left)} are left for activations"
        elif left > 0:
            few = bytes_text(left)
            yield f"{head}: does not fit {memory.text}, {few} are too little for activations"
        else:
            yield f"{head}: does not fit {memory.text}, {bytes_text(-left)} are missing"
