"""Rank-0 output: the run folder and the sinks."""

from __future__ import annotations

from collections.abc import Sequence

from distmon.record.record import Record
from distmon.rules.alert import Alert
from distmon.runs.run_folder import RunFolder
from distmon.sinks import Delivery
from distmon.sinks.gaps import GapLog, LastObservation


class RunOutput:
    """Posts records and alerts to the sinks; never waits for them before `close`."""

    def __init__(self, folder: RunFolder, delivery: Delivery, world_size: int) -> None:
        self.path = folder.path
        self._folder = folder
        self._delivery = delivery
        self._world_size = world_size

    def begin(self, resumed_from: int) -> None:
        """Add this attempt to the run folder, once; called at the first step."""
        if self._folder.resumed_from is None:
            self._folder.begin_attempt(resumed_from=resumed_from, world_size=self._world_size)

    def post(self, record: Record, alerts: Sequence[Alert]) -> None:
        """Deliver a record and its alerts."""
        self._delivery.post_record(record)
        for alert in alerts:
            self._delivery.post_alert(alert)

    def alert(self, alert: Alert) -> None:
        """Deliver an alert at once, before the next record."""
        self._delivery.post_alert(alert)

    def close(self, timeout: float = 10.0, last: LastObservation | None = None) -> None:
        """Flush the sinks within `timeout` seconds. Safe to call twice.

        `last`: noted as the end of the run; None in a process that does not know it.
        """
        self._delivery.close(timeout)
        if last is not None:
            GapLog(self._folder).end(last)
        self._folder.release()
