"""States and gradients of parameters that torch laid out: DTensors, in checkpoints and out."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.tensor import DTensor, Replicate, Shard

from ranks import on_ranks
from sharding import RaggedDTensor
from torch_layouts import Matrices, full, on_fsdp2, step
from vfsdp_optim import AdamW, Muon
from vfsdp_optim.testing import assert_program_is_exact
from vfsdp_optim.testing.programs import Load, Program, Save, Step

R, S0 = Replicate(), Shard(0)


def make_muon(module: nn.Module) -> Muon:
    matrices = [(n, p) for n, p in module.named_parameters() if p.dim() == 2]
    rest = [(n, p) for n, p in module.named_parameters() if p.dim() != 2]
    return Muon([{"params": matrices}, {"params": rest, "algorithm": "adamw"}], lr=0.1)


@pytest.mark.parametrize("checkpoint", ["dcp", "state_dict"])
@pytest.mark.parametrize(
    "places",
    [
        [(2, "fsdp2"), (3, "fsdp2"), (2, "ours"), (4, "hsdp"), (2, "fsdp2")],
        [(4, "hsdp"), (2, "replicated"), (3, "ours"), (2, "hsdp")],
    ],
    ids=["from_fsdp2", "from_hsdp"],
)
def test_states_move_between_torchs_shards_ours_and_numbers_of_ranks(checkpoint, places):
    instructions: list[Any] = [Step(), Save()]
    for world_size, layout in places[1:]:
        instructions += [Load(world_size, layout), Step(), Save()]
    world_size, layout = places[0]
    program = Program(
        ((13, 4), (3, 5), (7,), (1, 6)), world_size, layout, tuple(instructions), 0, "float32",
        checkpoint,
    )  # fmt: skip
    assert_program_is_exact(make_muon, program)


def make_copy(saved: dict[str, Any], change: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    state = {
        i: {key: change(value).clone() for key, value in of_param.items()}
        for i, of_param in saved["state"].items()
    }
    return {**saved, "state": state}


@on_ranks(3)
def test_states_of_dtensors_are_dtensors_with_the_same_placements():
    model = on_fsdp2(Matrices([(7, 3), (2, 4)]))
    optimizer = Muon(list(model.named_parameters()), lr=0.1)
    step(optimizer, 1)
    states = get_optimizer_state_dict(model, optimizer)["state"]
    params = dict(model.named_parameters())
    for name, state in states.items():
        momentum = state["momentum_buffer"]
        assert type(momentum) is DTensor
        assert not isinstance(momentum, RaggedDTensor)
        assert momentum.placements == params[name].placements
        assert momentum.device_mesh == params[name].device_mesh
        assert momentum.shape == params[name].shape
        assert momentum.stride() == params[name].stride()
    # A state in another layout of the same mesh is laid out as the parameter.
    saved = optimizer.state_dict()
    other = make_copy(saved, lambda t: t.redistribute(placements=[R]))
    step(optimizer, 2)
    optimizer.load_state_dict(other)
    for i, state in saved["state"].items():
        param = optimizer.param_groups[0]["params"][i]
        loaded = optimizer.state[param]["momentum_buffer"]
        assert torch.equal(full(loaded), full(other["state"][i]["momentum_buffer"]))
        assert loaded.placements == (S0,)
        del state
    assert sorted(states) == ["ws.0", "ws.1"]


@on_ranks(2)
def test_gradient_in_another_layout_is_refused_by_name():
    model = on_fsdp2(Matrices([(7, 3)]))
    (param,) = model.parameters()
    optimizer = AdamW([("layer.w", param)])
    param.grad = DTensor.from_local(torch.ones(7, 3), param.device_mesh, [R])
    with pytest.raises(TypeError) as error:
        optimizer.step()
    error = str(error.value)
    assert error.startswith("layer.w: expected a gradient laid out as its parameter, in (Shard(")
    assert "got a DTensor in (Replicate(),)" in error
