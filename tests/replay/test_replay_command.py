"""`distmon replay`: tables, JSON, exit codes."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from small_runs import batch, quiet, small_model

import distmon
from distmon.cli.main import run
from distmon.cli.replay import ReplayOptions, replay_runs

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs `distmon replay ...` here; exit code, output, errors."""

    def call(*arguments: str | Path) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["distmon", "replay", *map(str, arguments)])
        with pytest.raises(SystemExit) as left:
            run()
        captured = capsys.readouterr()
        return int(left.value.code or 0), captured.out, captured.err

    return call


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    """Two logs, one of them with a jump of the loss at step 50."""
    for name, jumps_at in (("calm", 0), ("wild", 50)):
        rows = [f"{step},{100 if step == jumps_at else 4 - step / 80}" for step in range(1, 81)]
        (tmp_path / f"{name}.csv").write_text("\n".join(["step,loss", *rows]))
    return tmp_path


def test_one_run_in_detail(command: Command, trained_run: Path) -> None:
    code, output, errors = command(trained_run, "--own-rules")
    assert (code, errors) == (0, "")
    assert f"{trained_run}: run folder, 20 observations, steps 2 to 40" in " ".join(output.split())
    for alert in distmon.read_run(trained_run).alerts:
        (line,) = [
            row
            for row in output.splitlines()
            if row.split()[:3] == [str(alert["step"]), alert["severity"], alert["rule"]]
        ]
        assert alert["message"][:20] in line
    assert "of the observations raised an alarm" in output


def test_default_rules_are_not_those_of_the_run(command: Command, trained_run: Path) -> None:
    _, output, _ = command(trained_run)
    assert "loss_spike" in output
    assert "loss_is_high" not in output


def test_rules_of_a_run_that_no_longer_exist(
    command: Command, trained_run: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "old"
    shutil.copytree(trained_run, copy)
    info = json.loads((copy / "run.json").read_text())
    info["config"]["rules"]["frozen"] = {"speed": 2}
    (copy / "run.json").write_text(json.dumps(info))
    assert command(copy)[0] == 0
    code, _, errors = command(copy, "--own-rules")
    assert code == 2
    assert errors.startswith(f'distmon: {copy}: unknown key "speed" in rules.frozen')


def test_nothing_fired(command: Command, logs: Path) -> None:
    code, output, _ = command(logs / "calm.csv", "--fail-on", "info")
    assert code == 0
    assert "no rule would have fired" in output
    assert "rules without data in this recording: " in output


def test_a_failing_rule_is_reported(monkeypatch: pytest.MonkeyPatch, logs: Path) -> None:
    from distmon.rules.engine import RuleEngine

    def evaluate(self: object, record: Any) -> tuple[list[Any], dict[str, Exception]]:  # noqa: ARG001
        return [], {"shaky": ValueError("no numbers")}

    monkeypatch.setattr(RuleEngine, "evaluate", evaluate)
    console = Console(width=140, record=True, quiet=False)
    replay_runs(console, Console(stderr=True), ReplayOptions([logs / "calm.csv"]))
    words = "rule shaky failed on 80 of 80 observations, first at step 1: ValueError"
    assert words in console.export_text()


def test_many_runs_and_a_sweep(command: Command, logs: Path, trained_run: Path) -> None:
    code, output, errors = command(
        *(logs / "calm.csv", logs / "wild.csv", trained_run),
        *("--sweep", "loss_spike.warning_factor=10,40", "--sweep", "frozen.patience=3"),
    )
    assert (code, errors) == (0, "")
    lines = ["".join(line.split()) for line in output.splitlines()]
    assert any(line.startswith("all3180") for line in lines), output  # 80 + 80 + 20 observations
    (ten,) = [line for line in lines if line.startswith("10(now)")]
    (forty,) = [line for line in lines if line.startswith("40")]
    assert ten.startswith("10(now)01(50)1(22)22of3")
    assert forty.startswith("4000")
    assert "alerts of frozen (first step)" in output


def test_json_is_for_programs(command: Command, logs: Path) -> None:
    code, output, errors = command(
        *(logs / "calm.csv", logs / "wild.csv", "--format", "json"),
        *("--sweep", "loss_spike.warning_factor=10,40"),
    )
    assert (code, errors) == (0, "")
    calm, wild = json.loads(output)["runs"]
    assert calm["severities"] == {"critical": 0, "warning": 0, "info": 0}
    assert (wild["observations"], wild["last_step"], wild["first_alarm"]) == (80, 80, 50)
    assert [a["step"] for a in wild["alerts"] if a["rule"] == "loss_spike"] == [50]
    assert wild["rules"]["loss_spike"] == {"alerts": 1, "share": 1 / 80, "first_step": 50}
    points = wild["sweeps"]["loss_spike.warning_factor"]
    assert [(p["value"], p["alerts"], p["first_step"]) for p in points] == [
        (10, 1, 50),
        (40, 0, None),
    ]
    assert json.loads(output)["unreadable"] == []


def test_a_run_that_cannot_be_read_is_named_and_skipped(command: Command, logs: Path) -> None:
    (logs / "odd.csv").write_text("a,b\n1,2\n")
    code, output, errors = command(logs / "calm.csv", logs / "odd.csv", logs / "gone")
    assert code == 1
    assert f"runs in {logs}" in output
    rows = [line.split()[:2] for line in output.splitlines()]
    assert [name for name, *count in filter(None, rows) if count == ["80"]] == ["calm.csv"]
    gone, odd = sorted(errors.splitlines())
    assert gone == f"distmon: {logs / 'gone'} does not exist"
    assert odd.startswith(f"distmon: {logs / 'odd.csv'}: no column is known")
    code, output, errors = command(logs / "odd.csv", logs / "gone")
    assert (code, output, len(errors.splitlines())) == (1, "", 2)
    code, output, errors = command(logs / "odd.csv")
    assert (code, output) == (2, "")
    assert len(errors.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--sweep", "loss_spike.sigmas"], "expected rule.threshold=a,b,c"),
        (["--rules", "/nowhere.yaml"], "cannot read the config file /nowhere.yaml"),
        (["--rules", "/nowhere.yaml", "--own-rules"], "cannot be combined"),
        (["--map", "los=x"], 'did you mean "loss"?'),
        (["--fail-on", "loud"], '--fail-on must be one of info, warning, critical, not "loud"'),
        (["--format", "xml"], '--format must be one of table, json, not "xml"'),
    ],
)
def test_mistakes_are_one_sentence(
    arguments: list[str], sentence: str, command: Command, logs: Path
) -> None:
    code, output, errors = command(logs / "calm.csv", *arguments)
    assert (code, output) == (2, "")
    assert sentence in errors
    assert len(errors.splitlines()) == 1


