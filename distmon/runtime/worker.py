"""What follows an observation: on rank 0 in a thread or a process, elsewhere on request."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, Protocol

from distmon.own_threads import OwnThread
from distmon.record.builder import RecordBuilder
from distmon.record.digest import record_hash
from distmon.record.observation import Observation
from distmon.record.record import Record
from distmon.rules import RuleEngine
from distmon.rules.alert import Alert, Severity
from distmon.runs.run_folder import RunFolder
from distmon.runtime.arrived import Arrived
from distmon.sinks.gaps import GapLog, LastObservation
from distmon.writer.evaluator import Evaluated, Evaluator, Rest

_MOST_BYTES: Final = 64 << 20
"""Memory for observations that wait for the worker, unless four need more."""
PATIENCE_S: Final = 5.0
"""Longest wait for a result of the worker."""

OnAlerts = Callable[[Sequence[Alert]], Mapping[str, Exception]]
"""Calls the user's function and returns what failed in it."""


class Evaluation(Protocol):
    """What follows an observation on one rank."""

    @property
    def path(self) -> Path | None:
        """The run folder; None on a rank that writes none."""

    def cpu_seconds_elsewhere(self) -> float:
        """Return the CPU time so far of a process beside this one that it has."""

    @property
    def busy(self) -> bool:
        """Whether something was submitted whose result was not taken."""

    @property
    def newest_record(self) -> Record | None:
        """The newest record, that of what was submitted included. Waits for it a moment."""

    @property
    def newest_hash(self) -> tuple[int, int]:
        """Step and hash of the newest record, with `check_records`; else (0, 0)."""

    @property
    def read_in_full(self) -> Sequence[int]:
        """Parameters whose gradient this rank reads in full at the next observation."""

    def severity(self, rule: str) -> Severity | None:
        """Return the configured severity of a rule; None when it is disabled."""

    def begin(self, resumed_from: int) -> None:
        """Begin the attempt, at the first step; again, if that failed, at an observation."""

    def submit(self, arrived: Arrived) -> bool:
        """Take in an observation; return whether there was room for it.

        Its buffers stay as they are until the next one is submitted.
        """

    def alert(self, alert: Alert) -> None:
        """Deliver an alert before the next record."""

    def finish(self, rest: Rest) -> None:
        """Deliver what no observation has followed."""

    def finished(self) -> Iterator[Evaluated | Exception]:
        """Yield what has finished since the last call. Does not wait."""

    def settle(self, seconds: float = PATIENCE_S) -> bool:
        """Wait until everything submitted has finished; return whether it has."""

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps: `record` and `rules`."""

    def load_state_dict(self, state: Mapping[str, Any], losses: Sequence[float]) -> None:
        """Continue where `state_dict` was taken, and then `losses`."""

    def close(self, last: LastObservation) -> None:
        """Deliver everything, within a limit, and take nothing any more. Safe to call twice.

        `last`: what this run has observed last, whether or not it was submitted.
        """


class EvaluationWorker:
    """Rank 0, without a writer process: derives, evaluates and delivers on a daemon thread.

    What follows from the evaluation is left to the training thread. Nothing here is waited for
    without a limit: rules and callbacks of the user's have a time limit of their own.
    """

    def __init__(
        self, evaluator: Evaluator, folder: RunFolder, on_alerts: OnAlerts = lambda _: {}
    ) -> None:
        self.evaluator = evaluator
        self._folder = folder
        self._on_alerts = on_alerts
        self._changed = threading.Condition()
        self._waiting: deque[Observation] = deque()
        self._working = False
        self._closed = False
        self._finished: deque[Evaluated | Exception] = deque()
        self.newest_hash = (0, 0)
        self._thread: OwnThread | None = None
        self._beginning: OwnThread | None = None

    @property
    def path(self) -> Path:
        return self._folder.path

    @property
    def busy(self) -> bool:
        return bool(self._waiting) or self._working or bool(self._finished)

    @property
    def read_in_full(self) -> Sequence[int]:
        return self.evaluator.builder.read_in_full

    def severity(self, rule: str) -> Severity | None:
        return self.evaluator.rules.severity(rule)

    def begin(self, resumed_from: int) -> None:
        # `run.json` is written and synced, which may take seconds.
        self._beginning = OwnThread(self._begin, "begin-run", args=(resumed_from,))
        self._beginning.start()

    def _begin(self, resumed_from: int) -> None:
        try:
            if self._folder.resumed_from is None:
                world_size = self.evaluator.builder.world_size
                self._folder.begin_attempt(resumed_from=resumed_from, world_size=world_size)
        except Exception as error:
            self._finished.append(error)

    def _wait_until_begun(self, seconds: float | None = None) -> None:
        if self._beginning is not None:
            self._beginning.join(seconds)

    def cpu_seconds_elsewhere(self) -> float:
        return 0.0

    def submit(self, arrived: Arrived) -> bool:
        observation = arrived.observation(copied=True)
        with self._changed:
            room = max(4, min(64, _MOST_BYTES // max(1, observation.nbytes)))
            if self._closed or len(self._waiting) >= room:
                return False
            self._waiting.append(observation)
            if self._thread is None:
                self._thread = OwnThread(self._run, "evaluation")
                self._thread.start()
            self._changed.notify_all()
        return True

    def alert(self, alert: Alert) -> None:
        self.evaluator.delivery.post_alert(alert)

    def finish(self, rest: Rest) -> None:
        self._wait_until_begun(PATIENCE_S)
        self.evaluator.finish(rest)

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
        return self.evaluator.newest

    def state_dict(self) -> dict[str, Any]:
        return self.evaluator.state_dict()

    def load_state_dict(self, state: Mapping[str, Any], losses: Sequence[float]) -> None:
        self.evaluator.load_state_dict(state, losses)

    def close(self, last: LastObservation) -> None:
        """Finish what was submitted, within the limit, end the thread and flush the sinks."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.notify_all()
        self._wait_until_begun(PATIENCE_S)
        if self._thread is not None:
            self._thread.join(PATIENCE_S)
        self.evaluator.delivery.close()
        GapLog(self._folder).end(last)
        self._folder.release()

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
        self._wait_until_begun()
        evaluated = self.evaluator.evaluate(observation)
        self.newest_hash = evaluated.hashed
        failed = self._on_alerts(evaluated.alerts)
        return replace(evaluated, failures={**evaluated.failures, **failed})


