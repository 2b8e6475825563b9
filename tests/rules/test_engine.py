"""Patience, episodes, needs, and what the engine remembers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from sample_records import alerts_of, make_engine, make_gain, make_record

from distmon.record.record import ParamTable, Record
from distmon.rules import RuleEngine, rule
from distmon.rules.base import MARGIN, Finding, Limits, Memory


@rule(thresholds={"limit": 10.0}, cooldown=2)
def too_large(record: Record, limits: Limits, _: Memory) -> Iterable[Finding]:
    """Judges the metric `x`; above 100 is critical."""
    value = record.metrics["x"]
    if value > (1 - MARGIN) * limits["limit"]:
        severity = "critical" if value > 100 else None
        fading = value <= limits["limit"]
        yield Finding(key="x", message=f"{value}", severity=severity, fading=fading)


@rule(patience=2, cooldown=1, needs=["tasks", "train/lr"])
def about_parts(_: Record, __: Limits, memory: Memory) -> Iterable[Finding]:
    """Finds something in every record that it is asked about."""
    memory["asked"] = memory.get("asked", 0) + 1
    yield Finding(key="part", message="there")


def _engine(**settings: Any) -> RuleEngine:
    return make_engine(own=[too_large, about_parts], **settings)


def _told(engine: RuleEngine, values: Sequence[float]) -> list[int]:
    """The places at which `too_large` fired."""
    return [
        i
        for i, value in enumerate(values)
        if any(
            a.rule == "too_large" for a in alerts_of(engine, make_record(i, metrics={"x": value}))
        )
    ]


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ([0, 11, 0], [1]),
        # One cooldown (2) of silence, then two, four, eight, and never more than eight.
        ([11.0] * 60, [0, 3, 8, 17, 34, 51]),
        # Around the limit it is one episode: 9.5 is inside, but by less than the margin.
        ([11, 9.5, 9.5, 9.5, 9.5, 9.5, 11, 9.5, 9.5, 11], [0, 6]),
        ([11, 0, 0, 11, 0, 0, 11, 0, 0, 11, 0, 0, 11], [0, 3, 9]),
        # Three calm observations end it, and the next one begins with a short silence.
        ([11, 11, 11, 11, 0, 0, 0, 11, 11, 11, 11], [0, 3, 7, 10]),
        # Also a new episode keeps the cooldown.
        ([11, 0, 0, 0, 11], [0, 4]),
        # What becomes graver is told at once, what becomes milder is not.
        ([11, 200, 11, 200], [0, 1]),
        # Fading alone is nothing.
        ([9.5] * 10, []),
    ],
)
def test_episodes(values: list[float], told: list[int]) -> None:
    assert _told(_engine(), values) == told


def test_a_long_cooldown_outlasts_its_episode() -> None:
    values = [11.0, 0, 0, 0, 0, 11, 0, 0, 0, 0, 11]
    assert _told(_engine(too_large={"cooldown": 8}), values) == [0, 10]


def test_a_fading_finding_interrupts_the_calm() -> None:
    engine = _engine(too_large={"cooldown": 3})
    # Told at 0 and 4; the episode lasts, so that the next reminder is due after 6 of silence.
    assert _told(engine, [11, 11, 11, 11, 11, 0, 0, 9.5, 0, 11, 11, 11]) == [0, 4, 11]


def test_patience_counts_findings_in_a_row_and_fading_ones_stand_still() -> None:
    patient = {"patience": 3}
    assert _told(_engine(too_large=patient), [11, 11, 0, 11, 11, 11]) == [5]
    assert _told(_engine(too_large=patient), [11, 11, 9.5, 11]) == [3]
    assert _told(_engine(too_large=patient), [9.5, 9.5, 9.5, 11, 11]) == []


def test_without_a_cooldown_every_finding_is_an_alert() -> None:
    assert _told(_engine(too_large={"cooldown": 0}), [11.0] * 4) == [0, 1, 2, 3]


def test_new_findings_ignore_the_cooldown() -> None:
    @rule(cooldown=100)
    def events(record: Record, _: Limits, __: Memory) -> Iterable[Finding]:
        """New at even steps."""
        yield Finding(key="e", message="", is_new=record.step % 2 == 0)

    engine = make_engine(own=[events])
    assert [i for i in range(1, 7) if alerts_of(engine, make_record(i))] == [1, 2, 4, 6]


def test_a_record_without_the_needed_part_is_no_observation() -> None:
    engine = _engine(too_large={"enabled": False})
    parts: list[dict[str, Any]] = [
        {"tasks": {"a": 1.0}},
        {},
        {"metrics": {"train/lr": float("nan")}},
        {"metrics": {"train/lr": 1.0}},  # the second that counts: patience is 2
        {},
        {"tasks": {"a": 1.0}},
        {},
        {"tasks": {"a": 1.0}},  # one of silence between: told again
    ]
    told = [i for i, p in enumerate(parts) if alerts_of(engine, make_record(i, **p))]
    assert told == [3, 7]
    assert engine.state_dict()["rules"]["about_parts"]["memory"] == {"asked": 4}


def test_a_partial_record_is_for_the_rules_that_need_what_it_has() -> None:
    engine = _engine()
    whole = make_record(1, metrics={"x": 99.0}, tasks={"a": 1.0})
    partial = replace(whole, partial=True, params=ParamTable.empty())
    assert engine.evaluate(replace(partial, tasks={})) == ([], {})
    assert engine.evaluate(partial) == ([], {})
    assert [a.rule for a in engine.evaluate(partial)[0]] == ["about_parts"]
    counted = {n: s["observation"] for n, s in engine.state_dict()["rules"].items()}
    assert {n for n, count in counted.items() if count} == {
        "about_parts",
        "task_imbalance",
        "task_collapse",
    }


def test_what_is_over_is_forgotten() -> None:
    @rule(cooldown=2)
    def ever_new(record: Record, _: Limits, __: Memory) -> Iterable[Finding]:
        """Another key at every record."""
        yield Finding(key=f"k{record.step}", message="")

    engine = make_engine(own=[ever_new])
    for step in range(200):
        assert len(alerts_of(engine, make_record(step))) == 1
    assert len(engine.state_dict()["rules"]["ever_new"]["tracks"]) <= 4


def test_layers_of_a_finding_and_of_its_parameters() -> None:
    @rule()
    def both(_: Record, __: Limits, ___: Memory) -> Iterable[Finding]:
        """Names a layer and a parameter."""
        yield Finding(key="", message="", layers=("blocks.1",), params=("blocks.0.w", "blocks.1.w"))

    (alert,) = alerts_of(make_engine(own=[both]), make_record(1, gradient_gain=make_gain([1.0])))
    assert alert.layers == ("blocks.1", "blocks.0")


def test_an_info_that_goes_on_is_not_repeated() -> None:
    engine = make_engine(frozen={"severity": "info", "cooldown": 2})
    still = {"update_ratio": 0.0, "update_norm": 0.0, "grad_norm": 0.0, "has_grad": 0.0}
    found = [alerts_of(engine, make_record(10 * i, {"head.weight": still})) for i in range(1, 30)]
    assert [a.rule for alerts in found for a in alerts].count("frozen") == 1
