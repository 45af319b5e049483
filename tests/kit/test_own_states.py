"""States that an optimizer keeps as plain tensors of its own part: whole rows, flat, whole."""

from functools import partial

import pytest
import torch

from vfsdp_optim.testing import assert_sharded_equals_unsharded
from vfsdp_optim.testing.differences import DifferenceError

SHAPES = [(16, 8), (5, 12), (2, 3), (7, 2, 3)]


class RowsAndColumns(torch.optim.Optimizer):
    """Scales by the largest gradients of rows and of columns, as Adafactor does by means.

    Args:
        params: cut between rows, or not at all.
        columns: "of all rows", or wrongly "of own rows".
    """

    def __init__(self, params, columns):
        super().__init__(params, {"columns": columns})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                sharded = hasattr(p, "to_local")
                x, g = (t.to_local() if sharded else t for t in (p, p.grad))
                gather = sharded and group["columns"] == "of all rows"
                every = p.grad.full_tensor() if gather else g
                state = self.state[p]
                state["row"] = g.abs().amax(-1)
                state["column"] = (
                    every.abs().amax(0) if len(every) else every.new_zeros(p.shape[1:])
                )
                state["flat"] = g.flatten().clone()
                x.sub_(g / (state["row"][..., None] + state["column"]), alpha=0.1)


def make(columns, module):
    return RowsAndColumns(module.parameters(), columns)


def test_plain_states_of_own_rows_are_parts_of_the_unsharded_ones():
    # Adafactor on FSDP2 keeps a number for each of its rows; 8-bit codes are often flat.
    assert_sharded_equals_unsharded(
        partial(make, "of all rows"), shapes=SHAPES, layouts=("fsdp2", "hsdp"), steps=2
    )


def test_plain_states_that_should_be_whole_are_still_compared():
    with pytest.raises(DifferenceError) as error:
        assert_sharded_equals_unsharded(
            partial(make, "of own rows"), shapes=SHAPES, world_sizes=[2], layouts="fsdp2"
        )
    lines = str(error.value).splitlines()
    assert lines[1] == "first difference: step 1, parameter 'p0', state 'column'"
    assert "of a plain tensor; its parameter is cut by (Shard(dim=0),)" in lines[5]


class FlatMomentum(torch.optim.Optimizer):
    """SGD whose momentum is flat, on shards and without."""

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            x, g = (t.to_local() if hasattr(t, "to_local") else t for t in (p, p.grad))
            state = self.state[p]
            state.setdefault("momentum", torch.zeros(g.numel())).mul_(0.5).add_(g.flatten())
            x.sub_(state["momentum"].view_as(x))


def test_flat_states_of_own_elements_are_parts_of_a_flat_one():
    assert_sharded_equals_unsharded(
        lambda module: FlatMomentum(module.parameters(), {}), shapes=SHAPES, layouts="any"
    )
