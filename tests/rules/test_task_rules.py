"""Tasks that pull with different force."""

from __future__ import annotations

import math

import pytest
from sample_records import alerts_of, make_engine, make_record

from distmon.rules.alert import Alert


def _alerts(tasks: dict[str, float], times: int, name: str) -> list[Alert]:
    engine = make_engine()
    found = [a for i in range(times) for a in alerts_of(engine, make_record(i, tasks=tasks))]
    return [a for a in found if a.rule == name]


@pytest.mark.parametrize(
    ("norms", "named"),
    [
        ([1.0, 1.9], None),
        ([1.0, 2.1], "b"),
        ([0.4, 1.0, 1.0], "a"),  # none is too strong: the weak one is named
        ([1.0, 1.0, 1.0, 2.1], "d"),
        ([1.0, 0.0], "a"),
        ([0.0, 0.0], None),
        ([1.0, math.nan], None),
        ([1.0, math.inf], None),
        ([3.0], None),
    ],
)
def test_imbalance(norms: list[float], named: str | None) -> None:
    tasks = dict(zip("abcd", norms, strict=False))
    assert _alerts(tasks, 2, "task_imbalance") == []
    found = _alerts(tasks, 3, "task_imbalance")
    assert len(found) == (named is not None)
    for alert in found:
        assert alert.severity == "info"
        assert alert.message.startswith(f"the gradient of task {named} is")
        assert alert.message.count("task") == 1


def test_several_tasks_share_an_alert() -> None:
    (alert,) = _alerts({"a": 3.0, "b": 3.0, "c": 0.1, "d": 0.1}, 3, "task_imbalance")
    assert [f"task {t} is" in alert.message for t in "abcd"] == [True, True, False, False]


@pytest.mark.parametrize(
    ("norms", "words"),
    [
        ([1.0, 4.9], None),
        ([1.0, 5.1], "task b dominates: its gradient was 5.10x"),
        ([0.1, 1.0, 1.0], "task a starves: its gradient was 0.10x"),
        ([1.0, 9.0, 1.0], "task b dominates"),
    ],
)
def test_collapse_needs_ten_checks(norms: list[float], words: str | None) -> None:
    tasks = dict(zip("abc", norms, strict=False))
    assert _alerts(tasks, 9, "task_collapse") == []
    found = _alerts(tasks, 10, "task_collapse")
    assert len(found) == (words is not None)
    for alert in found:
        assert words in alert.message
        assert alert.step == 9


def test_collapse_is_a_mean_and_names_the_weight_to_set() -> None:
    engine = make_engine()
    found = []
    for i in range(10):
        tasks = {"words": 11.0 if i % 2 else 1.0, "tags": 1.0}
        found += alerts_of(engine, make_record(i, tasks=tasks))
    (alert,) = [a for a in found if a.rule == "task_collapse"]
    assert alert.measured == 6.0
    assert alert.advice[0] == "multiply the loss of task words by 0.17"
