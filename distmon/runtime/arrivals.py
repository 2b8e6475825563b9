"""Observations that arrive: searched, handed to the evaluation, and followed up."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import Final

from distmon.collect.evaluations import PendingEvaluations
from distmon.collect.finite_watch import FiniteWatch
from distmon.record.builder import DIFFERENT
from distmon.record.record import Record
from distmon.reduce.rank_wait import RankWait
from distmon.runtime.actions import AlertActions
from distmon.runtime.arrived import Arrived
from distmon.runtime.decisions import Decisions
from distmon.runtime.fault_log import FaultLog
from distmon.runtime.interval_change import IntervalChange
from distmon.runtime.observer import Observer
from distmon.runtime.self_cost import SelfCost
from distmon.runtime.worker import Evaluation
from distmon.writer.evaluator import Evaluated

log = logging.getLogger("distmon")
POLL_SECONDS: Final = 0.0005


class FollowUp:
    """Rank 0: decides on what was evaluated, and proposes a longer interval for the budget."""

    def __init__(
        self,
        decisions: Decisions,
        interval: IntervalChange,
        actions: AlertActions,
        cost: SelfCost,
        faults: FaultLog,
    ) -> None:
        self._decisions = decisions
        self._interval = interval
        self._actions = actions
        self._cost = cost
        self._faults = faults

    def take(self, evaluated: Evaluated) -> None:
        """Report what failed in the evaluation, and decide on its alerts and its cost."""
        for what, error in evaluated.failures.items():
            self._faults.report(what, error)
        for fault in evaluated.faults:
            if DIFFERENT in fault:
                log.error("distmon: %s", fault)
        self._faults.guard("decision", lambda: self._decide(evaluated))

    def _decide(self, evaluated: Evaluated) -> None:
        if evaluated.alerts:
            self._decisions.decide(self._actions.decide(evaluated.alerts))
        if self._interval.wanted:
            return
        stretch = self._cost.evaluate(evaluated.cost)
        if stretch is not None:
            log.warning("distmon: %s", stretch)
            self._interval.wanted = stretch.after


class Arrivals:
    """Takes observations from the outbox to the evaluation of this rank, in their order."""

    def __init__(
        self,
        observer: Observer,
        worker: Evaluation,
        evaluations: PendingEvaluations,
        finite_watch: FiniteWatch,
        interval: IntervalChange,
        follow_up: FollowUp,
        faults: FaultLog,
    ) -> None:
        self.known_record: Record | None = None
        """The newest record that this process has; for threads that must not wait for one."""
        self._observer = observer
        self._worker = worker
        self._evaluations = evaluations
        self._finite_watch = finite_watch
        self._interval = interval
        self._follow_up = follow_up
        self._faults = faults
        self._arrived: deque[Arrived] = deque()
        self._unpacked = 0
        """Number of the newest observation in, or that has been in, `_arrived`."""
        self._held: Arrived | None = None

    def __len__(self) -> int:
        """Return how many observations have not been handed over, those in flight included."""
        return len(self._observer.outbox) + len(self._arrived)

    def advance(self) -> None:
        """Take everything in flight as far as it has come. Never waits.

        Raises CollectiveError when the collectives of an observation have failed.
        """
        outbox = self._observer.outbox
        while (landed := outbox.first_arrived()) is not None:
            if landed.number > self._unpacked:
                self._arrived.append(self._observer.unpack(landed))
                self._unpacked = landed.number
            outbox.remove_first()
        while self._arrived and self._arrived[0].search.poll():
            self._hand_over(self._arrived[0])
            self._arrived.popleft()
        for evaluated in self._worker.finished():
            if isinstance(evaluated, Evaluated):
                self.known_record = evaluated.record or self.known_record
                self._follow_up.take(evaluated)
            else:
                self._faults.report("record", evaluated)

    def _hand_over(self, arrived: Arrived) -> None:
        """Give an observation to the evaluation of this rank, once."""
        if arrived.handed_over:
            return
        self._interval.arrive(arrived.number, arrived.fields)
        arrived.handed_over = True
        try:
            self._evaluations.arrived(arrived.number)
            self._finite_watch.observed(arrived.local.evidence, arrived.has_nonfinite)
            if not self._worker.submit(arrived):
                raise TimeoutError(f"evaluation is behind: dropped step {arrived.local.step}")
        except Exception as error:
            self._faults.report("record", error)
        # Other ranks than 0 may still derive a record from the newest buffers.
        self._held, before = arrived, self._held
        if before is not None:
            self._observer.outbox.pool.give(before.buffers)

    def wait_for_interval(self, number: int, patience_s: Callable[[], float]) -> int | None:
        """Return the interval in effect from observation `number` on; None for no change.

        Waits for an earlier observation only where a change depends on it, at most `patience_s()`,
        then raises CollectiveError.
        """
        if self._interval.must_wait(number):
            what = "an observation on which the interval depends"
            with RankWait(patience_s(), self._observer.ranks.progress, what) as wait:
                wait.until(lambda: self._interval_is_known(number))
        return self._interval.take(number)

    def _interval_is_known(self, number: int) -> bool:
        self.advance()
        return not self._interval.must_wait(number)

    def newest_record(self) -> Record | None:
        """Return the newest record; waits for its evaluation. Other ranks than 0 derive it here."""
        self.known_record = self._worker.newest_record
        return self.known_record

    def abandon(self) -> list[int]:
        """Forget what has not been handed over; return its steps."""
        lost = [*(each.local.step for each in self._arrived), *self._observer.outbox.abandon()]
        self._arrived.clear()
        return lost
