"""A param group that has every key, and names those that a checkpoint holds. Communicates nothing.

[Note: keys that checkpoints do not hold]
torch's recipe for checkpoints asks a file for each key that `state_dict()` has, and its flat form
for each key that a loop over a group yields; one that the file lacks is an error. Files of torch's
own optimizers have torch's keys only. So both leave out a key that torch does not know, as long as
its value is the one that says "as in torch.optim", and what describes this process's memory only.
All other ways of reading a group - by key, `get`, `in`, `keys()`, `items()`, `**`, copies - find
all keys.

The other way round nothing asks a file for what it has and this optimizer lacks: master copies
would be lost without a word. AdamW groups whose state torch could not continue therefore leave out
the keys by which torch runs its update, and the recipe refuses such a file where those are asked
for.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from vfsdp_optim.algorithm import EXECUTION_KEYS, PRECISION_KEYS, TORCH_KEYS, Algorithm

_OF_THIS_MEMORY = frozenset({"keep_32bit", "unaligned"})


class Group(dict[str, Any]):
    """A param group whose iteration yields the keys that a checkpoint holds.

    See [Note: keys that checkpoints do not hold]. Pickled and copied it is a plain dict.
    """

    _as_torch: Mapping[str, Any] = {}
    _never: frozenset[str] = frozenset()

    def follow(self, algorithm: Algorithm) -> None:
        """Take from the algorithm of the group which keys checkpoints do not hold."""
        self._as_torch = algorithm.as_torch
        # Schedulers that cycle momentum write betas of groups that have no use for them.
        unused = () if "betas" in algorithm.defaults else ("betas",)
        self._never = _OF_THIS_MEMORY.union(unused)

    def __iter__(self) -> Iterator[str]:
        """Yield the keys that a checkpoint holds."""
        left_out = {
            key
            for key, value in self._as_torch.items()
            if key in self and type(self[key]) is type(value) and self[key] == value
        }
        beyond_torch = self._as_torch and not left_out.issuperset(PRECISION_KEYS)
        left_out |= self._never.union(EXECUTION_KEYS if beyond_torch else ())
        return (key for key in self.keys() if key not in left_out)

    def __reduce__(self) -> tuple[Any, ...]:
        """Return what pickles and copies as a plain dict: files know no class of this package."""
        return dict, (dict(self.items()),)


def complete(groups: Iterable[dict[str, Any]], algorithms: Iterable[Algorithm]) -> None:
    """Fill in what dicts lack that users put among the groups, such as a loop over one made.

    Their algorithm is the first that has their keys, else the first.
    """
    for g, group in enumerate(groups):
        if "algorithm" not in group:
            keys, (first, *others) = group.keys() - TORCH_KEYS, algorithms
            fitting = (each for each in (first, *others) if keys <= each.defaults.keys())
            chosen = next(fitting, first)
            group["algorithm"] = chosen.name
            chosen.complete(group, f"param group {g}")
