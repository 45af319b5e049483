"""Which backend of a process group moves the tensors of a device.

Touches nothing; asks process groups. One group may have a backend for each device type
("cpu:gloo,cuda:nccl"), and one that was made without a name is called "undefined": what a group is
called says nothing about how a tensor travels.
"""

from __future__ import annotations

import torch
import torch.distributed as dist


def world() -> dist.ProcessGroup:
    """Return the default process group.

    Raises:
        RuntimeError: There is none.
    """
    group = dist.group.WORLD
    if group is None:
        raise RuntimeError(
            "no default process group: launch with torchrun and call "
            "torch.distributed.init_process_group() first"
        )
    return group


def device_types(group: dist.ProcessGroup) -> list[str]:
    """Return the device types whose tensors a group can move, in alphabetical order."""
    return sorted({device.type for device in group._device_types})


def backend_of(group: dist.ProcessGroup, device_type: str) -> str:
    """Return the name of the backend that moves tensors of a device type, such as "gloo".

    Raises:
        ValueError: The group has none; names those that it has and the cure.
    """
    if device_type not in device_types(group):
        raise ValueError(
            f"the process group of ranks {dist.get_process_group_ranks(group)} has no backend for "
            f"tensors on {device_type!r}, only {dist.get_backend_config(group)!r}; name one for "
            f"each device, as in init_process_group('cpu:gloo,cuda:nccl')"
        )
    return str(group._get_backend(torch.device(device_type)).name()).lower()


def is_fake(group: dist.ProcessGroup) -> bool:
    """Return whether no other rank exists: the fake backend of torch's tests and planners."""
    return all(backend_of(group, each) == "fake" for each in device_types(group))


def message_device(group: dist.ProcessGroup) -> torch.device:
    """Return where small messages that the host reads travel: on the CPU if the group can."""
    types = device_types(group)
    if "cpu" in types:
        return torch.device("cpu")
    return torch.device(types[0], torch.accelerator.current_device_index())


def main_device_type(group: dist.ProcessGroup) -> str:
    """Return the accelerator whose tensors a group moves without the host, else "cpu".

    gloo takes tensors of an accelerator, but carries them through the host.
    """
    for device_type in device_types(group):
        if device_type != "cpu" and backend_of(group, device_type) not in ("gloo", "fake"):
            return device_type
    return "cpu"
