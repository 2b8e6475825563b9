"""The interface of a sink."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from rich.console import Console

from distmon.config import MonitorConfig
from distmon.record.record import Record
from distmon.rules.alert import Alert
from distmon.runs.run_folder import RunFolder


class Sink(Protocol):
    """Writes or sends records and alerts. Runs in its own thread; may be slow and may raise."""

    def record(self, record: Record) -> None:
        """Write one record."""

    def alert(self, alert: Alert) -> None:
        """Write one alert."""

    def close(self) -> None:
        """Flush and release resources. Called once, last."""


@dataclass(frozen=True)
class SinkContext:
    """What a sink may need; the argument of `open_sink` in every sink's module."""

    config: MonitorConfig
    folder: RunFolder
    console: Console | None
    """Where to print; None for the terminal."""
    tagged_params: frozenset[str]
    """Parameters that `param_tags` selects."""


SinkFactory = Callable[[], Sink]
"""Makes the sink. Called in the sink's thread when the first item arrives; it may take seconds."""