def test_a_map_needs_a_log_of_others(command: Command, trained_run: Path) -> None:
    code, _, errors = command(trained_run, "--map", "loss=x")
    assert code == 2
    assert "--map applies to logs of other tools" in errors


def test_fail_on_is_for_scripts(command: Command, logs: Path) -> None:
    assert command(logs / "wild.csv", "--fail-on", "warning")[0] == 1
    assert command(logs / "wild.csv", "--fail-on", "critical")[0] == 0


def test_the_bar_is_for_terminals(logs: Path) -> None:
    options = ReplayOptions([logs / "calm.csv", logs / "wild.csv"])
    for terminal in (True, False):
        errors = Console(stderr=True, record=True, force_terminal=terminal, width=200)
        with errors.capture() as shown:
            replay_runs(Console(quiet=True), errors, options)
        assert ("wild.csv" in shown.get()) == terminal


def test_the_threshold_of_frozen_can_be_swept(command: Command, tmp_path: Path) -> None:
    """One parameter moves by a tiny part of itself, and is frozen to a coarser threshold only."""
    model = small_model().double()
    slow, *others = model.parameters()
    groups = [{"params": [slow], "lr": 1e-9}, {"params": others, "lr": 1e-2}]
    optimizer = torch.optim.SGD(groups)
    with distmon.attach(model, optimizer, **quiet(tmp_path)) as monitor:
        for step in range(1, 7):
            optimizer.zero_grad()
            loss = model(batch(step).double()).square().mean()
            loss.backward()
            optimizer.step()
            monitor.step(loss=loss)
    run = distmon.read_run(tmp_path / "run")
    ratios = [row["update_ratio"] for row in run.params.to_pylist() if row["name"] == "0.weight"]
    assert all(1e-12 < ratio < 1e-6 for ratio in ratios)
    code, output, errors = command(
        *(tmp_path / "run", "--format", "json", "--sweep", "frozen.ratio=1e-12,1e-6")
    )
    assert (code, errors) == (0, "")
    (replayed,) = json.loads(output)["runs"]
    points = replayed["sweeps"]["frozen.ratio"]
    assert [point["alerts"] for point in points] == [0, 1]
