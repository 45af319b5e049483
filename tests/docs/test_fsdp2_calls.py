"""docs/fsdp2-calls.md: every call of FSDP2, tried with torch's `fully_shard` and with ours.

`make docs` writes the page.
"""

import inspect
import os
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.fsdp as torch_fsdp
from fsdp2_calls import ARGUMENTS, METHODS, NAMES, POLICIES, Call, Scene, full
from fsdp2_clients import CLIENTS
from torch.testing import assert_close

import sharding
from ranks import run_ranks

PAGE = Path(__file__).parents[2] / "docs" / "fsdp2-calls.md"
# The tests of torch 2.6 (test/distributed/_composable/fsdp) on CPU ranks over gloo, `fully_shard`
# replaced at import, that end otherwise than with torch's. They are no part of this project.
TORCHS_OWN = Path(__file__).parent / "torchs_own_tests.md"
SECTIONS = {
    "Arguments of `fully_shard`": ARGUMENTS,
    "Fields of the policies": POLICIES,
    "Methods of `FSDPModule`": METHODS,
    "Other names of `torch.distributed.fsdp`": NAMES,
    "Around it": CLIENTS,
}


@dataclass(frozen=True)
class Tried:
    """What a call did: `value` if it returned, else the error."""

    value: Any
    error: BaseException | None = None


def tried(call: Call, fully_shard: Any) -> Tried:
    try:
        return Tried(full(call.run(Scene(fully_shard))))
    except Exception as error:
        return Tried(None, error)


def check(call: Call) -> str:
    """The error of a refusal; complains where the call does not do what its row says."""
    ours = tried(call, sharding.fully_shard)
    if call.here == "refused":
        assert isinstance(ours.error, call.error or ()), (
            f"{call.call}: expected a refusal, got {ours}"
        )
        return str(ours.error)
    if ours.error is not None:
        raise AssertionError(f"{call.call} raises here") from ours.error
    theirs = tried(call, torch_fsdp.fully_shard)
    if call.here == "same":
        if theirs.error is not None:
            raise AssertionError(f"{call.call} raises with torch's") from theirs.error
        assert_close(ours.value, theirs.value)
    else:
        same = theirs.error is None and ours.value == theirs.value
        assert not same, f"{call.call} does the same with torch's, {theirs}"
    return ""


def check_all() -> tuple[dict[tuple[str, str], str], list[str]]:
    """The refusals, by section and call; and what rows are wrong."""
    refusals, wrong = {}, []
    for section, calls in SECTIONS.items():
        for call in calls:
            try:
                refusals[section, call.call] = check(call)
            except AssertionError as error:
                wrong.append(f"{error}" + (f": {error.__cause__!r}" if error.__cause__ else ""))
    return refusals, wrong


def rendered(refusals: dict[tuple[str, str], str]) -> str:
    lines = [INTRODUCTION]
    for section, calls in SECTIONS.items():
        lines += [f"## {section}", "", "| call | here | |", "|---|---|---|"]
        for call in calls:
            quoted = refusals[section, call.call]
            words = " ".join(filter(None, (call.words, f"`{quoted}`" if quoted else "")))
            lines.append(f"| `{call.call}` | {call.here} | {words} |")
        lines.append("")
    return "\n".join([*lines, TORCHS_OWN.read_text()])


INTRODUCTION = """\
# A call of FSDP2, and what it does here

A test runs each row with torch's `fully_shard` and with this one and compares the results
(`tests/docs/test_fsdp2_calls.py`, which writes this page). *same*: the results are equal.
*better*, *other*: it works, as the row says. *refused*: it raises the error that is quoted.
"""


@pytest.fixture(scope="module")
def outcome() -> tuple[dict[tuple[str, str], str], list[str]]:
    return run_ranks(check_all, 2)[0]


def test_every_call_of_fsdp2_does_what_its_row_says(outcome: Any) -> None:
    assert not outcome[1], "\n".join(outcome[1])


def test_the_page_of_calls_is_what_the_test_found(outcome: Any) -> None:
    page = rendered(outcome[0])
    if os.environ.get("VFSDP_WRITE_DOCS") == "1":
        PAGE.write_text(page)
    assert PAGE.read_text() == page, "write it anew: make docs"


def test_the_table_has_a_row_for_all_that_torch_offers() -> None:
    """A newer torch with more arguments, methods or fields fails here."""
    policies = (torch_fsdp.MixedPrecisionPolicy, torch_fsdp.CPUOffloadPolicy)
    offered = {
        ARGUMENTS: set(inspect.signature(torch_fsdp.fully_shard).parameters),
        POLICIES: {field.name for policy in policies for field in fields(policy)},
        METHODS: {
            name
            for name, value in vars(torch_fsdp.FSDPModule).items()
            if inspect.isfunction(value) and not name.startswith("_")
        },
        NAMES: set(torch_fsdp._fully_shard.__all__),
    }
    for rows, names in offered.items():
        assert not names - {row.name for row in rows}
