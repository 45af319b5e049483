"""What `sharding.checkpoint` saves on some ranks goes on with the same bits there and elsewhere."""

import re
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import vfsdp_optim
from dcp_checkpoints import (
    Net,
    difference,
    full_state,
    local_state,
    make_net,
    make_optimizer,
    shard_net,
    take_steps,
)
from ranks import run_ranks
from sharding import checkpoint

KINDS = ["adamw 8bit", "muon", "shampoo", "soap 8bit"]


def optimizer_of(net: nn.Module, kind: str) -> torch.optim.Optimizer:
    name, _, bits = kind.partition(" ")
    states = {"states": "8bit"} if bits else {}
    if name in ("shampoo", "soap"):
        groups = vfsdp_optim.param_groups(net, algorithm=name, adamw={"lr": 0.02})
        cls = vfsdp_optim.Shampoo if name == "shampoo" else vfsdp_optim.SOAP
        return cls(groups, lr=0.03, block_size=16, **states)
    return make_optimizer(net, name, **states)


def trained(kind: str, seed: int, steps: int) -> tuple[Net, torch.optim.Optimizer]:
    net = make_net(seed, sharded=True)
    optimizer = optimizer_of(net, kind)
    take_steps(net, optimizer, range(steps))
    return net, optimizer


def states(net: Net, optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [full_state(net, optimizer), local_state(net, optimizer)]


def save_all(folder: Path) -> dict[str, list[Any]]:
    """Saves after 2 steps, one of two in the background; returns the states then and after 3."""
    found = {}
    for i, kind in enumerate(KINDS):
        net, optimizer = trained(kind, 1, 2)
        then = states(net, optimizer)
        saving = checkpoint.save(
            folder / kind, 2, model=net, optimizer=optimizer, asynchronous=i % 2 == 1
        )
        take_steps(net, optimizer, range(2, 3))
        saving.result()
        found[kind] = [then, states(net, optimizer)]
    return found


def load_all(folder: Path) -> dict[str, list[Any]]:
    found = {}
    for kind in KINDS:
        net, optimizer = trained(kind, 5, 1)
        assert checkpoint.load(folder / kind, model=net, optimizer=optimizer) == 2
        then = states(net, optimizer)
        take_steps(net, optimizer, range(2, 3))
        found[kind] = [then, states(net, optimizer)]
    return found


def test_every_algorithm_resumes_bitwise_on_the_same_and_on_other_numbers_of_ranks(tmp_path):
    """DeepSpeed#7746, bitsandbytes#89, Megatron-LM#5974: states that load cast, cut or not at all;
    saving peeks at the state, and takes no hidden step."""
    saved = run_ranks(save_all, 2, tmp_path)
    for world_size in (2, 3):
        for rank, loaded in enumerate(run_ranks(load_all, world_size, tmp_path)):
            for kind in KINDS:
                for i in range(2):
                    expected, found = saved[rank % 2][kind][i], loaded[kind][i]
                    assert difference(found[0], expected[0]) == "", (world_size, kind, i)
                    if world_size == 2:
                        assert difference(found[1], expected[1]) == "", (kind, i)


# -- what else a run remembers ---------------------------------------------------------------------


def rates(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)


def run_with_everything(folder: Path, resume: bool) -> Any:
    """Two models, two optimizers, a scheduler, a position and the random generator of each rank."""
    rank = dist.get_rank()
    net, average = make_net(3, sharded=True), make_net(3, sharded=True)
    critic = shard_and_return(nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7)))
    optimizers = {
        "net": make_optimizer(net, "muon"),
        "critic": vfsdp_optim.AdamW(critic.parameters(), lr=0.1),
    }
    models = {"net": net, "average": average, "critic": critic}
    scheduler = rates(optimizers["net"])
    extra = {"scheduler": scheduler, "position": 12, "random": None, "seen": {"a": [rank // 9]}}
    torch.manual_seed(rank)
    if resume:
        extra.update(position=None, seen=None)
        checkpoint.load(folder, model=models, optimizer=optimizers, extra=extra)
        torch.set_rng_state(extra["random"])
    else:
        take_steps(net, optimizers["net"], range(2))
        scheduler.step()
        critic[1].running_mean.fill_(rank)
        torch.rand(3)
        extra["random"] = torch.get_rng_state()
        checkpoint.save(folder, 2, model=models, optimizer=optimizers, extra=extra)
    numbers = torch.rand(3)
    take_steps(net, optimizers["net"], range(2, 4))
    for parameter in critic.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizers["critic"].step()
    scheduler.step()
    kept = {name: local_state(model) for name, model in models.items()}
    kept |= {name: each.state_dict()["param_groups"] for name, each in optimizers.items()}
    return kept, numbers, extra["position"], extra["seen"], scheduler.state_dict()


def shard_and_return(model: nn.Module) -> nn.Module:
    return vfsdp_optim.fully_shard(model)


def load_of_others(folder: Path) -> list[str]:
    critic = shard_and_return(nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7)))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        checkpoint.load(folder, model={"critic": critic})
    assert float(critic[1].running_mean[0]) == 0
    with pytest.raises(ValueError, match=r"^extra\['random'\]: each of 2 ranks saved its own"):
        checkpoint.load(folder, extra={"random": None})
    return [str(each.message) for each in caught]


def test_run_with_several_models_goes_on_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    """Buffers and generators of each rank too, which DCP would save from one rank for all."""
    straight = run_ranks(run_with_everything, 2, tmp_path, False)
    for one, other in zip(straight, run_ranks(run_with_everything, 2, tmp_path, True), strict=True):
        assert difference(one, other) == ""
    for messages in run_ranks(load_of_others, 3, tmp_path):
        assert messages == [
            "['model.critic.1.running_mean'] differed between the 2 ranks that saved them; all "
            "ranks load those of rank 0"
        ]


def save_while_training(folder: Path) -> None:
    """Collectives of steps and those of the save, which is slow on one rank, do not mix."""
    net, optimizer = trained("adamw", 1, 1)
    expected = full_state(net, optimizer)
    run, slow = checkpoint.saving.Writing.write, threading.Event()

    def delayed(job: Any) -> Path:
        if dist.get_rank() == 1:
            slow.wait(30)
        return run(job)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint.saving.Writing, "write", delayed)
        saving = checkpoint.save(folder, 1, model=net, optimizer=optimizer, asynchronous=True)
        for step in range(1, 6):
            take_steps(net, optimizer, range(step, step + 1))
            full_state(net, optimizer)
        assert not saving.done()
        slow.set()
    assert saving.result(30).name == "step-00000001"
    checkpoint.load(folder, model=net, optimizer=optimizer)
    assert difference(full_state(net, optimizer), expected) == ""

    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(checkpoint.saving, "record_of", refuse)
        failed = checkpoint.save(folder, 2, model=net, asynchronous=True)
        with pytest.raises(RuntimeError, match=r"^the checkpoint of step 2, .* disk is full"):
            checkpoint.save(folder, 3, model=net)
        with pytest.raises(OSError, match="disk is full") as caught:
            failed.result()
    of_other = "rank 1 cannot write its part of a checkpoint: disk is full"
    assert str(caught.value) == ["disk is full", of_other][dist.get_rank() == 0]
    assert checkpoint.latest(folder) == 1
    checkpoint.save(folder, 3, model=net)
    assert sorted(path.name for path in folder.iterdir()) == ["step-00000001", "step-00000003"]


