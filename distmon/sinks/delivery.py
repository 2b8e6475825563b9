"""Carries records and alerts to the sinks without ever holding up the training thread.

Each sink has a bounded queue and a daemon thread of its own, so one that hangs or fails holds up
neither the trainer nor the other sinks.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from distmon.alert import Alert
from distmon.record import Record
from distmon.redaction import Redactor
from distmon.sinks.base import Sink, SinkFactory

logger = logging.getLogger("distmon")

Item = Record | Alert


@dataclass(frozen=True)
class AlertsOnly:
    """Makes a sink that no record is handed to: while it hangs, none is kept or lost for it."""

    make: SinkFactory

    def __call__(self) -> Sink:
        return self.make()


class Delivery:
    """The way from the training thread to every sink."""

    def __init__(self, factories: Sequence[tuple[str, SinkFactory]], queue_size: int) -> None:
        order = itertools.count()
        self._lanes = [_Lane(name, factory, queue_size, order) for name, factory in factories]
        self._closed = False

    def post_record(self, record: Record) -> None:
        """Hand a record to every sink. Never blocks, never raises; a full queue drops it."""
        for lane in self._lanes:
            lane.post(record)

    def post_alert(self, alert: Alert) -> None:
        """Hand an alert to every sink. Alerts queue apart, so records cannot crowd them out."""
        for lane in self._lanes:
            lane.post(alert)

    def close(self, timeout: float = 10.0) -> dict[str, dict[str, int]]:
        """Deliver what is queued and close the sinks, for at most `timeout` seconds altogether.

        A sink that has not finished by then is left behind in its daemon thread. Returns `stats()`.
        """
        if not self._closed:
            self._closed = True
            deadline = time.monotonic() + timeout
            for lane in self._lanes:
                lane.finish()
            for lane in self._lanes:
                lane.join(deadline)
            for lane in self._lanes:
                lane.report_losses(timeout)
        return self.stats()

    def stats(self) -> dict[str, dict[str, int]]:
        """Items by sink and fate: written, failed, dropped."""
        return {lane.name: lane.stats() for lane in self._lanes}


class _Lane:
    """One sink with its queue and thread."""

    def __init__(
        self, name: str, factory: SinkFactory, queue_size: int, order: Iterator[int]
    ) -> None:
        self.name = name
        self._factory = factory
        self._alerts_only = isinstance(factory, AlertsOnly)
        self._limit = queue_size
        self._order = order
        self._records: deque[tuple[int, Item]] = deque()
        self._alerts: deque[tuple[int, Item]] = deque()
        self._changed = threading.Condition()
        self._finishing = False
        self._abandoned = False
        self._busy = False
        self._named = False
        self._written = self._failed = self._dropped = 0
        self._thread = threading.Thread(target=self._run, name=f"distmon-{name}", daemon=True)
        self._thread.start()

    def post(self, item: Item) -> None:
        if self._alerts_only and not isinstance(item, Alert):
            return
        with self._changed:
            queue = self._alerts if isinstance(item, Alert) else self._records
            if self._finishing or len(queue) >= self._limit:
                self._dropped += 1
                return
            queue.append((next(self._order), item))
            self._changed.notify()

    def finish(self) -> None:
        with self._changed:
            self._finishing = True
            self._changed.notify()

    def join(self, deadline: float) -> None:
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if not self._thread.is_alive():
            return
        with self._changed:
            self._abandoned = True
            self._dropped += len(self._records) + len(self._alerts)
            self._records.clear()
            self._alerts.clear()
            self._failed += self._busy

    def report_losses(self, timeout: float) -> None:
        if self._abandoned:
            logger.warning(
                'the distmon sink "%s" did not finish within %g s and was left behind: %s',
                self.name,
                timeout,
                self._counts(),
            )
        elif self._failed or self._dropped:
            logger.warning('the distmon sink "%s" is incomplete: %s', self.name, self._counts())

    def stats(self) -> dict[str, int]:
        with self._changed:
            return {
                "written": self._written,
                "failed": self._failed,
                "dropped": self._dropped,
            }

    def _counts(self) -> str:
        return ", ".join(f"{count} {fate}" for fate, count in self.stats().items())

    def _run(self) -> None:
        sink: Sink | None = None
        unusable = False
        # BaseException: a sink that calls sys.exit() must not end its lane unnoticed.
        while (item := self._take()) is not None:
            error: BaseException | None = None
            if sink is None and not unusable:
                try:
                    sink = self._factory()
                except BaseException as caught:
                    error, unusable = caught, True
            if sink is not None:
                try:
                    if isinstance(item, Alert):
                        sink.alert(item)
                    else:
                        sink.record(item)
                except BaseException as caught:
                    error = caught
            self._count(ok=sink is not None and error is None)
            if error is not None:
                self._name_once(
                    error,
                    "could not be opened and gets nothing"
                    if unusable
                    else "failed; it stays in use",
                )
        if sink is not None:
            try:
                sink.close()
            except BaseException as caught:
                self._count(ok=False)
                self._name_once(caught, "failed to close")

    def _take(self) -> Item | None:
        """The oldest item of both queues; None when there will be no more."""
        with self._changed:
            while not (self._records or self._alerts):
                if self._finishing:
                    return None
                self._changed.wait()
            queues = [queue for queue in (self._records, self._alerts) if queue]
            self._busy = True
            # Posting order over both queues: an alert comes after the record that it is about.
            return min(queues, key=lambda queue: queue[0][0]).popleft()[1]

    def _count(self, *, ok: bool) -> None:
        with self._changed:
            self._busy = False
            if self._abandoned:
                return
            if ok:
                self._written += 1
            else:
                self._failed += 1

    def _name_once(self, error: BaseException, outcome: str) -> None:
        if self._named:
            return
        self._named = True
        text = Redactor().text(" ".join(str(error).split())) or "no message"
        logger.warning(
            'the distmon sink "%s" %s: %s: %s', self.name, outcome, type(error).__name__, text
        )
