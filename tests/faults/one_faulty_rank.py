"""Trains on a few forked ranks of which one fails at a named moment; prints what the others saw.

A program of its own, since its ranks are killed: `python one_faulty_rank.py '[["stop", "forward",
"1-D"], ...]'` prints a JSON list of each row's `{rank: [moment, error]}` without the faulty rank.
Rows run beside each other, since most of their time is the timeout.
"""

import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh

import sharding.checkpoint as checkpoint
from sharding import fully_shard, load_full_state_dict
from vfsdp_optim import Muon, param_groups

FAULTY = 1
TIMEOUT = timedelta(seconds=3)
HANGS = 60  # seconds after which a rank is said to hang


def fail(fault: str) -> None:
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    raise ValueError("an error of the user's")


def train(mesh_dims: str, folder: Path, at: Callable[[str], None]) -> None:
    """Run all moments in order, each announced just before."""
    if mesh_dims == "2-D":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    else:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(16, 16) for _ in range(4)])
    at("construction")
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = Muon(param_groups(model), lr=0.01)
    for moment in (lambda name: at("first " + name) if name == "forward" else None, at):
        moment("forward")
        loss = model(torch.randn(4, 16)).square().sum()
        moment("backward")
        loss.backward()
        moment("clip")
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        moment("step")
        optimizer.step()
        optimizer.zero_grad()
    at("full_tensor")
    for parameter in model.parameters():
        parameter.full_tensor()  # type: ignore[attr-defined]
    at("state_dict")
    full = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = get_model_state_dict(model, options=full)
    at("load_full_state_dict")
    load_full_state_dict(model, state=state or None, broadcast_from_rank0=True)
    at("save")
    checkpoint.save(folder / "checkpoints", 1, model=model, optimizer=optimizer)
    at("load")
    checkpoint.load(folder / "checkpoints", model=model, optimizer=optimizer)


def one_rank(rank: int, world_size: int, row: tuple[str, str, str], folder: Path) -> None:
    fault, faulty_moment, mesh_dims = row
    moment = ""

    def at(name: str) -> None:
        nonlocal moment
        moment = name
        if (rank, name) == (FAULTY, faulty_moment):
            fail(fault)

    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=TIMEOUT)
    try:
        train(mesh_dims, folder, at)
        seen = [moment, "nothing"]
    except Exception as error:
        seen = [moment, f"{type(error).__name__}: {error}"]
    (folder / f"{rank}.json").write_text(json.dumps(seen))
    os._exit(0)  # what gloo has in flight would be waited for


def run(rows: list[tuple[str, str, str]]) -> list[dict[str, list[str]]]:
    fork = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as top:
        ranks: list[tuple[Path, int, multiprocessing.process.BaseProcess]] = []
        for i, row in enumerate(rows):
            folder = Path(top) / str(i)
            folder.mkdir()
            world_size = 4 if row[2] == "2-D" else 3
            for rank in range(world_size):
                process = fork.Process(target=one_rank, args=(rank, world_size, row, folder))
                process.start()
                ranks.append((folder, rank, process))
        end = time.monotonic() + HANGS
        results: list[dict[str, list[str]]] = [{} for _ in rows]
        for folder, rank, process in ranks:
            if rank == FAULTY:
                continue
            process.join(max(end - time.monotonic(), 0))
            report = folder / f"{rank}.json"
            seen = json.loads(report.read_text()) if report.exists() else ["", "hangs"]
            results[int(folder.name)][str(rank)] = seen
        for _, _, process in ranks:
            process.kill()
            process.join()
    return results


if __name__ == "__main__":
    print(json.dumps(run([tuple(row) for row in json.loads(sys.argv[1])])))
