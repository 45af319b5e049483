"""The kit finds planted faults within the default number of examples, and says what is wrong."""

import re
from functools import partial

import pytest
from hypothesis import Phase, given, settings
from mutants import MUTANTS, make_mutant

from vfsdp_optim.testing import assert_program_is_exact, step_programs
from vfsdp_optim.testing.differences import DifferenceError

REPORT = re.compile(
    r"\w+ on \d ranks? in layout ('ours'|drawn RaggedShards) is not the unsharded optimizer\n"
    r"first difference: (the save after )?step \d+, "
    r"(parameter 'p\d+', (state '\w+(\[\d\]|\.\d+)?'|option '\w+' of its group|the parameter)|"
    r"beside all parameters, state \"\w+\['\w+'\]\")"
)


def find(name: str) -> str:
    """Return the report on a mutant; fails if none of 100 examples, the usual number, shows it."""

    @settings(max_examples=100, phases=[Phase.generate], report_multiple_bugs=False)
    @given(program=step_programs())
    def every_program_is_exact(program):
        assert_program_is_exact(partial(make_mutant, name), program)

    with pytest.raises(DifferenceError) as error:
        every_program_is_exact()
    return str(error.value)


def test_there_are_enough_mutants():
    assert len(MUTANTS) >= 15


@pytest.mark.parametrize("name", MUTANTS)
def test_planted_fault_is_found_and_reported(name):
    report = find(name)
    assert REPORT.match(report), report
    if name == "PaddingNotZero":
        assert "the padding of the buffer is not zero" in report
        return
    for line in ("index  ", "sharded  ", "unsharded  ", "held by    rank ", "in all  "):
        assert f"\n  {line}" in report, report
