"""Plans for real models: how much longer the busiest ranks compute than their equal share."""

import json
from pathlib import Path
from typing import Any

import pytest

import vfsdp_optim
from sharding.planning.holders import HeldUnit
from sharding.planning.negotiation import BucketPlan, ParamSpec, negotiate
from sharding.planning.ownership import OwnerPlan, plan_owners
from sharding.planning.structure import Demand, FullMatrix
from vfsdp_optim.newton_schulz import newton_schulz_cost
from vfsdp_optim.optimizer import MAX_EXCHANGE_BYTES

MODELS = Path(vfsdp_optim.__file__).parent / "capacity" / "models"
ELEMENTWISE = ("embed", "lm_head")


def tensors_of(bucket: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the tensors of a bucket, repeated groups written out."""
    tensors: list[dict[str, Any]] = []
    for entry in bucket["tensors"]:
        tensors += entry["group"] * entry["repeat"] if "repeat" in entry else [entry]
    return tensors


def layout_of(bucket: dict[str, Any], world_size: int) -> BucketPlan:
    params = []
    for i, tensor in enumerate(tensors_of(bucket)):
        shape = tuple(tensor["shape"])
        demands: tuple[Demand, ...] = ()
        if len(shape) > 1 and tensor["name"] not in ELEMENTWISE:
            pattern = "m n -> m n" if len(shape) == 2 else "e m n -> e m n"
            demands = (Demand(FullMatrix(pattern), "step", "Muon"),)
        kind = "muon" if demands else "adamw"
        params.append(ParamSpec(f"{tensor['name']}.{i}", shape, tensor["dtype"], demands, kind))
    return negotiate(bucket["bucket"], params, world_size)


def units_of(model: str, world_size: int) -> tuple[HeldUnit, ...]:
    """Return the matrices of all layers, and who holds them."""
    units: list[HeldUnit] = []
    for bucket in json.loads((MODELS / f"{model}.json").read_text())["buckets"]:
        plan = layout_of(bucket, world_size)
        layer: list[HeldUnit] = []
        for i, param in enumerate(plan.params):
            which, index = plan.location[i]
            size = plan.segments[which].shard_numel
            for unit in param.step_units:
                start = plan.segments[which].offsets[index] + unit.start
                stop = start + unit.numel
                holders = tuple(
                    (rank, min(stop, (rank + 1) * size) - max(start, rank * size))
                    for rank in range(start // size, (stop - 1) // size + 1)
                )
                cost = newton_schulz_cost(unit.rows, unit.cols, 5)
                layer.append(HeldUnit(param.fqn, 0, unit.numel, cost, holders))
        units += layer * bucket["count"]
    return tuple(units)


def plan_of(model: str, world_size: int) -> OwnerPlan:
    units = units_of(model, world_size)
    return plan_owners(units, world_size, slot_numel=MAX_EXCHANGE_BYTES // 2)


@pytest.mark.parametrize(
    ("model", "world_size", "matrices", "skew"),
    [
        ("llama3_8b", 8, 224, 1.05),
        ("llama3_8b", 64, 224, 1.10),
        ("deepseek_v3_perexpert", 1024, 45_090, 1.05),
        ("kimi_k2_perexpert", 64, 69_668, 1.05),
        ("gpt_oss_120b", 64, None, 1.05),
        ("llama3_70b", 64, 560, 1.05),
    ],
)
def test_muon_work_is_balanced_over_all_waves(model, world_size, matrices, skew):
    plan = plan_of(model, world_size)
    assert matrices is None or len(plan.units) == matrices
    assert plan.skew <= skew
    # An even mean is no balance by itself: every wave has its busiest rank.
    assert sum(plan.wave_loads) >= max(plan.loads) >= sum(plan.loads) / world_size


def test_muon_work_of_matrices_larger_than_a_share_is_as_skewed_as_they_are_large():
    # 96 matrices of half a share each for 64 ranks, and on 256 ranks of two shares each.
    assert 1.0 < plan_of("llama3_8b", 64).skew < 1.06
    plan = plan_of("llama3_8b", 256)
    assert plan.largest_share > 2
    assert plan.skew == pytest.approx(plan.largest_share)
