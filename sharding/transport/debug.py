"""Checks that cost time, switched on by VFSDP_DEBUG=1: order of collectives, equal weights.

May touch: the environment, parameters (to read them), one small collective per check.

Off, ranks that gather buckets in different orders are found where they do over gloo (see
[Note: heralds] in heralds.py), and by the next reduction elsewhere if collectives match by order
(see [Note: order of collectives] in root.py), or they wait until the timeout of the process group.
On, every collective is announced before it is posted, and a difference raises on all ranks at once,
naming it.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from sharding.transport.agreement import check_same_on_all_ranks


def enabled() -> bool:
    """Return whether the environment asks for the checks; buckets ask when they are made."""
    return os.environ.get("VFSDP_DEBUG", "0") not in ("", "0")


def announce(event: str, groups: Sequence[dist.ProcessGroup]) -> None:
    """Raise on all ranks unless they are about to do the same.

    Args:
        event: The verb and the bucket, the same text on ranks that agree.
        groups: Of the axes of the mesh whose ranks must agree.
    """
    check_same_on_all_ranks(event, groups, "the order of collectives")


def checksums(parameters: Mapping[str, Tensor]) -> str:
    """Return one line per parameter that changes when any bit of it does; empty outside of debug
    mode."""
    return "\n".join(_digests("initial values of", parameters)) if enabled() else ""


def check_written(
    written: Mapping[str, Tensor], groups: Sequence[dist.ProcessGroup], bucket: str
) -> None:
    """Raise on all ranks unless they wrote the same into gathered weights.

    Every rank keeps its own range of what it wrote, so that other values elsewhere would be lost.
    """
    text = "\n".join(_digests("values of", written))
    check_same_on_all_ranks(text, groups, f"what was written into gathered {bucket!r}")


def _digests(what: str, parameters: Mapping[str, Tensor]) -> list[str]:
    lines = []
    for fqn, parameter in parameters.items():
        if parameter.device.type == "meta":
            continue
        flat = parameter.detach().reshape(-1).contiguous().view(torch.uint8).cpu()
        digest = hashlib.blake2b(flat.numpy().tobytes(), digest_size=8).hexdigest()
        lines.append(f"{what} {fqn}: {digest}")
    return lines
