"""A rank that is killed, stops or raises: what the others are told, and that none of them hangs.

All moments and faults are the table of docs/faults.md, which `make docs` writes anew from this
test; the suite runs a few of them.
"""

import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "one_faulty_rank.py"
ROOT = Path(__file__).parents[2]
TABLE = ROOT / "docs" / "faults.md"

Row = tuple[str, str, str]

# At each moment, what a peer may be waiting for when it finds out.
MOMENTS = {
    "construction": "the comparison of the sharding plan",
    "first forward": "the comparison of the sharding plan",
    "forward": r"the (gather|reduction) of bucket '(\d|root)'",
    "backward": r"the (gather|reduction) of bucket '(\d|root)'",
    "clip": "a norm, sum or other reduction of sharded tensors|wave 0 of gradients to their owners",
    "step": r"wave 0 of (gradients to|updates from) their owners|full_tensor\(\) of \d+ elements",
    "full_tensor": r"full_tensor\(\) of \d+ elements|rank 0's list of the state to load",
    "state_dict": r"full_tensor\(\) of \d+ elements|rank 0's list of the state to load",
    "load_full_state_dict": "rank 0's list of the state to load",
    "save": "the agreement of ranks to save a checkpoint",
    "load": "the agreement of ranks to load a checkpoint",
}
IN_THE_SUITE: list[Row] = [
    ("stop", "forward", "2-D"),
    ("stop", "save", "1-D"),
    ("kill", "backward", "1-D"),
    ("kill", "step", "2-D"),
    ("raise", "clip", "1-D"),
]
WRITE = bool(os.environ.get("VFSDP_WRITE_DOCS"))


def seen_by_peers(rows: list[Row]) -> list[dict[str, list[str]]]:
    """The errors of the ranks that go on, by row."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(PROGRAM), json.dumps(rows)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    results: list[dict[str, list[str]]] = json.loads(done.stdout.splitlines()[-1])
    return results


def test_peers_of_a_faulty_rank_are_told_what_they_waited_for_and_which_rank_is_missing() -> None:
    for row, seen in zip(IN_THE_SUITE, seen_by_peers(IN_THE_SUITE), strict=True):
        _check(row, seen)


def _check(row: Row, seen: dict[str, list[str]]) -> None:
    _, moment, mesh = row
    assert sorted(seen) == (["0", "2", "3"] if mesh == "2-D" else ["0", "2"]), row
    told = (
        f"WaitFailed: ({MOMENTS[moment]}) did not complete; ranks? (0, )?1(, 2)?(, 3)? did not say"
    )
    for _, error in seen.values():
        assert re.match(told, error), (row, error)


@pytest.mark.skipif(not WRITE, reason="minutes; `make docs` runs it")
def test_every_fault_at_every_moment_is_a_row_of_the_table() -> None:
    faults, meshes = ("kill", "stop", "raise"), ("1-D", "2-D")
    lines = []
    for moment in MOMENTS:
        rows = list(itertools.product(faults, (moment,), meshes))
        for row, seen in zip(rows, seen_by_peers(rows), strict=True):
            _check(row, seen)
            waits = sorted({_waited_for(error) for _, error in seen.values()})
            lines.append(f"| {moment} | {row[0]} | {row[2]} | {'; '.join(waits)} |")
    text = TABLE.read_text().split("<!-- rows -->")[0]
    TABLE.write_text(text + "<!-- rows -->\n" + "\n".join(lines) + "\n")


def _waited_for(error: str) -> str:
    waited = error.removeprefix("WaitFailed: ").split(" did not complete")[0]
    return re.sub(r"bucket '.*'", "bucket '...'", re.sub(r"\d+ elements", "... elements", waited))


def test_table_of_faults_has_every_moment_fault_and_mesh() -> None:
    rows = [line.split(" | ")[:3] for line in TABLE.read_text().splitlines()]
    found = {(a.removeprefix("| "), b, c) for a, b, c in (row for row in rows if len(row) == 3)}
    assert found >= set(itertools.product(MOMENTS, ("kill", "stop", "raise"), ("1-D", "2-D")))
