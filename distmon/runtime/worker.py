"""Derive records and evaluate rules: on rank 0 off the training thread, elsewhere on request."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from distmon.record.builder import Observation, RecordBuilder
from distmon.record.digest import record_hash
from distmon.record.record import Record
from distmon.rules import RuleEngine
from distmon.rules.alert import Alert
from distmon.sinks.run_output import RunOutput

_MOST_BYTES: Final = 64 << 20
"""Memory for observations that wait for the worker, unless four need more."""
PATIENCE_S: Final = 5.0
"""Longest wait for the worker where somebody asks for its result."""


@dataclass(frozen=True)
class Evaluated:
    """A record and its alerts."""

    record: Record
    alerts: Sequence[Alert]
    failures: Mapping[str, Exception] = field(default_factory=dict)
    """Rules and callbacks that failed, by name."""


class Evaluation(Protocol):
    """What follows an observation on one rank."""

    builder: RecordBuilder
    rules: RuleEngine
    output: RunOutput | None

    @property
    def busy(self) -> bool:
        """Whether something was submitted whose result was not taken."""

    @property
    def newest_record(self) -> Record | None:
        """The newest record, that of what was submitted included. Waits for it a moment."""

    @property
    def newest_hash(self) -> tuple[int, int]:
        """Step and hash of the newest record, with `check_records`; else (0, 0)."""

    def submit(self, observation: Observation) -> bool:
        """Take in an observation; return whether there was room for it."""

    def finished(self) -> Iterator[Evaluated | Exception]:
        """Yield what has finished since the last call. Does not wait."""

    def settle(self, seconds: float = PATIENCE_S) -> bool:
        """Wait until everything submitted has finished; return whether it has."""

    def close(self) -> None:
        """Take nothing any more."""


class EvaluationWorker:
    """Rank 0: derives, evaluates and delivers on a daemon thread, while the next steps run.

    What follows from the evaluation is left to the training thread. Nothing here is waited for
    without a limit: rules and callbacks of the user's have a time limit of their own.
    """

    def __init__(
        self,
        builder: RecordBuilder,
        rules: RuleEngine,
        output: RunOutput | None,
        on_alerts: Callable[[Sequence[Alert]], Mapping[str, Exception]] = lambda _: {},
        hashed: bool = False,
    ) -> None:
        """`on_alerts` calls the user's function and returns what failed in it."""
        self.builder = builder
        self.rules = rules
        self.output = output
        self._on_alerts = on_alerts
        self._hashed = hashed
        self._changed = threading.Condition()
        self._waiting: deque[Observation] = deque()
        self._working = False
        self._closed = False
        self._finished: deque[Evaluated | Exception] = deque()
        self._newest: Record | None = None
        self.newest_hash = (0, 0)
        self._thread: threading.Thread | None = None

    @property
    def busy(self) -> bool:
        return bool(self._waiting) or self._working or bool(self._finished)

    def submit(self, observation: Observation) -> bool:
        with self._changed:
            room = max(4, min(64, _MOST_BYTES // max(1, observation.nbytes)))
            if self._closed or len(self._waiting) >= room:
                return False
            self._waiting.append(observation)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="distmon-evaluation", daemon=True
                )
                self._thread.start()
            self._changed.notify_all()
        return True

    def finished(self) -> Iterator[Evaluated | Exception]:
        while self._finished:
            yield self._finished.popleft()

    def settle(self, seconds: float = PATIENCE_S) -> bool:
        deadline = time.monotonic() + seconds
        with self._changed:
            while self._waiting or self._working:
                if not self._changed.wait(max(0.0, deadline - time.monotonic())):
                    return False
        return True

    @property
    def newest_record(self) -> Record | None:
        self.settle()
        return self._newest

    def close(self) -> None:
        """Finish what was submitted, within the limit, and end the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(PATIENCE_S)

    def _run(self) -> None:
        while (observation := self._take()) is not None:
            result: Evaluated | Exception
            try:
                result = self._evaluate(observation)
            except Exception as error:
                result = error
            with self._changed:
                self._finished.append(result)
                self._working = False
                self._changed.notify_all()

    def _take(self) -> Observation | None:
        with self._changed:
            while not self._waiting:
                if self._closed:
                    return None
                self._changed.wait()
            self._working = True
            return self._waiting.popleft()

    def _evaluate(self, observation: Observation) -> Evaluated:
        record = self._newest = self.builder.build(observation)
        if self._hashed:
            self.newest_hash = (record.step, record_hash(record))
        alerts, failures = self.rules.evaluate(record)
        failed = {f"rule {name}": error for name, error in failures.items()}
        if self.output is not None:
            self.output.post(record, alerts)
        return Evaluated(record, alerts, {**failed, **self._on_alerts(alerts)})


class DerivedOnRequest:
    """Other ranks: keeps the newest observation, and derives its record when somebody asks."""

    busy = False

    def __init__(self, builder: RecordBuilder, rules: RuleEngine, hashed: bool = False) -> None:
        self.output: RunOutput | None = None
        self.builder = builder
        self.rules = rules
        self._hashed = hashed
        self._derive: Callable[[], Record] | None = None
        self._newest: Record | None = None

    def submit(self, observation: Observation) -> bool:
        state = self.builder.advance(observation)
        self._derive = lambda: self.builder.derive(observation, state)
        return True

    def finished(self) -> Iterator[Evaluated | Exception]:
        return iter(())

    def settle(self, seconds: float = 0.0) -> bool:  # noqa: ARG002
        return True

    @property
    def newest_record(self) -> Record | None:
        if self._derive is not None:
            self._newest, self._derive = self._derive(), None
        return self._newest

    @property
    def newest_hash(self) -> tuple[int, int]:
        record = self.newest_record if self._hashed else None
        return (0, 0) if record is None else (record.step, record_hash(record))

    def close(self) -> None: ...
