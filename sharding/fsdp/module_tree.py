"""ModuleTree: which modules and parameters there are below a root, and which nobody shards.

May touch: nothing; reads modules.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import chain, repeat
from operator import attrgetter, is_

from torch import nn

from sharding.fsdp.bucket import Bucket


class ModuleTree:
    """What was below a root when it was last checked.

    Users add modules and parameters at any time, also past torch's registration
    (`nn.ModuleList.insert`), and unfreeze what they left out. That is asked before every forward of
    the root, in C over lists that are made once; only a change has Python look at each parameter.

    Args:
        root: The module.
    """

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self._left_out: list[nn.Parameter] = []  # frozen, so that no rank trains its own
        self._look()

    def _look(self) -> None:
        modules = list(self._root.modules())
        self._below = [module._modules for module in modules]
        self._slots = [module._parameters for module in modules]
        self._children = list(chain.from_iterable(map(dict.values, self._below)))
        self._empty = self._are_empty()

    def _are_empty(self) -> list[bool]:
        return list(map(is_, chain.from_iterable(map(dict.values, self._slots)), repeat(None)))

    def has_changed(self) -> bool:
        """Return whether modules or parameters came, went or were unfrozen since the last check."""
        if any(map(attrgetter("requires_grad"), self._left_out)):
            return True
        children = list(chain.from_iterable(map(dict.values, self._below)))
        if len(children) != len(self._children) or not all(map(is_, children, self._children)):
            return True
        return self._are_empty() != self._empty

    def check(self, buckets: Sequence[Bucket], ignored: Collection[nn.Parameter]) -> None:
        """Prove that every trainable parameter lies in a bucket or is ignored.

        Raises:
            RuntimeError: Names one that no `fully_shard` call took.
        """
        parameters = [p for bucket in buckets for p in bucket.parameters]
        taken = {(id(module), name) for p in parameters for module, name in p.sites}
        forms = {id(form): p.fqn for p in parameters for form in (p.sharded, p.unsharded)}
        left_out: list[nn.Parameter] = []
        kept = {id(p) for p in ignored}
        for path, module in self._root.named_modules():
            for name, parameter in module._parameters.items():
                if parameter is None or id(parameter) in kept or (id(module), name) in taken:
                    continue
                fqn = f"{path}.{name}" if path else name
                if (tied := forms.get(id(parameter))) is not None:
                    raise RuntimeError(
                        f"{fqn} was tied to {tied} after fully_shard, and its module would run "
                        f"with weights that nobody gathers; add and tie modules before fully_shard"
                    )
                if parameter.requires_grad:
                    raise RuntimeError(
                        f"{fqn} was added after fully_shard: every rank would train its own; add "
                        f"parameters before fully_shard, or pass it in ignored_params"
                    )
                left_out.append(parameter)
        self._left_out = left_out
        self._look()
