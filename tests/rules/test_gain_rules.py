"""Gain of the backward pass: above its limit, and on its way there."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from sample_records import alerts_of, make_engine, make_gain, make_record

from distmon.rules import RuleEngine
from distmon.rules.alert import Alert
from distmon.rules.base import Memory
from distmon.rules.gain import RULES

WARMUP = [1.15, 1.18, 1.25, 1.38]


def _alerts(engine: RuleEngine, means: Sequence[float]) -> list[Alert]:
    """All alerts of a run; the step of each is the place in `means`, from 1."""
    records = (
        make_record(i, metrics={"gradient_monitor/mean_gain": mean})
        for i, mean in enumerate(means, start=1)
    )
    return [alert for record in records for alert in alerts_of(engine, record)]


def _first(means: Sequence[float], name: str = "gain_drift") -> int | None:
    return next((a.step for a in _alerts(make_engine(), means) if a.rule == name), None)


def _between(points: Sequence[float], parts: int) -> list[float]:
    steps = [a + (b - a) * i / parts for a, b in pairwise(points) for i in range(parts)]
    return [*steps, points[-1]]


def test_drift_is_reported_before_the_limit_is_passed() -> None:
    assert _first(WARMUP) == 3  # 1.25 * sqrt(1.25 / 1.15) = 1.3032
    assert _first(WARMUP[:2]) is None


@pytest.mark.parametrize("parts", [2, 3, 4, 5, 6, 8, 10, 15])
def test_shorter_intervals_report_the_warmup_in_time(parts: int) -> None:
    means = _between(WARMUP, parts)
    told = _first(means)
    assert told is not None
    assert max(means[:told]) <= 1.3


@pytest.mark.parametrize(
    ("centre", "spread", "end"),
    [(1.18, 0.05, 1.18), (1.0, 0.02, 1.0), (1.28, 0.02, 1.0), (0.8, 0.04, 1.0), (1.1, 0.05, 0.9)],
)
def test_noise_and_a_healthy_change_are_no_drift(centre: float, spread: float, end: float) -> None:
    base = make_record(1)
    for seed in range(10):
        noise = random.Random(seed)
        memories: list[Memory] = [{} for _ in RULES]
        for i in range(1000):
            mean = centre + (end - centre) * i / 1000 + noise.uniform(-spread, spread)
            record = replace(base, metrics={"gradient_monitor/mean_gain": mean})
            for rule, memory in zip(RULES, memories, strict=True):
                limits = {name: threshold.value for name, threshold in rule.thresholds.items()}
                assert all(found.fading for found in rule.check(record, limits, memory))


def test_a_rise_over_the_window_has_to_be_confirmed() -> None:
    slow = [1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.11, 1.08, 1.12, 1.13, 1.12, 1.14]
    (alert,) = _alerts(make_engine(), slow)
    assert (alert.rule, alert.step, alert.threshold) == ("gain_drift", 11, 0.1)
    assert "12% more than 5 observations ago" in alert.message
    # The same rise below 1, where gradients do not grow, is none.
    assert _alerts(make_engine(), [x - 0.2 for x in slow]) == []


def test_above_the_limit() -> None:
    jump = [1.1, 1.1, 1.4, 1.4, 1.4, 1.28, 1.28, 1.28]
    absolute = [a for a in _alerts(make_engine(), jump) if a.rule == "gain_absolute"]
    assert [(a.step, a.measured, a.threshold) for a in absolute] == [(5, 1.4, 1.3)]


def test_blocks_are_named_without_the_first() -> None:
    def alert_of(gains: list[float], **limits: Any) -> Alert | None:
        engine = make_engine(gain_absolute={"patience": 1, **limits})
        metrics = {
            "gradient_monitor/mean_gain": sum(gains) / len(gains),
            "train/lr": 3e-3,
            "train/unclipped_grad_norm": 4.0,
            "monitor/grad_norm": 1.0,
        }
        found = alerts_of(engine, make_record(9, gradient_gain=make_gain(gains), metrics=metrics))
        return next((a for a in found if a.rule == "gain_absolute"), None)

    alert = alert_of([1.0, 1.5, 2.6, 0.4])
    assert alert is not None
    assert "gradient gain is 1.500 per block" in alert.message
    assert "largest in blocks.2 (2.60), blocks.1 (1.50)" in alert.message
    assert "amplifying (> 2.0): blocks.2; damping (< 0.5): blocks.3" in alert.message
    assert alert.layers == ("blocks.2", "blocks.1")
    assert alert.advice[:2] == (
        "halve the learning rate from 3e-3 to 1.5e-3",
        "tighten gradient clipping from 1.0 to 0.7",
    )
    assert alert_of([60.0, 1.1, 1.0, 1.0]) is None  # a small embedding, normalised
    assert alert_of([1.4, 1.4]) is None  # a mean of one
    assert alert_of([float("nan"), 1.4, 1.4]) is not None
    # 1 + 0.05 * sqrt(4)
    assert alert_of([1.0, 1.12, 1.12, 1.12], scale_by_depth=1) is not None
    assert alert_of([1.0, 1.08, 1.08, 1.08], scale_by_depth=1) is None
