"""RaggedDTensor on a 2-D mesh: dim 0 replicates, dim 1 cuts, and no op leaves a replica."""

import copy
import io

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from ranks import collectives, on_ranks
from sharding import RaggedDTensor, RaggedShard
from sharding.tensor.ragged_tensor import distribute_ragged
from training import mesh_of

SHAPE = (5, 3)
PLACEMENT = RaggedShard((0, 1), (2, 6), 2)  # the last unit of 15 elements is shorter
OTHER = RaggedShard((0, 1), (0, 15))


def full_of(replica: int) -> Tensor:
    """Replicas that differ, so that an op that reached another replica would be seen."""
    return torch.arange(15.0).view(SHAPE) * (1 + replica) - 3


def ragged() -> tuple[RaggedDTensor, Tensor]:
    full = full_of(dist.get_rank() // 2)
    return distribute_ragged(full, mesh_of((2, 2)), PLACEMENT), full


@on_ranks(4)
def test_every_layout_holds_the_tensor_of_its_replica() -> None:
    x, full = ragged()
    lead = (Replicate(),)
    assert x.placements == (*lead, PLACEMENT)
    assert x.placement == PLACEMENT
    assert x.device_mesh.shape == (2, 2)
    assert x.bounds == [(0, 4), (4, 15)][dist.get_rank() % 2]
    assert torch.equal(x.to_local(), full.view(-1)[slice(*x.bounds)])
    assert torch.equal(x.full_tensor(), full)
    replicated = x.redistribute(placements=[*lead, Replicate()])
    assert type(replicated) is DTensor
    assert replicated.placements == (*lead, Replicate())
    assert torch.equal(replicated.to_local(), full)
    rows = x.redistribute(placements=[*lead, Shard(0)])
    assert rows.placements == (*lead, Shard(0))
    assert torch.equal(rows.to_local(), full.chunk(2)[dist.get_rank() % 2])
    moved = x.redistribute(placements=[*lead, OTHER])
    assert moved.placements == (*lead, OTHER)
    assert torch.equal(moved.full_tensor(), full)
    assert x.redistribute(placements=x.placements) is x
    row = x[2]
    assert row.placements[0] == Replicate()
    assert torch.equal(row.full_tensor(), full[2])


@on_ranks(4)
def test_layouts_that_would_end_replication_are_refused_by_name():
    x, _ = ragged()
    messages = []
    for placements in ([Replicate()], [Shard(0), Shard(0)], [Shard(0), Replicate()], [PLACEMENT]):
        with pytest.raises(NotImplementedError) as error:
            x.redistribute(placements=placements)
        messages.append(str(error.value))
    mesh = mesh_of((4, 1))
    with pytest.raises(ValueError, match="with as many") as wrong:
        RaggedDTensor.from_local(torch.zeros(15), mesh, PLACEMENT, SHAPE)
    messages.append(str(wrong.value).replace(repr(mesh), "MESH"))
    deep = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("a", "b", "c"))
    with pytest.raises(ValueError, match="with as many"):
        distribute_ragged(torch.zeros(SHAPE), deep, PLACEMENT)
    *refusals, mismatch = messages
    for message, got in zip(
        refusals,
        ["[Replicate()]", "[Shard(dim=0), Shard(dim=0)]", "[Shard(dim=0), Repl", "[Ragg"],
        strict=True,
    ):
        assert message.startswith(
            "expected [Replicate(), Replicate()], [Replicate(), Shard(0)] or [Replicate(), "
            "RaggedShard(...)] for a tensor of shape (5, 3), got " + got
        )
    assert mismatch == (
        "expected a 1-D mesh of 2 ranks, or a 2-D mesh with as many in its last dim, for "
        "RaggedShard(dims=(0, 1), local_units=(2, 6), unit_numel=2), got MESH"
    )


@on_ranks(4)
def test_reductions_stay_within_a_replica() -> None:
    x, full = ragged()
    other = distribute_ragged(full, x.device_mesh, PLACEMENT)
    torch.testing.assert_close(x.norm(), full.norm())
    torch.testing.assert_close(torch._foreach_norm([x, x], 1.0), [full.norm(1)] * 2)
    for op in ("sum", "mean", "max", "min"):
        assert torch.equal(getattr(x, op)(), getattr(full, op)()), op
    assert x.any()
    assert torch.equal(x, other)
    # One element of one replica differs: its other rank sees it too, the other replica does not.
    rank = dist.get_rank()
    if rank == 2:
        other.to_local()[1] += 1
    assert torch.equal(x, other) == (rank < 2)
    found = torch.zeros(1)
    if rank == 1:
        other.to_local()[0] = torch.inf
    torch._amp_foreach_non_finite_check_and_unscale_([other], found, torch.ones(1))
    assert found.item() == (rank < 2)
    parameter = nn.Parameter(other)
    parameter.grad = x.detach().clone()
    norm = nn.utils.clip_grad_norm_([parameter], 0.5)
    torch.testing.assert_close(norm, full.norm())
    torch.testing.assert_close(parameter.grad.norm(), torch.tensor(0.5))


@on_ranks(4)
def test_copies_keep_mesh_placements_and_values() -> None:
    x, full = ragged()
    for twin in (copy.deepcopy(x), x.clone(), x.detach(), x * 1, torch.zeros_like(x).copy_(full)):
        assert type(twin) is RaggedDTensor
        assert twin.placements == x.placements
        assert torch.equal(twin.full_tensor(), full)
    parameter = nn.Parameter(x)
    twin = copy.deepcopy(parameter)
    assert type(twin) is type(parameter)
    assert twin.to_local().data_ptr() != parameter.to_local().data_ptr()
    torch.manual_seed(7)
    expected = torch.empty(SHAPE).normal_()
    torch.manual_seed(7)
    assert torch.equal(x.clone().normal_().full_tensor(), expected)
    x.requires_grad_()
    (x.full_tensor() * full).sum().backward()
    assert x.grad.placements == x.placements
    assert torch.equal(x.grad.full_tensor(), full)


@on_ranks(4)
def test_torch_save_and_load_keep_the_layout() -> None:
    x, _ = ragged()
    file = io.BytesIO()
    torch.save({"x": x}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)["x"]
    assert type(loaded) is RaggedDTensor
    assert loaded.placements == x.placements
    assert loaded.device_mesh.shape == (2, 2)
    assert torch.equal(loaded.to_local(), x.to_local())


@on_ranks(4)
def test_each_reduction_is_one_collective_and_others_are_none():
    x, _ = ragged()
    full, norm, *none = [
        collectives(function)
        for function in (x.full_tensor, x.norm, lambda: x + 1, x._boxes, lambda: x.copy_(x))
    ]
    assert len(full) == len(norm) == 1
    assert none == [[], [], []]
