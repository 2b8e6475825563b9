"""Runs the rules on every record: patience, episodes, settings, and state for the checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, get_args

import numpy as np

from distmon.alert import Alert, Severity
from distmon.config import RuleConfig, suggest
from distmon.errors import ConfigError
from distmon.record import Record
from distmon.rules.base import Finding, Limits, Rule, layer_of, metric
from distmon.rules.episodes import RuleState

_SEVERITIES: Final[tuple[Severity, ...]] = get_args(Severity)
"""From the mildest to the gravest."""


@dataclass(frozen=True)
class ActiveRule:
    """A rule with its settings applied."""

    rule: Rule
    severity: Severity | None
    """Set by the user: replaces what rule and finding say."""
    patience: int
    cooldown: int
    limits: Limits

    def gravity(self, severity: Severity | None = None) -> int:
        """How grave an alert is whose finding has this severity."""
        return _SEVERITIES.index(self.severity or severity or self.rule.severity)


def configure(rules: Sequence[Rule], settings: Mapping[str, RuleConfig]) -> list[ActiveRule]:
    """Apply the user's settings; an unknown rule or threshold is a ConfigError."""
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
        if given.enabled:
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
    """YAML reads 1e-9 as text because it has no dot; people write it all the same."""
    if isinstance(value, int | float | str) and not isinstance(value, bool):
        with suppress(ValueError):
            return float(value)
    raise ConfigError(f'bad value {value!r} for "{key}": it must be a number')


class RuleEngine:
    """Evaluates the active rules. The same records give the same alerts on every rank.

    An episode of a key begins with its first alert and ends after three observations in a row
    without a finding. While it lasts, reminders come after one cooldown, then two, four and eight;
    what becomes graver is told at once.
    """

    def __init__(self, active: Sequence[ActiveRule]) -> None:
        self._active = active
        self._states = {a.rule.name: RuleState() for a in active}

    def evaluate(self, record: Record) -> tuple[list[Alert], dict[str, Exception]]:
        """The alerts that this record raises, and the rules that failed on it, by name.

        A partial record is an observation only for the rules that need what it has.
        """
        alerts: list[Alert] = []
        failures: dict[str, Exception] = {}
        # What was not measured, as on a skipped step, neither confirms nor ends a streak.
        unmeasured = {
            record.params.names[i]
            for i in np.flatnonzero(np.isnan(record.params.columns["update_ratio"]))
        }
        for active in self._active:
            rule, state = active.rule, self._states[active.rule.name]
            try:
                if not _has_one(record, rule.needs):
                    continue
                state.observation += 1
                found = {f.key: f for f in rule.check(record, active.limits, state.memory)}
                state.follow(found, unmeasured, active.cooldown)
                alerts += _fire(active, state, [*found.values()], record.step)
            except Exception as error:
                failures[rule.name] = error
        return alerts, failures

    def severity(self, name: str) -> Severity | None:
        """The severity of a rule as configured, None when it is switched off."""
        for active in self._active:
            if active.rule.name == name:
                return active.severity or active.rule.severity
        return None

    def state_dict(self) -> dict[str, Any]:
        """JSON-able; independent of rank and world size."""
        return {"rules": {name: state.to_dict() for name, state in self._states.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken; rules that are new or gone are left alone."""
        for active in self._active:
            saved = state["rules"].get(active.rule.name)
            if saved is None:
                continue
            self._states[active.rule.name] = (
                RuleState.from_dict(saved)
                if "tracks" in saved
                else RuleState.from_old(
                    saved, int(state["observation"]), active.cooldown, active.gravity()
                )
            )


def _has_one(record: Record, needs: Sequence[str]) -> bool:
    """Whether a part that the rule can judge is there; a metric has to be a finite number."""
    if not needs:
        return not record.partial
    return any(
        metric(record, part) is not None if "/" in part else bool(getattr(record, part))
        for part in needs
    )


def _fire(
    active: ActiveRule, state: RuleState, findings: Sequence[Finding], step: int
) -> list[Alert]:
    groups: dict[str, list[Finding]] = {}
    for finding in findings:
        if finding.fading:
            continue
        gravity = active.gravity(finding.severity)
        if state.due(finding.key, active.patience, active.cooldown, gravity, finding.is_new):
            groups.setdefault(finding.group, []).append(finding)
    return [_alert(active, group, step) for group in groups.values()]


def _alert(active: ActiveRule, findings: Sequence[Finding], step: int) -> Alert:
    first = findings[0]
    params = tuple(dict.fromkeys(p for f in findings for p in f.params))
    layers = (*(layer for f in findings for layer in f.layers), *map(layer_of, params))
    return Alert(
        rule=active.rule.name,
        severity=_SEVERITIES[max(active.gravity(f.severity) for f in findings)],
        step=step,
        message=active.rule.tell(findings),
        params=params,
        layers=tuple(dict.fromkeys(layers)),
        ranks=tuple(sorted({r for f in findings for r in f.ranks})),
        advice=first.advice or active.rule.advice,
        measured=first.measured,
        threshold=first.threshold,
    )
