"""Mark the time that a training loop waits in a `torch.utils.data.DataLoader`.

A loader has no hooks, so the method that returns the next batch is replaced on the class of its
iterators while a monitor is attached. Iterators in worker processes are of another class.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Mapping
from typing import Any, Final

from torch.utils.data.dataloader import _BaseDataLoaderIter

from distmon.collect.telemetry.phases import EVALUATION, PhaseClock

_CLOCKS: Final = "__distmon_clocks__"
"""Attribute of the replaced method: the clocks of the attached monitors."""


class LoaderHook:
    """Attributes the time inside `next(iterator)` to the phase `data` of one clock."""

    def __init__(self, clock: PhaseClock, iterators: Any = _BaseDataLoaderIter) -> None:
        self._clock = clock
        self._iterators = iterators
        if not hasattr(iterators.__next__, _CLOCKS):
            iterators.__next__ = _timed(iterators.__next__)
        getattr(iterators.__next__, _CLOCKS).append(clock)

    def remove(self) -> None:
        """Remove the clock; the last one restores the method of the class."""
        replaced = self._iterators.__next__
        clocks: list[PhaseClock] = getattr(replaced, _CLOCKS, [])
        if self._clock in clocks:
            clocks.remove(self._clock)
            if not clocks:
                self._iterators.__next__ = replaced.__wrapped__


def _enter(phases: Mapping[PhaseClock, str]) -> None:
    for clock, phase in phases.items():
        try:
            clock.enter(phase)
        except Exception as error:  # never into the training loop
            clock.fault = error


def _timed(original: Any) -> Any:
    clocks: list[PhaseClock] = []
    training_thread = threading.get_ident()

    @functools.wraps(original)
    def __next__(iterator: Any) -> Any:
        if threading.get_ident() != training_thread:  # a loader that another thread reads ahead
            return original(iterator)
        before = {clock: clock.phase for clock in clocks if clock.phase != EVALUATION}
        _enter(dict.fromkeys(before, "data"))
        try:
            return original(iterator)
        finally:
            _enter(before)

    setattr(__next__, _CLOCKS, clocks)
    return __next__
