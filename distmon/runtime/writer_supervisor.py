"""Keep a writer process at work: read its answers, replace it when it ends or makes no progress."""

from __future__ import annotations

import logging
import os
import subprocess
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final

from distmon.own_threads import OwnThread
from distmon.runtime.sent_messages import SentMessages
from distmon.runtime.training_side import Printer, TrainingSide
from distmon.runtime.worker import PATIENCE_S
from distmon.runtime.writer_start import (
    RESTART_S,
    Restarts,
    RunningWriter,
    WriterStartError,
    start_writer,
)
from distmon.writer.evaluator import Evaluated
from distmon.writer.session import Assignment, Failure, Request, SendRecords

log = logging.getLogger("distmon")
CLOSE_S: Final = 15.0
"""Longest wait for the writer at `close`: its sinks have 10 s to flush."""
STATE_EVERY_S: Final = 10.0
"""How often the writer's state is asked for, with which another one would continue."""
STUCK_S: Final = 120.0
"""A writer without room for more that has confirmed nothing for so long is ended and replaced: it
is stopped or hangs, since one observation takes milliseconds."""


class WriterSupervisor:
    """Runs one writer process after another: when one ends the next is started, each time later.

    A thread of this object reads the answers and starts the next writer; which writer there is and
    when it was replaced is changed on that thread only. What it shares with the training thread is
    in `messages`, under their lock; the rest are flags that one thread sets. The lock is not held
    while `follow` runs, which may call functions of the user's, or while a process starts.
    """

    def __init__(
        self,
        writer: RunningWriter,
        messages: SentMessages,
        assignment: Assignment,
        follow: Callable[[Evaluated, bool], Evaluated],
        side: TrainingSide,
    ) -> None:
        """`writer` is ready and reads from the mailbox of `messages`.

        `follow` gets each evaluation, and whether it is that of an observation; it returns what the
        training thread takes. `side` knows whether it needs records, and prints.
        """
        self.process = writer.process
        self.assignment = assignment
        """What another writer would start with: the newest known state is in it."""
        self.closed = False
        """The run has ended; no other writer is started."""
        self._messages = messages
        self._follow = follow
        self._side = side
        self._no_pause = threading.Event()
        """Set before the run ends: another writer is started now or never."""
        self._restarts = Restarts()
        self._replaced = time.monotonic()
        """When the writer was last replaced."""
        self._confirmed = time.monotonic()
        """When it last confirmed a message."""
        self._full_since: float | None = None
        """When an observation was refused first, since the last message that was confirmed."""
        self._state_asked = time.monotonic()
        self._flushed = False
        self._printer = Printer(messages.mailbox.printed, side.console)
        self._connect(writer)
        self._thread = OwnThread(self._read_answers, "writer-answers", args=(writer,))
        self._thread.start()
        _forget_in_children(self)

    def keep(self, **known: Any) -> None:
        """Change what another writer would start with."""
        with self._messages.changed:
            self.assignment = replace(self.assignment, **known)

    def after_observation(self, sent: bool) -> None:
        """Ask for the writer's state now and then; end it where it has refused for too long."""
        now = time.monotonic()
        if not sent:
            self._end_if_stuck(now)
        elif not self._messages.absent and now - self._state_asked > STATE_EVERY_S:
            self._state_asked = now
            self._messages.send(Request("state"))

    def _end_if_stuck(self, now: float) -> None:
        """End a writer that makes no progress; another one gets what it has not handled."""
        if self._full_since is None or self.process.returncode is not None:
            self._full_since = now
        elif now - self._full_since > STUCK_S:
            self._full_since = now
            log.warning("distmon: the writer process makes no progress; it is replaced")
            self.process.kill()

    def hurry(self) -> None:
        """Wait for the next writer if there is none: it is started now or never."""
        self._no_pause.set()
        self._messages.wait_for_writer(CLOSE_S)

    def end(self) -> None:
        """Let the writer flush its sinks and end."""
        self.closed = True
        self._flushed = self._messages.request(Request("close"), CLOSE_S) is True

    def finish_printing(self) -> None:
        """Print what the writer has sent; name it where it continues without the training."""
        if not self._flushed and not self._messages.ended:
            log.warning(
                "distmon: sinks did not finish within %g s; the writer process %d continues "
                "without the training",
                CLOSE_S,
                self.process.pid,
            )
        self._printer.close(PATIENCE_S)

    def release(self) -> None:
        """Close the pipe to the writer, and the memory once nothing reads it any more."""
        mailbox = self._messages.mailbox
        mailbox.forget()
        self._thread.join(PATIENCE_S)
        if not self._thread.is_alive():
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(PATIENCE_S)
            mailbox.close()

    def forget(self) -> None:
        """Let go of the writer in a forked child, whose copy of the pipe would keep it alive."""
        self.closed = self._messages.ended = True
        self._messages.mailbox.disconnect()

    def _read_answers(self, writer: RunningWriter) -> None:
        """Take answers until there is no writer any more."""
        try:
            self._follow_writers(writer)
        except Exception as error:
            log.error("distmon: the answers of the writer process cannot be read: %r", error)
            self._messages.mailbox.forget()
        self._messages.end()

    def _follow_writers(self, writer: RunningWriter) -> None:
        """Take answers until the writer ends; then continue with another one."""
        while True:
            with writer.answers:
                while (answer := writer.answers.read()) is not None:
                    try:
                        self._take(answer)
                    except Exception as error:
                        self._messages.finished.append(error)
            replaced = None if self.closed else self._replace(writer)
            if replaced is None:
                return
            writer = replaced

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
        messages = self._messages
        messages.mailbox.confirm(number)
        if number:  # 0 is the assignment
            self._confirmed, self._full_since = time.monotonic(), None
        message = messages.kind_of(number)
        finished: Evaluated | Exception | None = None
        if isinstance(result, Evaluated):
            try:
                finished = self._follow(result, isinstance(message, int))
            except Exception as error:
                finished = error
        elif isinstance(result, Failure) and not messages.is_waited_for(number):
            finished = result.error()
        elif message == Request("state") and not isinstance(result, Failure):
            self.keep(state=result)
        messages.conclude(number, result, finished)

    def _replace(self, ended: RunningWriter) -> RunningWriter | None:
        """Start another writer with the last known state; None when the run ends without one."""
        found = f"the writer process ended (code {ended.process.wait()})"
        mailbox = self._messages.mailbox
        mailbox.pause()
        for number in self._messages.handled():
            self._conclude(number, None)
        self._messages.drop_unfinished()
        while True:
            pause = self._restarts.pause(self._confirmed - self._replaced)
            if pause and self._no_pause.is_set():
                log.error("distmon: %s; nothing more is recorded", found)
                mailbox.forget()
                return None
            again = f"starting another one in {pause:g} s" if pause else "starting another one"
            log.warning("distmon: %s; %s", found, again)
            self._messages.set_absent(pause > 0)
            self._no_pause.wait(pause)
            try:
                return self._start_another()
            except WriterStartError as error:
                found = f"no other writer process: {error}"

    def _start_another(self) -> RunningWriter:
        writer = start_writer(self._messages.mailbox.file, self.assignment.config.sinks)
        writer.wait_until_ready(RESTART_S)
        with self._messages.changed:  # `end` enters it after `closed` is set
            if self.closed:
                writer.kill()
                raise WriterStartError("the run has ended")
            self._connect(writer)
        self.process = writer.process
        self._replaced = self._confirmed = time.monotonic()
        self._messages.set_absent(False)
        return writer

    def _connect(self, writer: RunningWriter) -> None:
        self._messages.connect(writer.notes, self.assignment)
        if self._side.needs_records:
            self._messages.send(SendRecords())


def _forget_in_children(supervisor: WriterSupervisor) -> None:
    reference = weakref.ref(supervisor)

    def forget() -> None:
        found = reference()
        if found is not None:
            found.forget()

    os.register_at_fork(after_in_child=forget)
