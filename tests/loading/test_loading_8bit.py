"""8-bit states in checkpoints: bytes on any ranks, explicit conversion, other libraries."""

import copy
import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from dcp_checkpoints import difference, plain, take_steps
from ranks import run_ranks
from sharding import fully_shard, load_full_state_dict
from vfsdp_optim import AdamW, Muon, Precision
from vfsdp_optim.states.block_codec import CODES_FORMAT, dynamic_map
from vfsdp_optim.states.scratch import Scratch

# In the order in which nn.ParameterDict has them.
SHAPES = {"norm": (300,), "odd": (70, 71), "rows": (10, 300), "square": (64, 64), "wide": (16, 300)}
BFLOAT16 = torch.bfloat16


def make_model(dtype: torch.dtype = torch.float32) -> nn.Module:
    generator = torch.Generator().manual_seed(0)
    return nn.ParameterDict(
        {n: nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for n, s in SHAPES.items()}
    )


def make_optimizer(kind: str, model: nn.Module, **options: Any) -> Any:
    named = list(model.named_parameters())
    options = {"states": "8bit", **options}
    if kind == "adamw":
        return AdamW(named, lr=0.01, **options)
    matrices = [item for item in named if item[1].dim() == 2]
    rest = [item for item in named if item[1].dim() != 2]
    return Muon([{"params": matrices}, {"params": rest, "algorithm": "adamw"}], lr=0.01, **options)


def full_states(optimizer: Any) -> list[dict[str, Any]]:
    params = [p for group in optimizer.param_groups for p in group["params"]]
    return [plain(dict(optimizer.state[p])) for p in params]


def full_weights(model: nn.Module) -> list[Tensor]:
    return plain(list(model.parameters()))


def save(kind: str, directory: str) -> list[dict[str, Any]]:
    model = fully_shard(make_model())
    optimizer = make_optimizer(kind, model)
    take_steps(model, optimizer, range(3))
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=directory)
    return full_states(optimizer)


def resume(kind: str, directory: str) -> tuple[list[dict[str, Any]], list[Tensor]]:
    model = fully_shard(make_model())
    optimizer = make_optimizer(kind, model)
    weights, state = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=directory)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
    loaded = full_states(optimizer)
    take_steps(model, optimizer, range(3, 6))
    return loaded, full_weights(model)


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_8bit_states_saved_on_4_ranks_load_byte_by_byte_on_others(kind, tmp_path):
    """bitsandbytes#89, #1840, ao#1189: quantized states could not be gathered or resharded."""
    saved = run_ranks(save, 4, kind, str(tmp_path))[0]
    assert (
        saved[1 if kind == "adamw" else 0][
            "exp_avg.codes" if kind == "adamw" else "momentum_buffer.codes"
        ].dim()
        == 2
    )
    model = make_model()
    optimizer = make_optimizer(kind, model)
    take_steps(model, optimizer, range(6))
    for world_size in (1, 2, 3):
        for loaded, weights in run_ranks(resume, world_size, kind, str(tmp_path)):
            assert difference(loaded, saved) == ""
            assert difference(weights, full_weights(model)) == ""


def load_full_from_rank_0(kind: str, state: dict[str, Any]) -> list[dict[str, Any]]:
    model = fully_shard(make_model())
    optimizer = make_optimizer(kind, model)
    given = state if dist.get_rank() == 0 else {}
    load_full_state_dict(model, optimizer, state=given, broadcast_from_rank0=True)
    return full_states(optimizer)


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_8bit_states_of_one_process_load_from_rank_0(kind):
    model = make_model()
    optimizer = make_optimizer(kind, model)
    take_steps(model, optimizer, range(2))
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    for loaded in run_ranks(load_full_from_rank_0, 3, kind, state):
        assert difference(loaded, full_states(optimizer)) == ""


def decoded(state: dict[str, Any], key: str, shape: tuple[int, ...], *, signed: bool) -> Tensor:
    codes, absmax = state[f"{key}.codes"], state[f"{key}.absmax"]
    assert codes.shape == shape
    whole = nn.functional.pad(codes.reshape(-1), (0, -codes.numel() % 256))
    numbers = torch.empty(whole.numel())
    dynamic_map(signed, torch.device("cpu")).decode(whole, absmax, numbers, Scratch())
    return numbers[: codes.numel()].view(shape)


