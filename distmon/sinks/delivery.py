"""Deliver records and alerts to the sinks without blocking the training thread.

Each sink has its own bounded queue and daemon thread, so a sink that hangs or fails blocks neither
the trainer nor the other sinks. While storage fails, items wait in the queue and are tried again;
what is lost nevertheless is counted in the run folder.
"""

from __future__ import annotations

import itertools
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from distmon.errors import ConfigError
from distmon.own_threads import OwnThread, run_within
from distmon.record.record import Record
from distmon.rules.alert import Alert
from distmon.sinks.base import Sink, SinkFactory
from distmon.sinks.gaps import WRITE_S, GapLog
from distmon.sinks.outcomes import Item, Outcomes

MOST_BYTES: Final = 64 << 20
"""Memory for what waits for one sink, unless one item needs more."""
RETRY_S: Final = 0.2
"""Pause before the first new try; it doubles up to `LONGEST_RETRY_S`."""
LONGEST_RETRY_S: Final = 10.0


@dataclass(frozen=True)
class AlertsOnly:
    """Wraps the factory of a sink that gets no records, so that none are queued for it."""

    make: SinkFactory

    def __call__(self) -> Sink:
        return self.make()


@dataclass(frozen=True)
class WritesFiles:
    """Wraps the factory of a sink whose queue is limited by bytes alone: a disk may be full for
    hours, and nothing else has its records."""

    make: SinkFactory

    def __call__(self) -> Sink:
        return self.make()


class Delivery:
    """Queues records and alerts for every sink."""

    def __init__(
        self,
        factories: Sequence[tuple[str, SinkFactory]],
        queue_size: int,
        gaps: GapLog | None = None,
    ) -> None:
        order = itertools.count()
        self._gaps = gaps
        self._lanes = [_Lane(name, factory, queue_size, order, gaps) for name, factory in factories]
        self._closed = False

    def post(self, record: Record | None, alerts: Iterable[Alert]) -> None:
        """Queue a record, if there is one, and then its alerts. Never blocks or raises."""
        if record is not None:
            self.post_record(record)
        for alert in alerts:
            self.post_alert(alert)

    def post_record(self, record: Record) -> None:
        """Queue a record for every sink. Never blocks or raises; a full queue drops it."""
        size = _size(record)
        for lane in self._lanes:
            lane.post(record, size)

    def post_alert(self, alert: Alert) -> None:
        """Queue an alert for every sink. Alerts have their own queue, so records cannot fill it."""
        size = _size(alert)
        for lane in self._lanes:
            lane.post(alert, size)

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
            if self._gaps is not None:
                run_within(WRITE_S, self._gaps.write, "gaps")
        return self.stats()

    def stats(self) -> dict[str, dict[str, int]]:
        """Return the number of items that were written, failed and dropped, by sink."""
        return {lane.name: lane.stats() for lane in self._lanes}


_Queued = tuple[int, Item, int]
"""Its place in the order of posting, the item, and about how many bytes it takes."""


