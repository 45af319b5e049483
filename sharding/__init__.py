"""Sharding that optimizers shape: ragged layouts, flat buffers, the FSDP core that runs them."""

from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy

from sharding.fsdp import FSDPModule, fully_shard
from sharding.loading import load_full_state_dict
from sharding.placement import RaggedShard
from sharding.ragged_tensor import RaggedDTensor
from sharding.report import layout
from sharding.structure import Blocks, Elementwise, FullMatrix, RowPanels

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
