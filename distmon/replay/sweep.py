"""Sweep one threshold: how often the rule would have fired with each value."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from distmon.config import RuleConfig, suggest
from distmon.errors import ConfigError
from distmon.record.record import Record
from distmon.replay.backtest import run_rules
from distmon.replay.settings import Settings, activate, as_settings
from distmon.rules import BUILTIN, with_users_rules
from distmon.rules.base import Rule
from distmon.rules.engine import ActiveRule

_COUNTS = ("patience", "cooldown")
"""Settings that every rule has besides its thresholds."""


@dataclass(frozen=True)
class Sweep:
    """The values that one threshold (or patience, or cooldown) of one rule takes in turn."""

    rule: str
    key: str
    values: tuple[float, ...]

    @property
    def name(self) -> str:
        """`rule.key`."""
        return f"{self.rule}.{self.key}"


@dataclass(frozen=True)
class SweepPoint:
    """The alerts of one run with one value."""

    value: float
    alerts: int
    share: float
    """Share of the observations that raised an alert of this rule."""
    first_step: int | None


def parse_sweep(text: str, settings: Settings, own_rules: Sequence[Rule] = ()) -> Sweep:
    """Parse `rule.threshold=a,b,c`; raise ConfigError for an unknown rule or threshold."""
    left, _, right = text.partition("=")
    rule_name, dot, key = left.strip().rpartition(".")
    if not dot or not right.strip():
        raise ConfigError(f'bad sweep "{text}": expected rule.threshold=a,b,c')
    rules = {rule.name: rule for rule in with_users_rules(BUILTIN, settings, own_rules)}
    if rule_name not in rules:
        raise ConfigError(
            f'unknown rule "{rule_name}" in the sweep; {suggest(rule_name, [*rules])}'
        )
    keys = [*rules[rule_name].thresholds, *_COUNTS]
    if key not in keys:
        raise ConfigError(f'unknown threshold "{key}" of {rule_name}; {suggest(key, keys)}')
    try:
        values = tuple(float(part) for part in right.split(","))
    except ValueError:
        raise ConfigError(f'bad sweep "{text}": {right} is not a list of numbers') from None
    sweep = Sweep(rule_name, key, values)
    for value in values:
        with_value(sweep, value, settings, own_rules)
    return sweep


def run_sweep(
    records: Sequence[Record], sweep: Sweep, settings: Settings, own_rules: Sequence[Rule] = ()
) -> list[SweepPoint]:
    """Evaluate the rule with each value on the records of one run; other rules are not run."""
    points = []
    for value in sweep.values:
        replay = run_rules(records, [with_value(sweep, value, settings, own_rules)])
        steps = [alert.step for alert in replay.alerts]
        points.append(
            SweepPoint(value, len(steps), replay.share(replay.alerts), min(steps, default=None))
        )
    return points


def with_value(
    sweep: Sweep, value: float, settings: Settings, own_rules: Sequence[Rule] = ()
) -> ActiveRule:
    """Return the rule with that value, enabled even if the settings disable it."""
    given = settings.get(sweep.rule, RuleConfig()).model_dump(exclude_unset=True)
    changed = as_settings({sweep.rule: {**given, "enabled": True, sweep.key: value}})
    active = activate({**settings, **changed}, own_rules)
    return next(each for each in active if each.rule.name == sweep.rule)


def current_value(sweep: Sweep, settings: Settings, own_rules: Sequence[Rule] = ()) -> float:
    """Return the value in the settings."""
    given = settings.get(sweep.rule, RuleConfig()).model_copy(update={"enabled": True})
    active = activate({**settings, sweep.rule: given}, own_rules)
    rule = next(each for each in active if each.rule.name == sweep.rule)
    return float(getattr(rule, sweep.key) if sweep.key in _COUNTS else rule.limits[sweep.key])
