"""What `Monitor.step` does: each part is done whatever happens in the others."""

from __future__ import annotations

import time
from collections.abc import Callable

from distmon.collect.losses import Number
from distmon.errors import CollectiveError
from distmon.runtime.assembly import Parts
from distmon.runtime.idle_lane import PythonLane
from distmon.runtime.lifetime import Lifetime

Signals = tuple[Number | None, Number | None, Number | None]
"""Loss, gradient norm and learning rate that the trainer reported with the step."""


class StepCompletion:
    """Completes training steps. Other ranks count on it: each step counts, and is exchanged."""

    def __init__(
        self, parts: Parts, lane: PythonLane, lifetime: Lifetime, stepped: Callable[[], None]
    ) -> None:
        self._parts = parts
        self._lane = lane
        self._lifetime = lifetime
        self._stepped = stepped
        self.exchanged = True
        """Whether what ranks exchange at this step was launched; the caller clears it before."""

    def complete(
        self,
        step: int | None,
        tokens: Number | None,
        samples: Number | None,
        signals: Signals,
    ) -> None:
        """Complete a step. After any error but a CollectiveError `make_up` does what is missing."""
        self._parts.faults.guard("step", self._lane.settle)
        schedule, telemetry, cycle = self._parts.schedule, self._parts.telemetry, self._parts.cycle
        guard, first, before = self._parts.faults.guard, not schedule.begun, schedule.counted
        begin = time.perf_counter()
        guard("step", lambda: schedule.advance(step))
        if schedule.counted == before:
            schedule.advance_anyway()  # counted on all ranks, whatever failed on this one
        guard("step", lambda: telemetry.step_ends(begin, tokens, samples))
        guard("step", lambda: cycle.take_in(*signals))
        idle = cycle.at_rest and not schedule.is_observed
        if not idle:
            cycle.run()
        self.exchanged = True
        guard("step", cycle.prepare_step)
        guard("step", lambda: telemetry.step_begins(schedule.coming, schedule.next_observation))
        self._parts.cost.add_step(begin, idle=idle and not first)
        self._lane.open()
        self._stepped()

    def make_up(self, before: int) -> None:
        """Do after an error what other ranks count on; `before`: steps counted before it.

        Where that fails, too, monitoring ends.
        """
        try:
            with self._lifetime.in_use:
                if not self._lifetime.closed:
                    self._make_up(before)
        except Exception as error:
            self._lifetime.end_monitoring(CollectiveError(f"{type(error).__name__}: {error}"))

    def _make_up(self, before: int) -> None:
        schedule, cycle = self._parts.schedule, self._parts.cycle
        if schedule.counted == before:
            schedule.advance_anyway()
        cycle.observer.losses.complete(schedule.completed)
        if not self.exchanged:
            cycle.run()
