"""`python -m distmon.selftest` on the CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from distmon.selftest.__main__ import main, run
from distmon.selftest.checks import all_checks
from distmon.selftest.transports import check_transport


def test_the_file_has_every_check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "found.json"
    assert main(["--device", "cpu", "--out", str(out)]) == 0
    found = json.loads(out.read_text())
    assert [each["check"] for each in found["results"]] == [name for name, _ in all_checks()]
    by_name = {each["check"]: each["result"] for each in found["results"]}
    assert by_name["kernels against references"] == by_name["compiled optimizer"] == "ok"
    assert by_name["transport: host"] == by_name["transport: device"] == "ok"
    assert by_name["graph capture"] == by_name["timings"] == "not checked"
    assert not found["simulated"]
    printed = capsys.readouterr().out
    assert "No accelerator was checked" in printed
    assert "5 ok, 0 failed, 5 not checked" in printed


def test_a_failure_is_in_the_table() -> None:
    def broken(_: torch.device) -> str:
        raise ValueError("no such kernel")

    (found,) = run(torch.device("cpu"), [("kernels", broken)])
    assert (found["result"], found["detail"]) == ("failed", "ValueError: no such kernel")
    assert "in broken" in found["traceback"]


def test_a_rank_that_fails_is_named_with_its_last_line(tmp_path: Path) -> None:
    program = tmp_path / "failing_rank.py"
    program.write_text(
        "import os, sys, time\n"
        "sys.exit('no such backend') if os.environ['RANK'] == '1' else time.sleep(600)\n"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(tmp_path))
        with pytest.raises(RuntimeError, match="rank 1: no such backend"):
            check_transport("host", torch.device("cpu"), "failing_rank", dict)
