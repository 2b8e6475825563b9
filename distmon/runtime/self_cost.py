"""The monitor's own time, and the budget that it is held to."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from distmon.own_threads import ThreadCosts
from distmon.record.telemetry import ObservationCost
from distmon.runtime.budget import Budget, Stretch


class SelfCost:
    """Adds up what the monitor takes from this rank's training between observations.

    The time of the training thread in it, its hooks in forward and backward passes included, and
    the CPU time of its threads in this process: while they hold the interpreter lock, training
    waits.
    """

    def __init__(
        self,
        budget: Budget,
        now: Callable[[], float] = time.perf_counter,
        hook_seconds: Callable[[], float] = float,
    ) -> None:
        """`hook_seconds` returns the time that hooks of models and tensors took so far."""
        self.now = now
        self._hook_seconds = hook_seconds
        self._hooks_before = 0.0
        self._budget = budget
        self._seconds = 0.0
        self._idle_seconds = 0.0
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

    def add_step(self, begin: float, idle: bool) -> None:
        """Add the time since `begin`, spent in a `step()`; `idle` ones are also counted apart."""
        seconds = self.now() - begin
        self._seconds += seconds
        if idle:
            self._idle_seconds += seconds

    def add_idle(self, seconds: float) -> None:
        """Add the time of steps that were not observed."""
        self._seconds += seconds
        self._idle_seconds += seconds

    def exclude_since(self, begin: float) -> None:
        """Do not count the time since `begin`, which is within a time that is counted."""
        self._seconds -= self.now() - begin

    def take(self) -> dict[str, float]:
        """Return the rank telemetry about the monitor's own time and start over."""
        before, self._hooks_before = self._hooks_before, self._hook_seconds()
        own = self._seconds + self._hooks_before - before + self._threads.take()
        taken = {"monitor_seconds": own, "monitor_step_seconds": self._idle_seconds}
        self._seconds = self._idle_seconds = 0.0
        return taken

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
