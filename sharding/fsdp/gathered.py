"""The gathered forms of a bucket's parameters: how old they are, and what was written into them.

May touch: the forms of one bucket's parameters; allocates and communicates nothing.

[Note: writes into gathered weights]
A module may write its weights in forward (a clamp, an average of code books), and users write them
between `unshard()` and `reshard()`. torch counts the in-place changes of each tensor, so that a
reshard sees which gathered parameters were written, and each rank copies its own range of them
back: the same as in one process wherever all ranks write the same. What was gathered is old when
what it was gathered from was written since, in the form that users see or in the piece below it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from sharding.fsdp.parameter import BucketParameter

# Set on unsharded parameters, which nobody may keep: their memory is freed after backward.
_GATHERED = "_gathered_form_of"
_VIEWS = "_views_lent"


def mark_gathered(parameter: Tensor, fqn: str) -> None:
    """Have `gathered_from` return `fqn` for an unsharded parameter from here on."""
    setattr(parameter, _GATHERED, fqn)


def gathered_from(parameter: Tensor) -> str | None:
    """Return the fqn of the sharded parameter whose unsharded form this is; None if it is no such
    form."""
    return cast("str | None", parameter.__dict__.get(_GATHERED))


def _metadata() -> frozenset[Callable[..., Any]]:
    """Return what may be asked of a parameter without memory: all that reads none."""
    properties = """shape dtype device layout ndim requires_grad is_leaf grad grad_fn is_meta
    is_cuda is_cpu is_sparse is_nested _version _backward_hooks""".split()
    methods = """size dim numel nelement stride storage_offset element_size untyped_storage
    is_floating_point is_complex is_contiguous requires_grad_ __len__ __hash__""".split()
    found: list[Any] = [getattr(Tensor, name) for name in methods]
    for name in properties:
        found += [getattr(Tensor, name).__get__, getattr(Tensor, name).__set__]
    return frozenset(found)


_METADATA = _metadata()


class GatheredParameter(nn.Parameter):
    """What a parameter is while it is gathered; `.data` is its memory, as torch's.

    torch counts no in-place changes of `.data`: whoever took it is taken to have written it.
    """

    data_taken = False
    any_taken = False  # of any parameter of the process, so far

    @property
    def data(self) -> Tensor:
        """The memory, without autograd."""
        self.data_taken = GatheredParameter.any_taken = True
        return _lent(self, super().data)

    @data.setter
    def data(self, value: Tensor) -> None:
        with torch.no_grad():
            self.copy_(value)

    def detach(self) -> Tensor:
        """Return the memory, without autograd."""
        view = super().detach()
        return view if torch.compiler.is_compiling() else _lent(self, view)


def _lent(parameter: Tensor, view: Tensor) -> Tensor:
    """Remember a view of a gathered parameter, which somebody may keep; returns it."""
    views = parameter.__dict__.get(_VIEWS)
    if views is None:
        views = parameter.__dict__[_VIEWS] = weakref.WeakValueDictionary()
    views[id(view)] = view
    return view


class _Freed:
    """What was gathered, while its memory is freed: no operation reads it unnoticed."""

    __slots__ = ()

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Answer what needs no memory.

        Raises:
            RuntimeError: Anything else is asked for; names the parameter.
        """
        if func in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        leaves = [*args, *(kwargs or {}).values()]
        lists = [each for each in leaves if isinstance(each, (list, tuple))]
        leaves += [each for one in lists for each in one]
        freed = next((each for each in leaves if isinstance(each, _Freed)), None)
        name = "a parameter" if freed is None else gathered_from(cast(Tensor, freed))
        raise RuntimeError(
            f"{name} was kept in its gathered form, whose memory was freed by a reshard, and used "
            f"in {getattr(func, '__name__', func)}; take parameters from model.named_parameters() "
            f"when they are needed, or keep them gathered with set_reshard_after_forward(False)"
        )

    def __repr__(self, *, tensor_contents: object = None) -> str:
        """Say what it was; never raises, so that debuggers can show it."""
        tensor = cast(Tensor, self)
        return f"{type(self).__name__}({gathered_from(tensor)!r}, shape={tuple(tensor.shape)})"


