"""Alerts to people: one message per alert, as many in an hour as somebody wants to read."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Final, Protocol, get_args

from distmon.alert import Alert, Severity
from distmon.config import NotifyConfig
from distmon.record import Record

HOUR_S: Final = 3600.0
KEPT_SHARE: Final = 4
"""One in so many messages of an hour is kept for critical alerts."""
SHOWN_PLACES: Final = 5
LONGEST_MESSAGE: Final = 1000
SEVERITIES: Final[tuple[Severity, ...]] = get_args(Severity)


class Service(Protocol):
    """Takes messages to people."""

    def send(self, title: str, body: str, severity: Severity) -> None:
        """Deliver one message; raises when it could not. May take a while."""


class NotifySink:
    """Sends alerts through one service. Each service has a sink, so none waits for another."""

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
        self._held_back: Counter[str] = Counter()
        self._undelivered: Counter[str] = Counter()

    def record(self, record: Record) -> None:
        """Records are not for people's inboxes."""

    def alert(self, alert: Alert) -> None:
        if alert.severity not in self._wanted:
            return
        if not self._limit.admits(alert.severity):
            self._held_back[alert.rule] += 1
            return
        try:
            self._send(title(alert, self._run_name), body(alert), alert.severity)
        except Exception:
            self._undelivered[alert.rule] += 1
            raise

    def close(self) -> None:
        """One last message if something was never told."""
        if self._held_back or self._undelivered:
            self._send(f"Alerts that were not sent: run {self._run_name}", "", "warning")

    def _send(self, title: str, body: str, severity: Severity) -> None:
        told = [part for part in (body, *self._untold()) if part]
        self._service.send(title, "\n\n".join(told), severity)
        self._limit.count()
        self._held_back.clear()
        self._undelivered.clear()

    def _untold(self) -> list[str]:
        return [
            f"{_alerts(rules.total())} {fate}: {_by_rule(rules)}."
            for rules, fate in (
                (self._held_back, "held back"),
                (self._undelivered, "not delivered"),
            )
            if rules
        ]


class HourlyLimit:
    """At most so many messages in any hour, a part of them for critical alerts only."""

    def __init__(self, per_hour: int, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._sent: deque[float] = deque()
        # Warnings may never use up what a NaN needs; of one message nothing can be kept.
        kept = min(max(1, per_hour // KEPT_SHARE), per_hour - 1)
        self._most = {"critical": per_hour, "warning": per_hour - kept, "info": per_hour - kept}

    def admits(self, severity: Severity) -> bool:
        """Whether a message of this severity may go out now."""
        while self._sent and self._clock() - self._sent[0] >= HOUR_S:
            self._sent.popleft()
        return len(self._sent) < self._most[severity]

    def count(self) -> None:
        """A message has gone out."""
        self._sent.append(self._clock())


def title(alert: Alert, run_name: str) -> str:
    """What is wrong, where and when, in one line."""
    return f"{alert.severity.upper()} {alert.rule} at step {alert.step}: run {run_name}"


def body(alert: Alert) -> str:
    """What was measured, where, and what to try, as plain text."""
    parts = [_shortened(alert.message)]
    places = [
        f"{label}: {_listed(names)}"
        for label, names in (
            ("parameters", alert.params),
            ("layers", alert.layers),
            ("ranks", [str(rank) for rank in alert.ranks]),
        )
        if names
    ]
    if places:
        parts.append("\n".join(places))
    if alert.advice:
        parts.append("\n".join(f"{i}. {text}" for i, text in enumerate(alert.advice, start=1)))
    return "\n\n".join(parts)


def _listed(names: Sequence[str]) -> str:
    more = len(names) - SHOWN_PLACES
    return ", ".join(names[:SHOWN_PLACES]) + (f" and {more} more" if more > 0 else "")


def _shortened(text: str) -> str:
    return text if len(text) <= LONGEST_MESSAGE else f"{text[: LONGEST_MESSAGE - 1]}…"


def _alerts(count: int) -> str:
    return "1 more alert was" if count == 1 else f"{count} more alerts were"


def _by_rule(rules: Counter[str]) -> str:
    return ", ".join(f"{count} {rule}" for rule, count in rules.most_common())