def test_8bit_states_become_32bit_ones_and_back_by_an_explicit_call_only():
    model = make_model()
    packed = make_optimizer("adamw", model)
    take_steps(model, packed, range(3))
    plain = make_optimizer("adamw", model, states="32bit")
    before = full_states(plain)
    with pytest.raises(ValueError, match=r"norm: the checkpoint has states='8bit'.*convert_state"):
        plain.load_state_dict(packed.state_dict())
    assert difference(full_states(plain), before) == ""
    plain.load_state_dict(plain.convert_state_dict(packed.state_dict()))
    states = dict(zip(SHAPES, full_states(plain), strict=True))
    codes = dict(zip(SHAPES, full_states(packed), strict=True))
    for name in ("wide", "square", "odd"):
        for key, signed in (("exp_avg", True), ("exp_avg_sq", False)):
            numbers = decoded(codes[name], key, SHAPES[name], signed=signed)
            assert torch.equal(states[name][key], numbers)
    assert torch.equal(states["norm"]["exp_avg"], codes["norm"]["exp_avg"])
    assert states["wide"]["step"] == 3

    again = make_optimizer("adamw", model)
    with pytest.raises(ValueError, match=r"odd: expected state .*precision: .*convert_state"):
        again.load_state_dict(plain.state_dict())
    again.load_state_dict(again.convert_state_dict(plain.state_dict()))
    numbers = decoded(full_states(again)[4], "exp_avg", SHAPES["wide"], signed=True)
    # Rounded twice: the signed map has no -1, so that the scale of some blocks is smaller.
    torch.testing.assert_close(numbers, states["wide"]["exp_avg"], atol=0.02, rtol=0)


def convert_sharded(saved: dict[str, Any], states: str) -> list[dict[str, Any]]:
    model = fully_shard(make_model())
    optimizer = make_optimizer("adamw", model, states=states)
    optimizer.load_state_dict(optimizer.convert_state_dict(saved))
    other = make_optimizer("adamw", model, states="8bit" if states == "32bit" else "32bit")
    other.load_state_dict(other.convert_state_dict(optimizer.state_dict()))
    return full_states(optimizer)


@pytest.mark.parametrize("states", ["8bit", "32bit"])
def test_8bit_conversion_on_shards_has_the_bits_of_the_unsharded_one(states):
    model = make_model()
    source = make_optimizer("adamw", model, states="8bit" if states == "32bit" else "32bit")
    take_steps(model, source, range(2))
    target = make_optimizer("adamw", model, states=states)
    target.load_state_dict(target.convert_state_dict(source.state_dict()))
    for converted in run_ranks(convert_sharded, 3, source.state_dict(), states):
        assert difference(converted, full_states(target)) == ""


def test_conversion_adds_and_drops_master_weights():
    model = make_model(BFLOAT16)
    plain = make_optimizer("muon", model, states="32bit", state_dtype=torch.float32)
    take_steps(model, plain, range(2))
    master = make_optimizer("muon", model, states=Precision("8bit", master_weights=True))
    with pytest.raises(ValueError, match=r"odd: expected state .*convert_state_dict"):
        master.load_state_dict(plain.state_dict())
    master.load_state_dict(master.convert_state_dict(plain.state_dict()))
    assert torch.equal(master.state[model["rows"]]["master"], model["rows"].detach().float())
    take_steps(model, master, range(2, 3))
    plain.load_state_dict(plain.convert_state_dict(master.state_dict()))
    assert set(plain.state[model["wide"]]) == {"momentum_buffer"}


@pytest.mark.parametrize("states", ["8bit", "32bit"])
def test_conversion_refuses_codes_that_mean_something_else(states):
    """Their shapes fit, and the numbers would be wrong."""
    model = make_model()
    source = make_optimizer("adamw", model)
    take_steps(model, source, range(1))
    saved = source.state_dict()
    target = make_optimizer("adamw", model, states=states)
    others = ("dynamic8 version 1, blocks of 256, maps 0", f"{CODES_FORMAT}, local blocks of 0")
    for other, load in itertools.product(
        others, (target.convert_state_dict, source.load_state_dict)
    ):
        saved["param_groups"][0]["states_format"] = other
        with pytest.raises(ValueError, match=f"norm: the checkpoint has states_format='{other}'"):
            load(saved)


def test_8bit_state_of_another_choice_of_parameters_is_named_and_converts():
    model = make_model()
    source = make_optimizer("adamw", model, states=Precision("8bit", keep_32bit=["odd"]))
    take_steps(model, source, range(1))
    target = make_optimizer("adamw", model)
    before = full_states(target)
    with pytest.raises(ValueError, match=r"odd: expected state .*codes.*got .*convert_state_dict"):
        target.load_state_dict(source.state_dict())
    assert difference(full_states(target), before) == ""
    target.load_state_dict(target.convert_state_dict(source.state_dict()))
    assert bool(target.state[model["odd"]]["exp_avg.absmax"].all())
    again = make_optimizer("adamw", model, states=Precision("8bit", keep_32bit=["odd"]))
    again.load_state_dict(again.convert_state_dict(target.state_dict()))
    assert again.state[model["odd"]]["exp_avg"].shape == (70, 71)


