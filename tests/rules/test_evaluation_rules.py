"""What is said after an evaluation."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from sample_records import alerts_of, make_engine, make_evaluations

from distmon.record.record import Record
from distmon.rules.alert import Alert


def _alerts(records: Sequence[Record]) -> list[Alert]:
    engine = make_engine()
    return [alert for record in records for alert in alerts_of(engine, record)]


def _told(
    train: list[float | None], val: list[float], every: int = 100
) -> list[tuple[str, str, int]]:
    """Rule, severity and number of the evaluation."""
    found = _alerts(make_evaluations(train, val, every, every))
    return [(a.rule, a.severity, a.step // every) for a in found]


def test_slow_improvement_and_a_gap() -> None:
    found = _told([3.2, 2.1, 2.0, 1.98], [3.5, 2.8, 2.7, 2.68])
    # A gap of 33% while the validation loss falls is not overfitting yet.
    assert ("overfit", "info", 2) in found
    assert ("overfit", "warning", 4) in found
    assert ("slow_improvement", "warning", 4) in found  # 0.74%
    assert len(found) == 3
    slow = _alerts(make_evaluations([3.2, 2.1, 2.0, 1.98], [3.5, 2.8, 2.7, 2.68]))[-2]
    assert "improved by 0.74% at evaluation 4 (step 400), from 2.7 to 2.68" in slow.message
    assert len(slow.advice) == 3


def test_severe_overfitting_from_the_first_evaluation() -> None:
    alert, _, again, *_ = _alerts(make_evaluations([0.8, 0.5], [2.7, 2.7]))
    assert (alert.rule, alert.severity) == ("overfit", "info")
    assert (again.rule, again.severity) == ("overfit", "warning")
    assert "2.7 is 238% above the training loss 0.8 (limit 30%)" in alert.message


def test_underfitting() -> None:
    (alert,) = _alerts(make_evaluations([4.5, 3.9], [4.6, 4.1]))
    assert (alert.rule, alert.severity) == ("underfit", "info")
    assert "5.1% apart (below 10%) and fall slowly, by 13.3% and 10.9%" in alert.message
    assert alert.advice[2] == "double the learning rate from 1e-3 to 2e-3"


PLATEAU = ("eval_plateau", "warning", 5)
FALLING = [5.0, 4.0, 3.0, 2.4, 2.0]


@pytest.mark.parametrize(
    ("train", "val", "expected"),
    [
        (FALLING, FALLING, []),
        ([None] * 5, FALLING, []),
        # Mild at evaluations 2 and 3 only; severe at any, a warning when it no longer improves.
        ([4.2, 3.3, 2.5, 2.0, 1.7], FALLING, [("overfit", "info", 2)]),
        ([4.9, 3.9, 2.9, 2.0, 1.3], FALLING, [("overfit", "info", 5)]),
        (
            [4.2, 3.3, 2.2, 1.7, 1.4],
            [*FALLING[:4], 2.4],
            [("overfit", "info", 2), ("overfit", "warning", 5), ("slow_improvement", "warning", 5)],
        ),
        # 12% above its best.
        ([4.9, 3.9, 2.9, 2.8, 3.0], [5, 4, 3, 2.8, 3.14], [("val_increase", "warning", 5)]),
        # Rising a little, twice, while training falls.
        (
            [4.9, 3.9, 2.9, 2.8, 2.7],
            [5, 4, 3, 3.05, 3.1],
            [("val_increase", "warning", 5)],
        ),
        # Three that change nothing; the first of them is slow.
        (
            FALLING,
            [5.0, 4.0, 3.99, 3.98, 3.97],
            [*((r, "warning", 3) for r in ("slow_improvement", "overfit")), PLATEAU],
        ),
        ([5.0, 5.0], [5.0, 4.98], [("slow_improvement", "warning", 2), ("lr_check", "info", 2)]),
        (
            [5.0, 7.0],
            [5.0, 7.0],
            [(r, "warning", 2) for r in ("val_increase", "lr_check")],
        ),
        ([5.0, float("nan"), 4.0], [5.0, float("nan"), 4.0], []),
        ([float("inf"), 0.0, -1.0], [-1.0, 0.0, float("inf")], []),
    ],
)
def test_findings(
    train: list[float | None], val: list[float], expected: list[tuple[str, str, int]]
) -> None:
    assert sorted(_told(train, val)) == sorted(expected)


def test_a_plateau_is_not_reported_as_slow_too() -> None:
    engine = make_engine(slow_improvement={"cooldown": 0})
    records = make_evaluations([None] * 6, [5.0, 4.0, 3.99, 3.98, 3.97, 3.96])
    found = [(a.rule, a.step) for record in records for a in alerts_of(engine, record)]
    assert found == [("slow_improvement", 300), ("slow_improvement", 400), ("eval_plateau", 500)]


def test_a_healthy_long_run_with_many_evaluations() -> None:
    val = [1.7 + 4 * (i + 1) ** -0.5 for i in range(100)]
    found = _told([v * 0.98 for v in val], val)
    # Not slow: the evaluations only lie close together. In the end they are a plateau, rarely told.
    assert {rule for rule, _, _ in found} == {"underfit", "eval_plateau"}
    assert len(found) <= 5


def test_a_run_that_goes_on_without_its_past() -> None:
    late = make_evaluations([2.0] * 3, [2.1, 2.095, 2.09], every=500, first=50_000)
    assert _alerts(late) == []


def test_when_the_learning_rate_ends_slowness_is_meant() -> None:
    records = make_evaluations([2.9, 2.4, 2.0, 2.0, 2.0], [3, 2.5, 2.1, 2.09, 2.08])
    for record, lr in zip(records, (1e-3, 8e-4, 5e-4, 2e-4, 1e-4), strict=True):
        record.metrics["train/lr"] = lr  # type: ignore[index]
    # The evaluation at the very end comes with a record that holds nothing else.
    records[-1].metrics.clear()  # type: ignore[attr-defined]
    assert _alerts(records) == []


def _on_batches(
    trend: Callable[[float], float], spread: float, seed: int, on: int = 1, of: int = 400
) -> list[Record]:
    """A run whose losses are of one batch, with evaluations on `on` batches every 20 steps."""
    noise = random.Random(seed)

    def loss(step: int) -> float:
        return trend(step / of) * noise.lognormvariate(0, spread)

    steps = range(20, of + 1, 20)
    val = [sum(loss(step) for _ in range(on)) / on for step in steps]
    records = make_evaluations([trend(step / of) for step in steps], val, 20, 20)
    return [
        replace(record, losses={i: loss(i) for i in range(record.step - 19, record.step + 1)})
        for record in records
    ]


@pytest.mark.parametrize("spread", [0.02, 0.1, 0.5, 1.2])
@pytest.mark.parametrize("trend", [lambda x: 4.2 - 0.2 * x, lambda x: 2 / (1 + 9 * x)])
def test_evaluations_on_one_batch_are_noise(trend: Callable[[float], float], spread: float) -> None:
    runs = [_alerts(_on_batches(trend, spread, seed)) for seed in range(10)]
    rules = ("slow_improvement", "val_increase", "overfit", "lr_check", "underfit")
    warned = [a for alerts in runs for a in alerts if a.rule in rules and a.severity != "info"]
    assert len(warned) <= 1, warned
    assert sum(a.rule in rules for alerts in runs for a in alerts) <= 4


def test_a_rise_beyond_the_noise_of_evaluations() -> None:
    rising = _on_batches(lambda x: 2 - x if x < 0.5 else 0.5 + 2 * x, 0.05, seed=1, on=8)
    found = [(a.rule, a.step) for a in _alerts(rising) if a.severity == "warning"]
    assert {"val_increase"} <= {rule for rule, _ in found}
    assert next(step for rule, step in found if rule == "val_increase") <= 280
