"""The collector rests while a model is set up, and is afterwards as its user had it."""

import gc

import pytest
from torch import nn

from sharding.fsdp.many_objects import collector_paused
from vfsdp_optim import param_groups


class Counted(nn.Linear):
    """A layer that says whether the collector ran when it was asked for its parameters."""

    def named_parameters(self, *args, **kwargs):
        self.collecting = gc.isenabled()
        return super().named_parameters(*args, **kwargs)


@pytest.mark.parametrize("enabled", [True, False])
def test_groups_are_made_without_the_collector_which_then_is_as_before(enabled: bool) -> None:
    model = Counted(2, 2)
    try:
        (gc.enable if enabled else gc.disable)()
        param_groups(model)
        after = gc.isenabled()
        with pytest.raises(TypeError):
            param_groups(None)
        after_error = gc.isenabled()
    finally:
        gc.enable()
    assert (model.collecting, after, after_error) == (False, enabled, enabled)


@pytest.mark.parametrize("frozen", [True, False])
def test_many_objects_that_stay_count_as_old_unless_a_user_has_frozen_others(frozen: bool) -> None:
    (gc.freeze if frozen else gc.unfreeze)()
    try:
        before = gc.get_freeze_count()
        with collector_paused():
            made = [[i] for i in range(50_000)]
            young = len(gc.get_objects(generation=0))
        old = sum(type(each) is list for each in gc.get_objects(generation=2))
        assert bool(gc.get_freeze_count()) == bool(before) == frozen
    finally:
        gc.unfreeze()
    assert young > len(made)
    assert (old >= len(made)) is not frozen
