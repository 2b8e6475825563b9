"""The benchmark of the signals times every call that it names."""

from __future__ import annotations

from pathlib import Path

from benchmarks.alarms.signal_cost import CALLS, HOOKS, INTERVAL, measure


def test_every_part_of_an_observation_is_timed(tmp_path: Path) -> None:
    clock, _ = measure(tmp_path / "run", steps=2 * INTERVAL)
    observed = clock.by_step[INTERVAL]
    assert {"step_begins", "take", HOOKS} <= observed.keys() <= {*CALLS, HOOKS}
    assert observed["take"] > 0
    assert observed[HOOKS] > 0