def test_state_of_torchs_adamw_loads_into_8bit_by_conversion():
    model = make_model()
    theirs = torch.optim.AdamW(model.parameters(), lr=0.03, foreach=True)
    take_steps(model, theirs, range(3))
    ours = make_optimizer("adamw", model)
    with pytest.raises(ValueError, match=r"odd: expected state .*codes.*convert_state_dict"):
        ours.load_state_dict(theirs.state_dict())
    ours.load_state_dict(ours.convert_state_dict(theirs.state_dict()))
    assert ours.param_groups[0]["lr"] == 0.03
    states = dict(zip(SHAPES, full_states(ours), strict=True))
    expected = theirs.state[model["wide"]]
    numbers = decoded(states["wide"], "exp_avg", SHAPES["wide"], signed=True)
    assert 0 < float((numbers - expected["exp_avg"]).norm() / expected["exp_avg"].norm()) < 0.015
    assert torch.equal(states["rows"]["exp_avg"], theirs.state[model["rows"]]["exp_avg"])
    assert states["wide"]["step"] == 3


@pytest.fixture(scope="module")
def bitsandbytes():
    """bitsandbytes, whose import takes seconds."""
    import bitsandbytes

    return bitsandbytes


def matrices_of(model: nn.Module) -> list[nn.Parameter]:
    return [param for param in model.parameters() if param.dim() == 2]


@pytest.mark.parametrize("dtype", [torch.float32, BFLOAT16])
def test_state_of_bitsandbytes_adamw8bit_loads_byte_by_byte(bitsandbytes, dtype, tmp_path):
    model = make_model(dtype)
    theirs = bitsandbytes.optim.AdamW8bit(matrices_of(model), lr=0.03)
    take_steps(model, theirs, range(3))
    torch.save(theirs.state_dict(), tmp_path / "optimizer.pt")
    saved = torch.load(tmp_path / "optimizer.pt", weights_only=True)
    options = dict(states="8bit", state_dtype=torch.float32)
    ours = AdamW(matrices_of(model), **options)
    ours.load_state_dict(copy.deepcopy(saved))
    assert (ours.param_groups[0]["lr"], "alpha" in ours.param_groups[0]) == (0.03, False)
    state, source = ours.state[model["odd"]], theirs.state[model["odd"]]
    for ours_key, key, i in (("exp_avg", "state1", 1), ("exp_avg_sq", "state2", 2)):
        assert torch.equal(state[f"{ours_key}.codes"], source[key])
        assert torch.equal(state[f"{ours_key}.absmax"], source[f"absmax{i}"])
    assert state["step"] == 3
    assert torch.equal(ours.state[model["rows"]]["exp_avg"], theirs.state[model["rows"]]["state1"])
    plain = AdamW(matrices_of(model))
    plain.load_state_dict(plain.convert_state_dict(saved))
    take_steps(nn.ParameterList(matrices_of(model)), ours, range(3, 4))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(absmax1=torch.ones(3)), r"expected 19 scales for the blocks of 256 of 4800 codes, g"),
        (dict(qmap2=torch.zeros(256)), r"expected the dynamic map of bitsandbytes in qmap2"),
        (dict(state2=None), r"expected the state1, state2 and step of a bitsandbytes Adam"),
    ],
)
def test_foreign_8bit_state_of_another_kind_is_refused(bitsandbytes, change, message):
    model = make_model()
    theirs = bitsandbytes.optim.AdamW8bit([model["wide"]])
    take_steps(nn.ParameterList([model["wide"]]), theirs, range(1))
    saved = theirs.state_dict()
    state = saved["state"][0]["__bnb_optimizer_quant_state__"]
    for key, value in change.items():
        if value is None:
            del state[key]
        else:
            state[key] = value
    ours = AdamW([model["wide"]], states="8bit")
    with pytest.raises(ValueError, match=message):
        ours.load_state_dict(saved)


@pytest.mark.parametrize(
    ("key", "change", "message"),
    [
        ("exp_avg.codes", lambda x: x[:-1],
         r"odd\.exp_avg\.codes: expected shape \(70, 71\), got \(69, 71\)"),
        ("exp_avg_sq.absmax", lambda x: x[:-1],
         r"odd\.exp_avg_sq\.absmax: expected shape \(20,\), got \(19,\)"),
        ("exp_avg.codes", lambda x: x.view(71, 70),
         r"odd\.exp_avg\.codes: expected shape \(70, 71\), got \(71, 70\)"),
        ("exp_avg.codes", Tensor.float,
         r"odd\.exp_avg\.codes: expected torch.uint8, got torch.float32"),
        ("exp_avg.absmax", None, r"odd: expected state .*exp_avg\.absmax"),
    ],
)  # fmt: skip
def test_8bit_codes_and_scales_that_disagree_are_named_and_nothing_is_loaded(key, change, message):
    model = make_model()
    source, target = (make_optimizer("adamw", model) for _ in range(2))
    take_steps(model, source, range(2))
    saved = copy.deepcopy(source.state_dict())
    state = saved["state"][list(SHAPES).index("odd")]
    value = state.pop(key)
    if change is not None:
        state[key] = change(value)
    before = full_states(target)
    with pytest.raises(ValueError, match=message):
        target.load_state_dict(saved)
    assert difference(full_states(target), before) == ""
