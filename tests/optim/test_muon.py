"""Muon: torch's bits on matrices, the right matrices of other shapes, and AdamW groups beside."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR

from sharding.planning.structure import Blocks, FullMatrix
from vfsdp_optim.adamw import AdamW
from vfsdp_optim.muon import Muon, MuonAlgorithm
from vfsdp_optim.newton_schulz import orthogonalize
from vfsdp_optim.testing.oracle import reference_orthogonalize

shapes_2d = st.lists(st.tuples(st.integers(1, 20), st.integers(1, 20)), min_size=1, max_size=4)


def parameters(shapes, seed=0, dtype=torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for s in shapes]


def set_gradients(params, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)


def train(optimizer, params, steps, first_seed=100):
    for step in range(steps):
        set_gradients(params, first_seed + step)
        optimizer.step()


@pytest.mark.parametrize("adjust_lr_fn", [None, "original", "match_rms_adamw"])
@pytest.mark.parametrize("nesterov", [True, False])
@given(
    shapes=shapes_2d,
    seed=st.integers(0, 2**31),
    momentum=st.sampled_from([0.0, 0.95]),
    ns_steps=st.sampled_from([1, 5]),
)
def test_step_has_torchs_bits(adjust_lr_fn, nesterov, shapes, seed, momentum, ns_steps):
    options = dict(
        lr=0.1, weight_decay=0.5, momentum=momentum, nesterov=nesterov, ns_steps=ns_steps,
        adjust_lr_fn=adjust_lr_fn,
    )  # fmt: skip
    params, reference = parameters(shapes, seed), parameters(shapes, seed)
    ours = Muon(params, ns_dtype=torch.bfloat16, **options)
    theirs = torch.optim.Muon(reference, **options)
    train(ours, params, 3, seed + 1)
    train(theirs, reference, 3, seed + 1)
    for p, q in zip(params, reference, strict=True):
        assert torch.equal(p, q)
        momentum_of = (ours.state[p]["momentum_buffer"], theirs.state[q]["momentum_buffer"])
        assert torch.equal(*momentum_of)


def test_defaults_are_torchs():
    (p,), (q,) = parameters([(3, 4)]), parameters([(3, 4)])
    ours, theirs = Muon([p]).param_groups[0], torch.optim.Muon([q]).param_groups[0]
    assert {key: ours[key] for key in theirs if key != "params"} == {
        key: value for key, value in theirs.items() if key != "params"
    }


def test_update_does_not_scale_with_the_gradient():
    # A step that skipped Newton-Schulz would: DeepSpeed#8441 trained plain SGD as Muon.
    moved = []
    for scale in (1.0, 1000.0):
        (p,) = parameters([(6, 6)])
        optimizer = Muon([p], lr=0.1, weight_decay=0.0, ns_dtype=torch.float32)
        before = p.detach().clone()
        p.grad = scale * torch.randn(6, 6, generator=torch.Generator().manual_seed(1))
        optimizer.step()
        moved.append(p.detach() - before)
    torch.testing.assert_close(moved[0], moved[1], atol=1e-4, rtol=0)
    singular_values = torch.linalg.svdvals(moved[0] / 0.1)
    assert 0.5 < singular_values.median() < 1.3


def test_float32_momentum_of_bfloat16_parameters():
    (p,) = parameters([(6, 4)], dtype=torch.bfloat16)
    optimizer = Muon([p], lr=0.1, state_dtype=torch.float32)
    expected = torch.zeros(6, 4)
    for step in range(3):
        set_gradients([p], step)
        expected.lerp_(p.grad.float(), 1 - 0.95)
        optimizer.step()
    assert torch.equal(optimizer.state[p]["momentum_buffer"], expected)


def mixed(**muon) -> tuple[Muon, list[nn.Parameter]]:
    params = parameters([(4, 6), (6, 4), (5,), (3, 3)])
    groups = [
        {"params": [("a", params[0]), ("b", params[1])], "lr": 1e-3, "weight_decay": 0.1},
        {"params": [("c", params[2]), ("d", params[3])], "algorithm": "adamw", "lr": 1e-4,
         "weight_decay": 0.0},
    ]  # fmt: skip
    return Muon(groups, **{"lr": 0.5, "weight_decay": 0.01, **muon}), params


def test_groups_of_both_algorithms_step_as_two_optimizers_would():
    optimizer, params = mixed(ns_dtype=torch.bfloat16)
    reference = [nn.Parameter(p.detach().clone()) for p in params]
    muon = torch.optim.Muon(reference[:2], lr=1e-3, weight_decay=0.1)
    adamw = torch.optim.AdamW(reference[2:], lr=1e-4, weight_decay=0.0, foreach=True)
    for step in range(4):
        set_gradients(params, step)
        set_gradients(reference, step)
        optimizer.step()
        muon.step()
        adamw.step()
    for p, q in zip(params, reference, strict=True):
        assert torch.equal(p, q)


def test_adamw_group_takes_adamws_defaults_and_not_muons():
    (p,), (q,) = parameters([(5,)]), parameters([(5,)])
    optimizer = Muon(
        [{"params": [p], "algorithm": "adamw"}], lr=9.0, weight_decay=9.0, momentum=0.5, eps=9.0
    )
    (group,) = optimizer.param_groups
    (theirs,) = torch.optim.AdamW([q]).param_groups
    assert "momentum" not in group
    for key in ("lr", "betas", "eps", "weight_decay", "amsgrad", "maximize"):
        assert group[key] == theirs[key]


@pytest.mark.parametrize(
    ("group", "fact"),
    [
        ({"shape": (3,)}, r"w: Muon updates matrices.*\(3,\).*param_groups\(model\).*\"adamw\""),
        ({"shape": (2, 3, 4)}, r"w: Muon updates matrices.*\(2, 3, 4\)"),
        ({"shape": (3, 4), "matrices": "e m n -> e m n"}, r"w: .*e m n -> e m n"),
        ({"shape": (3, 4), "matrices": "nonsense"}, "param group 0: .*nonsense"),
        (
            {"shape": (3, 4), "algorithm": "sgd"},
            r"param group 0: algorithm: expected one of \['adamw', 'muon'\] or an Algorithm object",
        ),
        ({"shape": (3, 4), "use_muon": True}, "param group 0: algorithm 'muon' has no 'use_muon'"),
        ({"shape": (3,), "algorithm": "adamw", "momentum": 0.9}, "'adamw' has no 'momentum'"),
        ({"shape": (3, 4), "lr": -1.0}, "param group 0: lr.*-1.0"),
        ({"shape": (3, 4), "momentum": -0.1}, "momentum.*-0.1"),
        ({"shape": (3, 4), "adjust_lr_fn": "spectral"}, "'spectral'"),
        ({"shape": (3, 4), "ns_steps": 100}, "param group 0: ns_steps.*100"),
        ({"shape": (3, 4), "ns_coefficients": "quintic", "ns_steps": 4}, "ns_steps=5"),
        ({"shape": (3, 4), "variant": "nor"}, "param group 0: variant: expected None or 'normuon'"),
        ({"shape": (3, 4), "beta2": 1.0}, "param group 0: beta2: expected 0 <= beta2 < 1, got 1.0"),
        ({"shape": (3, 4), "ns_algorithm": "fast"}, "param group 0: ns_algorithm: expected one of"),
        ({"shape": (3, 4), "ns_dtype": torch.int8}, "ns_dtype.*torch.int8"),
    ],
)
def test_group_that_muon_cannot_treat_is_an_error_that_names_it(group, fact):
    p = nn.Parameter(torch.zeros(group.pop("shape")))
    with pytest.raises(ValueError, match=fact):
        Muon([{"params": [("w", p)], **group}])


def test_options_of_newton_schulz_reach_it_and_the_plans_cost():
    options = dict(coefficients="polar_express", steps=6, algorithm="gram", dtype=torch.bfloat16)
    p = nn.Parameter(torch.zeros(4, 40))
    set_gradients([p], 0)
    group = {f"ns_{key}": value for key, value in options.items()}
    optimizer = Muon([p], lr=1.0, weight_decay=0.0, nesterov=False, **group)
    optimizer.step()
    momentum = torch.zeros(4, 40).lerp_(p.grad, 1 - 0.95).bfloat16()  # as matrices travel
    assert torch.equal(-p.detach(), orthogonalize(momentum, **options).float())
    standard = MuonAlgorithm(**{**group, "ns_algorithm": "standard"})
    gram = MuonAlgorithm(**group)
    assert gram.cost(gram.defaults, 4, 40) < 0.6 * standard.cost(standard.defaults, 4, 40)


@pytest.mark.parametrize("shape", [(4, 9), (9, 4)])
def test_normuon_divides_rows_by_their_averages_and_keeps_the_norm(shape):
    # dion's takes the norm of a local shard; here rows and norm are those of the whole matrix.
    generator = torch.Generator().manual_seed(0)
    p = nn.Parameter(torch.zeros(shape, dtype=torch.float64))
    optimizer = Muon(
        [p], lr=1.0, weight_decay=0.0, nesterov=False, variant="normuon", ns_dtype=torch.float64
    )
    momentum, averages = torch.zeros(shape, dtype=torch.float64), torch.zeros(shape[0], 1)
    expected = torch.zeros_like(momentum)
    for step in range(4):
        p.grad = torch.randn(shape, generator=generator, dtype=torch.float64)
        if step == 0:
            p.grad[1] *= 1e-3
        momentum = 0.95 * momentum + 0.05 * p.grad
        update = reference_orthogonalize(momentum)
        averages = 0.95 * averages + 0.05 * update.square().mean(dim=1, keepdim=True)
        rows = update / (averages.sqrt() + 1e-8)
        expected -= max(1, shape[0] / shape[1]) ** 0.5 * rows * update.norm() / rows.norm()
        optimizer.step()
    # averages are float32
    torch.testing.assert_close(p.detach(), expected, rtol=1e-5, atol=1e-6)
    zero = nn.Parameter(torch.ones(shape))
    zero.grad = torch.zeros(shape)
    Muon([zero], weight_decay=0.0, variant="normuon").step()
    assert torch.equal(zero.detach(), torch.ones(shape))


def test_muon_groups_need_muon():
    with pytest.raises(ValueError, match=r"got 'muon'; the optimizer of that name brings it"):
        AdamW([{"params": parameters([(3, 3)]), "algorithm": "muon"}])


def test_constructor_takes_what_torchs_take():
    model = nn.Sequential(nn.Linear(3, 4, bias=False), nn.Linear(4, 2, bias=False))
    assert len(Muon(model.parameters()).param_groups[0]["params"]) == 2
    named = Muon(model.named_parameters()).param_groups[0]
    assert named["param_names"] == ["0.weight", "1.weight"]
    empty = Muon([{"params": []}, {"params": list(model.parameters())}])
    empty.step()  # before any backward
    assert len(empty.state_dict()["state"]) == 2
    empty.load_state_dict(empty.state_dict())
    with pytest.raises(ValueError, match="empty parameter list"):
        Muon([])
    with pytest.raises(TypeError, match="iterable"):
        Muon(model[0].weight)


def test_momentum_schedulers_cycle_betas_beside_adamw_and_momentum_else():
    optimizer, _ = mixed()
    OneCycleLR(optimizer, max_lr=0.1, total_steps=9, max_momentum=0.8)
    assert [group["betas"][0] for group in optimizer.param_groups] == [0.8, 0.8]
    alone = Muon(parameters([(3, 3)]))
    OneCycleLR(alone, max_lr=0.1, total_steps=9, max_momentum=0.8)
    assert alone.param_groups[0]["momentum"] == 0.8


def test_state_dict_holds_one_momentum_or_two_moments_a_parameter():
    optimizer, params = mixed()
    train(optimizer, params, 1)
    saved = optimizer.state_dict()
    muon, adamw = ["momentum_buffer"], ["step", "exp_avg", "exp_avg_sq"]
    assert {i: list(state) for i, state in saved["state"].items()} == {
        0: muon, 1: muon, 2: adamw, 3: adamw,
    }  # fmt: skip
    assert ["momentum" in group for group in saved["param_groups"]] == [True, False]
    assert ["amsgrad" in group for group in saved["param_groups"]] == [False, True]


@pytest.mark.parametrize(
    ("saved", "loading", "key"),
    [
        ({"ns_steps": 4}, {}, "the checkpoint has ns_steps=4, the optimizer 5"),
        ({"variant": "normuon"}, {}, "the checkpoint has variant='normuon', the optimizer None"),
        ({"ns_algorithm": "gram"}, {}, "the checkpoint has ns_algorithm='gram'"),
        ({"ns_coefficients": "quintic"}, {}, "the checkpoint has ns_coefficients='quintic'"),
        ({"matrices": "(h m) n -> h m n; h=2"}, {}, "the checkpoint has matrices="),
        ({"algorithm": "adamw"}, {}, ".*written by another algorithm"),
    ],
)
def test_checkpoint_that_means_another_state_is_an_error_that_names_the_group(saved, loading, key):
    first = Muon([{"params": parameters([(4, 4)]), **saved}])
    other = Muon([{"params": parameters([(4, 4)]), **loading}])
    with pytest.raises(ValueError, match=f"group 0.*: .*{key}"):
        other.load_state_dict(first.state_dict())


def test_plan_of_plain_parameters_moves_nothing():
    params = parameters([(4, 6), (3, 5, 7), (5,)])
    optimizer = Muon(
        [
            {"params": [("w", params[0])], "adjust_lr_fn": "match_rms_adamw"},
            {"params": [("e", params[1])], "matrices": "e m n -> e m n"},
            {"params": [("b", params[2])], "algorithm": "adamw"},
        ]
    )
    plan = optimizer.plan()
    w, e, b = plan.rows
    assert (w.fqn, w.shape, w.algorithm, w.matrices) == ("w", (4, 6), "muon", "4x6")
    assert w.scale == 0.2 * 6**0.5
    assert (e.matrices, e.resident, e.owned, e.owners) == ("3 x 5x7", 3, 0, (0,))
    assert (b.algorithm, b.matrices) == ("adamw", "")
    assert (plan.moved_bytes, plan.loads) == (0, (1.0,))
    text = str(plan)
    for word in ("3 x 5x7", "0.49", "adamw", "3 parameters"):
        assert word in text


def test_demands_are_blocks_at_rest_and_whole_matrices_in_the_step():
    optimizer, params = mixed()
    stored, step = optimizer.demands(params[0])
    assert (stored.structure, stored.when) == (Blocks(256), "stored")
    assert (step.structure, step.when, step.by) == (FullMatrix(), "step", "Muon")
    assert [d.when for d in optimizer.demands(params[2])] == ["stored"]
    stranger = nn.Parameter(torch.zeros(2, 2))
    assert optimizer.demands(stranger) == ()
    optimizer.param_groups[0]["params"][0] = stranger  # in place, the same number of parameters
    assert (optimizer.group_of(stranger), optimizer.group_of(params[0])) == (0, None)
