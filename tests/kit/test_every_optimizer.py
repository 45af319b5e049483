"""Every optimizer of ours, in every state format, keeps its bits through any program."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.tensor import DTensor

from ranks import distributed_examples
from vfsdp_optim import SOAP, AdamW, Muon, Precision, Shampoo
from vfsdp_optim.testing import (
    assert_program_is_exact,
    parameter_sets,
    step_programs,
)

LARGEST = 1500  # elements of a drawn parameter
LARGEST_MATRIX = 6000  # of those that are large enough for 8-bit states
PATTERNS = {2: None, 3: "e m n -> e m n", 4: "o ... -> o (...)"}


def make_adamw(module: nn.Module, **options: Any) -> torch.optim.Optimizer:
    """AdamW of all parameters."""
    return AdamW(module.named_parameters(), lr=0.1, weight_decay=0.5, **options)


def make_muon(
    module: nn.Module, kind: type = Muon, algorithm: str = "muon", **options: Any
) -> torch.optim.Optimizer:
    """Muon, or another, of matrices, experts and convolutions, AdamW of the rest."""
    groups: dict[Any, dict[str, Any]] = {}
    for name, param in module.named_parameters():
        if param.dim() in PATTERNS:
            group = {"algorithm": algorithm, "matrices": PATTERNS[param.dim()]}
        else:
            group = {"algorithm": "adamw", "lr": 0.1}
        groups.setdefault(param.dim(), {"params": [], **group})["params"].append((name, param))
    return kind(list(groups.values()), lr=0.1, weight_decay=0.5, **options)


def make_shampoo(module: nn.Module, **options: Any) -> torch.optim.Optimizer:
    """Shampoo in small blocks, whose roots take turns."""
    own = {"block_size": (4, 8), "precondition_frequency": 2, "on_nonfinite": "skip", **options}
    return make_muon(module, Shampoo, "shampoo", **own)


def make_soap(module: nn.Module, **options: Any) -> torch.optim.Optimizer:
    """SOAP of whole matrices, one-sided where they are long."""
    own = {"max_dim": 30, "precondition_frequency": 2, "on_nonfinite": "skip", **options}
    return make_muon(module, SOAP, "soap", **own)


def make_muon_in_small_waves(
    module: nn.Module, largest: int = LARGEST, **options: Any
) -> torch.optim.Optimizer:
    """Muon whose exchanges have just the room of the largest matrix, and of its copies."""
    params = list(module.parameters())
    group = options.get("process_group")
    copies = 1 if group is None else dist.get_world_size(group)
    if isinstance(params[0], DTensor) and params[0].device_mesh.ndim == 2:
        copies = params[0].device_mesh.size(0)
    room = 4 * largest * (1 + copies if copies > 1 else 1)
    return make_muon(module, max_exchange_bytes=room, adjust_lr_fn="match_rms_adamw", **options)


OPTIMIZERS = {
    "adamw": make_adamw,
    "adamw_amsgrad_skips": partial(make_adamw, amsgrad=True, on_nonfinite="skip"),
    "muon": make_muon,
    "muon_in_small_waves": make_muon_in_small_waves,
    "muon_gram_skips": partial(
        make_muon,
        nesterov=False,
        on_nonfinite="skip",
        ns_algorithm="gram",
        ns_coefficients="polar_express",
    ),
    "normuon": partial(make_muon, variant="normuon"),
    "shampoo": make_shampoo,
    "soap": make_soap,
}
# Their states need cuts between blocks.
IN_BLOCKS = {
    "adamw_8bit": partial(make_adamw, states="8bit"),
    "adamw_8bit_amsgrad_skips": partial(
        make_adamw, states="8bit", amsgrad=True, on_nonfinite="skip"
    ),
    "muon_8bit": partial(make_muon, states="8bit"),
    "muon_8bit_in_small_waves": partial(
        make_muon_in_small_waves, states="8bit", largest=LARGEST_MATRIX, nesterov=False
    ),
    "shampoo_8bit": partial(make_shampoo, states="8bit", block_size=(16, 64)),
}
OF_BFLOAT16 = {
    "adamw_master_weights": partial(make_adamw, states=Precision(master_weights=True)),
    "adamw_stochastic_rounding": partial(make_adamw, states=Precision(stochastic_rounding=True)),
    "muon_master_weights": partial(
        make_muon, on_nonfinite="skip", states=Precision(master_weights=True)
    ),
    "muon_8bit_stochastic_rounding": partial(
        make_muon, states=Precision("8bit", stochastic_rounding=True)
    ),
    "muon_8bit_master_weights": partial(make_muon, states=Precision("8bit", master_weights=True)),
}
CHECKPOINTS = ("state_dict", "dcp")
third_of_the_examples = settings(max_examples=settings.default.max_examples // 3)


@st.composite
def with_large_matrices(draw):
    """Shapes of which some are large enough for 8-bit states, in any order; few of whole blocks."""
    large = st.one_of(
        st.tuples(st.integers(14, 20), st.just(300)),
        st.tuples(st.integers(64, 72), st.integers(64, 72)),
        st.tuples(st.integers(16, 20), st.just(256)),
        st.tuples(st.just(3), st.integers(40, 44), st.just(37)),
        st.tuples(st.just(9), st.integers(52, 56), st.just(3), st.just(3)),
    )
    shapes = [draw(large) for _ in range(draw(st.integers(1, 2)))]
    shapes += draw(parameter_sets(max_params=2, max_numel=600))
    return tuple(draw(st.permutations(shapes)))


@pytest.mark.parametrize("name", OPTIMIZERS)
@third_of_the_examples
@given(
    program=step_programs(
        layouts=("ragged", "ours", "negotiated"),
        dtypes=("float32", "bfloat16", "float16"),
        checkpoints=CHECKPOINTS,
    )
)
def test_optimizer_equals_its_unsharded_self_through_any_program(name, program):
    assert_program_is_exact(OPTIMIZERS[name], program)


@pytest.mark.parametrize("name", IN_BLOCKS)
@third_of_the_examples
@given(
    program=step_programs(
        shapes=with_large_matrices(),
        layouts=("blocks", "ours", "ours_hsdp", "negotiated"),
        dtypes=("float32", "bfloat16"),
        checkpoints=CHECKPOINTS,
    )
)
def test_8bit_optimizer_equals_its_unsharded_self_through_any_program(name, program):
    assert_program_is_exact(IN_BLOCKS[name], program)


@pytest.mark.parametrize("name", OF_BFLOAT16)
@third_of_the_examples
@given(
    program=step_programs(
        shapes=with_large_matrices(),
        layouts=("blocks", "ours", "ours_hsdp", "negotiated"),
        dtypes=("bfloat16",),
        checkpoints=CHECKPOINTS,
    )
)
def test_update_in_fp32_of_bfloat16_equals_its_unsharded_self_through_any_program(name, program):
    assert_program_is_exact(OF_BFLOAT16[name], program)


@pytest.mark.parametrize("name", OPTIMIZERS)
@distributed_examples
@given(
    program=step_programs(
        layouts=("fsdp2", "hsdp", "ours", "ours_hsdp"),
        dtypes=("float32", "bfloat16"),
        checkpoints=CHECKPOINTS,
    )
)
def test_optimizer_equals_its_unsharded_self_on_torchs_shards_and_meshes_through_any_program(
    name, program
):
    assert_program_is_exact(OPTIMIZERS[name], program)


@pytest.mark.parametrize("name", ["adamw", "muon", "shampoo", "soap"])
@distributed_examples
@given(
    program=step_programs(
        layouts=("tp", "tp_fsdp", "ep", "ours"),
        world_sizes=(4, 2, 3),
        dtypes=("float32", "bfloat16"),
        checkpoints=CHECKPOINTS,
    )
)
def test_optimizer_equals_its_unsharded_self_on_meshes_of_any_cut_through_any_program(
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
