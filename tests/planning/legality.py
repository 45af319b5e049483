"""The definition of a legal cut, written out here, and tensors drawn with granules of all kinds."""

import random

from sharding.planning.granule import Granule
from sharding.planning.planner import TensorSpec


def is_legal(cut: int, granule: Granule) -> bool:
    """From the three numbers alone."""
    numel, restart, cuts = granule.numel, granule.restart, granule.cuts or ()
    return cut in (0, *cuts) or (numel > 0 and (cut % restart if restart else cut) % numel == 0)


def lies_legally(tensor: TensorSpec, offset: int, shard: int, world_size: int) -> bool:
    """Whether the tensor ends within the buffer, and no boundary of ranks cuts a granule."""
    stop = offset + tensor.numel
    if stop > shard * world_size:
        return False
    first = offset // shard + 1
    return all(is_legal(b - offset, tensor.granule) for b in range(first * shard, stop, shard))


def draw_tensors(seed: int, most: int, largest: int = 40, unit: int = 1) -> tuple[TensorSpec, ...]:
    """Plain, restarting and listed granules, and mixtures; sizes in units, and odd ends."""
    rng = random.Random(seed)

    def some(low: int, high: int) -> int:
        return rng.randint(low, high) * unit

    tensors = []
    for i in range(rng.randint(0, most)):
        numel = rng.choice([0, 1, some(1, largest), some(1, largest // 3), some(1, largest) - 1])
        granule = rng.choice(
            [
                Granule(some(1, 14)),
                Granule(some(1, 14)),
                Granule(some(1, 6), restart=some(2, 20)),
                Granule(0, cuts=tuple(some(1, 40) for _ in range(rng.randint(0, 5)))),
                Granule(some(1, 14), cuts=tuple(some(1, 40) for _ in range(2))),
            ]
        )
        tensors.append(TensorSpec(str(i), numel, granule, rng.choice("ab")))
    return tuple(tensors)
