"""Runs the rules on every record: patience, cooldown, settings, and state for the checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import numpy as np

from distmon.alert import Alert, Severity
from distmon.config import RuleConfig, suggest
from distmon.errors import ConfigError
from distmon.record import Record
from distmon.rules.base import Finding, Limits, Memory, Rule, layer_of


@dataclass(frozen=True)
class ActiveRule:
    """A rule with its settings applied."""

    rule: Rule
    severity: Severity | None
    """Set by the user: replaces what rule and finding say."""
    patience: int
    cooldown: int
    limits: Limits


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


@dataclass
class _State:
    """What is remembered of one rule. All of it is JSON-able."""

    streak: dict[str, int]
    silent_until: dict[str, int]
    memory: Memory


class RuleEngine:
    """Evaluates the active rules. The same records give the same alerts on every rank."""

    def __init__(self, active: Sequence[ActiveRule]) -> None:
        self._active = active
        self._observation = 0
        self._states = {a.rule.name: _State({}, {}, {}) for a in active}

    def evaluate(self, record: Record) -> tuple[list[Alert], dict[str, Exception]]:
        """The alerts that this record raises, and the rules that failed on it, by name."""
        self._observation += 1
        alerts: list[Alert] = []
        failures: dict[str, Exception] = {}
        # What was not measured, as on a skipped step, neither confirms nor ends a streak.
        unmeasured = {
            record.params.names[i]
            for i in np.flatnonzero(np.isnan(record.params.columns["update_ratio"]))
        }
        for active in self._active:
            state = self._states[active.rule.name]
            try:
                found = {f.key: f for f in active.rule.check(record, active.limits, state.memory)}
                kept = {key: n for key, n in state.streak.items() if key in unmeasured}
                state.streak = kept | {key: state.streak.get(key, 0) + 1 for key in found}
                alerts += self._fire(active, state, found, record.step)
            except Exception as error:
                failures[active.rule.name] = error
        return alerts, failures

    def severity(self, name: str) -> Severity | None:
        """The severity of a rule as configured, None when it is switched off."""
        for active in self._active:
            if active.rule.name == name:
                return active.severity or active.rule.severity
        return None

    def _fire(
        self, active: ActiveRule, state: _State, found: Mapping[str, Finding], step: int
    ) -> list[Alert]:
        groups: dict[str, list[Finding]] = {}
        for key, finding in found.items():
            ripe = state.streak[key] >= active.patience
            if ripe and (finding.is_new or self._observation >= state.silent_until.get(key, 0)):
                state.silent_until[key] = self._observation + active.cooldown + 1
                groups.setdefault(finding.group, []).append(finding)
        return [_alert(active, findings, step) for findings in groups.values()]

    def state_dict(self) -> dict[str, Any]:
        """JSON-able; independent of rank and world size."""
        return {
            "observation": self._observation,
            "rules": {
                name: {
                    "streak": dict(s.streak),
                    "silent_until": dict(s.silent_until),
                    "memory": deepcopy(s.memory),
                }
                for name, s in self._states.items()
            },
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken; rules that are new or gone are left alone."""
        self._observation = int(state["observation"])
        for name, saved in state["rules"].items():
            if name in self._states:
                self._states[name] = _State(
                    dict(saved["streak"]), dict(saved["silent_until"]), deepcopy(saved["memory"])
                )


def _alert(active: ActiveRule, findings: Sequence[Finding], step: int) -> Alert:
    first = findings[0]
    params = tuple(dict.fromkeys(p for f in findings for p in f.params))
    return Alert(
        rule=active.rule.name,
        severity=active.severity or first.severity or active.rule.severity,
        step=step,
        message=active.rule.tell(findings),
        params=params,
        layers=tuple(dict.fromkeys(layer_of(p) for p in params)),
        ranks=tuple(sorted({r for f in findings for r in f.ranks})),
        advice=first.advice or active.rule.advice,
        measured=first.measured,
        threshold=first.threshold,
    )
