"""Advice names the numbers that there are, and says it without those that are missing."""

from __future__ import annotations

import math

import pytest
from sample_records import make_record

from distmon.record.history import RunHistory
from distmon.rules.advice import lower_lr, number, raise_lr, ranked_causes, tighten_clipping


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (3e-3, "3e-3"),
        (1.5e-3, "1.5e-3"),
        (0.7, "0.7"),
        (1.0, "1.0"),
        (0.01, "0.01"),
        (0.123, "0.12"),
        (9.96, "10"),
        (250, "250"),
        (12345, "1.2e4"),
        (0.0, "0"),
        (math.inf, "inf"),
    ],
)
def test_numbers_as_people_write_them(value: float, text: str) -> None:
    assert number(value) == text


@pytest.mark.parametrize(
    ("lr", "half", "double"),
    [
        (3e-3, " from 3e-3 to 1.5e-3", " from 3e-3 to 6e-3"),
        (0.0, "", ""),
        (math.nan, "", ""),
        (None, "", ""),
    ],
)
def test_learning_rates(lr: float | None, half: str, double: str) -> None:
    record = make_record(1, metrics={} if lr is None else {"train/lr": lr})
    assert lower_lr(record) == f"halve the learning rate{half}"
    assert raise_lr(record) == f"double the learning rate{double}"


@pytest.mark.parametrize(
    ("shown", "applied", "error", "text"),
    [
        (4.0, 1.0, 0.0, "tighten gradient clipping from 1.0 to 0.7"),
        (4.0, 1.0, 0.1, "tighten gradient clipping from 1.0 to 0.7"),
        # The applied norm is an estimate: within its error nothing was clipped.
        (1.3, 1.0, 0.2, "clip gradients at 1.0, or tighten the clip by a third"),
        (math.nan, math.nan, 0.0, "clip gradients at 1.0, or tighten the clip by a third"),
        (None, None, 0.0, "clip gradients at 1.0, or tighten the clip by a third"),
    ],
)
def test_clipping(shown: float | None, applied: float | None, error: float, text: str) -> None:
    metrics = {
        "train/unclipped_grad_norm": shown,
        "monitor/grad_norm": applied,
        "monitor/grad_norm_stderr": error,
    }
    given = {tag: value for tag, value in metrics.items() if value is not None}
    assert tighten_clipping(make_record(1, metrics=given)) == text


def test_the_clip_comes_from_the_norms_of_the_run() -> None:
    """Not from the norm of the moment, which may be a thousand times the usual one."""
    history = RunHistory()
    for i in range(20):
        history.update(make_record(i, metrics={"monitor/grad_norm": 0.024 * (1 + i / 20)}))
    record = make_record(21, metrics={"monitor/grad_norm": 500.0}, history=history)
    assert tighten_clipping(record).startswith("clip gradients at 0.045, which nine of ten")


def test_causes_are_ranked_by_what_speaks_for_them() -> None:
    history = RunHistory()
    for i in range(10):
        history.update(make_record(i, metrics={"monitor/grad_norm": 1.0, "train/lr": 1e-3}))

    def ranked(lr: float, ratio: float) -> str:
        metrics = {"train/lr": lr, "monitor/update_ratio_median": ratio, "monitor/grad_norm": 1.0}
        return ranked_causes(make_record(11, metrics=metrics, history=history))[0]

    assert ranked(1e-3, 1e-3).startswith("inspect the data since the rise")
    assert ranked(2e-3, 1e-3).startswith("halve the learning rate from 2e-3")
    assert "a step changes half of the parameters by 10%" in ranked(1e-3, 0.1)
