"""Where the time of a step goes, from marks that hooks make on the way.

At any moment one phase is running; a mark ends it and begins the next. Only the last steps before
an observation are cut up so, and the median over them is told: a step with a garbage collection, an
evaluation or a checkpoint in it says nothing about the others.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
import torch

PHASES: Final = ("data", "forward", "backward", "communication", "optimizer", "other")
"""In the order of a step. `other` is what none of the marks tells, evaluation among it."""
OWN: Final = ("data", "forward", "backward", "optimizer")
"""What a rank may be slow in by itself; in the others it may be waiting."""
STEPS: Final = 32
"""Steps before an observation that are cut up."""


class StreamMark:
    """A moment in the current stream of an accelerator; never waited for."""

    def __init__(self) -> None:
        self._event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._event.record()

    def __sub__(self, earlier: StreamMark) -> float | None:
        """The seconds between; None when they are not known yet."""
        if not (self._event.query() and earlier._event.query()):  # type: ignore[no-untyped-call]
            return None
        return float(earlier._event.elapsed_time(self._event)) / 1000.0


Mark = Any
"""A moment, of which an earlier one can be subtracted: a StreamMark, or seconds of the host's
clock, which is also that of a CPU."""
Piece = tuple[str, Mark, Mark]
"""A phase, where it began and where it ended."""


def marks_for(device: torch.device) -> Callable[[], Mark]:
    """What makes the marks where `device` does the work."""
    return StreamMark if device.type == "cuda" else time.perf_counter


class PhaseClock:
    """Cuts steps into phases. Everything but `take` costs one comparison while it rests."""

    def __init__(self, mark: Callable[[], Mark]) -> None:
        self._mark = mark
        self._working = False
        self._phase = "other"
        self._since: Mark = None
        self._pieces: list[Piece] = []
        self._steps: list[list[Piece]] = []
        self._given = False

    def enter(self, phase: str) -> None:
        """A new phase begins; what the user names by `told` is not cut."""
        if not self._working or self._given:
            return
        self._cut(phase)

    @contextmanager
    def told(self, phase: str) -> Iterator[None]:
        """The user says what this is; then the phase before goes on."""
        if not self._working or self._given:
            yield
            return
        before = self._phase
        self._cut(phase)
        self._given = True
        try:
            yield
        finally:
            self._given = False
            if self._working:
                self._cut(before)

    def step_done(self, coming: int, observed: int) -> None:
        """A step has ended; `coming` is the next one, `observed` the next that is observed."""
        if self._working:
            self._cut("data")
            self._steps.append(self._pieces)
            self._pieces = []
            del self._steps[:-STEPS]
        self._working = observed - coming < STEPS
        if self._working and self._since is None:
            self._since = self._mark()
        elif not self._working:
            self._since = None
        self._phase = "data"

    def take(self) -> dict[str, float]:
        """Seconds of each phase over the steps since the last call; empty without any.

        `data_seconds` is the median; `data_floor_seconds`, and so on for the OWN phases, what all
        but the fastest quarter of the steps take at least: a slow rank is slow in nearly all.
        That of backward is NaN unless communication was told apart from it in every step.
        """
        steps, self._steps = self._steps, []
        found = [seconds for pieces in steps if (seconds := _seconds_of(pieces)) is not None]
        if not found:
            return {}
        count, times = len(found), np.sort(np.array(found), axis=0)
        middle = ((times[(count - 1) // 2] + times[count // 2]) / 2).tolist()
        floor = times[count // 4].tolist()
        told = {f"{phase}_seconds": middle[i] for i, phase in enumerate(PHASES)}
        told |= {f"{phase}_floor_seconds": floor[PHASES.index(phase)] for phase in OWN}
        if not times[0, PHASES.index("communication")]:
            told["backward_floor_seconds"] = math.nan
        return told

    def _cut(self, phase: str) -> None:
        now = self._mark()
        if self._since is not None:
            self._pieces.append((self._phase, self._since, now))
        self._phase, self._since = phase, now


def _seconds_of(pieces: list[Piece]) -> list[float] | None:
    """Of each phase of one step; None when a mark has not been reached."""
    seconds = dict.fromkeys(PHASES, 0.0)
    for phase, begin, end in pieces:
        passed = end - begin
        if passed is None:
            return None
        seconds[phase if phase in seconds else "other"] += passed
    return [*seconds.values()]
