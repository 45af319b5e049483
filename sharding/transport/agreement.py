"""Proofs that all ranks are about to do the same, before what would hang or mix their tensors.

Communicates digests; texts travel only where they differ.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
import torch.distributed as dist

from sharding.transport.backends import is_fake, message_device
from sharding.transport.collectives import all_gather_flat
from sharding.transport.waits import waiting_for


def check_same_on_all_ranks(
    text: str, group: dist.ProcessGroup | Sequence[dist.ProcessGroup], what: str
) -> None:
    """Prove that `text` is the same on every rank of `group`.

    One small all-gather of digests; only when they differ do the texts travel. Does nothing under
    the fake backend, where no other rank exists.

    Args:
        text: Of this rank.
        group: The ranks to compare; or the group of each axis of a mesh (see `axes.groups_of`),
            whose ranks then raise together and are counted in the order of the mesh.
        what: Names the text in the error.

    Raises:
        RuntimeError: On every rank, naming `what`, the first rank that differs from rank 0 and the
            first line that does.
    """
    groups = [group] if isinstance(group, dist.ProcessGroup) else list(group)
    groups = [g for g in groups if dist.get_world_size(g) > 1 and not is_fake(g)]
    if not groups:
        return
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    digests = torch.frombuffer(bytearray(digest), dtype=torch.uint8)  # (8 * ranks,)
    for each in groups:
        digests = digests.to(message_device(each))
        gathered = digests.new_empty(dist.get_world_size(each) * digests.numel())
        with waiting_for(f"the comparison of {what}", each):
            all_gather_flat(gathered, digests, group=each)
        digests = gathered
    rows = digests.view(-1, 8).tolist()
    if all(row == rows[0] for row in rows):
        return
    texts = [text]
    for each in groups:
        lists: list[list[str]] = [[]] * dist.get_world_size(each)
        dist.all_gather_object(lists, texts, group=each)
        texts = [one for of_rank in lists for one in of_rank]
    rank = next(r for r in range(len(texts)) if texts[r] != texts[0])
    raise RuntimeError(
        f"{what} differs between ranks 0 and {rank}: {_first_difference(texts, rank)}; every rank "
        f"must make the same calls with the same arguments"
    )


def _first_difference(texts: Sequence[str], rank: int) -> str:
    ours, theirs = texts[0].splitlines(), texts[rank].splitlines()
    for a, b in zip(ours, theirs, strict=False):
        if a != b:
            return f"{a!r} against {b!r}"
    longer = ours if len(ours) > len(theirs) else theirs
    owner = 0 if longer is ours else rank
    return f"{longer[min(len(ours), len(theirs))]!r} is on rank {owner} only"
