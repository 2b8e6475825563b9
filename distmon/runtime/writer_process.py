"""Rank 0 with a writer process: send it observations, take back what follows from them.

The training thread only copies reduced numbers to shared memory. A thread reads the answers.
"""

from __future__ import annotations

import logging
import os
import subprocess
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, Literal

from distmon.own_threads import OwnThread
from distmon.record.builder import Observation
from distmon.record.record import Record
from distmon.rules.alert import Alert, Severity
from distmon.rules.engine import ActiveRule, severity_of
from distmon.runtime.training_side import Printer, TrainingSide
from distmon.runtime.worker import PATIENCE_S
from distmon.runtime.writer_start import (
    RESTART_S,
    Restarts,
    RunningWriter,
    WriterStartError,
    start_writer,
)
from distmon.sinks.gaps import GapLog, LastObservation
from distmon.writer import sent_observation
from distmon.writer.evaluator import Evaluated, Rest
from distmon.writer.mailbox import Mailbox
from distmon.writer.session import Assignment, Begin, Failure, Held, Load, Request, SendRecords

log = logging.getLogger("distmon")
CLOSE_S: Final = 15.0
"""Longest wait for the writer at `close`: its sinks have 10 s to flush."""
STATE_EVERY_S: Final = 10.0
"""How often the writer's state is asked for, with which another one would continue."""
STUCK_S: Final = 120.0
"""A writer without room for more that has confirmed nothing for so long is ended and replaced: it
is stopped or hangs, since one observation takes milliseconds."""


