"""The collector rests while a model is set up, and is afterwards as its user had it."""

import gc

import pytest
from torch import nn

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
