"""What is done when an alert is raised: which alerts are meant, and how a run is ended."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Final, get_args

from distmon.alert import Alert, Severity
from distmon.config import ActionsConfig, suggest
from distmon.errors import ConfigError

STOP_EXIT_CODE: Final = 86
"""Of a process that a rule has ended; not used by shells, signals or sysexits."""

AlertCall = Callable[[Alert], object]


@dataclass(frozen=True)
class Callbacks:
    """The user's functions; called on every rank at the same step, after the record is known."""

    on_alert: AlertCall | None = None
    on_checkpoint: AlertCall | None = None


def matches(patterns: Iterable[str], alert: Alert) -> bool:
    """Whether an alert is meant by a list of rule globs and severities."""
    return any(p == alert.severity or fnmatchcase(alert.rule, p) for p in patterns)


def first_match(patterns: Iterable[str], alerts: Sequence[Alert]) -> Alert | None:
    """The first of the alerts that is meant."""
    wanted = [*patterns]
    return next((alert for alert in alerts if matches(wanted, alert)), None)


def check_patterns(actions: ActionsConfig, rules: Sequence[str]) -> None:
    """`ConfigError` for a pattern that means no alert: a typo would be noticed too late."""
    severities = get_args(Severity)
    for action, patterns in actions:
        for pattern in patterns:
            if pattern not in severities and not any(fnmatchcase(r, pattern) for r in rules):
                hint = suggest(pattern, [*rules, *severities])
                raise ConfigError(f'"{pattern}" in actions.{action} is no rule or severity; {hint}')


class TrainingStopped(SystemExit):
    """Raised by `Monitor.step` on every rank at the same step when `actions.stop` asks for it.

    A SystemExit, so that no `except Exception` swallows it and the process ends with code 86
    unless the trainer catches it to clean up. Everything has been delivered by then.
    """

    def __init__(self, alert: Alert) -> None:
        super().__init__(STOP_EXIT_CODE)
        self.alert = alert

    def __str__(self) -> str:
        return f"stopped by {self.alert.rule} at step {self.alert.step}: {self.alert.message}"
