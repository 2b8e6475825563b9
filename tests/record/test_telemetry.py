"""What the monitor costs, and what is only waiting for a late rank."""

from __future__ import annotations

import numpy as np
import pytest

from distmon.record.telemetry import without_waiting


def _rows(**columns: list[float]) -> dict[str, np.ndarray]:
    return {name: np.array(values) for name, values in columns.items()}


def test_waiting_for_a_late_rank_is_not_the_monitors_cost() -> None:
    """Rank 1 comes 5 ms late: the others wait for it in the collective, which takes 1 ms."""
    rows = _rows(
        monitor_seconds=[0.010, 0.004, 0.009],
        monitor_wait_seconds=[0.006, 0.001, 0.006],
        failed=[0.0, 0.0, 0.0],
    )
    reduced = without_waiting(rows)
    assert reduced["monitor_seconds"] == pytest.approx([0.005, 0.004, 0.004])
    assert reduced["monitor_wait_seconds"] == pytest.approx([0.005, 0.0, 0.005])


def test_a_rank_that_could_not_tell_does_not_count() -> None:
    rows = _rows(
        monitor_seconds=[0.010, 0.0],
        monitor_wait_seconds=[0.006, 0.0],
        failed=[0.0, 1.0],
    )
    assert without_waiting(rows)["monitor_seconds"] == pytest.approx([0.010, 0.0])
    assert without_waiting({**rows, "failed": np.ones(2)})["monitor_seconds"][0] == 0.010
