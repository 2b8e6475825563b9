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
        guard("step", schedule.advance, step)
        if schedule.counted == before:
            schedule.advance_anyway()  # counted on all ranks, whatever failed on this one
        guard("step", telemetry.step_ends, begin, tokens, samples)
        guard("step", cycle.take_in, *signals)
        observing = schedule.is_observed or cycle.in_flight
        if observing or cycle.worker.busy or cycle.decisions.enabled:
            cycle.run()
        self.exchanged = True
        guard("step", cycle.prepare_step)
        self._begin_next(ended=False)
        self._parts.cost.add_call(begin, idle=not (observing or first))
        self._stepped()

    def prepare(self) -> None:
        """Prepare the coming step: the lane has counted the one before it, and goes no further."""
        begin, guard = time.perf_counter(), self._parts.faults.guard
        guard("step", self._lane.settle)
        guard("step", self._parts.cycle.prepare_step)
        self._begin_next(ended=True)
        self._parts.cost.add_call(begin)

    def _begin_next(self, ended: bool) -> None:
        schedule, telemetry = self._parts.schedule, self._parts.telemetry
        coming, observed = schedule.coming, schedule.next_observation
        self._parts.faults.guard("step", telemetry.step_begins, coming, observed, ended)
        self._lane.open()

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
