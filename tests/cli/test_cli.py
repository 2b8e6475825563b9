"""The command line: what a person sees, and exit code 2 for a mistake."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import observe, quiet, small_model, train
from typer.testing import CliRunner

import distmon
from distmon.cli.main import app, run
from distmon.metrics import RANK_METRICS
from distmon.rules import BUILTIN
from distmon.runs.params_file import whole_messages


@dataclass(frozen=True)
class Ended:
    """What a command left behind."""

    returncode: int
    stdout: str
    stderr: str


Command = Callable[..., Ended]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Run the command line as the installed script does, without the start of a process."""

    def call(*arguments: str) -> Ended:
        monkeypatch.setattr(sys, "argv", ["distmon", *arguments])
        code: Any = 0
        try:
            run()
        except SystemExit as ended:
            code = ended.code
        return Ended(int(code or 0), *capsys.readouterr())

    return call


def test_a_process_of_its_own_ends_with_the_exit_code() -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "distmon.cli.main", "rules", "--confg", "x"],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert ended.returncode == 2
    assert "Traceback" not in ended.stderr


def test_doctor_reports_what_works_and_why_not(command: Command) -> None:
    result = command("doctor")
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


def test_rules_lists_every_rule_with_its_settings(tmp_path: Path, command: Command) -> None:
    config = tmp_path / "rules.yaml"
    config.write_text("rules: {frozen: {patience: 77}, loss_spike: {enabled: false}}\n")
    result = command("rules", "--config", str(config))
    assert result.returncode == 0, result.stderr
    assert all(rule.name in result.stdout for rule in BUILTIN)
    assert "77" in result.stdout
    assert "off" in result.stdout
    assert all(rule.advice for rule in BUILTIN)


def test_show_reads_a_run_back(tmp_path: Path, command: Command) -> None:
    observe(tmp_path, steps=4)
    result = command("show", str(tmp_path / "run"))
    assert result.returncode == 0, result.stderr
    assert "4 records, 24 parameter rows of 6 parameters, 0 alerts" in result.stdout
    assert "all files are intact and no record is missing" in result.stdout
    (tmp_path / "run" / ".claim").touch()  # as a killed training leaves it
    assert "intact" not in _in_process("show", str(tmp_path / "run"))
    (tmp_path / "run" / ".claim").unlink()
    gap = {"step": 9, "attempt": 0, "sink": "jsonl", "what": "record", "reason": "it was behind"}
    gaps = tmp_path / "run" / "gaps.jsonl"
    gaps.write_text(json.dumps(gap) + "\n")
    text = " ".join(_in_process("show", str(tmp_path / "run")).split())
    assert "intact" not in text
    assert "the sink jsonl lost 1 record (step 9): it was behind" in text
    gaps.unlink()
    lines = (tmp_path / "run" / "params.arrow").read_bytes()
    (tmp_path / "run" / "params.arrow").write_bytes(_without_last_batch(tmp_path / "run"))
    text = " ".join(_in_process("show", str(tmp_path / "run")).split())
    assert "params.arrow lacks the rows of 1 of 4 records, the first of step 4" in text
    (tmp_path / "run" / "params.arrow").write_bytes(lines)
    records = tmp_path / "run" / "records.jsonl"
    records.write_bytes(records.read_bytes()[:-20])
    result = command("show", str(tmp_path / "run"))
    assert result.returncode == 0
    assert "3 records" in result.stdout
    assert "records.jsonl" in result.stdout


def _without_last_batch(run: Path) -> bytes:
    ends = [end for _, end in whole_messages(run / "params.arrow")]
    return (run / "params.arrow").read_bytes()[: ends[-2]]


def _in_process(*arguments: str) -> str:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    return result.output


def test_one_is_singular_and_a_record_without_numbers_has_no_row(tmp_path: Path) -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with distmon.attach(model, optimizer, **quiet(tmp_path)) as monitor:
        train(model, optimizer, monitor, range(1, 2))
        monitor.evaluated(val_loss=0.01, train_loss=0.01)  # a record of its own, at the end
    text = _in_process("show", str(tmp_path / "run"))
    assert "0 alerts, 1 attempt, 1 rank in the last" in text
    rows = [line.strip("│ \n") for line in text.splitlines() if line.startswith("│")]
    assert len(rows) == 1
    assert rows[0].startswith("1 │")


def test_show_lists_the_runs_of_a_folder(tmp_path: Path) -> None:
    for name in ("first", "second"):
        observe(tmp_path / name, steps=2)
        (tmp_path / name / "run").rename(tmp_path / f"{name}-run")
    (tmp_path / "latest").symlink_to("second-run")
    text = _in_process("show", str(tmp_path))
    rows = [line for line in text.splitlines() if line.startswith("│")]
    assert ["first-run" in rows[0], "second-run" in rows[1], len(rows)] == [True, True, 2]


def test_version_one_rule_and_json() -> None:
    assert _in_process("--version") == f"distmon {distmon.__version__}\n"
    text = _in_process("rules", "steps_skipped")
    assert "fraction: 0.5" in text
    assert "1. call monitor.step() once per optimizer step, not once per micro-batch" in text
    assert "frozen" not in text
    found = json.loads(_in_process("doctor", "--json"))
    assert {"what": "torch", "verdict": "ok", "detail": torch.__version__} in found


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["rules", "frozn"], 'there is no rule "frozn"; did you mean "frozen"?'),
        (["show", "/nowhere/at/all"], "/nowhere/at/all is not a run folder"),
        (["rules", "--config", "/nowhere.yaml"], "cannot read the config file /nowhere.yaml"),
    ],
)
def test_mistakes_are_one_sentence_and_exit_code_2(
    arguments: list[str], sentence: str, command: Command
) -> None:
    result = command(*arguments)
    assert result.returncode == 2
    assert sentence in result.stderr
    assert "Traceback" not in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


def test_unknown_options_exit_2(command: Command) -> None:
    assert command("rules", "--confg", "x").returncode == 2
    assert len({m.name for m in RANK_METRICS}) == len(RANK_METRICS)
