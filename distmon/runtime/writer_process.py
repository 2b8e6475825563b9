"""Rank 0 with a writer process: send it observations, take back what follows from them.

The training thread only copies reduced numbers to shared memory. A thread reads the answers.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from distmon.own_threads import cpu_seconds_of
from distmon.record.record import Record
from distmon.rules.alert import Alert, Severity
from distmon.rules.engine import ActiveRule, severity_of
from distmon.runtime.arrived import Arrived
from distmon.runtime.sent_messages import SentMessages
from distmon.runtime.training_side import TrainingSide
from distmon.runtime.worker import PATIENCE_S
from distmon.runtime.writer_start import RunningWriter
from distmon.runtime.writer_supervisor import WriterSupervisor
from distmon.sinks.gaps import GapLog, LastObservation
from distmon.writer.evaluator import Evaluated, Rest
from distmon.writer.mailbox import Mailbox
from distmon.writer.session import Assignment, Begin, Failure, Load, Request, SendRecords


class WriterProcess:
    """The `Evaluation` of the training thread whose work a writer process does.

    `messages` has what was sent and is not confirmed, `supervisor` the process. This object keeps
    the newest result only. The thread of the supervisor sets it in `_follow`, one field after
    another and without a lock; the training thread reads it after `settle`, or as it is.
    """

    def __init__(
        self,
        writer: RunningWriter,
        mailbox: Mailbox,
        assignment: Assignment,
        side: TrainingSide,
        rules: Sequence[ActiveRule],
        mfu_source: Callable[[], str],
    ) -> None:
        """`writer` is ready and reads from `mailbox`."""
        self._side = side
        self._active = rules
        self._mfu_source = mfu_source
        self._newest: Record | None = None
        self._is_stale = True
        """Whether the writer has a newer record than `_newest`."""
        self.newest_hash = (0, 0)
        self.read_in_full: Sequence[int] = ()
        self._gaps = GapLog(side.folder)
        self.messages = SentMessages(mailbox, self._gaps)
        self.supervisor = WriterSupervisor(writer, self.messages, assignment, self._follow, side)

    @property
    def process(self) -> subprocess.Popen[bytes]:
        """The writer process; another one after it was replaced."""
        return self.supervisor.process

    @property
    def path(self) -> Path:
        return self.supervisor.assignment.folder.path

    @property
    def busy(self) -> bool:
        return self.messages.observations > 0 or bool(self.messages.finished)

    def severity(self, rule: str) -> Severity | None:
        return severity_of(self._active, rule)

    def begin(self, resumed_from: int) -> None:
        assignment = self.supervisor.assignment
        if assignment.begun is not None:
            return
        here = self._side.begin(resumed_from, assignment.inputs.world_size)
        begin = Begin(resumed_from, here)
        if self._side.needs_records:
            self.messages.send(SendRecords())
        if self.messages.send(begin) is None and not self.messages.ended:
            raise TimeoutError("the writer process is behind")
        self.supervisor.keep(begun=begin)

    def cpu_seconds_elsewhere(self) -> float:
        return cpu_seconds_of(self.supervisor.process.pid)

    def submit(self, arrived: Arrived) -> bool:
        message = arrived.message(self._mfu_source())
        sent = self.messages.send_observation(message, arrived.local.step)
        self.supervisor.after_observation(sent)
        return sent

    def alert(self, alert: Alert) -> None:
        self._side.alert(alert)
        self.messages.deliver(alert)

    def finish(self, rest: Rest) -> None:
        self.messages.deliver(rest)

    def finished(self) -> Iterator[Evaluated | Exception]:
        while self.messages.finished:
            yield self.messages.finished.popleft()

    def settle(self, seconds: float = PATIENCE_S) -> bool:
        return self.messages.settle(seconds)

    @property
    def newest_record(self) -> Record | None:
        self.settle()
        if self._is_stale:  # known by its step it would not be: a trainer may go back
            answer = self.messages.request(Request("record"), PATIENCE_S)
            found = None if isinstance(answer, Failure) else answer
            self._newest, self._is_stale = found or self._newest, False
        return self._newest

    def state_dict(self) -> dict[str, Any]:
        state = self._newest_state()
        if state is None:
            raise TimeoutError("the writer process has not answered")
        rules = state["rules"]
        own = {**rules["rules"], **self._side.state_dict()}
        return {**state, "rules": {**rules, "rules": own}}

    def _newest_state(self) -> dict[str, Any] | None:
        """Return the state of the writer, or the last known one when it does not answer in time."""
        self.messages.request(Request("state"), PATIENCE_S)  # the supervisor keeps it
        return self.supervisor.assignment.state

    def load_state_dict(self, state: Mapping[str, Any], losses: Sequence[float]) -> None:
        kept = {"record": state["record"], "rules": state["rules"]}
        self._side.load_state_dict(state["rules"])
        result = self.messages.request(Load(kept, [*losses]), PATIENCE_S)
        if isinstance(result, Failure):
            raise result.error()
        self.supervisor.keep(state=kept)

    def close(self, last: LastObservation) -> None:
        if self.supervisor.closed:
            return
        self.supervisor.hurry()
        if self.settle():  # a writer that is behind would not answer in time
            # For calls after `close`.
            self._newest = self.newest_record
            self._newest_state()
        self.supervisor.end()
        self._side.close()
        self.supervisor.finish_printing()
        self.messages.list_unreceived()
        self.messages.set_absent(True)  # no answer is read any more
        self._gaps.end(last)
        self.supervisor.release()
        self.supervisor.assignment.folder.release()

    def _follow(self, evaluated: Evaluated, is_observation: bool) -> Evaluated:
        """Keep what follows from an evaluation; on the thread that reads the answers."""
        self.newest_hash, self.read_in_full = evaluated.hashed, evaluated.read_in_full
        if is_observation:
            self._is_stale = evaluated.record is None
            self._newest = evaluated.record or self._newest
        if not (evaluated.alerts or evaluated.failures or self._side.needs_records):
            return evaluated  # as nearly always: nothing here follows from it
        failures = {
            name: error.error() if isinstance(error, Failure) else error
            for name, error in evaluated.failures.items()
        }
        own, failed = self._side.follow(replace(evaluated, failures=failures))
        for alert in own:
            self.messages.deliver(alert)
        return replace(evaluated, alerts=(*evaluated.alerts, *own), failures=failed, record=None)
