"""Rules that users write: a condition in the config, a function in Python."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from sample_records import alerts_of, make_engine, make_record

from distmon.errors import ConfigError
from distmon.record.record import Record
from distmon.rules import rule
from distmon.rules.base import Finding, Limits, Memory

CONDITION = {
    "when": "step_loss > 2 * median(step_loss, 3)",
    "message": "the loss is {step_loss}",
    "severity": "critical",
    "cooldown": 0,
    "advice": ["look at the batch"],
}


def _fired(engine: Any, losses: list[float], first: int = 1) -> list[int]:
    return [
        alert.step
        for step, loss in enumerate(losses, start=first)
        for alert in alerts_of(engine, make_record(step, metrics={"train/step_loss": loss}))
    ]


def test_a_condition_fires_with_its_message() -> None:
    engine = make_engine(jump=CONDITION)
    assert _fired(engine, [1.0, 5.0, 1.0, 1.0]) == []  # the window of 3 was not full at 5.0
    (alert,) = alerts_of(engine, make_record(5, metrics={"train/step_loss": 3.0}))
    assert (alert.rule, alert.severity, alert.message) == ("jump", "critical", "the loss is 3")
    assert alert.advice == ("look at the batch",)


def test_the_default_message_has_the_condition_and_its_values() -> None:
    engine = make_engine(large={"when": "step_loss > 4"})
    (alert,) = alerts_of(engine, make_record(1, metrics={"train/step_loss": 7.0}))
    assert alert.message == "step_loss > 4 (step_loss 7)"
    assert alert.severity == "warning"


def test_the_window_of_a_condition_survives_a_resume() -> None:
    losses = [1.0, 1.0, 1.0, 3.0, 1.0, 1.0, 1.0, 9.0]
    whole = _fired(make_engine(jump=CONDITION), losses)
    assert whole == [4, 8]
    for cut in range(len(losses)):
        first, second = make_engine(jump=CONDITION), make_engine(jump=CONDITION)
        before = _fired(first, losses[:cut])
        second.load_state_dict(first.state_dict())
        assert before + _fired(second, losses[cut:], first=cut + 1) == whole


def test_mistakes_name_the_rule() -> None:
    with pytest.raises(ConfigError, match=r'^rules\.jump\.when: .* no metric "los"'):
        make_engine(jump={"when": "los > 1"})
    with pytest.raises(ConfigError, match=r'unknown key "limit" in rules\.jump'):
        make_engine(jump={"when": "step_loss > 1", "limit": 3})
    with pytest.raises(ConfigError, match=r"rules\.frozen has `when`, but there already is a rule"):
        make_engine(frozen={"when": "step_loss > 1"})


@rule(severity="info", advice=["breathe"], thresholds={"limit": 3.0}, cooldown=0)
def too_many(record: Record, limits: Limits, memory: Memory) -> Iterable[Finding]:
    """Fires when it has seen too many records."""
    memory["seen"] = memory.get("seen", 0) + 1
    if memory["seen"] > limits["limit"]:
        yield Finding(key="", message=f"{memory['seen']} records at step {record.step}")


def test_a_function_is_a_rule_like_any_other() -> None:
    assert too_many.summary == "Fires when it has seen too many records."
    assert _fired(make_engine(own=[too_many]), [1.0] * 5) == [4, 5]
    assert _fired(make_engine(own=[too_many], too_many={"limit": 1}), [1.0] * 3) == [2, 3]
    with pytest.raises(ConfigError, match='two rules with the name "too_many"'):
        make_engine(own=[too_many, too_many])
    with pytest.raises(ConfigError, match=r"decorate the function with @distmon\.rule"):
        make_engine(own=[lambda *_: []])  # type: ignore[list-item]


def test_a_rule_can_read_one_parameter() -> None:
    params = make_record(1, {"embed.weight": {"weight_norm": 60.0}, "b": {}}).params
    assert params.row("embed.weight")["weight_norm"] == 60
    with pytest.raises(KeyError):
        params.row("c")
