"""Deliver records and alerts to the sinks without blocking the training thread.

Each sink has its own bounded queue and daemon thread, so a sink that hangs or fails blocks neither
the trainer nor the other sinks.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from distmon.record.record import Record
from distmon.redaction import Redactor
from distmon.rules.alert import Alert
from distmon.sinks.base import Sink, SinkFactory

logger = logging.getLogger("distmon")

Item = Record | Alert


@dataclass(frozen=True)
class AlertsOnly:
    """Wraps the factory of a sink that gets no records, so that none are queued for it."""

    make: SinkFactory

    def __call__(self) -> Sink:
        return self.make()


class Delivery:
    """Queues records and alerts for every sink."""

    def __init__(self, factories: Sequence[tuple[str, SinkFactory]], queue_size: int) -> None:
        order = itertools.count()
        self._lanes = [_Lane(name, factory, queue_size, order) for name, factory in factories]
        self._closed = False

    def post_record(self, record: Record) -> None:
        """Queue a record for every sink. Never blocks or raises; a full queue drops it."""
        for lane in self._lanes:
            lane.post(record)

    def post_alert(self, alert: Alert) -> None:
        """Queue an alert for every sink. Alerts have their own queue, so records cannot fill it."""
        for lane in self._lanes:
            lane.post(alert)

    def close(self, timeout: float = 10.0) -> dict[str, dict[str, int]]:
        """Deliver all queued items and close the sinks, within `timeout` seconds in total.

        A sink that has not finished by then is abandoned in its daemon thread, with a warning.
        Returns `stats()`.
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
        """Return the number of items that were written, failed and dropped, by sink."""
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
        self._warned = False
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
                'distmon: the sink "%s" did not finish within %g s and was abandoned: %s',
                self.name,
                timeout,
                self._counts(),
            )
        elif self._failed or self._dropped:
            logger.warning('distmon: the sink "%s" is incomplete: %s', self.name, self._counts())

    def stats(self) -> dict[str, int]:
        with self._changed:
            return {
                "written": self._written,
                "failed": self._failed,
                "dropped": self._dropped,
            }

    def _counts(self) -> str:
        return ", ".join(f"{count} {outcome}" for outcome, count in self.stats().items())

    def _run(self) -> None:
        sink: Sink | None = None
        unusable = False
        # BaseException: a sink that calls sys.exit() must not end its thread unnoticed.
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
                self._warn_once(
                    error,
                    "could not be opened and is disabled"
                    if unusable
                    else "failed on one item and stays in use",
                )
        if sink is not None:
            try:
                sink.close()
            except BaseException as caught:
                self._count(ok=False)
                self._warn_once(caught, "failed to close")

    def _take(self) -> Item | None:
        """Wait for the oldest item of both queues and return it; None after `finish`."""
        with self._changed:
            while not (self._records or self._alerts):
                if self._finishing:
                    return None
                self._changed.wait()
            queues = [queue for queue in (self._records, self._alerts) if queue]
            self._busy = True
            # In posting order over both queues: an alert follows the record that raised it.
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

    def _warn_once(self, error: BaseException, outcome: str) -> None:
        if self._warned:
            return
        self._warned = True
        text = Redactor().text(" ".join(str(error).split())) or "no message"
        logger.warning(
            'distmon: the sink "%s" %s: %s: %s', self.name, outcome, type(error).__name__, text
        )