class FreedParameter(_Freed, nn.Parameter):  # type: ignore[misc]
    """A gathered parameter."""


class FreedDTensor(_Freed, DTensor):  # type: ignore[misc]
    """A gathered parameter that is sharded over other axes too."""


class FreedView(_Freed, Tensor):  # type: ignore[misc]
    """What `data` or `detach()` of one gave. Other views are made too often to be watched."""


_FREED = {nn.Parameter: FreedParameter, GatheredParameter: FreedParameter, DTensor: FreedDTensor}
_OPEN = {
    nn.Parameter: GatheredParameter,
    FreedParameter: GatheredParameter,
    FreedDTensor: DTensor,
}


def _closed(form: Tensor, views: list[Tensor]) -> list[weakref.ref[Tensor]]:
    """Have further uses of kept views of a parameter raise, and return those; copies stay."""
    closed, memory = [], form.untyped_storage()._cdata
    for view in views:
        if type(view) is Tensor and view.untyped_storage()._cdata == memory:
            mark_gathered(view, cast(str, gathered_from(form)))
            view.__class__ = FreedView
            closed.append(weakref.ref(view))
    return closed


class GatheredForms:
    """What a bucket's gathered parameters came from. See [Note: writes into gathered weights]."""

    def __init__(self, parameters: Sequence[BucketParameter]) -> None:
        self._parameters = parameters
        self._sources: list[tuple[int, int]] = []  # versions as of the last gather
        self._forms: list[int] = []
        self._views: list[weakref.ref[Tensor]] = []  # that are kept, while their memory is freed

    def note_sources(self) -> None:
        """Remember what is gathered from now on."""
        self._sources = self._source_versions()

    def open(self) -> None:
        """Make parameters of what was freed; their values have arrived."""
        for parameter in self._parameters:
            form = parameter.unsharded
            form.__class__ = _OPEN.get(form.__class__, form.__class__)  # type: ignore[assignment]
        if self._views:
            for kept in self._views:
                if (view := kept()) is not None:
                    view.__class__ = Tensor
            self._views = []
        self._forms = self._form_versions()

    def close(self) -> None:
        """Have every further use of the gathered forms raise."""
        for parameter in self._parameters:
            form = parameter.unsharded
            if (lent := form.__dict__.pop(_VIEWS, None)) is not None:
                self._views += _closed(form, list(lent.values()))
            form.__class__ = _FREED.get(form.__class__, form.__class__)  # type: ignore[assignment]

    def are_old(self) -> bool:
        """Return whether what was gathered has been written since, in its sharded form."""
        return self._sources != self._source_versions()

    def written(self) -> list[BucketParameter]:
        """Return the parameters whose gathered form was written.

        Raises:
            RuntimeError: The sharded form of one was written as well.
        """
        versions = self._form_versions()
        if versions == self._forms and not GatheredParameter.any_taken:
            return []
        found = []
        for i, parameter in enumerate(self._parameters):
            form = cast(GatheredParameter, parameter.unsharded)
            if versions[i] == self._forms[i] and not getattr(form, "data_taken", False):
                continue
            form.data_taken = False
            if parameter.sharded._version != self._sources[i][0]:
                raise RuntimeError(
                    f"{parameter.fqn} was written in its gathered form and in its sharded one, and "
                    f"one would be lost; call reshard() between the two"
                )
            found.append(parameter)
        return found

    def _form_versions(self) -> list[int]:
        return [parameter.unsharded._version for parameter in self._parameters]

    def _source_versions(self) -> list[tuple[int, int]]:
        return [(p.sharded._version, p.sharded._local_tensor._version) for p in self._parameters]
