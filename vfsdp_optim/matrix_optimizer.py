"""The optimizer of matrices that has AdamW groups beside: what Muon, Shampoo and SOAP are."""

from collections.abc import Mapping
from typing import Any

from vfsdp_optim.adamw import AdamWAlgorithm
from vfsdp_optim.algorithm import MatrixAlgorithm, hyper_parameters
from vfsdp_optim.optimizer import StructuredOptimizer


class MatrixOptimizer(StructuredOptimizer):
    """A `StructuredOptimizer` of one rule for matrices; groups of AdamW keep states as it does.

    Args:
        rule: makes the algorithm of groups that name none.
        arguments: of the constructor of a subclass, its `locals()`: those of the optimizer as a
            whole, and hyper-parameters of the rule.
    """

    def __init__(self, rule: type[MatrixAlgorithm], arguments: Mapping[str, Any]) -> None:
        super().__init__(
            arguments["params"],
            rule(**hyper_parameters(arguments)),
            AdamWAlgorithm(states=arguments["states"]),
            max_exchange_bytes=arguments["max_exchange_bytes"],
            on_nonfinite=arguments["on_nonfinite"],
            process_group=arguments["process_group"],
        )