class WriterProcess:
    """Sends to one writer process. Another one is started if it ends, each time a bit later."""

    reads_later = False

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
        self.process = writer.process
        self._mailbox = mailbox
        self._assignment = assignment
        self._side = side
        self._active = rules
        self._mfu_source = mfu_source
        self._changed = threading.Condition()
        self._kinds: dict[int, object] = {}
        """Messages that are not confirmed, by number: an observation as its step."""
        self._observations = 0
        self._answers: dict[int, Any] = {}
        self._finished: deque[Evaluated | Exception] = deque()
        self._newest: Record | None = None
        self._is_stale = True
        self._state_asked = time.monotonic()
        self._closed = self._ended = False
        self._absent = False
        """Whether there is no writer for a while; nothing waits for one then."""
        self._no_pause = threading.Event()
        """Set at `close`: another writer is started now or never."""
        self._restarts = Restarts()
        self._replaced = time.monotonic()
        """When the writer was last replaced."""
        self._confirmed = time.monotonic()
        """When it last confirmed a message."""
        self._full_since: float | None = None
        """When an observation was refused first, since the last message that was confirmed."""
        self.newest_hash = (0, 0)
        self.read_in_full: Sequence[int] = ()
        self._gaps = GapLog(side.folder)
        self._printer = Printer(mailbox.printed)
        mailbox.connect(writer.notes, assignment)
        if side.needs_records:
            self._send(SendRecords())
        self._thread = OwnThread(self._read_answers, "writer-answers", args=(writer,))
        self._thread.start()
        _forget_in_children(self)

    @property
    def path(self) -> Path:
        return self._assignment.folder.path

    @property
    def busy(self) -> bool:
        return self._observations > 0 or bool(self._finished)

    def severity(self, rule: str) -> Severity | None:
        return severity_of(self._active, rule)

    def begin(self, resumed_from: int) -> None:
        if self._assignment.begun is not None:
            return
        here = self._side.begin(resumed_from, self._assignment.inputs.world_size)
        begin = Begin(resumed_from, here)
        if self._side.needs_records:
            self._send(SendRecords())
        if self._send(begin) is None and not self._ended:
            raise TimeoutError("the writer process is behind")
        self._assignment = replace(self._assignment, begun=begin)

    def submit(self, observation: Observation) -> bool:
        source = self._mfu_source()
        message: tuple[Any, ...]
        if observation.view is not None:
            message = sent_observation.to_message(observation, observation.view, source)
        else:
            message = (replace(observation, read=Held(observation.read())), source)
        with self._changed:
            if self._send(message, observation.step) is None:
                self._gaps.lost_step("writer", "record", observation.step, "it was behind")
                self._end_if_stuck()
                return False
            self._observations += 1
        if not self._absent and time.monotonic() - self._state_asked > STATE_EVERY_S:
            self._state_asked = time.monotonic()
            self._send(Request("state"))
        return True

    def _end_if_stuck(self) -> None:
        """End a writer that makes no progress; another one gets what it has not handled."""
        now = time.monotonic()
        if self._full_since is None or self.process.returncode is not None:
            self._full_since = now
        elif now - self._full_since > STUCK_S:
            self._full_since = now
            log.warning("distmon: the writer process makes no progress; it is replaced")
            self.process.kill()

    def alert(self, alert: Alert) -> None:
        self._side.alert(alert)
        self._deliver(alert)

    def finish(self, rest: Rest) -> None:
        self._deliver(rest)

    def _deliver(self, message: Alert | Rest) -> None:
        if self._send(message) is None:
            self._note_loss(message, "it had ended" if self._ended else "it was behind")

    def _note_loss(self, kind: object, why: str) -> None:
        """List in the run folder what was sent to a writer, or should have been, and is lost."""
        if isinstance(kind, int):
            self._gaps.lost_step("writer", "record", kind, why)
        elif isinstance(kind, Alert):
            self._gaps.lost_step("writer", "alert", kind.step, why)
        elif isinstance(kind, Rest):
            self._gaps.lost_step("writer", "record", kind.step, why)

    def finished(self) -> Iterator[Evaluated | Exception]:
        while self._finished:
            yield self._finished.popleft()

    def settle(self, seconds: float = PATIENCE_S) -> bool:
        if self._observations:
            self._mailbox.ask_for_answers()
        return self._wait(lambda: self._observations == 0, seconds)

    @property
    def newest_record(self) -> Record | None:
        self.settle()
        if self._is_stale:  # known by its step it would not be: a trainer may go back
            self._newest, self._is_stale = self._ask("record") or self._newest, False
        return self._newest

    def state_dict(self) -> dict[str, Any]:
        self._assignment = self._with_state(self._ask("state"))
        state = self._assignment.state
        if state is None:
            raise TimeoutError("the writer process has not answered")
        rules = state["rules"]
        own = {**rules["rules"], **self._side.state_dict()}
        return {**state, "rules": {**rules, "rules": own}}

    def load_state_dict(self, state: Mapping[str, Any], losses: Sequence[float]) -> None:
        kept = {"record": state["record"], "rules": state["rules"]}
        self._side.load_state_dict(state["rules"])
        result = self._request(Load(kept, [*losses]), PATIENCE_S)
        if isinstance(result, Failure):
            raise result.error()
        self._assignment = self._with_state(kept)

    def close(self, last: LastObservation) -> None:
        if self._closed:
            return
        self._no_pause.set()
        self._wait_for_writer(CLOSE_S)
        if self.settle():  # a writer that is behind would answer later than anybody waits
            # What somebody may still ask for.
            self._newest = self.newest_record
            self._assignment = self._with_state(self._ask("state"))
        self._closed = True
        closed = self._request(Request("close"), CLOSE_S)
        self._side.close()
        if closed is not True and not self._ended:
            log.warning(
                "distmon: sinks did not finish within %g s; the writer process %d continues "
                "without the training",
                CLOSE_S,
                self.process.pid,
            )
        self._printer.close(PATIENCE_S)
        self._list_unreceived()
        self._gaps.end(last)
        self._mailbox.forget()
        self._thread.join(PATIENCE_S)
        if not self._thread.is_alive():
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(PATIENCE_S)
            self._mailbox.close()
        self._assignment.folder.release()

    def _list_unreceived(self) -> None:
        """Count what no writer will get; one that is behind still writes what it has received."""
        with self._changed:
            for number in self._mailbox.unreceived():
                self._note_loss(self._kinds.pop(number, None), "it was behind when the run ended")

    def _ask(self, what: Literal["state", "record"]) -> Any:
        """Return what the writer answers; None when it does not in time."""
        result = self._request(Request(what), PATIENCE_S)
        return None if isinstance(result, Failure) else result

    def _with_state(self, state: dict[str, Any] | None) -> Assignment:
        known = self._assignment
        return known if state is None else replace(known, state=state)

    def _wait_for_writer(self, seconds: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._ended or not self._absent, seconds)

    def _request(self, message: object, seconds: float) -> Any:
        with self._changed:
            number = None if self._absent else self._send(message)
            if number is None:
                return None
            self._answers[number] = None
            self._wait(lambda: number not in self._kinds, seconds)
            return self._answers.pop(number)

    def _wait(self, reached: Callable[[], bool], seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        with self._changed:
            while not (reached() or self._ended or self._absent):
                if not self._changed.wait(max(0.0, deadline - time.monotonic())):
                    return False
            return reached()

    def _send(self, message: object, kind: object = None) -> int | None:
        with self._changed:
            number = None if self._ended else self._mailbox.send(message)
            if number is not None:
                self._kinds[number] = message if kind is None else kind
            return number

    def _read_answers(self, writer: RunningWriter) -> None:
        """Take answers until there is no writer any more."""
        try:
            self._follow_writers(writer)
        except Exception as error:
            log.error("distmon: the answers of the writer process cannot be read: %r", error)
            self._mailbox.forget()
        with self._changed:
            for kind in self._kinds.values():
                self._note_loss(kind, "it ended")
            self._ended = True
            self._observations = 0
            self._kinds.clear()
            self._changed.notify_all()

    def _follow_writers(self, writer: RunningWriter) -> None:
        """Take answers until the writer ends; then continue with another one."""
        while True:
            with writer.answers:
                while (answer := writer.answers.read()) is not None:
                    try:
                        self._take(answer)
                    except Exception as error:
                        self._finished.append(error)
            replaced = None if self._closed else self._replace(writer)
            if replaced is None:
                return
            writer = replaced

    def _replace(self, ended: RunningWriter) -> RunningWriter | None:
        """Start another writer with the last known state; None when the run ends without one."""
        found = f"the writer process ended (code {ended.process.wait()})"
        self._mailbox.pause()
        self._drop_unfinished()
        while True:
            pause = self._restarts.pause(self._confirmed - self._replaced)
            if pause and self._no_pause.is_set():
                log.error("distmon: %s; nothing more is recorded", found)
                self._mailbox.forget()
                return None
            again = f"starting another one in {pause:g} s" if pause else "starting another one"
            log.warning("distmon: %s; %s", found, again)
            self._set_absent(pause > 0)
            self._no_pause.wait(pause)
            try:
                return self._start_another()
            except WriterStartError as error:
                found = f"no other writer process: {error}"

    def _start_another(self) -> RunningWriter:
        writer = start_writer(self._mailbox.file, self._assignment.config.sinks)
        writer.wait_until_ready(RESTART_S)
        with self._changed:
            if self._closed:
                writer.kill()
                raise WriterStartError("the run has ended")
            try:
                self._mailbox.connect(writer.notes, self._assignment)
            except BufferError:  # the state has outgrown its room: continue without it
                self._mailbox.connect(writer.notes, replace(self._assignment, state=None))
            if self._side.needs_records:
                self._send(SendRecords())
        self.process = writer.process
        self._replaced = self._confirmed = time.monotonic()
        self._set_absent(False)
        return writer

    def _set_absent(self, absent: bool) -> None:
        with self._changed:
            self._absent = absent
            self._changed.notify_all()

    def _drop_unfinished(self) -> None:
        """Drop the message that a writer was handling when it ended: it may end the next one, too.

        Those without which another writer cannot continue are kept. What it had handled already is
        not sent again; of such an observation nothing follows but its record.
        """
        for done in self._mailbox.handled():
            with self._changed:
                kind = self._kinds.get(done)
            if isinstance(kind, int | Alert | Rest):
                self._conclude(done, None)
        number = self._mailbox.unfinished()
        with self._changed:
            kind = None if number is None else self._kinds.get(number)
            if number is None or kind is None or isinstance(kind, Begin | Load | SendRecords):
                return
            self._mailbox.confirm(number)
            del self._kinds[number]
            self._observations -= isinstance(kind, int)
            self._note_loss(kind, "it ended while handling it")
            self._changed.notify_all()
        self._gaps.write()

    def _take(self, answer: tuple[Any, ...]) -> None:
        match answer:
            case ("print", int() as number, str() as text):
                self._printer.print(number, text)
            case ("log", str() as name, int() as level, str() as text, dict() as extra):
                logging.getLogger(name).log(level, "%s", text, extra=extra)
            case ("done", int() as number, result):
                self._conclude(number, result)

    def _conclude(self, number: int, result: Any) -> None:
        """Take the result of one message."""
        self._mailbox.confirm(number)
        if number:  # 0 is the assignment
            self._confirmed, self._full_since = time.monotonic(), None
        with self._changed:  # held while a message is sent, until it is listed
            message = self._kinds.get(number)
        finished: Evaluated | Exception | None = None
        if isinstance(result, Evaluated):
            try:
                finished = self._follow(result, is_observation=isinstance(message, int))
            except Exception as error:
                finished = error
        elif isinstance(result, Failure) and number not in self._answers:
            finished = result.error()
        elif message == Request("state") and not isinstance(result, Failure):
            self._assignment = self._with_state(result)
        with self._changed:
            self._kinds.pop(number, None)
            if number in self._answers:
                self._answers[number] = result
            if finished is not None:
                self._finished.append(finished)
            self._observations -= isinstance(message, int)
            self._changed.notify_all()

    def _follow(self, evaluated: Evaluated, is_observation: bool) -> Evaluated:
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
            self._deliver(alert)
        return replace(evaluated, alerts=(*evaluated.alerts, *own), failures=failed, record=None)

    def forget(self) -> None:
        """Let go of the writer in a forked child, whose copy of the pipe would keep it alive."""
        self._closed = self._ended = True
        self._mailbox.disconnect()


def _forget_in_children(client: WriterProcess) -> None:
    reference = weakref.ref(client)

    def forget() -> None:
        found = reference()
        if found is not None:
            found.forget()

    os.register_at_fork(after_in_child=forget)
