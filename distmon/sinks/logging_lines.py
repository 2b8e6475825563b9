"""Records and alerts through Python's `logging`, for trainers that collect their logs there."""

from __future__ import annotations

import logging
from typing import Final

from distmon.record.record import Record
from distmon.rules.alert import Alert
from distmon.sinks.base import SinkContext
from distmon.sinks.console import record_line
from distmon.sinks.notify import body

LEVELS: Final = {"info": logging.INFO, "warning": logging.WARNING, "critical": logging.CRITICAL}


def open_sink(context: SinkContext) -> LoggingSink:
    """Return the sink of a monitor."""
    return LoggingSink(logging.getLogger("distmon.records"), context.config.total_steps)


class LoggingSink:
    """Logs the console's line of each record at level INFO, and alerts at their severity.

    The numbers are attributes of the log record too: `step`, and `metrics` or `rule`.
    """

    def __init__(self, logger: logging.Logger, total_steps: int | None) -> None:
        self._logger = logger
        self._total_steps = total_steps

    def record(self, record: Record) -> None:
        line = record_line(record, self._total_steps).plain
        extra = {"step": record.step, "metrics": dict(record.metrics)}
        self._logger.info("%s", line, extra=extra)

    def alert(self, alert: Alert) -> None:
        text = body(alert).replace("\n\n", " ").replace("\n", " ")
        extra = {"step": alert.step, "rule": alert.rule}
        self._logger.log(
            LEVELS[alert.severity], "%s at step %d: %s", alert.rule, alert.step, text, extra=extra
        )

    def close(self) -> None:
        """Do nothing: loggers belong to the trainer."""
