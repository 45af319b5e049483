"""What torch itself asks of the state of a module that passes for its `FSDPModule`.

May touch: torch's registry of composable APIs on a module, nothing else. `isinstance(module,
torch.distributed.fsdp.FSDPModule)` holds for ours, so torch goes on to read the state behind it:

    torch.distributed.pipelining    `fully_shard.state(module)`: after the last micro-batch, asks
                                    it to reduce what backwards without sync have left
    share_comm_ctx                  `_comm_ctx`, to share streams; ours run on the current one
    composable replicate            the registry, to refuse a module or leave it alone

It reads attributes of private classes, which no subclass could promise to have. Those that the
list above needs are here; any other one raises, and names itself.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY, RegistryItem


class AskedByTorch:
    """The part of torch's `FSDPState` that torch's own functions use."""

    _comm_ctx: object = None  # torch keeps streams here
    _fsdp_param_groups: tuple[()] = ()  # what torch does to each is done by the bucket

    @property
    def _state_ctx(self) -> AskedByTorch:
        return self

    @property
    def _is_root(self) -> bool | None:
        """Whether it runs first; None as long as that is not decided."""
        return self.is_root

    def _lazy_init(self) -> None:
        self.lazy_init()

    def _root_post_backward_final_callback(self) -> None:
        self.reduce_waiting_gradients()

    @property
    def is_root(self) -> bool | None:
        """Whether it runs first; None as long as that is not decided."""
        raise NotImplementedError

    @property
    def all_states(self) -> Sequence[AskedByTorch]:
        """Those of its root, itself first; none as long as that is not decided."""
        raise NotImplementedError

    def lazy_init(self) -> object:
        """Decide who is the root."""
        raise NotImplementedError

    def reduce_waiting_gradients(self) -> None:
        """Reduce what backwards without sync have left."""
        raise NotImplementedError

    if not TYPE_CHECKING:  # for a type checker every attribute would exist

        def __getattr__(self, name: str) -> NoReturn:
            """Say what is asked for and is not there.

            Raises:
                AttributeError: Always; this runs where the attribute does not exist.
            """
            raise AttributeError(
                f"{name!r} belongs to the state of torch's fully_shard, and this module was "
                f"sharded by vfsdp_optim.fully_shard, whose state has none; for what reads it "
                f"(such as FSDPMemTracker) shard with torch.distributed.fsdp.fully_shard"
            )


def register(module: nn.Module, state: AskedByTorch) -> None:
    """Have `torch.distributed.fsdp.fully_shard.state(module)` return `state`."""
    key = getattr(torch_fsdp.fully_shard, "__wrapped__")  # noqa: B009  (what the contract keys by)
    states: dict[Any, Any] = module.__dict__.setdefault(STATE_KEY, OrderedDict())
    states[key] = state
    registry: dict[str, Any] = module.__dict__.setdefault(REGISTRY_KEY, OrderedDict())
    registry["fully_shard"] = RegistryItem()
