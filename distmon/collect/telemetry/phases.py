"""Time of each phase of a step, from marks that hooks make.

At any moment one phase is active; a mark ends it and begins the next. Only the last steps before an
observation are measured, and the median over them is reported, so that a single step with garbage
collection, an evaluation or a checkpoint does not distort it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
import torch

from distmon.device import DeviceMark, is_accelerator, is_capturing
from distmon.metrics import OWN_PHASES, PHASES

STEPS: Final = 32
"""Number of steps before an observation that are measured."""
EVALUATION: Final = "evaluation"
"""Phase of an evaluation until the next training forward; its time counts as `other`."""


class StreamMark(DeviceMark):
    """A mark from which an earlier one can be subtracted; never waited for."""

    def __sub__(self, earlier: StreamMark) -> float | None:
        """Return the seconds between two marks; None when one has not been reached yet."""
        return self.seconds_since(earlier)


Mark = Any
"""A point in time from which an earlier one can be subtracted: a StreamMark, or seconds of the
host's clock for a CPU. None where none can be made."""
Span = tuple[str, Mark, Mark]
"""A phase, its beginning and its end."""


def marks_for(device: torch.device) -> Callable[[], Mark]:
    """Return the function that makes marks for work on `device`."""
    if not is_accelerator(device):
        return time.perf_counter
    # An event that was recorded into a graph can never be read.
    return lambda: None if is_capturing(device) else StreamMark(device, timing=True)


class PhaseClock:
    """Measures the phases of steps. While inactive, every method except `take` costs one check."""

    def __init__(self, mark: Callable[[], Mark]) -> None:
        self._mark = mark
        self._active = False
        self._phase = "other"
        self._since: Mark = None
        self._spans: list[Span] = []
        self._steps: list[list[Span]] = []
        self._named = False
        self._broken = False
        self._stopped = False

    @property
    def phase(self) -> str:
        """The current phase."""
        return self._phase

    def stop(self) -> None:
        """Measure nothing more."""
        self._stopped, self._active = True, False
        self._spans, self._steps = [], []

    def enter(self, phase: str) -> None:
        """Begin a new phase; ignored inside `named`, and when it is the current one."""
        if not self._active or self._named or phase == self._phase:
            return
        self._switch(phase)

    @contextmanager
    def named(self, phase: str) -> Iterator[None]:
        """Attribute the time inside the context to `phase`; then resume the phase before."""
        if not self._active or self._named:
            yield
            return
        before = self._phase
        self._switch(phase)
        self._named = True
        try:
            yield
        finally:
            self._named = False
            if self._active:
                self._switch(before)

    def step_done(self, coming: int, observed: int) -> None:
        """End a step; `coming` is the next step, `observed` the next observed step."""
        if self._active:
            self._switch("other")
            if not self._broken:
                self._steps.append(self._spans)
            self._spans, self._broken = [], False
            del self._steps[:-STEPS]
        self._active = observed - coming < STEPS and not self._stopped
        if self._active and self._since is None:
            self._since = self._mark()
        elif not self._active:
            self._since = None
        self._phase = "other"

    def take(self) -> dict[str, float]:
        """Return the seconds of each phase over the steps since the last call; empty without any.

        Steps that the device has not passed yet are kept for the next call.

        `{phase}_seconds` is the median over steps. `{phase}_floor_seconds`, for the OWN_PHASES, is
        the first quartile: a straggler is slow in nearly all steps. That of backward is NaN unless
        communication was measured separately in every step.
        """
        found, waiting = [], []
        for spans in self._steps:
            seconds = _seconds_of(spans)
            if seconds is None:
                waiting.append(spans)
            else:
                found.append(seconds)
        self._steps = waiting
        if not found:
            return {}
        count, times = len(found), np.sort(np.array(found), axis=0)
        middle = ((times[(count - 1) // 2] + times[count // 2]) / 2).tolist()
        floor = times[count // 4].tolist()
        telemetry = {f"{phase}_seconds": middle[i] for i, phase in enumerate(PHASES)}
        telemetry |= {f"{phase}_floor_seconds": floor[PHASES.index(phase)] for phase in OWN_PHASES}
        if not times[0, PHASES.index("communication")]:
            telemetry["backward_floor_seconds"] = math.nan
        return telemetry

    def _switch(self, phase: str) -> None:
        now = self._mark()
        self._broken |= now is None
        if self._since is not None and now is not None:
            self._spans.append((self._phase, self._since, now))
        self._phase, self._since = phase, now


def _seconds_of(spans: list[Span]) -> list[float] | None:
    """Return the seconds of each phase of one step; None when a mark has not been reached."""
    seconds = dict.fromkeys(PHASES, 0.0)
    for phase, begin, end in spans:
        passed = end - begin
        if passed is None:
            return None
        seconds[phase if phase in seconds else "other"] += passed
    return [*seconds.values()]
