"""Whole training loops against one process, and element-wise ops on cut tensors."""

import re
from functools import partial

import pytest
import torch
from torch import nn

from ranks import RankError
from vfsdp_optim import AdamW, Muon, param_groups
from vfsdp_optim.testing import assert_op_cut_invariant, assert_training_matches
from vfsdp_optim.testing.differences import DifferenceError


def make_model() -> nn.Module:
    blocks = [nn.Sequential(nn.Linear(20, 33), nn.ReLU(), nn.Linear(33, 20)) for _ in range(2)]
    return nn.Sequential(nn.Linear(7, 20), *blocks, nn.Linear(20, 3))


def batches(samples: int = 12, steps: int = 4):
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        x = torch.randn(samples, 7, generator=generator)
        yield {"x": x, "y": x[:, :3].cumsum(1)}


def loss(model: nn.Module, batch) -> torch.Tensor:
    return nn.functional.mse_loss(model(batch["x"]), batch["y"])


def make_adamw(module: nn.Module) -> torch.optim.Optimizer:
    return AdamW(module.named_parameters(), lr=0.01)


@pytest.mark.parametrize(
    ("make_optimizer", "layouts", "clip"),
    [
        (make_adamw, "ours", 0.5),
        (lambda m: Muon(param_groups(m, adamw=dict(lr=0.01)), lr=0.01), "negotiated", None),
        (lambda m: torch.optim.AdamW(m.parameters(), lr=0.01), ("fsdp2", "ours"), 0.5),
    ],
    ids=["adamw", "muon", "torch_adamw"],
)
def test_training_on_ranks_matches_one_process(make_optimizer, layouts, clip):
    assert_training_matches(
        make_model,
        make_optimizer,
        list(batches()),
        loss=loss,
        world_sizes=(2, 3),
        layouts=layouts,
        clip=clip,
    )


def loss_of_the_whole_batch(model: nn.Module, batch) -> torch.Tensor:
    """A sum divided by the number of samples that one process sees, not this rank."""
    return (model(batch["x"]) - batch["y"]).square().sum() / 12


def test_loss_with_the_wrong_divisor_is_found_in_the_first_step():
    with pytest.raises(DifferenceError, match="the loss of step 1") as error:
        assert_training_matches(
            make_model, make_adamw, list(batches()), loss=loss_of_the_whole_batch, world_sizes=[2]
        )
    on_ranks = float(re.search(r"on ranks +(\S+)", str(error.value))[1])
    one_process = float(re.search(r"\n  one process +(\S+)", str(error.value))[1])
    assert on_ranks == pytest.approx(one_process / 2, rel=1e-4)


class ClipsItsShard(AdamW):
    """Clips by the norm of what this rank holds."""

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                piece = p.grad.to_local() if hasattr(p.grad, "to_local") else p.grad
                piece.div_(piece.norm().clamp(min=1e-3))
        return super().step(closure)


def test_parameters_that_drift_are_found_with_their_step():
    with pytest.raises(DifferenceError, match="does not train as one process does\n") as error:
        assert_training_matches(
            make_model,
            lambda m: ClipsItsShard(m.named_parameters(), lr=0.1, betas=(0.0, 0.999), eps=1.0),
            list(batches()),
            loss=loss,
            world_sizes=[3],
        )
    assert "first difference: " in str(error.value)


def test_batch_that_ranks_cannot_share_evenly_is_named():
    with pytest.raises(ValueError, match=r"batches\[0\]: expected tensors that 5 ranks share"):
        assert_training_matches(make_model, make_adamw, list(batches()), loss=loss, world_sizes=[5])


class OnlyAlone(torch.optim.SGD):
    """Does nothing on shards."""

    def step(self, closure=None):
        if not any(
            hasattr(p, "placements") for group in self.param_groups for p in group["params"]
        ):
            super().step(closure)


def test_learning_rate_that_hides_missing_steps_in_the_tolerance_is_named():
    options = dict(loss=loss, world_sizes=[2])
    with pytest.raises(ValueError, match=r"move by more than atol=0.0001 and rtol=0.001"):
        assert_training_matches(
            make_model, lambda m: OnlyAlone(m.parameters(), lr=1e-6), list(batches()), **options
        )
    with pytest.raises(DifferenceError, match="the loss of step 2"):
        assert_training_matches(
            make_model, lambda m: OnlyAlone(m.parameters(), lr=0.1), list(batches()), **options
        )


def test_layouts_without_a_forward_are_refused_and_any_means_the_others():
    check = partial(
        assert_training_matches, make_model, make_adamw, list(batches()), loss=loss, world_sizes=[2]
    )
    check(layouts="any")
    for layout in ("ragged", "blocks", "replicated"):
        with pytest.raises(ValueError, match=f"in which models train, or 'any', got '{layout}'"):
            check(layouts=layout)


def test_error_of_a_rank_is_passed_on():
    with pytest.raises(RankError, match="KeyError"):
        assert_training_matches(
            make_model,
            make_adamw,
            [{"x": torch.ones(4, 7)}],
            loss=lambda model, batch: loss(model, batch) if batch else model(batch),
            world_sizes=[2],
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(
    ("op", "inputs"),
    [
        (lambda x, y: x.lerp_(y, 0.1), 2),
        (lambda x, y, z: x.addcmul_(y, z, value=0.3), 3),
        (lambda x: x.abs().sqrt(), 1),
        (lambda x, y: x.div_(y), 2),
        (lambda x, y: torch._foreach_mul([x], [y]), 2),
    ],
    ids=["lerp", "addcmul", "sqrt", "div", "foreach_mul"],
)
def test_op_that_optimizers_use_does_not_depend_on_cuts(op, inputs, dtype):
    assert_op_cut_invariant(op, inputs=inputs, dtype=dtype, numel=300, cuts=30)


def fused_adamw(param, grad, mean, square):
    torch._fused_adamw_(
        [param], [grad], [mean], [square], [], [torch.tensor(3.0)], lr=0.1, beta1=0.9, beta2=0.999,
        weight_decay=0.1, eps=1e-8, amsgrad=False, maximize=False,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("op", "words"),
    [
        (lambda x: x - x.mean(), "depends on where its tensors are cut: tensor 1 "),
        (lambda x: x.cumsum(0), "element "),
        (lambda x: x[:-1], "has 99. elements in pieces and 999 as a whole: it is not element-wise"),
        (
            lambda x: x.norm(),
            "has [3-6] elements in pieces and 1 as a whole: it is not element-wise",
        ),
        (lambda x: {"out": [x - x.mean()]}, "depends on where its tensors are cut: tensor 1 "),
    ],
    ids=["mean", "cumsum", "shorter", "number", "nested"],
)
def test_op_that_depends_on_cuts_is_found(op, words):
    with pytest.raises(DifferenceError, match=words):
        assert_op_cut_invariant(op)


def test_fused_adamw_depends_on_cuts():
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(2000, generator=generator) for _ in range(3)]
    kept = [x.clone() for x in tensors]
    with pytest.raises(DifferenceError, match=r"depends on where its tensors are cut(.|\n)*cut at"):
        assert_op_cut_invariant(fused_adamw, inputs=[*tensors, tensors[0].square()])
    assert all(torch.equal(x, y) for x, y in zip(tensors, kept, strict=True))
