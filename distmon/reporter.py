"""Rank 0's way out: the run folder and the sinks that write to it."""

from __future__ import annotations

import atexit
from collections.abc import Sequence

from distmon.alert import Alert
from distmon.record import Record
from distmon.run_folder import RunFolder
from distmon.sinks import Delivery


class Reporter:
    """Hands records and alerts to the sinks; never waits for them while training runs."""

    def __init__(self, folder: RunFolder, delivery: Delivery, world_size: int) -> None:
        self._folder = folder
        self._delivery = delivery
        self._world_size = world_size
        # A script that ends without close() still gets its last records on disk.
        atexit.register(self.close)

    def begin(self, resumed_from: int) -> None:
        """The first step of this process has shown where the run goes on."""
        self._folder.begin_attempt(resumed_from=resumed_from, world_size=self._world_size)

    def post(self, record: Record, alerts: Sequence[Alert]) -> None:
        """A record and what the rules say of it."""
        self._delivery.post_record(record)
        for alert in alerts:
            self._delivery.post_alert(alert)

    def alert(self, alert: Alert) -> None:
        """An alert that cannot wait for the next record."""
        self._delivery.post_alert(alert)

    def close(self) -> None:
        """Flush what can be flushed in a few seconds."""
        atexit.unregister(self.close)
        self._delivery.close()
