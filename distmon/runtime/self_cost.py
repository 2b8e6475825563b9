"""The monitor's own time, and the budget that it is held to."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

from distmon.native import IdleLane
from distmon.own_threads import ThreadCosts
from distmon.record.telemetry import ObservationCost
from distmon.runtime.budget import Budget, Stretch

LOST: Final = 1.4
"""What training loses for each second of its thread in the monitor. The caches that it finds
emptier afterwards, and torch's own way through modules with hooks, are in no clock: steps of 5 and
10 ms of 24 tensors took longer by 1.4 to 1.5 times that second (`benchmarks.overhead.wall_time`,
cases all-10 and fast-10)."""


class SelfCost:
    """Adds up what the monitor takes from this rank's training between observations.

    LOST times the time of the training thread in it, its hooks in forward and backward passes
    included, the CPU time of its threads in this process: while they hold the interpreter lock,
    training waits; and that of the writer where training has taken all cores.
    """

    lane: IdleLane | None = None
    """Where compiled code passes the calls of the training loop on, it times them, from their first
    instruction to their last."""

    def __init__(
        self,
        budget: Budget,
        now: Callable[[], float] = time.perf_counter,
        hook_seconds: Callable[[], float] = float,
        take_beside: Callable[[], float] = float,
    ) -> None:
        """`hook_seconds` returns the time that hooks of models and tensors took so far.

        `take_beside` returns what training has lost to other processes since it was last called.
        """
        self.now = now
        self._hook_seconds = hook_seconds
        self._take_beside = take_beside
        self._hooks_before = 0.0
        self._budget = budget
        self._seconds = 0.0
        self._idle_seconds = 0.0
        self._waited = 0.0
        self._idle_waited = 0.0
        self._excluded = 0.0
        """Of the call that has not ended, as is the next one."""
        self._waited_in_call = 0.0
        self._threads = ThreadCosts()

    def add_since(self, begin: float) -> None:
        """Add the time since `begin`, a value of `now`."""
        self._seconds += self.now() - begin

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Add the time that is spent in the context, unless it raises."""
        begin = self.now()
        yield
        self.add_since(begin)

    def add_call(self, begin: float, idle: bool = False) -> None:
        """Add the time since `begin`, spent in a call of the training loop that ends.

        `idle`: a longer interval would not save it; such time is also counted apart.
        """
        own = -self._excluded
        if self.lane is None:
            own += self.now() - begin
        elif idle:
            self.lane.call_is_idle()
        self._seconds += own
        self._waited += self._waited_in_call
        if idle:
            self._idle_seconds += own
            self._idle_waited += self._waited_in_call
        self._excluded = self._waited_in_call = 0.0

    def add_idle(self, seconds: float) -> None:
        """Add the time of steps that were not observed."""
        self._seconds += seconds
        self._idle_seconds += seconds

    def exclude_since(self, begin: float) -> None:
        """Do not count the time since `begin`, which is within a call that has not ended."""
        self._excluded += self.now() - begin

    def waited_since(self, begin: float) -> None:
        """Count the time since `begin` as a wait for other ranks: training loses no more than it.

        It is within a call that has not ended.
        """
        self._waited_in_call += self.now() - begin

    def take(self, waited: float) -> dict[str, float]:
        """Return the rank telemetry about the monitor's own time and start over.

        `waited`: the part of it in which this rank waited for others to send.
        """
        before, self._hooks_before = self._hooks_before, self._hook_seconds()
        own, idle = self._seconds + self._hooks_before - before, self._idle_seconds
        if self.lane is not None:
            in_calls, in_idle_calls = self.lane.take_call_seconds()
            own, idle = own + in_calls, idle + in_idle_calls
        waited, idle_waited = waited + self._waited, self._idle_waited
        self._seconds = self._idle_seconds = self._waited = self._idle_waited = 0.0
        return {
            "monitor_seconds": _lost(own, waited) + self._threads.take() + self._take_beside(),
            "monitor_step_seconds": _lost(idle, idle_waited),
        }

    def evaluate(self, cost: ObservationCost | None) -> Stretch | None:
        """Return the change of the interval that the budget requires after a record."""
        return self._budget.evaluate(cost)

    def adopt(self, interval: int) -> None:
        """Continue with an interval that all ranks have agreed on."""
        self._budget.adopt(interval)

    def state_dict(self) -> dict[str, Any]:
        """Return how far the interval is stretched."""
        return {"stretch": self._budget.multiple}

    def load_state_dict(self, state: Mapping[str, Any]) -> int:
        """Continue with the interval that an earlier process had reached, and return it."""
        return self._budget.resume(int(state.get("stretch", 1)))


def _lost(own: float, waited: float) -> float:
    """Return what training loses for `own` seconds of its thread, of which it `waited` some."""
    return LOST * (own - waited) + waited
