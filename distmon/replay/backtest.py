"""Evaluate rules on a list of records and count the alerts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, get_args

from distmon.record.record import Record
from distmon.rules import RuleEngine
from distmon.rules.alert import Alert, Severity
from distmon.rules.engine import ActiveRule

SEVERITIES: Final[tuple[Severity, ...]] = get_args(Severity)
"""In increasing order."""
ALARM: Final[Severity] = "warning"
"""The lowest severity that counts as an alarm."""


@dataclass(frozen=True)
class Failure:
    """A rule that raised an exception on some of the records."""

    rule: str
    count: int
    """Number of records on which it failed."""
    step: int
    """Step of the first of these records."""
    error: str


@dataclass(frozen=True)
class Replay:
    """The alerts of the rules on the records of one run."""

    records: Sequence[Record]
    alerts: tuple[Alert, ...]
    """In step order."""
    failures: tuple[Failure, ...] = ()
    idle: tuple[str, ...] = ()
    """Rules that no record had the data for, so that no alert does not mean no problem."""

    @property
    def observations(self) -> int:
        """Number of observed steps. A partial record at the same step does not count again."""
        return len({record.step for record in self.records})

    @property
    def alarms(self) -> tuple[Alert, ...]:
        """Alerts with severity warning or higher."""
        return at_least(self.alerts, ALARM)

    @property
    def alarm_share(self) -> float:
        """Share of the observations that raised an alarm."""
        return self.share(self.alarms)

    def share(self, alerts: Iterable[Alert]) -> float:
        """Return the share of observations that raised one of `alerts`; 0 without observations."""
        return len({alert.step for alert in alerts}) / max(1, self.observations)

    def by_rule(self) -> dict[str, list[Alert]]:
        """Return the alerts of each rule that fired, most alerts first."""
        found: dict[str, list[Alert]] = {}
        for alert in self.alerts:
            found.setdefault(alert.rule, []).append(alert)
        return dict(sorted(found.items(), key=lambda item: -len(item[1])))

    def by_severity(self) -> dict[Severity, int]:
        """Return the number of alerts of each severity, highest first."""
        return {s: sum(a.severity == s for a in self.alerts) for s in reversed(SEVERITIES)}


def run_rules(
    records: Sequence[Record],
    active: Sequence[ActiveRule],
    progress: Callable[[float], None] = lambda _: None,
) -> Replay:
    """Evaluate the records in order, as a monitor would have done from a fresh start.

    `progress` is called with the completed share. A rule that raises is skipped for that record
    only.
    """
    engine = RuleEngine(active)
    alerts: list[Alert] = []
    failures: dict[str, Failure] = {}
    for done, record in enumerate(records, start=1):
        raised, failed = engine.evaluate(record)
        alerts += raised
        for rule, error in failed.items():
            before = failures.get(rule)
            failures[rule] = Failure(
                rule=rule,
                count=1 + (before.count if before else 0),
                step=before.step if before else record.step,
                error=before.error if before else f"{type(error).__name__}: {error}",
            )
        progress(done / len(records))
    return Replay(records, tuple(alerts), tuple(failures.values()), engine.without_data())


def at_least(alerts: Iterable[Alert], severity: Severity) -> tuple[Alert, ...]:
    """Return the alerts with this severity or a higher one."""
    limit = SEVERITIES.index(severity)
    return tuple(a for a in alerts if SEVERITIES.index(a.severity) >= limit)
