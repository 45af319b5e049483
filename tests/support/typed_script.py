"""A user's script as mypy and pyright see it; nobody runs it.

A comment that ignores an error says that there is one: both complain about those they have no use
for.
"""

from typing import assert_type

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule as TorchFSDPModule

import vfsdp_optim
from vfsdp_optim import AdamW, FSDPModule, Muon, Precision, Shampoo, fully_shard, param_groups


class Model(nn.Module):
    """Blocks and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.head = nn.Linear(4, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        return self.head(self.blocks[0](x))


def train(model: Model, batch: torch.Tensor) -> None:
    """Do what training scripts do with what is public."""
    for block in model.blocks:
        fully_shard(block, reshard_after_forward=False)
    sharded = fully_shard(model)
    as_module: nn.Module = sharded
    as_fsdp: FSDPModule = sharded
    of_torch: TorchFSDPModule = sharded
    for each in fully_shard([nn.Linear(2, 2), nn.Linear(2, 3)]):
        each.set_requires_gradient_sync(False)
    sharded.set_requires_gradient_sync(True)
    sharded.train()
    fully_shard("model")  # type: ignore[call-overload]

    overrides = {"*norm*": {"weight_decay": 0.0}, "head.*": {"lr": 1e-4}}
    groups = param_groups(model, adamw={"lr": 3e-4}, overrides=overrides)
    groups.append({"params": [], "lr": 1.0})
    optimizer = Muon(groups, lr=0.02, adjust_lr_fn="match_rms_adamw", on_nonfinite="skip")
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    Muon(groups, adjust_lr_fn="rms")  # type: ignore[arg-type]
    Muon(groups, states="4bit")  # type: ignore[arg-type]
    AdamW(model.parameters(), states=Precision("8bit", unaligned="local_blocks"))
    AdamW(model.named_parameters(), on_nonfinite="drop")  # type: ignore[arg-type]
    Shampoo(groups, on_nonfinite="ignore")  # type: ignore[arg-type]

    loss = nn.functional.cross_entropy(sharded(batch), batch.argmax(-1))
    loss.backward()
    optimizer.step()
    assert_type(optimizer.step(lambda: 1.0), float)
    optimizer.load_state_dict(optimizer.state_dict())
    schedule.step()
    assert_type(vfsdp_optim.__version__, str)
    print(optimizer.plan(), vfsdp_optim.layout(sharded), as_module, as_fsdp, of_torch)
