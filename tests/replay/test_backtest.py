"""Rules over lists of records: counts, shares, failures, and thresholds in turn."""

from __future__ import annotations

from pathlib import Path

import pytest
from rules.sample_records import make_record

import distmon
from distmon.errors import ConfigError
from distmon.record.record import Record
from distmon.replay import activate, load_rules, parse_sweep, run_rules, run_sweep
from distmon.replay.settings import as_settings
from distmon.replay.sweep import current_value
from distmon.rules.base import Finding

SETTINGS = as_settings(
    {
        "often": {"when": "step_loss > 1", "cooldown": 0, "severity": "critical"},
        "rarely": {"when": "step_loss > 3", "cooldown": 0, "severity": "info"},
    }
)


def _records(*losses: float) -> list[Record]:
    return [make_record(10 * i, metrics={"train/step_loss": loss}) for i, loss in enumerate(losses)]


def test_counts_and_shares() -> None:
    only = [a for a in activate(SETTINGS) if a.rule.name in SETTINGS]
    done: list[float] = []
    replay = run_rules(_records(0, 2, 0, 4, 0, 0, 0, 0), only, done.append)
    assert [(a.step, a.rule) for a in replay.alerts] == [
        (10, "often"),
        (30, "often"),
        (30, "rarely"),
    ]
    assert replay.by_severity() == {"critical": 2, "warning": 0, "info": 1}
    assert [a.rule for a in replay.alarms] == ["often", "often"]
    assert replay.observations == 8
    assert replay.alarm_share == 2 / 8
    assert replay.share(replay.by_rule()["rarely"]) == 1 / 8
    assert done[-1] == 1.0
    assert len(done) == 8
    nothing = run_rules([], only)
    assert (nothing.alarm_share, nothing.alerts) == (0.0, ())


def test_a_failing_rule_is_reported_and_the_others_continue() -> None:
    @distmon.rule()
    def fragile(record: Record, limits: object, memory: object) -> list[Finding]:  # noqa: ARG001
        if record.step >= 10:
            raise KeyError("missing")
        return []

    active = [a for a in activate(SETTINGS, [fragile]) if a.rule.name in ("fragile", "often")]
    replay = run_rules(_records(2, 2, 2), active)
    (failure,) = replay.failures
    assert (failure.rule, failure.count, failure.step) == ("fragile", 2, 10)
    assert failure.error == "KeyError: 'missing'"
    assert [a.rule for a in replay.alerts] == ["often"] * 3


def test_a_sweep_runs_one_rule_with_each_value() -> None:
    quiet = [1.0, 1.02] * 75  # longer than the rule remembers a spike
    losses = [*quiet, 12.0, *quiet, 30.0, *quiet]
    records = [
        make_record(10 * i, losses={10 * i: loss}, loss_ema={10 * i: 1.0})
        for i, loss in enumerate(losses)
    ]
    settings = as_settings({"loss_spike": {"enabled": False, "cooldown": 0, "sigmas": 1e9}})
    sweep = parse_sweep("loss_spike.warning_factor=5, 20, 50", settings)
    points = run_sweep(records, sweep, settings)
    assert [(p.value, p.alerts, p.first_step, p.share) for p in points] == [
        (5, 2, 1500, 2 / len(records)),
        (20, 1, 3010, 1 / len(records)),
        (50, 0, None, 0.0),
    ]
    assert current_value(sweep, settings) == 10
    silent = parse_sweep("loss_spike.cooldown=0,1000", settings)
    assert [p.alerts for p in run_sweep(records, silent, settings)] == [2, 1]
    assert current_value(silent, settings) == 0


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("loss_spike", 'bad sweep "loss_spike": expected rule.threshold=a,b,c'),
        ("loss_spike.sigmas=", "expected rule.threshold=a,b,c"),
        ("loss_spke.sigmas=1", 'unknown rule "loss_spke" in the sweep; did you mean "loss_spike"?'),
        ("loss_spike.sigma=1", 'unknown threshold "sigma" of loss_spike; did you mean "sigmas"?'),
        ("loss_spike.sigmas=1,two", "1,two is not a list of numbers"),
        ("loss_spike.patience=0", 'bad value 0.0 for "rules.loss_spike.patience"'),
    ],
)
def test_a_wrong_sweep_is_one_sentence(text: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_sweep(text, {})
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_rules_come_from_a_config_or_stand_alone(tmp_path: Path) -> None:
    alone = tmp_path / "alone.yaml"
    alone.write_text("frozen: {patience: 7}\nmine: {when: 'step_loss > 3'}\n")
    whole = tmp_path / "whole.json"
    whole.write_text('{"interval": 5, "rules": {"frozen": {"patience": 7}}}')
    for file in (alone, whole):
        frozen = next(a for a in activate(load_rules(file)) if a.rule.name == "frozen")
        assert frozen.patience == 7
    assert "mine" in {a.rule.name for a in activate(load_rules(alone))}
    without = tmp_path / "without.yaml"
    without.write_text("interval: 5\n")
    assert load_rules(without) == {}


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("frozen: {patience: 0}", 'bad value 0 for "rules.frozen.patience" in'),
        ("frozen: 3", 'bad value 3 for "rules.frozen" in'),
        ("frozzen: {patience: 1}", 'unknown rule "frozzen" in rules'),
        ("frozen: {patients: 1}", 'unknown key "patients" in rules.frozen'),
        ("[1, 2]", "must hold keys and values, not a list"),
    ],
)
def test_a_wrong_rules_file_is_one_sentence(text: str, sentence: str, tmp_path: Path) -> None:
    file = tmp_path / "rules.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        activate(load_rules(file))
    assert sentence in str(caught.value)


def test_the_threshold_of_frozen_is_swept_like_any_other() -> None:
    """The record holds the evidence; how little movement is none is decided by the rule."""
    table = {"w": {"update_ratio": 1e-9, "update_expected": 1.0}}
    records = [make_record(step, table) for step in range(1, 6)]
    sweep = parse_sweep("frozen.ratio=1e-12,1e-8", {})
    assert [point.alerts for point in run_sweep(records, sweep, {})] == [0, 1]
