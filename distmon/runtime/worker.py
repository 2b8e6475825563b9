"""Derive records and evaluate rules off the training thread."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

from distmon.record.builder import Observation, RecordBuilder
from distmon.record.record import Record
from distmon.rules import RuleEngine
from distmon.rules.alert import Alert
from distmon.sinks.run_output import RunOutput


@dataclass(frozen=True)
class Evaluated:
    """A record and its alerts; the same on every rank."""

    record: Record
    alerts: Sequence[Alert]
    failures: Mapping[str, Exception]
    """Rules that failed on the record."""


class EvaluationWorker:
    """Works on one observation at a time, on a thread of its own, while the next steps run.

    It is a few milliseconds of Python. What follows from the evaluation is left to the training
    thread, at a step that is the same on all ranks.
    """

    def __init__(self, builder: RecordBuilder, rules: RuleEngine, output: RunOutput | None) -> None:
        self.builder = builder
        self.rules = rules
        self.output = output
        """Of rank 0 only."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="distmon-evaluation")
        self._pending: Future[Evaluated] | None = None
        self._newest: Record | None = None

    @property
    def pending(self) -> bool:
        """Whether an observation was submitted and its evaluation not taken."""
        return self._pending is not None

    def submit(self, observation: Observation) -> None:
        """Start on an observation; the evaluation of the one before must have been taken."""
        assert self._pending is None
        self._pending = self._thread.submit(self._evaluate, observation)

    def settle(self) -> None:
        """Wait until the thread is idle; then the builder and the rules may be read."""
        if self._pending is not None:
            with suppress(Exception):  # `take` re-raises
                self._pending.result()

    def take(self) -> Evaluated:
        """Wait for the evaluation and return it; re-raises what went wrong in it."""
        assert self._pending is not None
        pending, self._pending = self._pending, None
        return pending.result()

    @property
    def newest_record(self) -> Record | None:
        """The newest record, that of a pending evaluation included."""
        self.settle()
        return self._newest

    def close(self) -> None:
        """Finish what was submitted and end the thread."""
        self._thread.shutdown()

    def _evaluate(self, observation: Observation) -> Evaluated:
        record = self._newest = self.builder.build(observation)
        alerts, failures = self.rules.evaluate(record)
        if self.output is not None:
            self.output.post(record, alerts)
        return Evaluated(record, alerts, failures)
