"""`python -m distmon.selftest` on the CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from distmon.selftest.__main__ import main, run
from distmon.selftest.checks import CHECKS


def test_the_file_has_every_check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "found.json"
    assert main(["--device", "cpu", "--out", str(out)]) == 0
    found = json.loads(out.read_text())
    assert [each["check"] for each in found["results"]] == [name for name, _ in CHECKS]
    by_name = {each["check"]: each["result"] for each in found["results"]}
    assert by_name["kernels against references"] == by_name["compiled optimizer"] == "ok"
    assert by_name["both transports"] == "ok"
    assert by_name["graph capture"] == by_name["timings"] == "not checked"
    assert "not checked" in capsys.readouterr().out


def test_a_failure_is_in_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: torch.device) -> str:
        raise ValueError("no such kernel")

    monkeypatch.setattr("distmon.selftest.__main__.CHECKS", (("kernels", broken),))
    assert run(torch.device("cpu")) == [
        {"check": "kernels", "result": "failed", "detail": "ValueError: no such kernel"}
    ]
