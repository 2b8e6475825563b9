"""What a sink is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from distmon.alert import Alert
from distmon.record import Record


class Sink(Protocol):
    """Takes records and alerts somewhere. Lives in a thread of its own; may be slow, may raise."""

    def record(self, record: Record) -> None:
        """Take one observation."""

    def alert(self, alert: Alert) -> None:
        """Take one finding."""

    def close(self) -> None:
        """Write out what is held back. Called once, last."""


SinkFactory = Callable[[], Sink]
"""Makes the sink. Called in the sink's thread when the first item arrives: it may take seconds."""
