"""Planted faults are named by the right rule at the right layer, and healthy runs by none."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.alarms.inside_faults import FAULTS, alerts_and_losses, loss_shows
from benchmarks.alarms.inside_models import HEALTHY

STEPS = 60


@pytest.mark.parametrize("kind", HEALTHY)
def test_a_healthy_run_has_no_warning(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    alerts, _ = alerts_and_losses(HEALTHY[kind](), tmp_path, steps=STEPS)
    assert [(a.rule, a.message) for a in alerts if a.severity != "info"] == []


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named(name: str, tmp_path: Path) -> None:
    fault = FAULTS[name]
    torch.manual_seed(0)
    alerts, _ = alerts_and_losses(fault.run(), tmp_path, fault.change)
    named = [a for a in alerts if a.rule == fault.rule and a.severity == "warning"]
    assert named, [(a.rule, a.layers, a.message) for a in alerts]
    if fault.rule == "representation_collapse":  # what follows a collapsed layer has collapsed too
        tops = {name.partition(".")[0] for a in named for name in a.layers}
        assert tops & {fault.layer, "predictor"}
    else:
        assert named[0].layers[0] == fault.layer


def test_the_loss_shows_a_fault_from_the_first_of_three_steps() -> None:
    healthy = [1.0 + 0.01 * (i % 2) for i in range(30)]
    faulty = [*healthy[:20], *[1.2] * 10]
    faulty[10] = 1.2  # alone
    assert loss_shows(faulty, healthy) == 21
    assert loss_shows(healthy, healthy) is None
