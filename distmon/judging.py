"""Deriving the record and judging it, beside the training thread."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

from distmon.alert import Alert
from distmon.record import Record
from distmon.recording import Observation, Recorder
from distmon.reporter import Reporter
from distmon.rules import RuleEngine


@dataclass(frozen=True)
class Judgement:
    """A record and what the rules say of it; the same on every rank."""

    record: Record
    alerts: Sequence[Alert]
    failures: Mapping[str, Exception]
    """Rules that could not judge it."""


class Judge:
    """Works on one observation at a time, on a thread of its own, while the next steps run.

    It is a few milliseconds of Python, which the training thread would otherwise wait for. What
    follows from the judgement is the training thread's to do, at a step that all ranks agree on.
    """

    def __init__(self, recorder: Recorder, rules: RuleEngine, reporter: Reporter | None) -> None:
        self._recorder = recorder
        self._rules = rules
        self._reporter = reporter
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="distmon-judge")
        self._pending: Future[Judgement] | None = None
        self._newest: Record | None = None

    @property
    def pending(self) -> bool:
        """Whether a judgement was begun and not taken."""
        return self._pending is not None

    def begin(self, found: Observation) -> None:
        """Start to work on an observation; the one before must have been taken."""
        assert self._pending is None
        self._pending = self._thread.submit(self._judge, found)

    def settle(self) -> None:
        """Wait until the work is done: after it recorder and rules may be looked at."""
        if self._pending is not None:
            with suppress(Exception):  # whoever takes it is told
                self._pending.result()

    def take(self) -> Judgement:
        """The judgement that was begun, as soon as it is there; raises what went wrong in it."""
        assert self._pending is not None
        pending, self._pending = self._pending, None
        return pending.result()

    @property
    def newest_record(self) -> Record | None:
        """The newest record there is, that of a pending judgement included."""
        self.settle()
        return self._newest

    def close(self) -> None:
        """End the thread; what was begun is finished."""
        self._thread.shutdown()

    def _judge(self, found: Observation) -> Judgement:
        record = self._newest = self._recorder.record(found)
        alerts, failures = self._rules.evaluate(record)
        if self._reporter is not None:
            self._reporter.post(record, alerts)
        return Judgement(record, alerts, failures)
