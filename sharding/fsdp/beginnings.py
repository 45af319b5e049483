"""Whether all ranks began with the same weights. May touch: samples of parameters, one collective.

[Note: equal beginnings]
Each rank keeps its own range of the parameters that it was given. Ranks that were given other ones,
from other seeds, would train a mixture of several models. What tells them apart is a checksum of
the first elements of each full parameter; it costs no pass over the model, and one small reduction
before the first forward. Only ranks that still hold what they were given are compared: a checkpoint
that was loaded after sharding, or a new initialisation, replaces what one rank alone had; and a
rank that holds nothing of a parameter adds nothing to the mixture.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from sharding.transport.backends import is_fake, message_device
from sharding.transport.waits import waiting_for

ROOT_NAME = "root"  # of the bucket whose module has no name
_SAMPLE = 256  # elements of each parameter
_NONE = torch.iinfo(torch.int64).min  # of a rank that is not compared


class Beginnings:
    """What a rank was given for each parameter of a bucket. See [Note: equal beginnings].

    Args:
        originals: The full parameters, by fqn.
        shards: This rank's elements of each, as they were copied.
    """

    def __init__(self, originals: Mapping[str, Tensor], shards: Sequence[Tensor]) -> None:
        self.names = list(originals)
        self._given = [None if p.is_meta else _checksum(p) for p in originals.values()]
        self._held = [None if shard.is_meta else shard[:_SAMPLE].clone() for shard in shards]

    def checksums(self, shards: Sequence[Tensor]) -> list[int]:
        """Return one number for each parameter; waits for the device.

        Args:
            shards: This rank's elements of each parameter, as they are by now.
        """
        found = []
        for given, held, shard in zip(self._given, self._held, shards, strict=True):
            if given is None or held is None or not held.numel() or shard.is_meta:
                found.append(_NONE)
                continue
            # What was converted since is another one, and NaN may be what was given.
            now = shard[:_SAMPLE]
            same = now.dtype == held.dtype and torch.equal(_bits(now), _bits(held.to(now.device)))
            found.append(int(given) if same else _NONE)
        return found


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(torch.uint8)


@torch.no_grad()
def _checksum(parameter: Tensor) -> Tensor:
    """Return a 0-dim int64 that changes when one of the first elements does."""
    sample = _bits(parameter.detach().flatten()[:_SAMPLE]).to(torch.int64)
    return (sample * torch.arange(1, sample.numel() + 1, device=sample.device)).sum()


def check_equal_beginnings(
    beginnings: Sequence[tuple[str, Beginnings, Sequence[Tensor]]],
    groups: Sequence[dist.ProcessGroup],
) -> None:
    """Prove that no two ranks hold what they were given from different models; a collective.

    Args:
        beginnings: (name of the bucket, what it was given, what it holds), the same on all ranks.
        groups: Of the axes of the mesh whose ranks are compared.

    Raises:
        RuntimeError: On every rank, naming the first parameter that differs and two ranks.
    """
    groups = [each for each in groups if dist.get_world_size(each) > 1 and not is_fake(each)]
    if not groups or not beginnings:
        return
    names = [
        f"{name}.{fqn}".removeprefix(f"{ROOT_NAME}.")
        for name, b, _ in beginnings
        for fqn in b.names
    ]
    own = [number for _, b, shards in beginnings for number in b.checksums(shards)]
    extremes = torch.tensor(
        [*own, *(-number if number != _NONE else _NONE for number in own)],
        dtype=torch.int64,
        device=message_device(groups[0]),
    )  # (2 * parameters,), of which the largest are the largest and the negated smallest
    for each in groups:
        with waiting_for("the comparison of what fully_shard was given", each):
            dist.all_reduce(extremes, dist.ReduceOp.MAX, group=each)
    largest, smallest = extremes.cpu().view(2, -1).unbind(0)
    differ = (largest != _NONE) & (largest != -smallest)
    if not differ.any():
        return
    first = int(differ.nonzero()[0])
    numbers = [own[first]]
    for each in groups:
        lists: list[list[int]] = [[]] * dist.get_world_size(each)
        dist.all_gather_object(lists, numbers, group=each)
        numbers = [number for of_rank in lists for number in of_rank]
    a = next(rank for rank, number in enumerate(numbers) if number != _NONE)
    b = next(rank for rank, number in enumerate(numbers) if number not in (_NONE, numbers[a]))
    raise RuntimeError(
        f"{names[first]} was another one on rank {b} than on rank {a} when fully_shard cut it, so "
        f"that ranks would train a mixture of models; build the model from one seed on all ranks "
        f"(torch.manual_seed), broadcast it, or load a checkpoint before the first forward"
    )
