"""The parts of a monitor as tools and tests read them: nothing that was counted is missing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from distmon.runtime.assembly import Parts
from distmon.runtime.idle_lane import PythonLane

_Value = TypeVar("_Value")


class _Part(Generic[_Value]):
    """A part of the monitor, read after the idle lane has settled what it counted for it."""

    def __init__(self, read: Callable[[Parts], _Value]) -> None:
        self._read = read

    def __get__(self, monitor: SettledParts, owner: type[SettledParts] | None = None) -> _Value:
        monitor.lane.settle()
        return self._read(monitor.parts)


class SettledParts:
    """Base of `Monitor`. Where nothing can have been counted, `parts` is read without settling."""

    parts: Parts
    lane: PythonLane
    schedule = _Part(lambda parts: parts.schedule)
    """Step numbers, and which steps are observed."""
    cycle = _Part(lambda parts: parts.cycle)
    """The observations, from snapshot to alerts."""
    finite_watch = _Part(lambda parts: parts.finite_watch)
    """The watch for NaN and Inf in loss and gradient norm."""
    telemetry = _Part(lambda parts: parts.telemetry)
    """What this rank measures about itself."""
    cost = _Part(lambda parts: parts.cost)
    """The monitor's own time."""
