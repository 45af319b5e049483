"""8-bit states on layouts that are torch's: as exact, where cuts fall between blocks."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from ranks import on_ranks, run_ranks
from vfsdp_optim import AdamW, Muon, Precision
from vfsdp_optim.testing import assert_resume_is_exact, assert_sharded_equals_unsharded


def make_adamw(module: nn.Module) -> AdamW:
    return AdamW(module.named_parameters(), lr=0.01, states="8bit")


def make_muon(module: nn.Module, process_group: dist.ProcessGroup | None = None) -> Muon:
    named = list(module.named_parameters())
    groups = [
        {"params": [item for item in named if item[1].dim() == 2]},
        {"params": [item for item in named if item[1].dim() == 1], "algorithm": "adamw"},
    ]
    return Muon(groups, lr=0.01, states="8bit", process_group=process_group)


MAKERS = {"adamw": make_adamw, "muon": make_muon}

# Rows that torch.chunk cuts at whole blocks on 1, 2 and 3 ranks; a vector, and a small matrix.
ALIGNED = [(18, 256), (12, 512), (300,), (5, 11)]


def on_replicas(name: str, module: nn.Module) -> torch.optim.Optimizer:
    group = dist.group.WORLD if dist.is_initialized() else None
    return make_muon(module, group) if name == "muon" else make_adamw(module)


@pytest.mark.parametrize("name", MAKERS)
def test_8bit_training_on_torchs_shards_and_on_replicas_has_the_bits_of_the_unsharded_one(name):
    check = partial(assert_sharded_equals_unsharded, shapes=ALIGNED, steps=4)
    check(MAKERS[name], layouts="fsdp2", world_sizes=(1, 2, 3))
    check(MAKERS[name], layouts=("hsdp", "ours_hsdp"), world_sizes=(4,))
    check(partial(on_replicas, name), layouts="replicated", world_sizes=(2,))
    assert_resume_is_exact(
        MAKERS[name], shapes=ALIGNED, saved_on=2, resumed_on=3, layouts=("fsdp2", "ours_hsdp")
    )


def step_on_cut_rows() -> None:
    make_adamw(sharded_by_torch((20, 300)))


def sharded_by_torch(*shapes: tuple[int, ...]) -> nn.Module:
    module = nn.ParameterDict({f"p{i}": nn.Parameter(torch.ones(s)) for i, s in enumerate(shapes)})
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return torch.distributed.fsdp.fully_shard(module, mesh=mesh)


def test_8bit_states_on_torchs_cuts_inside_blocks_are_refused_at_once():
    message = r"p0: 8-bit states are blocks of 256 .* shard 1 holds elements 2100 to 4200"
    with pytest.raises(Exception, match=message):
        run_ranks(step_on_cut_rows, 3)


@on_ranks(2)
def test_8bit_states_of_columns_are_refused_by_name():
    mesh = init_device_mesh("cpu", (2,))
    param = nn.Parameter(distribute_tensor(torch.ones(64, 64), mesh, [Shard(1)]))
    with pytest.raises(NotImplementedError, match=r"wide: 8-bit states, .* with placements"):
        AdamW([("wide", param)], states="8bit")
    kept = AdamW([("wide", param)], states=Precision("8bit", keep_32bit=["wide"]))
    assert "exp_avg" in kept.state[param]
