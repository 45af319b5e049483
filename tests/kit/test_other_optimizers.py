"""What the kit says about optimizers that are not ours, on torch's FSDP2, HSDP and our shards."""

import re
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given
from torch import nn

from ranks import distributed_examples
from vfsdp_optim.testing import (
    assert_program_is_exact,
    assert_sharded_equals_unsharded,
    step_programs,
)
from vfsdp_optim.testing.differences import DifferenceError
from vfsdp_optim.testing.programs import Load, Program, Save, SetLr, Step

# Neither the rows of p0 nor those of p1 are multiples of 16 elements on 2 to 4 ranks.
ODD = [(37, 7), (5, 13, 3)]


def make_foreach_adamw(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.named_parameters(), lr=0.1, weight_decay=0.5, foreach=True)


def make_sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.named_parameters(), lr=0.1, momentum=0.9, nesterov=True)


def make_fused_adamw(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.named_parameters(), lr=0.1, fused=True)


def make_torch_muon(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Muon(module.named_parameters(), lr=0.1)


@pytest.mark.parametrize("make_optimizer", [make_foreach_adamw, make_sgd])
@distributed_examples
@given(program=step_programs(layouts=("fsdp2", "ragged", "ours", "ours_hsdp")))
def test_torchs_element_wise_optimizers_are_exact_through_any_program(make_optimizer, program):
    assert_program_is_exact(make_optimizer, program)


def figures(report: str) -> tuple[int, int, float]:
    """Return how many elements differ, of how many, and by how much."""
    found = re.search(
        r"(\d+) of (\d+) elements differ, on ranks? [\d, ]+, by at most (\S+)", report
    )
    assert found, report
    return int(found[1]), int(found[2]), float(found[3])


def test_fused_adamw_is_not_exact_on_odd_cuts():
    """The kernel rounds the last elements of a tensor otherwise than those before."""
    with pytest.raises(DifferenceError, match=r"AdamW on \d ranks in layout 'fsdp2'") as error:
        assert_sharded_equals_unsharded(make_fused_adamw, shapes=ODD, layouts="fsdp2")
    differing, numel, size = figures(str(error.value))
    assert 0 < differing < numel / 4
    assert 0 < size < 1e-6
    assert re.search(r"\d units? in the last place", str(error.value))
    # Rounding, not another algorithm: in a tolerance that is stated it passes.
    assert_sharded_equals_unsharded(
        make_fused_adamw, shapes=ODD, layouts="fsdp2", exact=False, atol=1e-5, rtol=1e-5
    )


def test_torchs_muon_is_not_exact_on_fsdp2():
    """DTensor sums partial products in the order of the ranks."""
    with pytest.raises(DifferenceError, match=r"Muon on 2 ranks in layout 'fsdp2'") as error:
        assert_sharded_equals_unsharded(
            make_torch_muon, shapes=[(37, 7)], layouts="fsdp2", world_sizes=(1, 2), steps=1
        )
    differing, numel, size = figures(str(error.value))
    assert differing > numel / 2
    assert 1e-5 < size < 0.1


class Unusual(torch.optim.Optimizer):
    """Right on shards, with states of all kinds, a key that reports use, and no learning rate."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self) -> None:
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            p.sub_(p.grad)
            old = self.state[p].get("last", {"grads": []})["grads"]
            self.state[p]["last"] = {"grads": [*old, p.grad.clone()][-2:]}
            self.state[p]["param"] = 2 * p.detach()
            self.state[p]["kinds"] = Counter(plain=2**64 - 1)
            self.state[p]["name"] = "plain"
            self.state["all"] = {"count": self.state["all"].get("count", 0) + 1}


def make_unusual(module: nn.Module) -> torch.optim.Optimizer:
    return Unusual(module.parameters())


def test_right_optimizer_with_unusual_states_is_exact():
    steps = Step(), SetLr(0.5), Step()
    for layout in ("ours", "fsdp2"):
        program = Program(tuple(ODD), 2, layout, (*steps, Save(), Load(3, layout), *steps))
        assert_program_is_exact(make_unusual, program)


class Refuses(torch.optim.SGD):
    """Refuses everything that is sharded."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)
        if any(hasattr(p, "placements") for group in self.param_groups for p in group["params"]):
            raise NotImplementedError("only plain tensors")


def test_layout_that_an_optimizer_refuses_is_named():
    with pytest.raises(
        NotImplementedError, match=r"Refuses does not run in layout 'hsdp': only pl"
    ):
        assert_sharded_equals_unsharded(
            lambda module: Refuses(module.parameters()),
            shapes=[(4, 4)],
            world_sizes=[2],
            layouts="hsdp",
        )


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        (dict(shapes=[(), (3,)], layouts="fsdp2"), ValueError, r"takes no 0-D parameters"),
        (dict(shapes=[(3,)], layouts="fsdp"), ValueError, r"expected 'any', some of .*got 'fsdp'"),
        (dict(shapes=[(3,)], gradients="rand"), ValueError, r"expected one of .*got 'rand'"),
        (dict(), ValueError, r"either shapes or model"),
        (dict(shapes=[(3,)], exact=False, atol=1e-5), ValueError, r"both atol and rtol"),
        (dict(shapes=[(3,)], rtol=1e-5), ValueError, r"exact=True alone"),
        (
            dict(shapes=[(3,)], layouts="negotiated"),
            NotImplementedError,
            r"AdamW does not run in layout 'negotiated': it declares no structure",
        ),
    ],
)
def test_wrong_arguments_are_named(arguments, error, words):
    with pytest.raises(error, match=words):
        assert_sharded_equals_unsharded(make_foreach_adamw, world_sizes=[2], **arguments)
