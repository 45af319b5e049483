"""Which saved parameter is which: by name in the model, by `param_names`, or by position."""

import re
from typing import Any

import pytest

from sharding.checkpoint.matching import Match, brought_names, match_parameters


class Shaped:
    """Stands for a parameter."""

    shape = (3, 2)


def groups(*ids: list[Any], names: list[list[str]] | None = None) -> list[dict[str, Any]]:
    """Return groups; of an optimizer, where `ids` are only counted, or saved ones."""
    found: list[dict[str, Any]] = [{"params": list(params)} for params in ids]
    for group, own in zip(found, names or (), strict=names is not None):
        group["param_names"] = own
    return found


def own(*names: list[str]) -> list[dict[str, Any]]:
    return groups(*[[Shaped()] * len(group) for group in names], names=list(names))


SWAPPED = Match((((1, 0),), ((0, 1), (0, 0))), (1, 0))
SWAPPED_NAMES = [["b"], ["a", "c"]]
IN_ORDER = Match((((0, 0),), ((1, 0), (1, 1))), (0, 1))
TIED = [[["b"]], [["x", "a"], ["c"]]]  # names in the model of the parameters of two groups


@pytest.mark.parametrize(
    ("saved", "present", "in_model", "expected"),
    [
        # Names in the model find a parameter whatever the optimizer calls it; a tied one by any.
        (groups(["c", "a"], ["b"]), own(["p"], ["q", "r"]), TIED, SWAPPED),
        (groups(["_orig_mod.c", "a"], ["module.b"]), own(["p"], ["q", "r"]), TIED, SWAPPED),
        # Without the model, `param_names` do if one is the model's; `param_names` of saved groups
        # whose ids are names may be in another order (torch's state-dict functions).
        (groups(["c", "a"], ["b"], names=[["a", "c"], []]), own(["b"], ["a", "c"]), None, SWAPPED),
        (groups(["c"], ["b", "a"]), own(["my.own"], ["x", "y"]), None, IN_ORDER),
        (groups(["c"], ["b", "a"]), groups([0], [1, 2]), None, IN_ORDER),
        # Numbers: by `param_names` where both sides have them, also beside a model.
        (groups([0, 1], [2], names=[["c", "a"], ["b"]]), own(["b"], ["a", "c"]), TIED, SWAPPED),
        (groups([0], [1, 2], names=[["c"], ["a", "b"]]), groups([0], [1, 2]), TIED, IN_ORDER),
        (groups([0], [1, 2]), own(["b"], ["a", "c"]), None, IN_ORDER),
        # A group without parameters: by name it has no home, by position it has.
        (groups([0], names=[["a"]]), own([], ["a"]), None, Match(((), ((0, 0),)), (None, 0))),
        (groups([], [0]), groups([], [0]), None, Match(((), ((1, 0),)), (0, 1))),
    ],
)  # fmt: skip
def test_parameters_are_found(saved, present, in_model, expected):
    assert match_parameters(saved, present, in_model) == expected


@pytest.mark.parametrize(
    ("saved", "present", "in_model", "error"),
    [
        (
            groups(["a", "d"]),
            own(["a", "b"]),
            None,
            "loaded state dict does not have the parameters of the optimizer: missing ['b'], "
            "unexpected ['d']; to match by position, remove param_names from its groups",
        ),
        (
            groups([0], [1], names=[["a"], ["b"]]),
            own(["a", "b"]),
            None,
            "param group 0 has parameters of several saved groups, [0, 1]: its hyper-parameters "
            "are ambiguous; group the parameters as they were saved",
        ),
        (
            groups(["a", "b"]),
            own(["a", "b"]),
            [[["a"], []]],
            "param group 0, parameter 1 of shape (3, 2) is not one of the model's; its state "
            "cannot be found by name",
        ),
        (
            groups([0], [1]),
            own(["a", "b"]),
            None,
            "at: loaded state dict has 2 parameter groups, the optimizer has 1",
        ),
        (
            groups([0]),
            own(["a", "b"]),
            None,
            "at: param group 0: loaded state dict has 1 parameters, the optimizer has 2",
        ),
    ],
)
def test_what_does_not_match_is_refused(saved, present, in_model, error):
    with pytest.raises(ValueError, match=f"^{re.escape(error)}$"):
        match_parameters(saved, present, in_model, "at: ")


@pytest.mark.parametrize(
    ("saved", "present", "expected"),
    [
        # Ids that are text are the names: torch's functions leave `param_names` in another order.
        (groups(["c", "a"], ["b"], names=[["a", "c"], ["b"]]), groups([0], [1, 2]), SWAPPED_NAMES),
        (groups([0, 1], [2], names=[["c", "a"], ["b"]]), groups([0], [1, 2]), SWAPPED_NAMES),
        (groups([0, 1], [2]), groups([0], [1, 2]), None),
        (groups(["c", "a"], ["b"]), groups([0], [1, 2]), None),
        (groups([0, 1], [2], names=[["c", "a"], ["b"]]), own(["x"], ["y", "z"]), None),
    ],
)
def test_names_come_with_a_saved_state_to_groups_without_any(saved, present, expected):
    assert brought_names(saved, present, SWAPPED) == expected
