"""Every optimizer of ours, in every state format, keeps its bits through any program.

A new optimizer or state format is added to `OPTIMIZERS`, and nothing else is needed.
"""

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from torch import nn
from torch.distributed.tensor import DTensor

from ranks import distributed_examples
from vfsdp_optim import AdamW, Muon
from vfsdp_optim.testing import (
    assert_program_is_exact,
    assert_sharded_equals_unsharded,
    step_programs,
)

LARGEST = 1500  # elements of a drawn parameter
PATTERNS = {2: None, 3: "e m n -> e m n", 4: "o ... -> o (...)"}


def make_adamw(module: nn.Module, **options: Any) -> torch.optim.Optimizer:
    """AdamW of all parameters."""
    return AdamW(module.named_parameters(), lr=0.1, weight_decay=0.5, **options)


def make_muon(module: nn.Module, **options: Any) -> torch.optim.Optimizer:
    """Muon of matrices, experts and convolutions, AdamW of the rest."""
    groups: dict[Any, dict[str, Any]] = {}
    for name, param in module.named_parameters():
        if param.dim() in PATTERNS:
            group = {"algorithm": "muon", "matrices": PATTERNS[param.dim()]}
        else:
            group = {"algorithm": "adamw", "lr": 0.1}
        groups.setdefault(param.dim(), {"params": [], **group})["params"].append((name, param))
    return Muon(list(groups.values()), lr=0.1, weight_decay=0.5, **options)


def make_muon_in_small_waves(module: nn.Module, **options: Any) -> torch.optim.Optimizer:
    """Muon whose exchanges have just the room of the largest matrix, and of its copies."""
    params = list(module.parameters())
    group = options.get("process_group")
    copies = 1 if group is None else dist.get_world_size(group)
    if isinstance(params[0], DTensor) and params[0].device_mesh.ndim == 2:
        copies = params[0].device_mesh.size(0)
    room = 4 * LARGEST * (1 + copies if copies > 1 else 1)
    return make_muon(module, max_exchange_bytes=room, adjust_lr_fn="match_rms_adamw", **options)


OPTIMIZERS = {
    "adamw": make_adamw,
    "adamw_amsgrad_skips": partial(make_adamw, amsgrad=True, on_nonfinite="skip"),
    "muon": make_muon,
    "muon_in_small_waves": make_muon_in_small_waves,
    "muon_skips": partial(make_muon, nesterov=False, on_nonfinite="skip"),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@given(
    program=step_programs(
        layouts=("ragged", "ours", "negotiated"),
        dtypes=("float32", "bfloat16", "float16"),
        checkpoints=("state_dict", "dcp"),
    )
)
def test_optimizer_equals_its_unsharded_self_through_any_program(name, program):
    assert_program_is_exact(OPTIMIZERS[name], program)


@pytest.mark.parametrize("name", OPTIMIZERS)
@distributed_examples
@given(
    program=step_programs(
        layouts=("fsdp2", "hsdp", "ours", "ours_hsdp"),
        dtypes=("float32", "bfloat16"),
        checkpoints=("state_dict", "dcp"),
    )
)
def test_optimizer_equals_its_unsharded_self_on_torchs_shards_and_meshes_through_any_program(
    name, program
):
    assert_program_is_exact(OPTIMIZERS[name], program)


@pytest.mark.parametrize("name", ["adamw", "adamw_amsgrad_skips", "muon", "muon_skips"])
@distributed_examples
@given(
    program=step_programs(
        layouts=("ours_hsdp", "ours"),
        dtypes=("float32", "bfloat16"),
        checkpoints=("state_dict", "dcp"),
    )
)
def test_optimizer_equals_its_unsharded_self_on_replicas_of_shards_through_any_program(
    name, program
):
    assert_program_is_exact(OPTIMIZERS[name], program)


@pytest.mark.parametrize("name", OPTIMIZERS)
@distributed_examples
@given(program=step_programs(layouts=("replicated",), dtypes=("float32", "bfloat16")))
def test_optimizer_equals_its_unsharded_self_on_replicas_through_any_program(name, program):
    assert_program_is_exact(partial(on_replicas, name), program)


def on_replicas(name: str, module: nn.Module) -> torch.optim.Optimizer:
    """Build an optimizer that divides matrices over all ranks."""
    group = dist.group.WORLD if dist.is_initialized() else None  # none in the unsharded run
    return OPTIMIZERS[name](module, process_group=group)


# Uneven and empty pieces on most numbers of ranks, a row, a column, a vector, experts, convolution.
SHAPES = [(6, 4), (5, 13), (1, 7), (9, 1), (9,), (3, 4, 2), (4, 2, 3, 3)]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_equals_its_unsharded_self_on_torchs_shards_and_on_replicas(name):
    assert_sharded_equals_unsharded(
        OPTIMIZERS[name],
        shapes=SHAPES,
        world_sizes=(1, 2, 3, 5),
        layouts="fsdp2",
        gradients="missing",
    )
    assert_sharded_equals_unsharded(
        OPTIMIZERS[name],
        shapes=SHAPES,
        world_sizes=[4],
        layouts=("hsdp", "ours_hsdp"),
        gradients="missing",
    )
    assert_sharded_equals_unsharded(
        partial(on_replicas, name),
        shapes=SHAPES,
        world_sizes=(2, 3),
        layouts="replicated",
        gradients="missing",
    )