class DerivedOnRequest:
    """Other ranks: keeps the newest observation, and derives its record on request."""

    busy = False
    path: Path | None = None

    def __init__(self, builder: RecordBuilder, rules: RuleEngine, hashed: bool = False) -> None:
        self._builder = builder
        self._rules = rules
        self._hashed = hashed
        self._derive: Callable[[], Record] | None = None
        self._newest: Record | None = None

    def cpu_seconds_elsewhere(self) -> float:
        return 0.0

    def submit(self, arrived: Arrived) -> bool:
        observation = arrived.observation(copied=False)
        state = self._builder.advance(observation)
        self._derive = lambda: self._builder.derive(observation, state)
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

    @property
    def read_in_full(self) -> Sequence[int]:
        return self._builder.read_in_full

    def severity(self, rule: str) -> Severity | None:
        return self._rules.severity(rule)

    def state_dict(self) -> dict[str, Any]:
        return {"record": self._builder.state_dict(), "rules": self._rules.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any], losses: Sequence[float]) -> None:
        self._builder.load_state_dict(state["record"])
        for loss in losses:
            self._builder.ema.update(loss)
        self._rules.load_state_dict(state["rules"])

    def begin(self, resumed_from: int) -> None: ...

    def alert(self, alert: Alert) -> None: ...

    def finish(self, rest: Rest) -> None: ...

    def close(self, last: LastObservation) -> None: ...
