"""Optimizers that declare the structure they need, on plain tensors and on shards alike."""

try:
    from sharding import (
        FSDPModule,
        FullMatrix,
        MixedPrecisionPolicy,
        fully_shard,
        layout,
        load_full_state_dict,
    )
except ImportError as error:
    if error.name != "sharding":
        raise
    raise ImportError(
        f"vfsdp_optim: expected its own package `sharding`, got {error.path}, which hides it; "
        "rename that module, or start Python where it is not the first on sys.path",
        name="sharding",
        path=error.path,
    ) from error
from vfsdp_optim.adamw import AdamW
from vfsdp_optim.algorithm import Precision
from vfsdp_optim.groups import param_groups
from vfsdp_optim.muon import Muon
from vfsdp_optim.qk_clip import QKHeads
from vfsdp_optim.shampoo import Shampoo
from vfsdp_optim.soap import SOAP

__version__ = "0.1.0"

__all__ = [
    "SOAP",
    "AdamW",
    "FSDPModule",
    "FullMatrix",
    "MixedPrecisionPolicy",
    "Muon",
    "Precision",
    "QKHeads",
    "Shampoo",
    "fully_shard",
    "layout",
    "load_full_state_dict",
    "param_groups",
]
