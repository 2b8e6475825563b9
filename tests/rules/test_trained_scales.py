"""The same training with its loss in other units, really trained: the same alerts."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from benchmarks.alarms.cases import Case
from benchmarks.alarms.kinds import faults
from benchmarks.alarms.kinds.setup import Fault, Setup
from benchmarks.alarms.kinds.tabular import regression
from benchmarks.alarms.record_cases import train
from distmon.replay import replay_run

STEPS = 100
RUNS: dict[str, tuple[Fault, str, float, str | None]] = {
    "healthy adamw": (Fault(), "adamw", 3e-3, None),
    "lr jump": (faults.LrFactor(51, 100.0), "adamw", 3e-3, "lr_jump"),
    "spike": (faults.Garbage(81, 81), "sgd", 0.02, "loss_spike"),
    "starved": (Fault(), "sgd", 1e-6, "not_learning"),
    "lost to rounding": (Fault(), "sgd", 1e-9, "frozen"),
    "diverges": (Fault(), "sgd", 1.0, "nonfinite"),
}
CHAOTIC = ("lr jump", "diverges")
"""Rounding would take these runs elsewhere: their factors are powers of two, near 1e-4 and 1e4."""


def _build(seed: int, optimizer: str, lr: float, scale: float) -> Setup:
    """Return a setup whose steps do not depend on `scale`, but for rounding."""
    rate = lr if optimizer == "adamw" else lr / scale
    setup = regression(seed=seed, optimizer=optimizer, lr=rate, scale=scale)
    for group in setup.optimizers[0].param_groups:
        if "eps" in group:
            group["eps"] = 1e-30  # an absolute number: it has the unit of the gradient
    return setup


def _alerts(name: str, scale: float, folder: Path) -> list[tuple[str, int, str]]:
    fault, optimizer, lr, _ = RUNS[name]
    build = partial(_build, optimizer=optimizer, lr=lr, scale=scale)
    train(Case(name, "regression", build, STEPS, 10, lambda: fault), 0, folder)
    # Rules on time depend on the machine, and the rate of SGD on the unit of the loss.
    about_time = {"straggler", "throughput_drop", "step_time_jitter", "dataloader_bound"}
    found = replay_run(folder).alerts
    return [(a.rule, a.step, a.severity) for a in found if a.rule not in about_time]


@pytest.mark.parametrize("name", RUNS)
def test_the_same_training_in_another_unit_has_the_same_alerts(name: str, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    scales = (2.0**-13, 1.0, 2.0**13) if name in CHAOTIC else (1e-4, 1.0, 1e4)
    by_scale = [_alerts(name, scale, tmp_path / str(scale)) for scale in scales]
    assert by_scale[0] == by_scale[1] == by_scale[2]
    expected = RUNS[name][-1]
    if expected is None:
        assert by_scale[0] == []
    else:
        assert expected in {rule for rule, _, _ in by_scale[0]}
