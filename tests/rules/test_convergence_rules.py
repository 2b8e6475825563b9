"""A loss that stands still, and the average that is evaluated."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence

import numpy as np
import pytest
from sample_records import alerts_of, make_engine, make_record

from distmon.record.loss_ema import LossEma


def _fired(losses: dict[int, float], lr: float = 1e-3, **settings: object) -> list[tuple[str, int]]:
    engine = make_engine(**settings)
    found = []
    for step, loss in losses.items():
        metrics = {"train/step_loss_ema": loss, "train/lr": lr}
        found += [(a.rule, a.step) for a in alerts_of(engine, make_record(step, metrics=metrics))]
    return found


def test_a_loss_that_stands_still() -> None:
    falls = {s: 6 - s / 1000 for s in range(100, 2001, 100)}
    stays = {s: 4 + 0.02 * (s // 100 % 2) for s in range(2100, 6001, 100)}
    assert _fired(falls | stays) == [("loss_plateau", 4100)]
    assert {rule for rule, _ in _fired(falls | stays, lr=0.0)} == {"lr_zero"}
    assert _fired(falls) == []


@pytest.mark.parametrize("interval", [10, 100, 1000])
def test_a_power_law_is_never_a_plateau(interval: int) -> None:
    steps = range(interval, 300_000, max(interval, 500))
    assert _fired({s: 1.7 + 12 * s**-0.2 for s in steps}) == []


def test_the_end_of_a_decay_is_no_plateau() -> None:
    engine = make_engine()
    for step in range(100, 12_001, 100):
        loss = 2 + max(0.0, 1 - step / 6000)
        lr = 1e-3 * max(0.05, 1 - step / 7000)
        metrics = {"train/step_loss_ema": loss, "train/lr": lr}
        assert alerts_of(engine, make_record(step, metrics=metrics)) == []


def test_no_better_average_for_10k_steps() -> None:
    settings = {"loss_plateau": {"enabled": False}}
    losses = {100: 3.0, 200: 2.0} | dict.fromkeys(range(300, 10_500, 100), 2.2)
    assert _fired(losses, **settings) == [("no_improvement", 10_200)]
    # 0.2% better in between is enough, 0.05% is not.
    assert _fired({**losses, 5000: 2.0 * 0.998}, **settings) == []
    assert _fired({**losses, 5000: 2.0 * 0.9995}, **settings) == [("no_improvement", 10_200)]
    assert _fired({**losses, 5000: math.nan}, **settings) == [("no_improvement", 10_200)]


def _divergence(
    losses: Sequence[float],
    interval: int = 5,
    expected_to_fall: float | None = None,
    alternating: float = 0.0,
) -> list[int]:
    engine, ema, fired = make_engine(), LossEma(0.99), []
    for step in range(interval, len(losses) + 1, interval):
        part = losses[step - interval : step]
        average = [ema.update(loss) for loss in part][-1]
        metrics = {"train/step_loss_ema": average, "train/lr": 1e-3}
        if expected_to_fall is not None:
            metrics["train/loss_expected_to_fall"] = expected_to_fall
        record = make_record(
            step,
            losses=dict(enumerate(part, start=step - interval + 1)),
            metrics=metrics,
            ranks={"alternating": np.array([alternating])},
        )
        fired += [a.step for a in alerts_of(engine, record) if a.rule == "loss_divergence"]
    return fired


def test_a_loss_that_climbs_without_a_jump() -> None:
    falls = [5 - i / 100 for i in range(250)]
    climbs = [2.5 + i / 50 for i in range(200)]
    (told, *_) = _divergence(falls + climbs)
    assert 250 < told < 400
    noise = random.Random(0)
    assert _divergence([x * noise.uniform(0.8, 1.25) for x in falls + [2.5] * 500]) == []
    # One bad batch at a time is a spike, not this.
    assert _divergence(falls + [2.5, 2.5, 30.0, 2.5, 2.5] * 20) == []
    # The zero of a loss means nothing: the same rise, shifted below zero and in other units.
    for scale, shift in ((1e-4, 0.0), (1e4, 0.0), (1.0, -20.0)):
        assert _divergence([scale * x + shift for x in falls + climbs])[0] == told


def test_a_loss_that_need_not_fall() -> None:
    falls, climbs = [5 - i / 100 for i in range(250)], [2.5 + i / 50 for i in range(200)]
    assert _divergence(falls + climbs, expected_to_fall=0.0) == []
    assert _divergence(falls + climbs, expected_to_fall=1.0) != []
    # Found out: optimizers that take turns, and a loss that keeps changing its sign.
    assert _divergence(falls + climbs, alternating=1.0) == []
    turns = [x * (-1) ** (i // 4) for i, x in enumerate(falls + climbs)]
    assert _divergence(turns) == []


def test_what_is_remembered_stays_small() -> None:
    engine = make_engine()
    for step in range(50, 50_000, 50):
        metrics = {"train/step_loss_ema": 5 - step / 1e5, "train/lr": 1e-3}
        alerts_of(engine, make_record(step, metrics=metrics))
    assert len(engine.state_dict()["rules"]["loss_plateau"]["memory"]["points"]) < 40


def test_the_average_has_less_than_a_tenth_of_the_variance() -> None:
    noise, ema = random.Random(3), LossEma(0.99)
    losses = [3 + noise.gauss(0, 0.3) for _ in range(5000)]
    averages = [ema.update(loss) for loss in losses]
    settled = [a for a in averages[500:] if a is not None]
    ratio = statistics.variance(settled) / statistics.variance(losses[500:])
    assert ratio < 0.1
    # (1 - decay) / (1 + decay) in theory.
    assert ratio == pytest.approx(0.01 / 1.99, rel=0.5)
