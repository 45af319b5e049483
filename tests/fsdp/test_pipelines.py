"""torch's pipeline schedules over our units: equal to one process."""

import pytest
import torch
import torch.distributed.pipelining as pipelining
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from ranks import run_ranks
from sharding import fully_shard
from vfsdp_optim import AdamW, Muon, param_groups

STAGES, WIDTH, MICRO_BATCHES = 2, 8, 4


class Stage(nn.Module):
    """Two matrices that 2 ranks cut."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 36), nn.Linear(36, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


def stages_of(count: int) -> list[Stage]:
    torch.manual_seed(0)
    return [Stage() for _ in range(count)]


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def batch(step: int) -> Tensor:
    return torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(step))


def optimizer_of(name: str, model: nn.Module) -> torch.optim.Optimizer:
    if name == "muon":
        return Muon(param_groups(model, adamw={"lr": 0.01}), lr=0.02)
    return AdamW(model.named_parameters(), lr=0.01, weight_decay=0.1)


def trained_in_a_pipeline(
    schedule_name: str, optimizer_name: str, reshard_after_forward: bool | None
) -> dict[str, Tensor]:
    """Full weights of this rank's stages after three steps, 2 stages (or 2 x 2) on all ranks."""
    kind = getattr(pipelining, schedule_name)
    several = issubclass(kind, pipelining.schedules.PipelineScheduleMulti)
    stages = stages_of(4 if several else 2)
    ranks = torch.distributed.get_world_size()
    mesh = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("pp", "dp"))
    place, replica = mesh["pp"].get_local_rank(), mesh["dp"].get_local_rank()
    own = range(place, len(stages), 2)
    mine = nn.ModuleDict({str(i): stages[i] for i in own})
    for part in mine.values():
        for each in (part.up, part.down, part):
            fully_shard(each, mesh=mesh["dp"], reshard_after_forward=reshard_after_forward)
    made = [
        pipelining.PipelineStage(
            stages[i], i, len(stages), torch.device("cpu"), group=mesh["pp"].get_group()
        )
        for i in own
    ]
    schedule = kind(made if several else made[0], n_microbatches=MICRO_BATCHES, loss_fn=loss_of)
    optimizer = optimizer_of(optimizer_name, mine)
    for step in range(3):
        x = batch(step).tensor_split(ranks // 2)[replica]
        target = {"target": x / 2} if place == 1 else {}
        schedule.step(*([x] if place == 0 else []), **target)
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.full_tensor() for name, p in mine.named_parameters()}


def trained_in_one_process(count: int, optimizer_name: str) -> dict[str, Tensor]:
    model = nn.Sequential(*stages_of(count))
    optimizer = optimizer_of(optimizer_name, model)
    for step in range(3):
        loss_of(model(batch(step)), batch(step) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach() for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    ("ranks", "schedule", "optimizer", "reshard_after_forward"),
    [
        (2, "ScheduleGPipe", "muon", None),
        (4, "ScheduleGPipe", "adamw", True),
        (2, "Schedule1F1B", "adamw", False),
        (4, "Schedule1F1B", "muon", None),
        (4, "ScheduleInterleaved1F1B", "muon", True),
        (4, "ScheduleInterleavedZeroBubble", "muon", False),
    ],
)
def test_pipeline_trains_as_one_process(ranks, schedule, optimizer, reshard_after_forward):
    """PiPPy#1105, torchtitan#318: 'NoneType' object has no attribute '_state_ctx'."""
    results = run_ranks(trained_in_a_pipeline, ranks, schedule, optimizer, reshard_after_forward)
    expected = trained_in_one_process(4 if "Interleaved" in schedule else 2, optimizer)
    assert set().union(*results) == set(expected)
    for weights in results:
        for name, weight in weights.items():
            # Gradients of micro-batches are added in another order; steps are about 0.02.
            torch.testing.assert_close(weight, expected[name], atol=2e-5, rtol=0)


def split_backward_of(reshard_after_forward: bool | None) -> str:
    """Ask for gradients of inputs first, as a schedule does that splits backward."""
    stage = stages_of(1)[0]
    for each in (stage.up, stage.down, stage):
        fully_shard(each, reshard_after_forward=reshard_after_forward)
    x = torch.ones(2, WIDTH, requires_grad=True)
    torch.autograd.grad(stage(x).sum(), x, retain_graph=True)  # no pipeline: gradients of inputs
    output = stage(x)
    stage.set_is_last_backward(False)
    stage.set_reshard_after_backward(False)
    stage.set_requires_gradient_sync(False)
    with pytest.raises(RuntimeError) as error:
        torch.autograd.grad(output.sum(), x, retain_graph=True)
    return str(error.value)


def test_split_backward_of_freed_weights_raises() -> None:
    """torch's FSDP2 loses the gradients of such a stage in silence."""
    for reshard_after_forward, first in ((None, "up"), (True, "down")):
        for report in run_ranks(split_backward_of, 2, reshard_after_forward):
            assert report == (
                f"backward of bucket {first!r} was split, gradients of inputs first, after its "
                f"weights were freed: those of weight would be lost. Pipeline schedules that split "
                f"backward (zero bubble, DualPipeV) need fully_shard(..., "
                f"reshard_after_forward=False) on every module of a stage"
            )
