"""The rules over a list of records, and what came of it in numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, get_args

from distmon.alert import Alert, Severity
from distmon.record import Record
from distmon.rules import RuleEngine
from distmon.rules.engine import ActiveRule

SEVERITIES: Final[tuple[Severity, ...]] = get_args(Severity)
"""From the mildest to the worst."""
ALARM: Final[Severity] = "warning"
"""The mildest alert that is called an alarm."""


@dataclass(frozen=True)
class Failure:
    """A rule that could not judge some of the records."""

    rule: str
    count: int
    """How many records."""
    step: int
    """Of the first of them."""
    error: str


@dataclass(frozen=True)
class Replay:
    """What rules said of the records of one run."""

    records: Sequence[Record]
    alerts: tuple[Alert, ...]
    """In step order."""
    failures: tuple[Failure, ...] = ()
    idle: tuple[str, ...] = ()
    """Rules that no record gave anything to judge: their silence means nothing."""

    @property
    def observations(self) -> int:
        """Steps that were looked at. An evaluation after the last look is a record of its own."""
        return len({record.step for record in self.records})

    @property
    def alarms(self) -> tuple[Alert, ...]:
        """Warnings and worse."""
        return at_least(self.alerts, ALARM)

    @property
    def alarm_share(self) -> float:
        """Share of the observations that raised an alarm."""
        return self.share(self.alarms)

    def share(self, alerts: Iterable[Alert]) -> float:
        """Share of the observations that raised one of `alerts`; 0 without observations."""
        return len({alert.step for alert in alerts}) / max(1, self.observations)

    def by_rule(self) -> dict[str, list[Alert]]:
        """The alerts of each rule that fired, most alerts first."""
        found: dict[str, list[Alert]] = {}
        for alert in self.alerts:
            found.setdefault(alert.rule, []).append(alert)
        return dict(sorted(found.items(), key=lambda item: -len(item[1])))

    def by_severity(self) -> dict[Severity, int]:
        """How many alerts of each severity, worst first."""
        return {s: sum(a.severity == s for a in self.alerts) for s in reversed(SEVERITIES)}


def run_rules(
    records: Sequence[Record],
    active: Sequence[ActiveRule],
    progress: Callable[[float], None] = lambda _: None,
) -> Replay:
    """Judge the records in order, as a monitor would have done it from a fresh start.

    `progress` is told the share that is done. A rule that fails is left out of that record only.
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
    judged = {name: state["observation"] for name, state in engine.state_dict()["rules"].items()}
    idle = tuple(each.rule.name for each in active if not judged[each.rule.name])
    return Replay(records, tuple(alerts), tuple(failures.values()), idle)


def at_least(alerts: Iterable[Alert], severity: Severity) -> tuple[Alert, ...]:
    """Those that are as bad or worse."""
    limit = SEVERITIES.index(severity)
    return tuple(a for a in alerts if SEVERITIES.index(a.severity) >= limit)
