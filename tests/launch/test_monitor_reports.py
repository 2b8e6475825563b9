"""What the trainer reports to the monitor besides its steps, and a run that a rule ends."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from trainer_process import TINY

import distmon
from launch.train import main

QUIET = ["--monitor", "--monitor.sinks=jsonl,arrow", "--monitor.run-dir=run", "--save-every=0"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory of the run."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_evaluations_and_tasks_reach_the_records(folder: Path) -> None:
    tasks = ["--tasks", "--task-weight=30", "--monitor.task-interval=2"]
    assert main([*TINY, *QUIET, *tasks, "--monitor.interval=2", "--eval-every=3"]) == 0
    run = distmon.read_run(folder / "run")
    reported = [each for record in run.records for each in record["evaluations"]]
    assert [each["step"] for each in reported] == [1, 3, 6]  # 1 stands for the untrained model
    assert reported[1]["train_loss"] == pytest.approx(sum(run.losses[s] for s in (1, 2, 3)) / 3)
    assert reported[2]["epoch"] == pytest.approx(6 * 8 * 32 / 190_000, rel=1e-3)
    assert reported[0]["val_loss"] == pytest.approx(run.losses[1], rel=0.05)
    norms = [record["tasks"] for record in run.records if record["tasks"]]
    assert norms
    assert all(each["kind"] > 5 * each["byte"] for each in norms)


def test_a_rule_ends_the_run_and_asks_for_a_checkpoint(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    actions = ["--monitor.actions.stop=nonfinite", "--monitor.actions.checkpoint=critical"]
    fault = ["--inject=nan", "--inject-at=3", "--monitor.interval=2"]
    # Nobody waits for the evaluation, so the step at which the run ends depends on its speed.
    assert main([*TINY, *QUIET, *actions, *fault, "--steps=400"]) == 86
    out = " ".join(capsys.readouterr().out.split())
    assert "stopped by nonfinite at step 4: " in out
    ended = re.search(r"; (\d+)/400 steps, train_loss nan", out)
    assert ended is not None
    step = int(ended[1])
    assert 6 <= step < 400
    (path,) = folder.rglob("*.pt")
    saved = torch.load(path, weights_only=True)
    assert saved["monitor"]["schedule"]["step"] == saved["step"] == step


def test_without_the_action_nothing_is_saved_or_stopped(folder: Path) -> None:
    assert main([*TINY, *QUIET, "--inject=nan", "--inject-at=3", "--monitor.interval=2"]) == 0
    assert not list(folder.rglob("*.pt"))
