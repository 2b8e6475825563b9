"""One run of the real trainer, shared by all tests of this folder."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from forked_python import run_script

TRAINER = Path(__file__).resolve().parents[2] / "launch" / "train.py"
TINY = (
    *("--layers=2", "--width=32", "--heads=2", "--context=32", "--batch-size=8", "--steps=40"),
    *("--corpus-mb=0.2", "--log-every=100", "--eval-every=10"),
)
LOUD = (
    "--monitor.rules.update_ratio_high.ratio=0.02",
    "--monitor.rules.update_ratio_high.after_step=6",
    "--monitor.rules.update_ratio_high.cooldown=2",
    "--monitor.rules.loss_is_high.when=step_loss_ema > 3",
    "--monitor.rules.loss_is_high.patience=2",
)
"""Settings that make more than one rule fire, one of them a condition of the user's own."""


@pytest.fixture(scope="session")
def trained_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run in which the loss jumped at step 21."""
    folder = tmp_path_factory.mktemp("trainer")
    monitor = (
        *("--monitoring", "--monitor.interval=2", "--monitor.sinks=jsonl,arrow,tensorboard"),
        *("--inject=spike", "--inject-at=21", "--monitor.run-dir=run"),
    )
    result = run_script([str(TRAINER), *TINY, *monitor, *LOUD], folder, os.environ)
    assert result.returncode == 0, result.stderr
    return folder / "run"
