"""Select alerts by rule glob or severity."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import get_args

from distmon.config import ActionsConfig, suggest
from distmon.errors import ConfigError
from distmon.rules.alert import Alert, Severity


def matches(patterns: Iterable[str], alert: Alert) -> bool:
    """Return whether an alert matches one of the rule globs or severities."""
    return any(p == alert.severity or fnmatchcase(alert.rule, p) for p in patterns)


def first_match(patterns: Iterable[str], alerts: Sequence[Alert]) -> Alert | None:
    """Return the first alert that matches; None when none does."""
    wanted = [*patterns]
    return next((alert for alert in alerts if matches(wanted, alert)), None)


def check_patterns(actions: ActionsConfig, rules: Sequence[str]) -> None:
    """Raise ConfigError for a pattern that matches no rule: a typo would be noticed too late."""
    severities = get_args(Severity)
    for action in ("stop", "checkpoint", "bundle"):
        for pattern in getattr(actions, action):
            if pattern not in severities and not any(fnmatchcase(r, pattern) for r in rules):
                hint = suggest(pattern, [*rules, *severities])
                raise ConfigError(
                    f'"{pattern}" in actions.{action} matches no rule or severity; {hint}'
                )
