"""Rules about speed, stragglers, memory and devices."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from sample_records import alerts_of, make_engine, make_record

from distmon.collect.telemetry.hardware.throttle import HARDWARE_THERMAL, IDLE, POWER_CAP
from distmon.rules.alert import Alert

WORLD = 4
PHASES = {"data": 0.01, "forward": 0.1, "backward": 0.2, "optimizer": 0.02, "other": 0.0}


def _ranks(**columns: Any) -> dict[str, np.ndarray]:
    rows = {f"{p}_seconds": np.full(WORLD, s) for p, s in PHASES.items()}
    return rows | {name: np.asarray(v, dtype=float) for name, v in columns.items()}


def _follow(rule: str, records: list[dict[str, Any]], **settings: Any) -> list[Alert]:
    """Alerts of one rule over records, with its state saved and loaded after each."""
    engine, found = make_engine(**settings), []
    for step, fields in enumerate(records, start=1):
        found += [a for a in alerts_of(engine, make_record(step, **fields)) if a.rule == rule]
        state = json.loads(json.dumps(engine.state_dict()))
        engine = make_engine(**settings)
        engine.load_state_dict(state)
    return found


def test_a_straggler_is_named_after_two_observations() -> None:
    slow = _ranks()
    slow["forward_seconds"][2] += 0.1
    slow["forward_floor_seconds"] = slow["forward_seconds"].copy()
    slow["backward_seconds"][[0, 1, 3]] += 0.1
    hosts = ("a", "a", "b", "b")
    alerts = _follow("straggler", [{"ranks": slow, "hosts": hosts}] * 25)
    first = alerts[0]
    assert (first.step, first.severity, first.ranks) == (2, "warning", (2,))
    assert first.message.startswith(
        "rank 2 on b is slower than the others: its forward phase takes 100 ms longer"
    )
    assert "3 ranks wait for it" in first.message
    assert next(a.step for a in alerts if a.severity == "critical") == 20
    assert _follow("straggler", [{"ranks": _ranks()}] * 25) == []


def test_throughput_is_compared_with_its_own_past() -> None:
    def rates(*values: float) -> list[dict[str, Any]]:
        return [{"metrics": {"performance/tokens_per_second": v}} for v in values]

    assert _follow("throughput_drop", rates(*[100] * 8, 60, 60, 60)) == []
    (alert,) = _follow("throughput_drop", rates(*[100] * 8, 40, 40, 40))
    assert (alert.severity, alert.step) == ("warning", 10)
    (alert,) = _follow("throughput_drop", rates(*[100] * 8, 10, 10))
    assert alert.severity == "critical"
    assert _follow("throughput_drop", rates(100, 100, 10, 10, 10)) == []  # too early to judge


def test_jitter_takes_more_than_one_slow_record() -> None:
    def times(*values: float) -> list[dict[str, Any]]:
        return [{"metrics": {"performance/step_seconds": v}} for v in values]

    assert _follow("step_time_jitter", times(*[1.0] * 8, 3.0, 1.0, 1.0)) == []
    (alert,) = _follow("step_time_jitter", times(*[1.0] * 8, 3.0, 3.0))
    assert alert.measured == 3.0


@pytest.mark.parametrize(
    ("share", "severity"), [(0.05, None), (0.15, "warning"), (0.3, "critical")]
)
def test_waiting_for_data(share: float, severity: str | None) -> None:
    ranks = _ranks(data_seconds=[0.1, 0.4, 0.1, 0.1])
    records = [{"metrics": {"performance/data_fraction": share}, "ranks": ranks}] * 4
    assert [a.severity for a in _follow("dataloader_bound", records)] == [severity][
        : bool(severity)
    ]


def test_an_impossible_mfu() -> None:
    (alert,) = _follow("mfu_invalid", [{"metrics": {"performance/mfu_over_limit": 1.52}}] * 3)
    assert "MFU is 152%, which is impossible" in alert.message
    assert _follow("mfu_invalid", [{"metrics": {"performance/mfu": 0.5}}] * 3) == []


def test_devices() -> None:
    metrics = {"hardware/temperature": 90.0, "hardware/memory_fraction": 0.97}
    bad = _ranks(
        temperature_c=[60, 90, 70, np.nan],
        memory_used_bytes=[50, 97, 50, np.nan],
        memory_total_bytes=[100] * 4,
        throttle_reasons=[POWER_CAP, HARDWARE_THERMAL, IDLE, np.nan],
        ecc_uncorrected=[0, 0, 0, 0],
        retries=[0, 0, 0, 0],
    )
    worse = {
        **bad,
        "ecc_uncorrected": np.array([0, 0, 2.0, 0]),
        "retries": np.array([0, 3.0, 0, 0]),
    }
    records = [{"metrics": metrics, "ranks": bad}, {"metrics": metrics, "ranks": worse}]
    for rule, rank, words in (
        ("gpu_hot", 1, "is at 90 C (limit 85)"),
        ("gpu_throttled", 1, "too hot, throttled by the hardware"),
        ("memory_high", 1, "97.0% of the device memory of rank 1"),
        ("gpu_ecc", 2, "2 uncorrected memory errors"),
        ("memory_retries", 1, "freed its cache to find memory 3 times"),
    ):
        (alert,) = _follow(rule, records)
        assert alert.ranks == (rank,), rule
        assert words in alert.message
    idle = [{"metrics": {"hardware/utilization": 0.2}}] * 5
    assert [a.rule for a in _follow("gpu_underused", idle)] == ["gpu_underused"]


def test_a_leak_is_distinguished_from_warmup() -> None:
    rng = np.random.default_rng(0)
    teeth = rng.random(300) * 60e6

    def records(base: np.ndarray) -> list[dict[str, Any]]:
        return [{"metrics": {"memory/rss_bytes": float(v)}} for v in base + teeth]

    steps = np.arange(300.0)
    found = _follow("memory_creep", records(1e9 + 1e6 * steps))
    assert found[0].rule == "memory_creep"
    assert "host memory keeps growing, most on the rank that uses most" in found[0].message
    assert found[0].ranks == ()
    assert _follow("memory_creep", records(1e9 + 3e8 * (1 - np.exp(-steps / 20)))) == []
    assert _follow("memory_creep", records(np.full(300, 1e9))) == []


def test_a_fast_leak_is_named_early_and_on_its_rank() -> None:
    """On a rank that holds less than another one, and after a record that it did not tell."""

    def records(by_rank: np.ndarray) -> list[dict[str, Any]]:
        return [
            {"metrics": {"memory/rss_bytes": float(np.nanmax(row))}, "ranks": _ranks(rss_bytes=row)}
            for row in by_rank
        ]

    held = np.tile([5e9, 1e9, 1e9, 1e9], (60, 1)) + np.random.default_rng(0).random((60, 4)) * 20e6
    leaking = held.copy()
    leaking[:, 2] += 80e6 * np.arange(60)
    leaking[0, 2] = np.nan
    (alert, *_) = _follow("memory_creep", records(leaking))
    assert (alert.step, alert.ranks) == (16, (2,))
    assert "most on rank 2: by 73,743.5 MB per 1000 steps" in alert.message
    assert _follow("memory_creep", records(held)) == []
