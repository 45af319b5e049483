"""What a large model costs before its first step: calls are counted, not seconds."""

import cProfile
import pstats
from typing import Any

from torch import nn

from ranks import on_ranks
from vfsdp_optim import Muon, fully_shard, param_groups

MATRICES = 64  # of a layer


def calls_of_set_up(layers: int) -> int:
    """Return how many functions are called from the groups to the plan of a step."""
    model = nn.ModuleList(
        nn.ModuleList(nn.Linear(16, 32, bias=False) for _ in range(MATRICES)) for _ in range(layers)
    )
    with cProfile.Profile() as profile:
        optimizer = Muon(param_groups(model))
        for layer in model:
            fully_shard(list(layer), optimizer=optimizer)
        optimizer.plan()
    found: Any = pstats.Stats(profile)
    return int(found.total_calls)


@on_ranks(2)
def test_set_up_calls_few_functions_a_parameter_however_many_there_are() -> None:
    calls_of_set_up(1)  # what is worked out once for all equal layers
    few, more, most = map(calls_of_set_up, (2, 4, 8))
    assert most - more < 2.1 * (more - few)
    assert (most - more) / (4 * MATRICES) < 1000
