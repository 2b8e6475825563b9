"""Evaluate the rules on every record: settings, patience, episodes, and checkpointed state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Final, get_args

import numpy as np

from distmon.config import RuleConfig, suggest
from distmon.errors import ConfigError
from distmon.record.history import RunHistory
from distmon.record.record import Record
from distmon.rules.alert import Alert, Severity
from distmon.rules.base import Finding, Limits, Memory, Rule, layer_of, metric
from distmon.rules.diagnosis import Diagnosis
from distmon.rules.episodes import RuleState
from distmon.rules.user_code import UserCode, UserCodeTimeoutError

_SEVERITIES: Final[tuple[Severity, ...]] = get_args(Severity)
"""In increasing order."""


@dataclass(frozen=True)
class ActiveRule:
    """A rule with its settings applied."""

    rule: Rule
    severity: Severity | None
    """Set by the user; overrides the severity of rule and finding."""
    patience: int
    cooldown: int
    limits: Limits

    def severity_index(self, severity: Severity | None = None) -> int:
        """Return the severity of an alert as an index, given the severity of its finding."""
        return _SEVERITIES.index(self.severity or severity or self.rule.severity)


def configure(rules: Sequence[Rule], settings: Mapping[str, RuleConfig]) -> list[ActiveRule]:
    """Apply the user's settings; raise ConfigError for an unknown rule or threshold."""
    known = {rule.name: rule for rule in rules}
    for name in settings:
        if name not in known:
            raise ConfigError(f'unknown rule "{name}" in rules; {suggest(name, [*known])}')
    active = []
    for rule in rules:
        given = settings.get(rule.name, RuleConfig())
        limits = {name: threshold.value for name, threshold in rule.thresholds.items()}
        for key, value in (given.model_extra or {}).items():
            where = f"rules.{rule.name}"
            if key not in limits:
                valid = [*limits, *RuleConfig.model_fields]
                raise ConfigError(f'unknown key "{key}" in {where}; {suggest(key, valid)}')
            limits[key] = _number(value, f"{where}.{key}")
        if given.enabled if "enabled" in given.model_fields_set else rule.enabled:
            active.append(
                ActiveRule(
                    rule=rule,
                    severity=given.severity,
                    patience=given.patience or rule.patience,
                    cooldown=rule.cooldown if given.cooldown is None else given.cooldown,
                    limits=limits,
                )
            )
    return active


def _number(value: Any, key: str) -> float:
    """Convert to float; YAML parses 1e-9 as a string because it has no dot."""
    if isinstance(value, int | float | str) and not isinstance(value, bool):
        with suppress(ValueError, OverflowError):
            return float(value)
    raise ConfigError(f'bad value {value!r} for "{key}": it must be a number')


