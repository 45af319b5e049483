"""How many bytes this rank puts on the wire. Watches torch's collectives; changes nothing."""

from collections.abc import Callable, Iterable, Sequence
from math import prod
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


class WireBytes(TorchDispatchMode):
    """Counts what a rank sends while the context is open.

    Collectives count by what a ring sends at least: an all-gather and a reduce-scatter (W - 1) / W
    of the full tensor, an all-reduce twice that, an all-to-all what is for others.

    Args:
        rank: of this process.
        world_size: ranks of the groups that are used.

    Attributes:
        sent: bytes so far.
        unknown: names of collectives that are not counted.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        super().__init__()
        self._rank, self._world_size = rank, world_size
        self.sent = 0.0
        self.unknown: set[str] = set()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Count a collective, and run every op."""
        if any(issubclass(cls, DTensor) for cls in types):
            return NotImplemented  # the tensor runs it, and what it sends comes here
        if func.namespace in ("c10d", "_c10d_functional"):
            self._count(func._schema.name.partition("::")[2], args)
        return func(*args, **(kwargs or {}))

    def _count(self, name: str, args: Sequence[Any]) -> None:
        share = (self._world_size - 1) / self._world_size
        counted = _RULES.get(name)
        if counted is not None:
            self.sent += counted(args, self._rank, share)
        elif name not in _FREE:
            self.unknown.add(name)


def _bytes(tree: Any) -> int:
    return sum(x.numel() * x.element_size() for x in pytree.tree_leaves(tree) if _is_tensor(x))


def _is_tensor(x: Any) -> bool:
    return isinstance(x, Tensor)


def _all_to_all(args: Sequence[Any], rank: int, share: float) -> float:
    # (output, input, group, output_splits, input_splits, ...)
    whole, splits = args[1], args[4]
    if not splits:
        return _bytes(whole) * share
    row = prod(whole.shape[1:]) * whole.element_size()
    return (sum(splits) - splits[rank]) * row


Rule = Callable[[Sequence[Any], int, float], float]


def _of(index: int, factor: float = 1.0) -> Rule:
    """Return a rule: the argument at `index` is the full tensor of a ring."""
    return lambda args, rank, share: _bytes(args[index]) * share * factor


_RULES: dict[str, Rule] = {
    "_allgather_base_": _of(0),
    "allgather_": _of(0),
    "allgather_into_tensor_coalesced_": _of(0),
    "allgather_coalesced_": _of(0),
    "_reduce_scatter_base_": _of(1),
    "reduce_scatter_": _of(1),
    "reduce_scatter_tensor_coalesced_": _of(1),
    "allreduce_": _of(0, 2.0),
    "allreduce_coalesced_": _of(0, 2.0),
    "broadcast_": _of(0),
    "alltoall_base_": _all_to_all,
    "alltoall_": _of(1),
    "send": lambda args, rank, share: _bytes(args[0]),
    # Functional ones have their input alone: (input, group_size, group_name).
    "all_gather_into_tensor": lambda args, rank, share: _bytes(args[0]) * (args[1] - 1),
    "reduce_scatter_tensor": _of(0),
    "all_reduce": _of(0, 2.0),
    "all_to_all_single": _of(0),
}
_FREE = {
    "recv_",
    "recv_any_source_",
    "barrier",
    "monitored_barrier_",
    "wait_tensor",
    "_wrap_tensor_autograd",
}


def wire_bytes(
    run: Callable[[], object], rank: int, world_size: int
) -> tuple[float, Iterable[str]]:
    """Return the bytes that this rank sends during `run`, and collectives that are not counted."""
    with WireBytes(rank, world_size) as counter:
        run()
    return counter.sent, sorted(counter.unknown)
