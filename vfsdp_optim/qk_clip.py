"""QK-clip: scales the query and key rows of heads whose attention logits grew too large.

Touches local shards, and communicates once: one packed reduction of the largest logits. The rule is
MuonClip's (Kimi K2, arXiv:2507.20534, section 2.1 and algorithm 1): a head whose largest logit
S_max is above tau has its logits multiplied by tau / S_max, half by the query's weights and half by
the key's, once a step after the update.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

from sharding.transport.debug import announce, enabled
from sharding.transport.waits import waiting_for
from vfsdp_optim.parameters.param_shard import ParamShard, Ranks

# Rows start:stop of a weight, the head whose factor they get, and the power of it.
_Rows = tuple[int, int, int, float]


@dataclass(frozen=True, slots=True)
class QKHeads:
    """Which rows of which weights are the query and key heads of one attention.

    Attributes:
        query: names of the weight with the queries, and of its bias if it has one.
        key: the same of the keys; () if they are in the query's weight.
        heads: query heads.
        head_dim: rows of a query head.
        key_heads: key heads; 0 means `heads`. With fewer, each serves heads / key_heads successive
            query heads, and all of them are scaled as the one with the largest logit needs.
        rotary_dim: last rows of each query head that meet a key which all heads share and which
            stays as it is (multi-head latent attention): they take the whole factor.
        key_rows: rows of a key head in its weight; 0 means `head_dim - rotary_dim`. More when other
            rows follow in each head, such as the values of latent attention.
        grouped: for a single weight, whether its rows are (queries, key, value) of one key head
            after another, as in Megatron, and not all queries, all keys, all values.

    Raises:
        TypeError: a name that is no text, or a number that is not whole.
        ValueError: numbers that do not fit each other.

    Example:
        >>> QKHeads("blocks.0.qkv.weight", heads=8, head_dim=64, key_heads=2).scaled_rows()[1][-1]
        (576, 640, 4, 0.5)
    """

    query: str | tuple[str, ...]
    key: str | tuple[str, ...] = ()
    heads: int = 1
    head_dim: int = 1
    key_heads: int = 0
    rotary_dim: int = 0
    key_rows: int = 0
    grouped: bool = False

    def __post_init__(self) -> None:
        """Check the names and the numbers."""
        for names in (self.query, self.key):
            if not isinstance(names, str | tuple):
                raise TypeError(f"{self!r}: expected a name or a tuple of names, got {names!r}")
        for number in (self.heads, self.head_dim, self.key_heads, self.rotary_dim, self.key_rows):
            if not isinstance(number, int):
                raise TypeError(f"{self!r}: expected whole numbers, got {number!r}")
        object.__setattr__(self, "key_heads", self.key_heads or self.heads)
        object.__setattr__(self, "key_rows", self.key_rows or self.head_dim - self.rotary_dim)
        fits = (
            min(self.heads, self.head_dim, self.key_heads) >= 1
            and self.heads % self.key_heads == 0
            and 0 <= self.rotary_dim < self.head_dim
            and self.key_rows >= self.head_dim - self.rotary_dim
            and not (self.grouped and self.key)
        )
        if not fits:
            raise ValueError(
                f"{self!r}: expected heads, head_dim and key_heads >= 1, heads a multiple of "
                "key_heads, rotary_dim below head_dim, key_rows of at least head_dim - rotary_dim, "
                "and grouped=True for a single weight alone"
            )

    def names(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the names of the query's parameters and of the key's."""
        query = (self.query,) if isinstance(self.query, str) else self.query
        key = (self.key,) if isinstance(self.key, str) else self.key
        return query, key or query

    def scaled_rows(self) -> tuple[list[_Rows], list[_Rows]]:
        """Return which rows of the query's weight, and of the key's, take which head's factor.

        Rows are (start, stop, query head, power of the factor). A key head is counted as the first
        of its query heads; by then all of them have one factor.
        """
        each, plain = self.heads // self.key_heads, self.head_dim - self.rotary_dim
        query: list[_Rows] = []
        for head in range(self.heads):
            group, place = divmod(head, each)
            start = head * self.head_dim
            if self.grouped:
                start = (group * (each + 2) + place) * self.head_dim
            query.append((start, start + plain, head, 0.5))
            if self.rotary_dim:
                query.append((start + plain, start + self.head_dim, head, 1.0))
        key: list[_Rows] = []
        for group in range(self.key_heads):
            start = group * self.key_rows + (0 if self.key else self.heads * self.head_dim)
            if self.grouped:
                start = (group * (each + 2) + each) * self.head_dim
            key.append((start, start + plain, group * each, 0.5))
        return query, key


