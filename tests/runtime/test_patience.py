"""How long a rank waits for others that are some steps behind."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from small_runs import quiet, small_model

import distmon
from distmon.collect.telemetry.step_clock import StepClock
from distmon.runtime.decisions import PATIENCE_S, patience_s


@pytest.mark.parametrize(
    ("longest", "timeout", "expected"),
    [(0.0, 600.0, PATIENCE_S), (2.0, 600.0, 16.0), (1000.0, 600.0, 150.0), (9.0, 4.0, PATIENCE_S)],
)
def test_several_steps_and_well_below_the_timeout(
    longest: float, timeout: float, expected: float
) -> None:
    assert patience_s(longest, timeout) == expected


def test_the_longest_of_the_recent_steps() -> None:
    clock = StepClock()
    for now in (100.0, 101.0, 104.0, 105.0):
        clock.tick(now, None)
    assert clock.longest_recent == 3.0
    clock.tick_idle(125.0, 5, 0.0, 0.0)
    assert clock.longest_recent == 4.0
    for now in range(126, 226):
        clock.tick(float(now), None)
    assert clock.longest_recent == 1.0


def test_a_monitor_of_long_steps_is_patient(tmp_path: Path) -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with distmon.attach(model, optimizer, **quiet(tmp_path, timeout_s=600)) as monitor:
        assert monitor.cycle.patience_s() == PATIENCE_S
        monitor.telemetry.steps.tick(100.0, None)
        monitor.telemetry.steps.tick(110.0, None)
        assert monitor.cycle.patience_s() == 80.0