class RuleEngine:
    """Evaluates the active rules. The same records give the same alerts on every rank.

    An episode of a key begins with its first alert and ends after three observations in a row
    without a finding. During an episode, the alert is repeated after one cooldown, then after two,
    four and eight; a higher severity is reported at once.
    """

    def __init__(self, active: Sequence[ActiveRule], user_code: UserCode | None = None) -> None:
        """`user_code` calls the user's functions; one that does not return in time is disabled."""
        self._active = [*active]
        self._user_code = user_code
        self.states = {a.rule.name: RuleState() for a in active}
        self.history = RunHistory()
        self.diagnosis = Diagnosis()

    def evaluate(self, record: Record) -> tuple[list[Alert], dict[str, Exception]]:
        """Return the alerts of this record, and the exceptions of rules that failed, by name.

        A partial record is evaluated only by rules whose `needs` it has.
        """
        alerts: list[Alert] = []
        failures: dict[str, Exception] = {}
        record = replace(record, history=self.history)
        # A parameter that was not measured, as on a skipped step, neither continues nor ends a
        # streak.
        unmeasured = {
            record.params.names[i]
            for i in np.flatnonzero(np.isnan(record.params.columns["update_ratio"]))
        }
        for active in self._active:
            rule, state = active.rule, self.states[active.rule.name]
            try:
                if not _has_one(record, rule.needs):
                    continue
                state.observation += 1
                found = {f.key: f for f in self._check(active, record, state.memory)}
                state.follow(found, unmeasured, active.cooldown)
                alerts += _fire(active, state, [*found.values()], record.step)
            except UserCodeTimeoutError as error:
                failures[rule.name] = error
                # Its function may still change the memory that it was given.
                state.memory = {}
                self._active = [each for each in self._active if each is not active]
            except Exception as error:
                failures[rule.name] = error
        lasting = [name for name, state in self.states.items() if state.is_open]
        alerts = self.diagnosis.combine(alerts, record, lasting)
        self.history.update(record)
        return alerts, failures

    def _check(self, active: ActiveRule, record: Record, memory: Memory) -> list[Finding]:
        rule = active.rule
        if self._user_code is None or not rule.users:
            return [*rule.check(record, active.limits, memory)]
        found: list[Finding] = self._user_code.call(
            lambda: [*rule.check(record, active.limits, memory)]
        )
        return found

    def severity(self, name: str) -> Severity | None:
        """Return the configured severity of a rule; None when the rule is disabled."""
        return severity_of(self._active, name)

    def without_data(self) -> tuple[str, ...]:
        """Return the rules that no record had the data for: their silence says nothing."""
        names = (active.rule.name for active in self._active)
        return tuple(name for name in names if not self.states[name].observation)

    def state_dict(self) -> dict[str, Any]:
        """Return a JSON-serializable state that is independent of rank and world size."""
        return {
            "rules": {name: state.to_dict() for name, state in self.states.items()},
            "history": self.history.state_dict(),
            "diagnosis": self.diagnosis.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state; new rules start fresh and the state of removed rules is ignored."""
        for active in self._active:
            saved = state["rules"].get(active.rule.name)
            if saved is None:
                continue
            self.states[active.rule.name] = RuleState.from_dict(saved)
        if "history" in state:
            self.history.load_state_dict(state["history"])
            self.diagnosis.load_state_dict(state["diagnosis"])


def severity_of(active: Sequence[ActiveRule], name: str) -> Severity | None:
    """Return the configured severity of a rule; None when the rule is disabled."""
    for each in active:
        if each.rule.name == name:
            return each.severity or each.rule.severity
    return None


def _has_one(record: Record, needs: Sequence[str]) -> bool:
    """Return whether the record has one of the parts that the rule needs."""
    if not needs:
        return not record.partial
    return any(_has(record, part) for part in needs)


def _has(record: Record, part: str) -> bool:
    if part.startswith("ranks."):
        values = record.ranks.get(part.removeprefix("ranks."))
        return values is not None and bool(np.isfinite(values).any())
    return metric(record, part) is not None if "/" in part else bool(getattr(record, part))


def _fire(
    active: ActiveRule, state: RuleState, findings: Sequence[Finding], step: int
) -> list[Alert]:
    groups: dict[str, list[Finding]] = {}
    for finding in findings:
        if finding.fading:
            continue
        severity = active.severity_index(finding.severity)
        # An info that goes on is no news; what users want repeated, their own cooldown says.
        once = finding.once or not (severity or finding.is_new or active.rule.users)
        if once and state.has_alerted(finding.key, severity):
            continue
        if state.due(finding.key, active.patience, active.cooldown, severity, finding.is_new):
            groups.setdefault(finding.group, []).append(finding)
    return [_alert(active, group, step) for group in groups.values()]


def _alert(active: ActiveRule, findings: Sequence[Finding], step: int) -> Alert:
    first = findings[0]
    params = tuple(dict.fromkeys(p for f in findings for p in f.params))
    layers = (*(layer for f in findings for layer in f.layers), *map(layer_of, params))
    return Alert(
        rule=active.rule.name,
        severity=_SEVERITIES[max(active.severity_index(f.severity) for f in findings)],
        step=step,
        message=active.rule.combine_messages(findings),
        params=params,
        layers=tuple(dict.fromkeys(layers)),
        ranks=tuple(sorted({r for f in findings for r in f.ranks})),
        advice=first.advice or active.rule.advice,
        measured=first.measured,
        threshold=first.threshold,
    )