def refuse(path: Path) -> None:
    raise OSError("disk is full")


def test_save_in_the_background_holds_the_state_of_its_step(tmp_path: Path) -> None:
    run_ranks(save_while_training, 2, tmp_path)


# -- into and from ---------------------------------------------------------------------------------


def net_of(layout: str, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    net: Any = make_net(seed)
    if layout == "torch":
        for block in net.blocks:
            torch_fsdp.fully_shard(block)
        torch_fsdp.fully_shard(net, ignored_params={net.scale.factor})  # torch takes no scalar
    elif layout == "ours":
        shard_net(net)
    elif layout == "replicas":
        net = DistributedDataParallel(net, broadcast_buffers=False)
    kind = "adamw" if layout in ("ours", "one process") else "torch_adamw"
    return net, make_optimizer(net, kind)


def move(folder: Path, source: str, target: str) -> str:
    net, optimizer = net_of(source, 1)
    for step in range(2):
        for parameter in net.parameters():
            parameter.grad = torch.full_like(parameter, step + 0.5)
        optimizer.step()
    checkpoint.save(folder / source, 2, model=net, optimizer=optimizer)
    other, other_optimizer = net_of(target, 2)
    checkpoint.load(folder / source, model=other, optimizer=other_optimizer)
    a, b = full_state(net, optimizer), full_state(other, other_optimizer)
    names = [name.removeprefix("module.") for name in a["model"]]
    a["model"] = dict(zip(names, a["model"].values(), strict=True))
    b["model"] = dict(zip(names, b["model"].values(), strict=True))
    return difference([a["model"], a["optimizer"]["state"]], [b["model"], b["optimizer"]["state"]])


def test_checkpoint_moves_between_ours_fsdp2_replicas_and_one_process(tmp_path: Path) -> None:
    layouts = ["ours", "torch", "replicas"]
    for i, source in enumerate(layouts):
        for target in layouts[i + 1 :] + layouts[:i]:
            assert run_ranks(move, 2, tmp_path, source, target) == ["", ""], (source, target)
    net, optimizer = net_of("one process", 7)
    expected = full_state(*net_of("one process", 1))
    for source in layouts:
        checkpoint.load(tmp_path / source, model=net, optimizer=optimizer)
        assert (
            difference(net.scale.get_extra_state(), expected["model"]["scale._extra_state"]) == ""
        )
        assert re.fullmatch(r"tensor\(2\.\)", repr(optimizer.state[net.scale.factor]["step"]))
