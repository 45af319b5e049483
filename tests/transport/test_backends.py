"""The backend that moves a tensor is asked for by device, never read from a group's name."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ranks import run_ranks
from sharding import FullMatrix, fully_shard
from sharding.transport.agreement import check_same_on_all_ranks
from sharding.transport.backends import backend_of, is_fake, main_device_type, message_device


class Vector(nn.Module):
    """The gradient of `weight` is the input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(700))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * x).sum()


def addend(rank: int) -> Tensor:
    return torch.randn(700, generator=torch.Generator().manual_seed(rank)) * 3.0**rank


def averages_of_groups() -> dict[str, list[Tensor]]:
    """By the name of a group, the full averaged gradient in two layouts."""
    averages: dict[str, list[Tensor]] = {}
    for name in ("undefined", "cpu:gloo", "gloo", "cpu:gloo,cuda:gloo"):
        group = dist.new_group(backend=name)
        assert dist.get_backend(group) == name
        check_same_on_all_ranks(name, group, "the name")
        for structure in (None, lambda fqn, parameter: FullMatrix("n -> n 1")):
            mesh = DeviceMesh.from_group(group, "cpu")
            model = fully_shard(Vector(), mesh=mesh, structure=structure)
            model(addend(dist.get_rank())).backward()
            averages.setdefault(name, []).append(model.weight.grad.full_tensor())
    with pytest.raises(ValueError, match=r"ranks \[0, 1, 2\] has no backend for tensors on 'meta'"):
        backend_of(dist.group.WORLD, "meta")
    return averages


def test_average_over_gloo_does_not_depend_on_the_name_of_the_group() -> None:
    """init_process_group() names its group "undefined"; gloo moves its CPU tensors all the same."""
    expected = (addend(0) + addend(1) + addend(2)) / 3
    for averages in run_ranks(averages_of_groups, 3):
        assert len(averages) == 4
        for name, layouts in averages.items():
            assert len(layouts) == 2
            for average in layouts:
                assert torch.equal(average, expected), name


def group_of(**backends: str) -> SimpleNamespace:
    """A process group that has a backend for each device type, as far as it can be asked."""
    return SimpleNamespace(
        _device_types=[torch.device(each) for each in backends],
        _get_backend=lambda device: SimpleNamespace(name=lambda: backends[device.type]),
    )


@pytest.mark.parametrize(
    ("backends", "main", "message"),
    [
        ({"cuda": "nccl"}, "cuda", "cuda:3"),
        ({"cuda": "nccl", "cpu": "gloo"}, "cuda", "cpu"),
        ({"cuda": "gloo", "cpu": "gloo"}, "cpu", "cpu"),
        ({"cpu": "gloo"}, "cpu", "cpu"),
        ({"xpu": "xccl"}, "xpu", "xpu:3"),
    ],
)
def test_devices_of_a_group(backends, main, message, monkeypatch):
    """ "cuda:nccl" was taken for a group of the CPU."""
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 3)
    group = group_of(**backends)
    assert main_device_type(group) == main
    assert message_device(group) == torch.device(message)
    assert not is_fake(group)
    assert is_fake(group_of(**dict.fromkeys(backends, "fake")))
