"""nonfinite, update ratios, loss spikes, replicas."""

from __future__ import annotations

import math
import random
from dataclasses import replace

from sample_records import alerts_of, make_engine, make_record

from distmon.record.loss_ema import LossEma
from distmon.record.record import Record
from distmon.reduce.findings import Desync, NonFinite, NonFinitePlace


def _losses(values: list[float], start: int = 1) -> Record:
    ema, averages = LossEma(0.99), {}
    for i, value in enumerate(values):
        average = ema.update(value)
        if average is not None:
            averages[start + i] = average
    losses = {start + i: v for i, v in enumerate(values)}
    return make_record(start + len(values) - 1, losses=losses, loss_ema=averages)


def test_nonfinite_names_parameter_rank_and_step() -> None:
    places = (NonFinitePlace("a.1.w", 3, 0, 0, 2, 0), NonFinitePlace("a.2.w", 3, 1, 0, 0, 1))
    record = make_record(100, nonfinite=NonFinite(97, "gradient norm", places, 2))
    (alert,) = alerts_of(make_engine(), record)
    assert alert.severity == "critical"
    assert (alert.params, alert.ranks) == (("a.1.w", "a.2.w"), (3,))
    assert "step 97" in alert.message
    assert "on rank 3, a.1.w holds 2 NaN in its gradient" in alert.message
    assert "1 others hold some too, such as a.2.w" in alert.message
    assert "where it began is not known" in alert.message  # a weight holds one: it has spread
    gradients = tuple(replace(place, weight_nan=0) for place in places)
    record = make_record(100, nonfinite=NonFinite(97, "gradient norm", gradients, 2))
    (alert,) = alerts_of(make_engine(), record)
    assert "a.2.w is the last in layer order: it began there or behind it" in alert.message


def test_nonfinite_loss_alone_is_critical() -> None:
    (alert,) = alerts_of(make_engine(), _losses([2.0, math.inf, 2.0]))
    assert (alert.rule, alert.severity) == ("nonfinite", "critical")
    assert "step 2" in alert.message


def test_update_ratios_outside_their_range() -> None:
    engine = make_engine(update_ratio_high={"patience": 1}, update_ratio_low={"patience": 1})
    table = {
        "big": {"update_ratio": 0.5},
        "bias": {"update_ratio": 0.5, "ndim": 1.0},
        "bigger": {"update_ratio": 0.9},
        "tiny": {"update_ratio": 1e-9},
        "tiny_lr": {"update_ratio": 1e-9, "lr": 1e-9},
        "still": {"update_ratio": 0.0, "update_expected": 1.0},
        "fine": {},
    }
    high, low = alerts_of(engine, make_record(150, table))
    assert high.params == ("bigger", "big")
    assert "bigger by 9.0e-01" in high.message
    assert low.params == ("tiny", "tiny_lr")  # a rate that was never higher explains nothing
    # Zero-initialized weights double at first: the first steps are not evaluated.
    assert alerts_of(engine, make_record(5, {"big": {"update_ratio": 0.5}})) == []


def test_loss_spikes_by_factor() -> None:
    (warning,) = alerts_of(make_engine(), _losses([3.0] * 20 + [40.0]))
    assert (warning.rule, warning.severity) == ("loss_spike", "warning")
    assert "step 21" in warning.message
    (critical,) = alerts_of(make_engine(), _losses([3.0] * 20 + [400.0, 3.0]))
    assert critical.severity == "critical"


def test_loss_spike_by_sigmas_needs_64_steps() -> None:
    noise = random.Random(0)
    calm = [2.0 + noise.gauss(0, 0.02) for _ in range(70)]
    (alert,) = alerts_of(make_engine(), _losses([*calm, 2.4]))
    assert "standard deviations above" in alert.message
    assert alerts_of(make_engine(), _losses([*calm[:50], 2.4])) == []


def test_an_average_that_is_no_number_is_not_compared_with() -> None:
    record = make_record(3, losses={1: 2.0, 2: 2.0, 3: 2.0}, loss_ema={1: math.nan, 2: math.nan})
    assert alerts_of(make_engine(), record) == []


def test_a_healthy_noisy_loss_is_no_spike() -> None:
    noise = random.Random(1)
    loss = [5.5 * math.exp(-i / 200) + 1.5 + noise.gauss(0, 0.1) for i in range(2000)]
    engine = make_engine()
    for start in range(0, 2000, 100):
        assert alerts_of(engine, _losses(loss[start : start + 100], start + 1)) == []


def test_desync_names_rank_and_parameter() -> None:
    desync = Desync((2,), 0, ("blocks.1.w",), tie=False)
    (alert,) = alerts_of(make_engine(), make_record(10, desync=desync))
    assert (alert.severity, alert.ranks, alert.params) == ("critical", (2,), ("blocks.1.w",))
    spoilt = make_record(10, desync=desync, losses={10: math.nan})
    assert [a.rule for a in alerts_of(make_engine(), spoilt)] == ["nonfinite"]
    tie = Desync((1,), 0, ("w",), tie=True)
    (alert,) = alerts_of(make_engine(), make_record(10, desync=tie))
    assert "no majority" in alert.message
