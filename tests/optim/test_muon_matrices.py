"""Matrices inside of parameters are updated as if each were a parameter of its own, bit by bit."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from vfsdp_optim import FullMatrix, Muon, param_groups
from vfsdp_optim.testing import assert_sharded_equals_unsharded, layouts

Cut = Callable[[Tensor], list[Tensor]]
Kind = tuple[tuple[int, ...], "str | FullMatrix", Cut]


def draw_kind(name: str, seed: int) -> Kind:
    """Return the shape of a parameter, where its matrices are, and how to cut them out by hand."""
    draw = random.Random(seed)
    a, b, c, d = (draw.randint(1, 9) for _ in range(4))
    n = draw.randint(1, 40)
    splits = tuple(draw.randint(1, 12) for _ in range(draw.randint(1, 4)))
    kinds: dict[str, Kind] = {
        "experts": ((a, 3 * b, n), "e m n -> e m n", lambda x: list(x)),
        "experts_input_first": (
            (a, 3 * b, n), "e n m -> e m n", lambda x: [y.T for y in x],
        ),
        "experts_gate_up": (
            (a, 2 * b, n), "e (g m) n -> (e g) m n; g=2",
            lambda x: [z for y in x for z in y.chunk(2)],
        ),
        "convolution": ((4 * a, b, 3, 2), "o ... -> o (...)", lambda x: [x.flatten(1)]),
        "convolution_groups": (
            (2 * a, b, 3), "(g o) ... -> g o (...); g=2",
            lambda x: [y.flatten(1) for y in x.chunk(2)],
        ),
        "fused": ((3 * b, n), "(q m) n -> q m n; q=3", lambda x: list(x.chunk(3))),
        "fused_unequal": (
            (sum(splits), n), FullMatrix(row_splits=splits), lambda x: list(x.split(splits)),
        ),
        "fused_by_head": (
            (3 * c * d, n), f"(h q d) n -> q (h d) n; h={c} q=3",
            lambda x: list(x.view(c, 3, d, n).transpose(0, 1).reshape(3, c * d, n)),
        ),
        "gate_up_alternating": ((2 * b, n), "(m g) n -> g m n; g=2", lambda x: [x[0::2], x[1::2]]),
        "heads_by_rows": ((c * d, n), f"(h d) n -> h d n; h={c}", lambda x: list(x.chunk(c))),
        "heads_by_columns": ((n, c * d), f"m (h d) -> h m d; h={c}", lambda x: list(x.chunk(c, 1))),
        "queries_and_keys_by_head": (
            (2 * c * d, n), f"(q h d) n -> (q h) d n; q=2 h={c}", lambda x: list(x.chunk(2 * c)),
        ),
    }  # fmt: skip
    return kinds[name]


NAMES = [
    "experts", "experts_input_first", "experts_gate_up", "convolution", "convolution_groups",
    "fused", "fused_unequal", "fused_by_head", "gate_up_alternating", "heads_by_rows",
    "heads_by_columns", "queries_and_keys_by_head",
]  # fmt: skip
OPTIONS = {"lr": 0.1, "weight_decay": 0.5}


class Fused(nn.Module):
    """The parameter, behind one that moves it away from the start of the buffer."""

    def __init__(self, shape: tuple[int, ...], before: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.before = nn.Parameter(torch.randn(before, 3, generator=generator))
        self.fused = nn.Parameter(torch.randn(shape, generator=generator))

    def forward(self) -> None:
        raise NotImplementedError


def make_optimizer(module: nn.Module, pattern: str | FullMatrix, **options: Any) -> Muon:
    groups = param_groups(module, matrices={"*fused": pattern, "before": "m n -> m n"})
    return Muon(groups, **OPTIONS, **options)


def gradient(step: int, shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(100 + step))


def assert_equals_separate_parameters(kind: Kind) -> None:
    """Three unsharded steps of the parameter against steps of its matrices as parameters."""
    shape, pattern, cut = kind
    module = Fused(shape, 4)
    separate = [nn.Parameter(x.clone()) for x in cut(module.fused.detach())]
    optimizer, reference = make_optimizer(module, pattern), Muon(separate, **OPTIONS)
    for step in range(3):
        full = gradient(step, shape)
        module.fused.grad = full.clone()
        for p, x in zip(separate, cut(full), strict=True):
            p.grad = x.clone()
        optimizer.step()
        reference.step()
    momentum = optimizer.state[module.fused]["momentum_buffer"]
    for p, x, m in zip(separate, cut(module.fused.detach()), cut(momentum), strict=True):
        assert torch.equal(p, x)
        assert torch.equal(reference.state[p]["momentum_buffer"], m)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=settings.default.max_examples // 2)
@given(seed=st.integers(0, 10**6))
def test_matrices_of_muon_equal_separate_parameters(name, seed):
    """KellerJordan/Muon and HeavyBall flattened experts, dion asks for divisible splits."""
    assert_equals_separate_parameters(draw_kind(name, seed))


@settings(max_examples=settings.default.max_examples * 3 // 2)
@given(
    name=st.sampled_from(NAMES),
    seed=st.integers(0, 10**6),
    world_size=st.sampled_from([2, 3, 1, 5]),
    before=st.integers(0, 200),
    data=st.data(),
)
def test_matrices_of_muon_have_the_bits_of_one_process_wherever_they_are_cut(
    name, seed, world_size, before, data
):
    shape, pattern, _ = draw_kind(name, seed)
    cut_anywhere = layouts(((before, 3), shape), world_size)
    names = ["ours", "negotiated", "fsdp2", *(["hsdp"] if world_size % 2 == 0 else [])]
    layout = data.draw(st.one_of(st.sampled_from(names), cut_anywhere))
    assert_sharded_equals_unsharded(
        partial(make_optimizer, pattern=pattern),
        model=partial(Fused, shape, before),
        world_sizes=(world_size,),
        layouts=layout,
        steps=2,
        gradients="random",
        seed=seed,
    )


def every_kind() -> nn.Module:
    """A parameter of each kind, called as its kind."""
    generator = torch.Generator().manual_seed(0)
    drawn = {name: draw_kind(name, seed)[0] for seed, name in enumerate(NAMES)}
    params = {n: nn.Parameter(torch.randn(s, generator=generator)) for n, s in drawn.items()}
    return nn.ParameterDict(params)


def make_for_every_kind(module: nn.Module) -> Muon:
    matrices = {name: draw_kind(name, seed)[1] for seed, name in enumerate(NAMES)}
    return Muon(param_groups(module, matrices=matrices), **OPTIONS)


def test_matrices_of_muon_on_shards_and_meshes_of_torch_have_the_bits_of_one_process():
    check = partial(assert_sharded_equals_unsharded, make_for_every_kind, model=every_kind, steps=2)
    check(layouts="fsdp2", world_sizes=(1, 2, 3, 5))
    check(layouts=("hsdp", "ours_hsdp"), world_sizes=[4])


def test_scale_of_muon_is_that_of_the_matrix_and_not_of_the_parameter():
    # 12 x 4 as one matrix is scaled by sqrt(3); its three 4 x 4 by 1.
    module = Fused((12, 4), 4)
    plan = make_optimizer(module, "(q m) n -> q m n; q=3").plan()
    assert {row.fqn: row.scale for row in plan.rows}["fused"] == 1.0
    (row,) = (row for row in make_optimizer(module, "m n -> m n").plan().rows if row.fqn == "fused")
    assert row.scale == pytest.approx(3**0.5)


@pytest.mark.parametrize(
    ("matrices", "fact"),
    [
        ({"*.fusd": "m n -> m n"}, r"'\*\.fusd' matches none of 2 parameters"),
        ({"fu*": "e m n -> e m n"}, r"fused, by matrices=\{'fu\*': 'e m n -> e m n'\}.*3 dims"),
        ({"fused": FullMatrix(row_splits=(8, 3))},
         r"fused, by matrices=\{'fused'.*splits 11 rows.*has 12.*add up to 12"),
        ({"fused": "(q m) n -> q m n; q=5"}, r"fused, by matrices.*12"),
        ({"fused": "nonsense"}, r"matrices: 'fused': expected an einops pattern"),
        ({"fused": "m n -> m n", "f*": "(q m) n -> q m n; q=3"},
         r"fused: matrices has 'fused'.*'f\*'"),
    ],
)  # fmt: skip
def test_matrices_that_cannot_be_are_an_error_that_names_parameter_glob_and_cure(matrices, fact):
    """torchtitan#4812: a pattern that matched no more after a rename left matrices to AdamW."""
    with pytest.raises(ValueError, match=f"(?s){fact}"):
        param_groups(Fused((12, 4), 4), matrices={"before": None, **matrices})
