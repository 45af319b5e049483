"""Ranks post the same collectives in the same order, whatever their hashes and local order."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from ranks import collectives, run_ranks
from sharding import fully_shard
from small_models import build, full_gradients, loss_of, make_optimizer, set_gradients, shard
from vfsdp_optim import Muon

ROOT = Path(__file__).parents[2]


def train_with_missing() -> list[list[str]]:
    """Steps in which each rank has other gradients missing, and its own order of setting them."""
    model = shard(build())
    optimizer = make_optimizer("muon", model, on_nonfinite="skip", max_exchange_bytes=2000)
    draw = random.Random(dist.get_rank())
    calls = []
    for step in range(3):
        parameters = list(model.parameters())
        gradients = full_gradients(parameters, step)
        pairs = list(zip(parameters, gradients, strict=True))
        draw.shuffle(pairs)
        set_gradients(*zip(*pairs, strict=True))
        for p in parameters:
            if draw.random() < 0.3:
                p.grad = None
        calls.append(collectives(optimizer.step))
        optimizer.zero_grad()
    return calls


def test_gradients_missing_on_some_ranks_do_not_change_the_exchange():
    """Megatron-LM#2218, Megatron-LM#6616, RLinf#1355: a rank that skipped an exchange hung all."""
    results = run_ranks(train_with_missing, 3)
    assert results == [results[0]] * 3
    assert any("alltoall" in name for name in results[0][1])


def many_equal_shapes() -> list[list[str]]:
    """Steps of a model of 20 equal matrices, in buckets that cut some of them."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(20, 30, bias=False) for _ in range(20)])
    for start, stop in ((0, 9), (9, 20)):  # odd numbers: the middle one is cut
        fully_shard([model[i] for i in range(start, stop)])
    optimizer = Muon(model.parameters(), max_exchange_bytes=20 * 30 * 4)
    calls = []
    for step in range(2):
        set_gradients(model.parameters(), full_gradients(model.parameters(), step))
        calls.append(collectives(optimizer.step))
    return calls


SCRIPT = """
import json, os, sys
sys.path[:0] = {paths!r}
import torch, torch.distributed as dist
torch.set_num_threads(1)
rank = int(sys.argv[1])
store = dist.FileStore(sys.argv[2], 2)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
import test_order_of_collectives as tests
print(json.dumps([hash("order"), tests.many_equal_shapes(), tests.train_backward()]))
dist.destroy_process_group()
"""


def train_backward() -> list[list[str]]:
    model = shard(build())
    calls = []
    for step in range(3):
        calls.append(collectives(lambda step=step: loss_of(model, step).backward()))
        model.zero_grad()
    return calls


def test_processes_with_other_hash_seeds_post_the_same_collectives(tmp_path):
    """Megatron-LM#2218, RLinf#1355: collectives in the order of a set, another on each rank."""
    script = tmp_path / "rank.py"
    paths = [str(ROOT), str(ROOT / "tests" / "support"), str(Path(__file__).parent)]
    script.write_text(SCRIPT.format(paths=paths))
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), str(tmp_path / "store")],
            env={**os.environ, "PYTHONHASHSEED": str(rank + 1), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [json.loads(rank.communicate(timeout=120)[0]) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert outputs[0][0] != outputs[1][0], "the hashes are to differ"
    assert outputs[0][1:] == outputs[1][1:]
    assert any("alltoall" in name for name in outputs[0][1][1])
    assert len(outputs[0][2][1]) >= 3  # a reduction for each bucket
