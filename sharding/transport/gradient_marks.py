"""One bit for each parameter that travels in an exchange: which ranks have a gradient of it.

Decides from the plan which ranks share parameters; touches small tensors.

[Note: marks]
A rank without the gradient of a parameter has to know whether others have it: with none anywhere
the parameter is left alone, else the missing piece counts as zero. So, at the head of what two
ranks send each other in the first wave of a step, each states for which of its parameters it has a
gradient, one bit each. Ranks that share no parameter say nothing to each other, and an owner that
holds no element of a parameter has no gradient of it, whatever stands in its `.grad`: the outcome
does not depend on who owns what. Only a rank that misses something reads what it was sent, and
waits for it; the others look at nothing.
"""

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from sharding.planning.ownership import OwnerPlan


class Marks:
    """The bits of one exchange.

    Args:
        plan: of the exchange.
        rank: this rank.
        parameters: of each unit of the plan, the number of its parameter, from 0.
        dtype: in which the bits travel; bytes are only copied.
        device: of the slots.

    Attributes:
        peers: ranks that share a parameter with this one.
        numel: elements of `dtype` that the bits take.
    """

    def __init__(
        self,
        plan: OwnerPlan,
        rank: int,
        parameters: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._sharing = _sharing(plan, parameters)
        self._bits = 8 * dtype.itemsize
        self.numel = -(-(max(parameters, default=-1) + 1) // self._bits)
        # About others a rank says nothing: not all who would have to know it hear of it.
        self._own = sorted(p for p, ranks in self._sharing.items() if rank in ranks)
        held = {p for p, u in zip(parameters, plan.units, strict=True) if u.held_by(rank)}
        self._held = [p for p in self._own if p in held]
        peers = frozenset[int]().union(*(self._sharing[parameter] for parameter in self._own))
        self.peers = tuple(sorted(peers - {rank}))
        self._dtype = dtype
        self._all = self._packed(()).to(device)

    def travels(self, parameter: int) -> bool:
        """Return whether the ranks that hold a parameter hear of each other."""
        return parameter in self._sharing

    def write(self, out: Tensor, positions: Tensor, missing: Collection[int]) -> None:
        """Write the bits of this rank for every peer.

        Args:
            out: 1-D, what is sent.
            positions: (number of peers * numel,) int64, where the bits for each peer lie in `out`.
            missing: parameters without a gradient.
        """
        if not self.peers:
            return
        bits = self._packed(missing).to(out.device, non_blocking=True) if missing else self._all
        out.index_copy_(0, positions, bits.repeat(len(self.peers)))

    def read(self, received: Tensor, positions: Tensor) -> frozenset[int]:
        """Return the parameters of this rank of which a peer has a gradient; waits for the device.

        Args:
            received: 1-D, what the peers sent.
            positions: where the bits of each peer lie in it.
        """
        if not self.peers:
            return frozenset()
        raw = received.index_select(0, positions).view(torch.uint8).cpu()
        rows = raw.view(len(self.peers), self.numel * self._dtype.itemsize)
        bits = (rows.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8, device="cpu")) & 1
        return frozenset(bits.amax(0).flatten().nonzero().flatten().tolist()).intersection(
            self._own
        )

    def _packed(self, missing: Collection[int]) -> Tensor:
        present = torch.zeros(self.numel * self._bits, dtype=torch.uint8, device="cpu")
        present[self._held] = 1
        present[list(missing)] = 0
        weights = 2 ** torch.arange(8, device="cpu")
        return (present.view(-1, 8) * weights).sum(1).to(torch.uint8).view(self._dtype)


def _sharing(plan: OwnerPlan, parameters: Sequence[int]) -> dict[int, frozenset[int]]:
    """Return, for each parameter with a unit that travels, the ranks that hold or compute units."""
    travelling = {parameters[unit] for wave in plan.waves for unit in wave}
    ranks: dict[int, set[int]] = {parameter: set() for parameter in travelling}
    for parameter, unit, owner in zip(parameters, plan.units, plan.owners, strict=True):
        if parameter in ranks:
            ranks[parameter].update(rank for rank, _, _ in unit.all_pieces())
            ranks[parameter].add(owner)
    return {parameter: frozenset(of_one) for parameter, of_one in ranks.items()}
