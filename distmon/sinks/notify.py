"""Send alerts to a notification service: one message per alert, limited per hour."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable
from typing import Final, Protocol, get_args

from distmon.config import NotifyConfig
from distmon.record.record import Record
from distmon.rules.alert import Alert, Severity
from distmon.rules.base import name_some

HOUR_S: Final = 3600.0
RESERVED_SHARE: Final = 4
"""One of this many messages per hour is reserved for critical alerts."""
LONGEST_MESSAGE: Final = 1000
SEVERITIES: Final[tuple[Severity, ...]] = get_args(Severity)


class Service(Protocol):
    """Sends messages."""

    def send(self, title: str, body: str, severity: Severity) -> None:
        """Send one message; raise if that fails. May take seconds."""


class NotifySink:
    """Sends alerts through one service. Each service has its own sink and thread."""

    def __init__(
        self,
        service: Service,
        settings: NotifyConfig,
        run_name: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._service = service
        self._wanted = SEVERITIES[SEVERITIES.index(settings.severity) :]
        self._limit = HourlyLimit(settings.per_hour, clock)
        self._run_name = run_name
        self._over_limit: Counter[str] = Counter()
        self._undelivered: Counter[str] = Counter()

    def record(self, record: Record) -> None:
        """Do nothing: only alerts are sent."""

    def alert(self, alert: Alert) -> None:
        if alert.severity not in self._wanted:
            return
        if not self._limit.admits(alert.severity):
            self._over_limit[alert.rule] += 1
            return
        try:
            self._send(title(alert, self._run_name), body(alert), alert.severity)
        except Exception:
            self._undelivered[alert.rule] += 1
            raise

    def close(self) -> None:
        """Send a last message if alerts were never sent."""
        if self._over_limit or self._undelivered:
            self._send(f"Alerts that were not sent: run {self._run_name}", "", "warning")

    def _send(self, title: str, body: str, severity: Severity) -> None:
        parts = [part for part in (body, *self._unsent()) if part]
        self._service.send(title, "\n\n".join(parts), severity)
        self._limit.count()
        self._over_limit.clear()
        self._undelivered.clear()

    def _unsent(self) -> list[str]:
        """Summarize the alerts since the last message that were not sent."""
        return [
            f"{_alerts(rules.total())} {reason}: {_by_rule(rules)}."
            for rules, reason in (
                (self._over_limit, "not sent because of the hourly limit"),
                (self._undelivered, "not delivered"),
            )
            if rules
        ]


class HourlyLimit:
    """Limits the messages in any hour and reserves some of them for critical alerts."""

    def __init__(self, per_hour: int, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._sent: deque[float] = deque()
        # Warnings must not use up the limit before a critical alert; a limit of 1 reserves none.
        reserved = min(max(1, per_hour // RESERVED_SHARE), per_hour - 1)
        other = per_hour - reserved
        self._most = {"critical": per_hour, "warning": other, "info": other}

    def admits(self, severity: Severity) -> bool:
        """Return whether a message of this severity may be sent now."""
        while self._sent and self._clock() - self._sent[0] >= HOUR_S:
            self._sent.popleft()
        return len(self._sent) < self._most[severity]

    def count(self) -> None:
        """Count one sent message."""
        self._sent.append(self._clock())


def title(alert: Alert, run_name: str) -> str:
    """Return severity, rule, step and run in one line."""
    return f"{alert.severity.upper()} {alert.rule} at step {alert.step}: run {run_name}"


def body(alert: Alert) -> str:
    """Return message, location and advice as plain text."""
    parts = [_shortened(alert.message)]
    location = [
        f"{label}: {name_some(names)}"
        for label, names in (
            ("parameters", alert.params),
            ("layers", alert.layers),
            ("ranks", [str(rank) for rank in alert.ranks]),
        )
        if names
    ]
    if location:
        parts.append("\n".join(location))
    if alert.advice:
        parts.append("\n".join(f"{i}. {text}" for i, text in enumerate(alert.advice, start=1)))
    return "\n\n".join(parts)


def _shortened(text: str) -> str:
    return text if len(text) <= LONGEST_MESSAGE else f"{text[: LONGEST_MESSAGE - 1]}…"


def _alerts(count: int) -> str:
    return "1 more alert was" if count == 1 else f"{count} more alerts were"


def _by_rule(rules: Counter[str]) -> str:
    return ", ".join(f"{count} {rule}" for rule, count in rules.most_common())
