"""The fault matrix, and a short soak: training is as without the monitor."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run(*command: str) -> str:
    found = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert found.returncode == 0, found.stdout + found.stderr
    return found.stdout


def test_the_matrix_has_at_least_120_faults_of_their_own() -> None:
    from benchmarks.faults.matrix import all_faults

    faults = all_faults()
    assert len(faults) >= 120
    assert len({(fault.family, fault.name) for fault in faults}) == len(faults)


def test_a_short_soak() -> None:
    text = run("benchmarks.soak", "--minutes", "0.12")
    assert "another loss than the twin: 0" in text
    assert "reached the loop: 0" in text
    assert re.search(r"[1-9]\d* steps, [1-9]\d* faults", text)