class _Lane:
    """One sink with its queue and thread."""

    def __init__(
        self,
        name: str,
        factory: SinkFactory,
        queue_size: int,
        order: Iterator[int],
        gaps: GapLog | None,
    ) -> None:
        self.name = name
        self._outcomes = Outcomes(name, gaps)
        self._sink: Sink | None = None
        self._unusable = False
        self._bytes = 0
        self._factory = factory
        self._alerts_only = isinstance(factory, AlertsOnly)
        self._limit = sys.maxsize if isinstance(factory, WritesFiles) else queue_size
        self._order = order
        self._records: deque[_Queued] = deque()
        self._alerts: deque[_Queued] = deque()
        self._changed = threading.Condition()
        self._finishing = False
        self._abandoned = False
        self._busy = False
        self._thread = OwnThread(self._run, name)
        self._thread.start()

    def post(self, item: Item, size: int) -> None:
        if self._alerts_only and not isinstance(item, Alert):
            return
        with self._changed:
            queue = self._alerts if isinstance(item, Alert) else self._records
            full = bool(self._bytes) and self._bytes + size > MOST_BYTES
            if self._finishing or full or len(queue) >= self._limit:
                self._outcomes.dropped += 1
                self._outcomes.lose(
                    item, "the run had ended" if self._finishing else "it was behind"
                )
                return
            self._bytes += size
            queue.append((next(self._order), item, size))
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
            self._outcomes.dropped += len(self._records) + len(self._alerts)
            for _, item, _ in (*self._records, *self._alerts):
                self._outcomes.lose(item, "it did not finish in time")
            self._records.clear()
            self._alerts.clear()
            self._outcomes.failed += self._busy

    def report_losses(self, timeout: float) -> None:
        self._outcomes.summarize(timeout if self._abandoned else None)

    def stats(self) -> dict[str, int]:
        with self._changed:
            return self._outcomes.stats()

    def _run(self) -> None:
        # BaseException: a sink that calls sys.exit() must not end its thread unnoticed.
        while (item := self._take()) is not None:
            self._deliver(item)
        if self._sink is not None:
            try:
                self._sink.close()
            except BaseException as caught:
                self._count(ok=False)
                self._outcomes.warn_once(caught, "failed to close")

    def _deliver(self, item: Item) -> None:
        """Deliver one item; again and again while the storage or the opening fails."""
        pause = RETRY_S
        while not self._unusable:
            # At the end of the run files are opened once more, and not again after that.
            last = self._finishing and self._sink is None
            error = self._try(item)
            if error is None:
                self._count(ok=True)
                self._outcomes.recover()
                return
            opening = self._sink is None
            self._unusable = opening and isinstance(error, ConfigError)
            waits = not self._unusable and (opening or _storage_failed(self._sink, error))
            self._outcomes.warn(error, opening=opening, waits=waits, unusable=self._unusable)
            if not waits:
                self._lose(item, error)
                return
            self._drop_sink()
            if last:
                self._lose(item, error)
                return
            self._pause(pause)
            pause = min(2 * pause, LONGEST_RETRY_S)
        self._lose(item, None)

    def _try(self, item: Item) -> BaseException | None:
        """Open the sink if it is not, and give it the item; return what it raised."""
        try:
            if self._sink is None:
                self._sink = self._factory()
            if isinstance(item, Alert):
                self._sink.alert(item)
            else:
                self._sink.record(item)
        except BaseException as caught:
            return caught
        return None

    def _drop_sink(self) -> None:
        """Forget a sink whose storage has failed; the next try opens another one."""
        sink, self._sink = self._sink, None
        if sink is not None:
            with suppress(BaseException):
                sink.close()

    def _pause(self, seconds: float) -> None:
        """Wait for the next try, or until there is no time for more."""
        with self._changed:
            if not self._finishing:
                self._changed.wait_for(lambda: self._finishing, seconds)

    def _lose(self, item: Item, error: BaseException | None) -> None:
        self._count(ok=False)
        self._outcomes.lose(item, "it is disabled" if error is None else type(error).__name__)

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
            _, item, size = min(queues, key=lambda queue: queue[0][0]).popleft()
            self._bytes -= size
            return item

    def _count(self, *, ok: bool) -> None:
        with self._changed:
            self._busy = False
            if self._abandoned:
                return
            if ok:
                self._outcomes.written += 1
            else:
                self._outcomes.failed += 1


def _storage_failed(sink: Sink | None, error: BaseException) -> bool:
    """Return whether a sink that writes files should open them again and repeat the item."""
    return isinstance(error, OSError) and bool(getattr(sink, "writes_files", False))


def _size(item: Item) -> int:
    """Return about how many bytes an item takes in memory."""
    if isinstance(item, Alert):
        return 1024
    numbers = len(item.metrics) + len(item.losses) + len(item.loss_ema)
    sizes = [array.nbytes for array in (*item.params.columns.values(), *item.ranks.values())]
    if item.params.grad_histogram is not None:
        sizes.append(item.params.grad_histogram.nbytes)
    return 4096 + 128 * numbers + sum(sizes)
