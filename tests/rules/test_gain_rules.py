"""Gain of the backward pass: an info alone, a warning with a second sign."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from sample_records import alerts_of, make_engine, make_gain, make_record

from distmon.rules import RuleEngine
from distmon.rules.alert import Alert

DEEP = 7
"""Blocks of a stack whose gain is evaluated: six follow the first."""


def _alerts(
    engine: RuleEngine,
    means: Sequence[float],
    norms: Sequence[float] = (),
    blocks: int = DEEP,
    **ranks: float,
) -> list[Alert]:
    """All alerts of the gain rules; the step of each is the place in `means`, from 1."""
    found: list[Alert] = []
    for i, mean in enumerate(means, start=1):
        record = make_record(
            i,
            gradient_gain=make_gain([1.0, *[mean] * (blocks - 1)]),
            metrics={"monitor/grad_norm": norms[i - 1]} if norms else {},
            ranks={name: np.array([value]) for name, value in ranks.items()},
        )
        found += [a for a in alerts_of(engine, record) if a.rule.startswith("gain")]
    return found


RISE = [1.0] * 6 + [1.12, 1.13, 1.14, 1.15, 1.16]


def test_a_rise_over_the_window_needs_a_second_sign() -> None:
    assert _alerts(make_engine(), RISE) == []
    growing = [1.0] * 6 + [2.0, 4.0, 5.0, 6.0, 8.0]
    (alert,) = _alerts(make_engine(), RISE, growing)
    assert (alert.rule, alert.severity, alert.step) == ("gain_drift", "warning", 9)
    assert "14% more than 5 observations ago" in alert.message
    assert "the gradient norm rises too: 5, 5.0x its median" in alert.message
    # The same rise below 1, where gradients do not grow, is none.
    assert _alerts(make_engine(), [x - 0.2 for x in RISE], growing) == []


def test_a_steep_rise_alone_is_an_info_without_advice_to_change_anything() -> None:
    steep = [1.0] * 6 + [1.6, 1.7, 1.8, 1.9, 2.0]
    (alert,) = _alerts(make_engine(), steep)
    assert (alert.rule, alert.severity) == ("gain_drift", "info")
    assert not any("learning rate" in line for line in alert.advice)


@pytest.mark.parametrize(("blocks", "ranks"), [(6, {}), (DEEP, {"batchnorm_layers": 4.0})])
def test_shallow_stacks_and_batchnorm_have_no_gain_alert(
    blocks: int, ranks: dict[str, float]
) -> None:
    growing = [1.0] * 6 + [20.0, 40.0, 50.0, 60.0, 80.0]
    assert _alerts(make_engine(), [2 * x for x in RISE], growing, blocks, **ranks) == []


def test_noise_is_no_drift() -> None:
    for seed in range(3):
        noise = random.Random(seed)
        means = [1.1 + noise.uniform(-0.05, 0.05) for _ in range(200)]
        assert _alerts(make_engine(), means) == []


def test_the_limit_belongs_to_the_absolute_preset() -> None:
    jump = [1.1, 1.1, 1.4, 1.4, 1.4, 1.28, 1.28, 1.28]
    assert _alerts(make_engine(), jump) == []
    (alert,) = _alerts(make_engine(preset="absolute"), jump)
    assert (alert.rule, alert.step, alert.measured) == ("gain_absolute", 5, pytest.approx(1.4))
    assert (alert.threshold, alert.severity) == (1.3, "info")


def test_blocks_are_named_without_the_first() -> None:
    def alert_of(gains: list[float], **limits: Any) -> Alert | None:
        engine = make_engine(preset="absolute", gain_absolute={"patience": 1, **limits})
        found = alerts_of(engine, make_record(9, gradient_gain=make_gain(gains)))
        return next((a for a in found if a.rule == "gain_absolute"), None)

    alert = alert_of([1.0, 1.5, 2.6, 0.4])
    assert alert is not None
    assert "gradient gain is 1.500 per block" in alert.message
    assert "largest in blocks.2 (2.60), blocks.1 (1.50)" in alert.message
    assert "amplifying (> 2.0): blocks.2; damping (< 0.5): blocks.3" in alert.message
    assert alert.layers == ("blocks.2", "blocks.1")
    assert alert_of([60.0, 1.1, 1.0, 1.0]) is None  # a small embedding, normalised
    assert alert_of([1.4, 1.4]) is None  # a mean of one
    assert alert_of([float("nan"), 1.4, 1.4]) is not None
    # 1 + 0.05 * sqrt(4)
    assert alert_of([1.0, 1.12, 1.12, 1.12], scale_by_depth=1) is not None
    assert alert_of([1.0, 1.08, 1.08, 1.08], scale_by_depth=1) is None
