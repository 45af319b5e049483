"""Sharding that optimizers shape: ragged layouts, flat buffers, the FSDP core that runs them."""

from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy

from sharding.checkpoint.full_state import load_full_state_dict
from sharding.fsdp.fsdp_module import FSDPModule
from sharding.fsdp.fully_shard import fully_shard
from sharding.planning.structure import Blocks, Elementwise, FullMatrix, RowPanels
from sharding.report import layout
from sharding.tensor.placement import RaggedShard
from sharding.tensor.ragged_tensor import RaggedDTensor

__all__ = [
    "Blocks",
    "Elementwise",
    "FSDPModule",
    "FullMatrix",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "RaggedDTensor",
    "RaggedShard",
    "RowPanels",
    "fully_shard",
    "layout",
    "load_full_state_dict",
]
