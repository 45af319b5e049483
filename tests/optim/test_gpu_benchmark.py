"""benchmarks/gpu.py works here in tiny size, so that it does on the day a device is there."""

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu.py"


def test_tiny_run_measures_every_candidate_and_names_what_is_missing() -> None:
    command = [sys.executable, str(SCRIPT), "--tiny", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    training, *models = found["results"].values()
    assert set(training) == {"ours", "FSDP2"}
    assert len(models) == 3
    for figures in models:
        # Launches do not depend on who else uses the machine.
        launches = {name: figure["launches"] for name, figure in figures.items()}
        assert 0 < launches["AdamW fused"] < launches["torch AdamW fused"]
        assert 0 < launches["AdamW"] < launches["torch AdamW foreach"]
        assert {"torch Muon", "Muon", "Muon gram", "Muon 8bit", "AdamW 8bit"} < set(launches)
    if found["device"] == "CPU":
        assert found["left_out"] == ["an accelerator", "bitsandbytes"]
