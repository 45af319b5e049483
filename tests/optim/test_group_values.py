"""What configuration libraries and training scripts put into groups: numbers of other kinds, and
labels of the scripts' own. torch.optim takes them, and a step has the same bits here."""

import collections
import fractions

import numpy as np
import pytest
import torch
from torch import nn

from vfsdp_optim import AdamW, Muon, Precision


class Config(collections.UserList):
    """A sequence that is no list, as OmegaConf's."""


MUON = {"momentum": 0.9, "ns_coefficients": (3.4445, -4.775, 2.0315)}
# As given; as plain numbers.
VALUES = (
    (AdamW, {"betas": Config([0.9, 0.95])}, {"betas": (0.9, 0.95)}),
    (AdamW, {"betas": np.array([0.9, 0.95])}, {"betas": (0.9, 0.95)}),
    (AdamW, {"betas": (np.float64(0.9), np.float64(0.95))}, {"betas": (0.9, 0.95)}),
    (AdamW, {"lr": np.float32(0.5), "weight_decay": np.float32(0.25)},
     {"lr": 0.5, "weight_decay": 0.25}),
    (AdamW, {"lr": np.array(0.5), "eps": np.float32(2.0**-20)}, {"lr": 0.5, "eps": 2.0**-20}),
    (AdamW, {"lr": fractions.Fraction(1, 1000), "amsgrad": np.bool_(True)},
     {"lr": 1e-3, "amsgrad": True}),
    (Muon, {"momentum": np.float32(0.5), "ns_steps": np.int64(3)},
     {"momentum": 0.5, "ns_steps": 3}),
    (Muon, {"ns_coefficients": Config(MUON["ns_coefficients"])}, MUON | {"momentum": 0.95}),
)  # fmt: skip


def stepped(cls: type, options: dict) -> tuple[torch.Tensor, dict]:
    """Return a weight after a step, a saved state that was loaded, and another step."""
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(3, 4))
    optimizer = cls([weight], **options)
    for _ in range(2):
        weight.grad = torch.randn(3, 4)
        optimizer.step()
        optimizer.load_state_dict(optimizer.state_dict())
    return weight.detach(), optimizer.param_groups[0]


@pytest.mark.parametrize(("cls", "given", "plain"), VALUES, ids=str)
def test_numbers_and_sequences_of_other_kinds_are_taken_as_in_torch(cls, given, plain):
    weight, group = stepped(cls, given)
    expected, wanted = stepped(cls, plain)
    assert torch.equal(weight, expected)
    for key in wanted.keys() - {"params"}:
        assert repr(group[key]) == repr(wanted[key]), key
    torch_weight, _ = stepped(getattr(torch.optim, cls.__name__), given)
    torch.testing.assert_close(weight, torch_weight, atol=1e-2, rtol=1e-2)  # bf16 in torch's Muon


@pytest.mark.parametrize("cls", [AdamW, Muon])
def test_labels_in_groups_are_kept_saved_and_loaded_as_in_torch(cls):
    # Lightning#20194 (name), timm's lr_scale, Megatron's lr_mult and wd_mult
    labels = {"name": "xyz", "lr_scale": 0.5, "lr_mult": 1.0, "weight_decay_mult": 0.0, "tag": 1}
    optimizers = []
    for kind in (cls, getattr(torch.optim, cls.__name__)):
        weight = nn.Parameter(torch.ones(3, 4))
        optimizers.append(kind([{"params": [weight], **labels}]))
        weight.grad = torch.ones(3, 4)
        optimizers[-1].step()
    other = cls([nn.Parameter(torch.ones(3, 4))])
    for optimizer in optimizers:
        assert labels.items() <= optimizer.param_groups[0].items()
        other.load_state_dict(optimizer.state_dict())
        assert labels.items() <= other.param_groups[0].items()
        other.param_groups[0]["name"] = "another"


@pytest.mark.parametrize("key", ["momentum", "use_muon", "weight_decya", "beta", "nesterov"])
def test_option_of_another_rule_and_a_misspelt_one_are_no_labels(key):
    with pytest.raises(ValueError, match=f"param group 0: algorithm 'adamw' has no '{key}'"):
        AdamW([{"params": [nn.Parameter(torch.ones(3, 4))], key: 1}])


@pytest.mark.parametrize("text_ids", [False, True])
def test_names_that_a_checkpoint_brings_stay(text_ids):
    # As in torch. Rounding by chance is drawn by name: the run goes on with the same bits.
    def build(named: bool) -> tuple[AdamW, list[nn.Parameter]]:
        torch.manual_seed(0)
        params = [nn.Parameter(torch.randn(40, 30).bfloat16()) for _ in range(2)]
        given = zip(["b", "a"], params, strict=True) if named else params
        return AdamW(given, lr=0.1, states=Precision(stochastic_rounding=True)), params

    def step(optimizer: AdamW, params: list[nn.Parameter], seed: int) -> None:
        torch.manual_seed(seed)
        for p in params:
            p.grad = torch.randn_like(p)
        optimizer.step()

    optimizer, params = build(named=True)
    step(optimizer, params, 1)
    saved = optimizer.state_dict()
    if text_ids:  # as torch's state-dict functions give them, which leave `param_names` alone
        saved["state"] = {"ba"[i]: state for i, state in saved["state"].items()}
        saved["param_groups"][0] |= {"params": ["b", "a"], "param_names": ["a", "b"]}
    other, copies = build(named=False)
    for load in (saved, other.convert_state_dict(saved)):
        other.load_state_dict(load)
        assert other.param_groups[0]["param_names"] == ["b", "a"]
    assert other.state_dict()["param_groups"][0]["param_names"] == ["b", "a"]
    for p, q in zip(copies, params, strict=True):
        p.data.copy_(q)
    step(optimizer, params, 2)
    step(other, copies, 2)
    assert all(torch.equal(p, q) for p, q in zip(copies, params, strict=True))
    nameless, _ = build(named=False)
    other.load_state_dict(nameless.state_dict())
    assert other.param_groups[0]["param_names"] == ["b", "a"]
