"""The page, the example in it, and the report that it shows."""

import importlib.util
import re
from pathlib import Path

import pytest

import vfsdp_optim.testing as kit
from vfsdp_optim.testing.differences import DifferenceError

ROOT = Path(__file__).parents[2]
PAGE = (Path(kit.__file__).parent / "README.md").read_text()
EXAMPLE = ROOT / "examples" / "test_your_optimizer.py"


def block_after(comment: str) -> str:
    """Return the code block that follows a comment of the page."""
    return re.search(rf"<!-- {re.escape(comment)} -->\n```\w*\n(.*?)```", PAGE, re.DOTALL)[1]


def test_page_shows_the_example_as_it_is():
    assert block_after("examples/test_your_optimizer.py") == EXAMPLE.read_text()
    assert len(EXAMPLE.read_text().splitlines()) <= 25


def without_numbers(text: str) -> str:
    """Digits of results depend on the machine; everything else does not."""
    return re.sub(r"-?\d+\.\d+(e-\d+)?|0x[0-9a-f]+", "#", text).strip()


def test_example_fails_with_the_report_that_the_page_shows():
    spec = importlib.util.spec_from_file_location("test_your_optimizer", EXAMPLE)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    with pytest.raises(DifferenceError) as error:
        example.test_row_muon()
    assert without_numbers(str(error.value)) == without_numbers(block_after("its report"))


def test_page_names_everything_public():
    for name in kit.__all__:
        assert name in PAGE, name
