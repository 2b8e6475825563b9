"""The command line: what a person sees, and exit code 2 for a mistake."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from small_runs import observe

from distmon.metrics import RANK_METRICS
from distmon.rules import BUILTIN


def _distmon(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "distmon.cli.main", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_doctor_reports_what_works_and_why_not() -> None:
    result = _distmon("doctor")
    assert result.returncode == 0, result.stderr
    for words in ("torch", "triton backend", "NVML", "gloo", "extra wandb", "torch backend"):
        assert words in result.stdout
    assert "fails" not in result.stdout


def test_doctor_names_the_extra_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    from distmon.cli import doctor

    monkeypatch.setattr(doctor, "_EXTRAS", {"no_such_module": "imaginary"})
    (line,) = [f for f in doctor.examine() if f.what.startswith("extra")]
    assert line.verdict == "absent"
    assert line.detail == "pip install 'distmon[imaginary]'"


def test_doctor_survives_a_failing_check(monkeypatch: pytest.MonkeyPatch) -> None:
    from distmon.cli import doctor

    def _broken() -> None:
        raise OSError("driver gone")

    monkeypatch.setattr(doctor, "_devices", _broken)
    assert doctor.Finding("broken", "fails", "OSError: driver gone") in doctor.examine()


def test_rules_lists_every_rule_with_its_settings(tmp_path: Path) -> None:
    config = tmp_path / "rules.yaml"
    config.write_text("rules: {frozen: {patience: 77}, loss_spike: {enabled: false}}\n")
    result = _distmon("rules", "--config", str(config))
    assert result.returncode == 0, result.stderr
    assert all(rule.name in result.stdout for rule in BUILTIN)
    assert "77" in result.stdout
    assert "off" in result.stdout
    assert all(rule.advice for rule in BUILTIN)


def test_show_reads_a_run_back(tmp_path: Path) -> None:
    observe(tmp_path, steps=4)
    result = _distmon("show", str(tmp_path / "run"))
    assert result.returncode == 0, result.stderr
    assert "4 records, 24 parameter rows of 6 parameters, 0 alerts" in result.stdout
    assert "all files are intact" in result.stdout
    records = tmp_path / "run" / "records.jsonl"
    records.write_bytes(records.read_bytes()[:-20])
    result = _distmon("show", str(tmp_path / "run"))
    assert result.returncode == 0
    assert "3 records" in result.stdout
    assert "records.jsonl" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["show", "/nowhere/at/all"], "/nowhere/at/all is not a run folder"),
        (["rules", "--config", "/nowhere.yaml"], "cannot read the config file /nowhere.yaml"),
    ],
)
def test_mistakes_are_one_sentence_and_exit_code_2(arguments: list[str], sentence: str) -> None:
    result = _distmon(*arguments)
    assert result.returncode == 2
    assert sentence in result.stderr
    assert "Traceback" not in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


def test_unknown_options_exit_2() -> None:
    assert _distmon("rules", "--confg", "x").returncode == 2
    assert len({m.name for m in RANK_METRICS}) == len(RANK_METRICS)
