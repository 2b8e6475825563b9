"""Update ratios of single parameters, and the median against what is usual."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from sample_records import alerts_of, make_engine, make_record

from distmon.rules.alert import Alert


def _median(ratios: Sequence[float], first: int, lrs: Sequence[float] = (1e-3,)) -> list[Alert]:
    engine = make_engine(preset="absolute")
    found = []
    for i, ratio in enumerate(ratios):
        lr = lrs[min(i, len(lrs) - 1)]
        metrics = {"monitor/update_ratio_median": ratio, "train/lr": lr}
        found += alerts_of(engine, make_record(first + 10 * i, metrics=metrics))
    return found


@pytest.mark.parametrize(
    ("first", "ratio", "words"),
    [
        (300, 5e-3, None),
        (300, 2e-2, "above the usual range of 1e-03 to 1e-02 before step 1000"),
        (300, 5e-4, "below the usual range of 1e-03 to 1e-02"),
        (10, 2e-2, None),
        (2000, 5e-4, None),
        (2000, 2e-3, "above the usual range of 1e-04 to 1e-03 before step 10000"),
        (20_000, 5e-5, None),
        (20_000, 5e-6, "below the usual range of 1e-05 to 1e-04 after step 10000"),
        (300, float("nan"), None),
    ],
)
def test_the_median_against_its_phase(first: int, ratio: float, words: str | None) -> None:
    assert _median([ratio] * 4, first) == []
    found = _median([ratio] * 12, first)  # patience 5, and then a long silence
    assert len(found) == (words is not None)
    for alert in found:
        assert (alert.rule, alert.severity) == ("update_ratio_phase", "info")
        assert words in alert.message


@pytest.mark.parametrize(
    "lrs",
    [
        [1e-5 * (i + 1) for i in range(40)],  # a warmup
        [1e-3, *[2e-4] * 40],  # the end of a decay
        [0.0],
    ],
)
def test_a_learning_rate_that_explains_the_ratio(lrs: list[float]) -> None:
    found = _median([1e-5] * 40, 300, lrs)
    assert [alert for alert in found if alert.rule != "lr_zero"] == []
    assert len(_median([1e-5] * 40, 300)) == 1


def test_the_first_steps_use_the_median() -> None:
    engine = make_engine()
    table = {"zero.w": {"update_ratio": 0.9}}
    alerts = [
        alert
        for i, median in enumerate([0.05, 0.25, 0.3, 0.3, 0.05], start=1)
        for alert in alerts_of(
            engine, make_record(i, table, metrics={"monitor/update_ratio_median": median})
        )
    ]
    assert [(a.rule, a.step, a.params) for a in alerts] == [("update_ratio_high", 3, ())]
    assert "half of the parameters by 3.0e-01" in alerts[0].message


def test_a_bias_near_zero_is_not_half_of_a_model() -> None:
    """The median of a weight at 0.1 and of a bias that crosses zero, at 110, would be 55."""
    engine = make_engine()
    table = {"weight": {"update_ratio": 0.1}, "bias": {"update_ratio": 110.0, "ndim": 1.0}}
    for step in (10, 20, 30):
        metrics = {"monitor/update_ratio_median": 55.05}
        assert alerts_of(engine, make_record(step, table, metrics=metrics)) == []


def test_advice_names_group_learning_rate_and_clip() -> None:
    engine = make_engine(update_ratio_high={"patience": 1}, grad_norm_high={"enabled": False})
    metrics = {"train/lr": 1e-3, "monitor/grad_norm": 2.0, "train/unclipped_grad_norm": 9.0}
    table = {"blocks.0.w": {"update_ratio": 0.3, "lr": 4e-4}, "blocks.1.w": {"update_ratio": 0.19}}
    (alert,) = alerts_of(engine, make_record(500, table, metrics=metrics))
    assert alert.advice == (
        "halve the learning rate of the group of blocks.0.w from 4e-4 to 2e-4",
        "lengthen the warmup",
        "tighten gradient clipping from 2.0 to 1.4",
    )
    assert alert.params == ("blocks.0.w",)  # the other is inside, by less than the margin
