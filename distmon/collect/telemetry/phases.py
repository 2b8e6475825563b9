"""Time of each phase of a step, from marks that hooks make.

At any moment one phase is active; a mark ends it and begins the next. Only the last steps before an
observation are measured, and the median over them is reported, so that a single step with garbage
collection, an evaluation or a checkpoint does not distort it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch

from distmon.device import DeviceMark, is_accelerator, is_capturing
from distmon.metrics import OWN_PHASES, PHASES
from distmon.native import IdleLane

STEPS: Final = 32
"""Number of steps before an observation that are measured."""
MOST_SPANS: Final = 10_000
"""Phases of one step that are kept; a step with more is left out."""
EVALUATION: Final = "evaluation"
"""Phase of an evaluation until the next training forward; its time counts as `other`."""
_NAMES: Final = (*PHASES, EVALUATION)
PHASE_NUMBERS: Final = {name: i for i, name in enumerate(_NAMES)}
_OTHER: Final = PHASE_NUMBERS["other"]
_EVALUATION: Final = PHASE_NUMBERS[EVALUATION]
_FIELDS: Final = {phase: f"{phase}_seconds" for phase in PHASES}
_FLOOR_FIELDS: Final = {phase: f"{phase}_floor_seconds" for phase in OWN_PHASES}


class StreamMark(DeviceMark):
    """A mark from which an earlier one can be subtracted; never waited for."""

    def __sub__(self, earlier: StreamMark) -> float | None:
        """Return the seconds between two marks; None when one has not been reached yet."""
        return self.seconds_since(earlier)


Mark = Any
"""A point in time from which an earlier one can be subtracted: a StreamMark, or seconds of the
host's clock for a CPU. None where none can be made."""
Span = tuple[int, Mark, Mark]
"""Number of a phase, its beginning and its end."""
_CutStep = tuple[list[Span], list[float]]
"""Spans of a step, and the seconds of its phases besides, by number."""
_Seconds = list[float]
"""Of PHASES in one step."""


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
        self._phase = _OTHER
        self._since: Mark = None
        self._spans: list[Span] = []
        self._spent: list[float] = []
        """Seconds by number of a phase that the lane has measured of the current step."""
        self._steps: list[_CutStep | _Seconds] = []
        self._named = False
        self._broken = False
        self._stopped = False
        self.hook_seconds = 0.0
        """Time that the hooks on the model took so far."""
        self.lane: IdleLane | None = None
        """Notes the marks instead, while it counts the steps."""
        self.switch_hooks: Callable[[bool], None] = lambda _: None
        """Called at the end of a step with whether the coming one is measured."""
        self.fault: Exception | None = None
        """What failed in a hook or in `named`: `step_done` drops the step; then it is raised."""

    @property
    def active(self) -> bool:
        """Whether the coming step is measured."""
        return self._active

    def until(self, observed: int) -> int:
        """Return the step up to which the clock stays active, or inactive, as it is now.

        `observed` is the next observed step.
        """
        return observed if self._active else observed - STEPS + 1

    @property
    def since(self) -> float:
        """When the current phase began, on the host's clock; NaN when none is measured."""
        return self._since if isinstance(self._since, float) else math.nan

    @property
    def phase(self) -> str:
        """The current phase."""
        return _NAMES[self._current]

    @property
    def _current(self) -> int:
        number = -1 if self.lane is None else self.lane.phase()
        return self._phase if number < 0 else number

    def stop(self) -> None:
        """Measure nothing more."""
        self._stopped, self._active = True, False
        self._spans, self._spent, self._steps = [], [], []

    def enter(self, phase: str) -> None:
        """Begin a new phase; ignored inside `named`, and when it is the current one."""
        self.enter_number(PHASE_NUMBERS.get(phase, _OTHER))

    def enter_number(self, phase: int) -> None:
        """Begin the phase with this number in PHASE_NUMBERS, as `enter`."""
        if self._active and not self._named:
            self._begin(phase)

    def take_in(
        self, steps: Sequence[list[float]], spent: list[float], phase: int, since: float
    ) -> None:
        """Take in what the lane has measured, all in seconds by number of a phase.

        `steps` it has counted, and of the current one what was `spent` until `phase` began.
        """
        for seconds in steps:
            seconds[_OTHER] += seconds[_EVALUATION]
            del seconds[len(PHASES) :]
        self._steps += steps
        del self._steps[:-STEPS]
        self._spent, self._phase, self._since = spent, phase, since

    @contextmanager
    def named(self, phase: str) -> Iterator[None]:
        """Attribute the time inside the context to `phase`; then resume the phase before.

        Errors of the context are the training loop's; those of the clock become its `fault`.
        """
        before: int | None = None
        try:
            if self._active and not self._named:
                before = self._current
                self._begin(PHASE_NUMBERS.get(phase, _OTHER) if isinstance(phase, str) else _OTHER)
                self._named = True
                self._name_in_lane()
        except Exception as error:
            self.fault = error
        try:
            yield
        finally:
            try:
                if before is not None:
                    self._named = False
                    self._name_in_lane()
                    if self._active:
                        self._begin(before)
            except Exception as error:
                self.fault = error

    def _name_in_lane(self) -> None:
        if self.lane is not None:
            self.lane.set_named(self._named)

    def _begin(self, phase: int) -> None:
        if self.lane is not None and self.lane.mark(phase):
            return
        if phase != self._phase:
            self._switch(phase, self._mark())

    def step_done(self, coming: int, observed: int) -> None:
        """End a step, and begin the next one."""
        if self._active:
            self._switch(_OTHER, self._mark())
            if not (self._broken or self.fault):
                self._steps.append((self._spans, self._spent))
            self._spans, self._spent, self._broken = [], [], False
            del self._steps[:-STEPS]
        self.begin_step(coming, observed)

    def begin_step(self, coming: int, observed: int) -> None:
        """Begin `coming` after a step that has ended; `observed` is the next observed step."""
        fault, self.fault = self.fault, None
        self._active = observed - coming < STEPS and not self._stopped
        if self._active and self._since is None:
            self._since = self._mark()
        elif not self._active:
            self._since = None
        self._phase = _OTHER
        self.switch_hooks(self._active)
        if fault is not None:
            raise fault

    def take(self) -> dict[str, float]:
        """Return the seconds of each phase over the steps since the last call; empty without any.

        Steps that the device has not passed yet are kept for the next call.

        `{phase}_seconds` is the median over steps. `{phase}_floor_seconds`, for the OWN_PHASES, is
        the first quartile: a straggler is slow in nearly all steps. That of backward is NaN unless
        communication was measured separately in every step.
        """
        steps, self._steps = self._steps, []  # what raises here is not taken again
        found = []
        for step in steps:
            seconds = _seconds_of(*step) if isinstance(step, tuple) else step
            if seconds is None:
                self._steps.append(step)
            else:
                found.append(seconds)
        if not found:
            return {}
        # Not by numpy: after a training step all code is cold, and these are a few dozen numbers.
        count = len(found)
        times = dict(zip(PHASES, map(sorted, zip(*found, strict=True)), strict=True))
        telemetry = {
            field: (times[phase][(count - 1) // 2] + times[phase][count // 2]) / 2
            for phase, field in _FIELDS.items()
        }
        for phase, field in _FLOOR_FIELDS.items():
            telemetry[field] = times[phase][count // 4]
        if not times["communication"][0]:
            telemetry["backward_floor_seconds"] = math.nan
        return telemetry

    def _switch(self, phase: int, now: Mark) -> None:
        self._broken |= now is None
        if len(self._spans) >= MOST_SPANS:
            self._broken, self._spans = True, []
        if self._since is not None and now is not None and not self._broken:
            self._spans.append((self._phase, self._since, now))
        self._phase, self._since = phase, now


def _seconds_of(spans: list[Span], spent: list[float]) -> list[float] | None:
    """Return the seconds of PHASES in one step; None when a mark has not been reached."""
    seconds = spent[: len(_NAMES)] or [0.0] * len(_NAMES)
    for phase, begin, end in spans:
        passed = end - begin
        if passed is None:
            return None
        seconds[phase] += passed
    seconds[_OTHER] += seconds.pop()  # an evaluation
    return seconds
