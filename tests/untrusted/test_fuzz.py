"""A thousand broken run folders, configs and logs: one sentence or a partial result each.

`python -m benchmarks.fuzz` does the same for as long as one likes.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.fuzz.fuzzing import Findings, Fuzzer


@pytest.mark.parametrize("part", range(4))
def test_no_input_traces_back_or_hangs(tmp_path: Path, part: int) -> None:
    findings = Findings()
    for _, found in Fuzzer(tmp_path, seed=22).run(range(250 * part, 250 * part + 250), commands=1):
        findings = found
    assert findings.inputs == 250
    assert not findings.failures, "\n".join(findings.lines)
    # Otherwise the inputs would be too broken, or not broken at all.
    assert findings.counts["ok"] > 75
    assert findings.counts["refused"] > 25
