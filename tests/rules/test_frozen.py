"""Frozen parameters: patience, cooldown, and the reason."""

from __future__ import annotations

import re

import pytest
from sample_records import alerts_of as all_alerts_of
from sample_records import make_engine, make_record

from distmon.record.record import Record
from distmon.rules import RuleEngine
from distmon.rules.alert import Alert

STILL = {"update_expected": 1.0, "update_ratio": 0.0, "update_norm": 0.0}


def alerts_of(engine: RuleEngine, record: Record) -> list[Alert]:
    """The alerts of the rule `frozen`."""
    return [alert for alert in all_alerts_of(engine, record) if alert.rule == "frozen"]


def test_fires_at_the_third_observation_and_then_rests() -> None:
    engine = make_engine(frozen={"cooldown": 2})
    fired = [
        step
        for step in range(1, 11)
        if alerts_of(engine, make_record(step, {"a.0.w": STILL, "a.1.w": {}}))
    ]
    assert fired == [3, 6]
    again = [s for s in range(11, 30) if alerts_of(engine, make_record(s, {"a.0.w": STILL}))]
    assert again == [11, 20]  # two and four cooldowns of silence


def test_a_moving_observation_starts_patience_anew() -> None:
    engine = make_engine()
    moves = [STILL, STILL, {}, STILL, STILL, STILL]
    fired = [bool(alerts_of(engine, make_record(i, {"w": m}))) for i, m in enumerate(moves)]
    assert fired == [False, False, False, False, False, True]


NAN = float("nan")
UNSTEPPED = {"update_expected": 1.0, "update_ratio": NAN, "update_norm": NAN, "has_grad": 0.0}


def test_an_optimizer_that_does_not_step_is_named() -> None:
    engine = make_engine()
    found = [
        alert
        for step in range(1, 5)
        for alert in alerts_of(engine, make_record(step, {"a.w": {}, "b.w": UNSTEPPED}))
    ]
    assert [(a.step, a.severity, a.params) for a in found] == [(3, "warning", ("b.w",))]
    assert "its optimizer has not stepped" in found[0].message
    assert "step()" in found[0].advice[0]


def test_an_optimizer_that_has_stepped_may_stop_or_step_in_between() -> None:
    engine = make_engine()
    for step, numbers in enumerate([{}, {}, *[UNSTEPPED] * 6], start=1):
        assert alerts_of(engine, make_record(step, {"a.w": {}, "b.w": numbers})) == []
    engine = make_engine()
    for step in range(1, 9):
        moving = {**UNSTEPPED, "weight_norm": 1.0 + step}
        assert alerts_of(engine, make_record(step, {"a.w": {}, "b.w": moving})) == []


def test_a_skipped_step_neither_confirms_nor_ends_a_streak() -> None:
    engine = make_engine()
    alerts_of(engine, make_record(1, {"w": STILL}))
    alerts_of(engine, make_record(2, {"w": STILL}))
    nan = {"update_ratio": float("nan")}
    assert alerts_of(engine, make_record(3, {"w": nan}, applied=False)) == []
    assert len(alerts_of(engine, make_record(4, {"w": STILL}))) == 1


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        ({"requires_grad": 0.0, "has_grad": 0.0}, "requires_grad was set to False"),
        ({"in_optimizer": 0.0}, "no optimizer owns it"),
        ({"has_grad": 0.0}, "it gets no gradient"),
        ({"grad_zero_fraction": 1.0}, "its gradient is exactly zero"),
        (
            {"update_lost_fraction": 0.97, "update_lost_bound": 0.02},
            r"lost to rounding \(97% of its non-zero gradients\)",
        ),
        ({}, "the optimizer does not change it"),
    ],
)
def test_reasons_of_frozen_parameters(numbers: dict[str, float], words: str) -> None:
    engine = make_engine(frozen={"patience": 1})
    assert alerts_of(engine, make_record(4, {"blocks.3.mlp.w": {}})) == []
    (alert,) = alerts_of(engine, make_record(5, {"blocks.3.mlp.w": {**STILL, **numbers}}))
    assert alert.rule == "frozen"
    assert alert.params == ("blocks.3.mlp.w",)
    assert alert.layers == ("blocks.3",)
    assert alert.advice
    assert alert.threshold == 1e-12
    assert re.search(words, alert.message)


def test_one_alert_per_reason_names_all_parameters() -> None:
    engine = make_engine(frozen={"patience": 1})
    table = {f"blocks.{i}.w": {**STILL, "has_grad": 0.0} for i in range(8)}
    table["head.w"] = {**STILL, "in_optimizer": 0.0}
    first, second = alerts_of(engine, make_record(5, table))
    assert first.message.startswith("8 parameters did not move: blocks.0.w")
    assert "and 3 more" in first.message
    assert len(first.params) == 8
    assert second.params == ("head.w",)


def test_a_gap_that_is_usual_in_the_run_is_no_fault() -> None:
    """Experts without tokens and blocks that are skipped get no gradient now and then."""
    engine = make_engine()
    rests = {**STILL, "has_grad": 0.0}
    pattern = [{}, rests, {}, {}] * 3  # gaps of one observation that end
    fired = [alerts_of(engine, make_record(i, {"w": m})) for i, m in enumerate(pattern)]
    assert not any(fired)
    fired = [i for i in range(10) if alerts_of(engine, make_record(20 + i, {"w": rests}))]
    assert fired == [5]  # three times the longest gap, and then the patience of three


def test_a_bias_before_batchnorm_is_not_called_frozen() -> None:
    """Its gradient is zero but for rounding."""
    engine = make_engine(frozen={"patience": 1})
    bias = {**STILL, "ndim": 1.0, "grad_norm": 1e-9}
    assert alerts_of(engine, make_record(5, {"w": {}, "b": bias, "v": {}})) == []
    assert alerts_of(engine, make_record(6, {"w": {}, "b": {**bias, "grad_norm": 0.1}})) != []


def test_vectors_that_bf16_cannot_move_share_one_info() -> None:
    engine = make_engine()
    lost = {**STILL, "ndim": 1.0, "update_lost_fraction": 1.0, "update_lost_bound": 0.1}
    found = []
    for i in range(6):
        table = {"w": {}, "norm1": lost if i % 2 else {}, "norm2": {} if i % 2 else lost}
        found += alerts_of(engine, make_record(i, table))
    (alert,) = found
    assert (alert.severity, alert.step) == ("info", 2)