def clip(
    max_logits: Mapping[QKHeads, Tensor],
    parameters: Mapping[str, Tensor],
    threshold: float,
    replicas: Ranks | None = None,
) -> None:
    """Scale the heads whose largest logit, on any rank, is above the threshold.

    A collective of all ranks that hold the parameters, whose order and sizes follow from
    `max_logits` alone. Nothing is read on the host.

    Args:
        max_logits: (heads,) largest logit of each head that this rank saw since the last call;
            -inf where it saw none. Heads that are not positive, or not finite, change nothing.
        parameters: by name.
        threshold: largest logit that is left alone.
        replicas: that hold a copy each of every plain parameter, and reduce with each other.

    Raises:
        TypeError: `max_logits` is no dict of QKHeads and tensors.
        ValueError: an unknown name, logits of another shape, a weight without these rows, or a
            threshold that is not positive.
        NotImplementedError: the pieces of a parameter are no ranges of it.
    """
    if not isinstance(threshold, int | float) or not threshold > 0:
        raise ValueError(f"threshold: expected a number > 0, got {threshold!r}")
    if not isinstance(max_logits, Mapping):
        raise TypeError(
            f"max_logits: expected a dict QKHeads -> Tensor, got a {type(max_logits).__name__}"
        )
    if not max_logits:
        return
    shards = {
        name: ParamShard.of(parameters[name], name, replicas)
        for name in _checked_names(max_logits, parameters)
    }
    for name, shard in shards.items():
        shard.check_has_ranges(name)
    packed = _largest(list(max_logits.items()), shards.values())
    for heads, largest in zip(max_logits, packed, strict=True):
        # The same operations at every number of ranks, on float32 whatever came.
        together = largest.view(heads.key_heads, -1).amax(1, keepdim=True)
        together = together.expand(-1, heads.heads // heads.key_heads).reshape(-1)
        above = (together > threshold) & together.isfinite()
        factors = torch.where(above, threshold / together, 1.0)  # (heads,)
        choices = torch.cat([factors, factors.sqrt(), torch.ones_like(factors[:1])])
        for which, names in enumerate(heads.names()):
            for name in names:
                rows = parameters[name].shape[0]
                _scale(shards[name], choices[_choice_of_rows(heads, which, rows, choices.device)])


def _checked_names(
    max_logits: Mapping[QKHeads, Tensor], parameters: Mapping[str, Tensor]
) -> list[str]:
    """Return all names once, in order, or say what does not fit."""
    checked: dict[str, None] = {}
    for heads, logits in max_logits.items():
        if not isinstance(heads, QKHeads) or not isinstance(logits, Tensor):
            raise TypeError(
                f"max_logits: expected QKHeads -> Tensor, got {heads!r} -> {type(logits).__name__}"
            )
        if logits.shape != (heads.heads,):
            raise ValueError(
                f"{heads.names()[0][0]}: expected the largest logit of each of {heads.heads} "
                f"heads, got shape {tuple(logits.shape)}"
            )
        for names, rows in zip(heads.names(), heads.scaled_rows(), strict=True):
            needed = max(stop for _, stop, _, _ in rows)
            for name in names:
                if name not in parameters:
                    raise ValueError(
                        f"max_logits: {name!r} is no parameter of the optimizer; build it from "
                        f"named parameters, of which it has {sorted(parameters)}"
                    )
                have = parameters[name].shape[0] if parameters[name].dim() else 0
                if have < needed:
                    raise ValueError(
                        f"{name}: has {have} rows and {heads!r} needs {needed}; correct heads, "
                        "head_dim, key_heads or key_rows"
                    )
                checked[name] = None
    return list(checked)


def _largest(items: Sequence[tuple[QKHeads, Tensor]], shards: Iterable[ParamShard]) -> list[Tensor]:
    """Return the largest logits over all ranks, float32: one reduction for each set of ranks."""
    packed = torch.cat([logits.detach().float() for _, logits in items])
    packed = packed.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    for ranks in dict.fromkeys(shard.ranks for shard in shards):
        if ranks is not None and ranks.size > 1:
            if enabled():
                heads = "".join(f"\n{heads!r}" for heads, _ in items)
                announce(f"qk_clip of {len(items)} attentions{heads}", [ranks.group()])
            with waiting_for("the largest attention logits of qk_clip", ranks.group()):
                dist.all_reduce(packed, dist.ReduceOp.MAX, group=ranks.group())
    return list(packed.split([heads.heads for heads, _ in items]))


@lru_cache(maxsize=1024)
def _choice_of_rows(heads: QKHeads, which: int, rows: int, device: torch.device) -> Tensor:
    """Return which of (factor of each head, its root of each head, 1) every row takes."""
    choice = [2 * heads.heads] * rows
    for start, stop, head, power in heads.scaled_rows()[which]:
        choice[start:stop] = [head if power == 1.0 else heads.heads + head] * (stop - start)
    return torch.tensor(choice, device=device)


def _scale(shard: ParamShard, factors: Tensor) -> None:
    """Multiply the local elements of every row by its factor; `factors` is (rows,) float32."""
    local = shard.tensor
    if shard.bounds is None or not local.numel():
        return
    first, last = shard.bounds
    width = prod(shard.param.shape[1:])
    flat = local.reshape(-1)  # a copy where strides forbid a view
    row, column = divmod(first, width)
    # The rest of a row that another rank has the start of, whole rows, and the start of a row.
    head = min(-column % width, last - first)
    rows = (last - first - head) // width
    tail = head + rows * width
    if head:
        flat[:head].mul_(factors[row : row + 1].expand(head))
        row += 1
    flat[head:tail].view(rows, width).mul_(factors[row : row + rows, None])
    if tail < last - first:
        flat[tail:].mul_(factors[row + rows].expand(last - first - tail))
    if not local.is_contiguous():
        local.copy_(flat.view(local.shape))
