"""Messages to the writer process: which are not confirmed, what was answered, what is lost."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from distmon.rules.alert import Alert
from distmon.sinks.gaps import GapLog
from distmon.writer.evaluator import Evaluated, Rest
from distmon.writer.mailbox import Mailbox
from distmon.writer.session import Assignment, Begin, Load, SendRecords


class SentMessages:
    """Keeps each message until a writer has confirmed it; lists in the run folder what is lost.

    Any thread sends and waits; the one that reads the answers calls `conclude` and what follows it.
    `changed` guards all fields, and wakes up those who wait. It is held from sending a message
    until it is listed, so that its answer is never earlier. The mailbox has a lock of its own,
    which is taken inside of this one.
    """

    def __init__(self, mailbox: Mailbox, gaps: GapLog) -> None:
        self.mailbox = mailbox
        self.changed = threading.Condition()
        self.unconfirmed: dict[int, object] = {}
        """Messages by number; of an observation, its step."""
        self.observations = 0
        """How many observations are among them."""
        self.ended = False
        """There is no writer any more."""
        self.absent = False
        """There is no writer for a while; nothing waits for one then."""
        self.finished: deque[Evaluated | Exception] = deque()
        """Results that were not waited for; the training thread takes them from the left."""
        self._answers: dict[int, Any] = {}
        """Results that are waited for, by the number of the message."""
        self._gaps = gaps

    def connect(self, pipe: int, assignment: Assignment) -> None:
        """Send to the writer that reads from `pipe` from now on: first what is not confirmed."""
        with self.changed:
            try:
                self.mailbox.connect(pipe, assignment)
            except BufferError:  # the state has outgrown its room: continue without it
                self.mailbox.connect(pipe, replace(assignment, state=None))

    def send(self, message: object) -> int | None:
        """Return the number of the message; None when it is refused. Never blocks."""
        with self.changed:
            return self._send(message, message)

    def send_observation(self, message: object, step: int) -> bool:
        """Return whether there was room for it; otherwise it is listed as lost."""
        with self.changed:
            if self._send(message, step) is None:
                self._note_loss(step, "it was behind")
                return False
            self.observations += 1
            return True

    def _send(self, message: object, kind: object) -> int | None:
        number = None if self.ended else self.mailbox.send(message)
        if number is not None:
            self.unconfirmed[number] = kind
        return number

    def deliver(self, message: Alert | Rest) -> None:
        """Send it, or list it as lost."""
        if self.send(message) is None:
            self._note_loss(message, "it had ended" if self.ended else "it was behind")

    def request(self, message: object, seconds: float) -> Any:
        """Return what the writer answers; None when it does not in time, or there is none."""
        with self.changed:
            number = None if self.absent else self.send(message)
            if number is None:
                return None
            self._answers[number] = None
            self._wait(lambda: number not in self.unconfirmed, seconds)
            return self._answers.pop(number)

    def settle(self, seconds: float) -> bool:
        """Wait for the results of all observations, at most `seconds`; return whether they came."""
        if self.observations:
            self.mailbox.ask_for_answers()
        return self._wait(lambda: self.observations == 0, seconds)

    def _wait(self, reached: Callable[[], bool], seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        with self.changed:
            while not (reached() or self.ended or self.absent):
                if not self.changed.wait(max(0.0, deadline - time.monotonic())):
                    return False
            return reached()

    def wait_for_writer(self, seconds: float) -> None:
        """Wait until there is a writer, or there will be none."""
        with self.changed:
            self.changed.wait_for(lambda: self.ended or not self.absent, seconds)

    def set_absent(self, absent: bool) -> None:
        """Note that there is no writer for a while, or that there is one again."""
        with self.changed:
            self.absent = absent
            self.changed.notify_all()

    def kind_of(self, number: int) -> object:
        """Return a message that is not confirmed, of an observation its step; else None."""
        with self.changed:
            return self.unconfirmed.get(number)

    def is_waited_for(self, number: int) -> bool:
        """Return whether a thread waits for the result of this message."""
        return number in self._answers

    def conclude(self, number: int, result: Any, finished: Evaluated | Exception | None) -> None:
        """Note the result of a message; `finished`: what the training thread is to take of it."""
        with self.changed:
            kind = self.unconfirmed.pop(number, None)
            if number in self._answers:
                self._answers[number] = result
            if finished is not None:
                self.finished.append(finished)
            self.observations -= isinstance(kind, int)
            self.changed.notify_all()

    def handled(self) -> list[int]:
        """Return what a writer that has ended had handled, and another one is not to handle again.

        Of such an observation nothing follows but its record.
        """
        numbers = self.mailbox.handled()
        return [each for each in numbers if isinstance(self.kind_of(each), int | Alert | Rest)]

    def drop_unfinished(self) -> None:
        """Drop the message that a writer was handling when it ended: it may end the next one, too.

        Those without which another writer cannot continue are kept.
        """
        number = self.mailbox.unfinished()
        if number is None:
            return
        with self.changed:
            kind = self.unconfirmed.get(number)
            if kind is None or isinstance(kind, Begin | Load | SendRecords):
                return
            self.mailbox.confirm(number)
            self.conclude(number, None, None)
            self._note_loss(kind, "it ended while handling it")
        self._gaps.write()

    def end(self) -> None:
        """List everything as lost that is not confirmed: there is no writer any more."""
        with self.changed:
            for kind in self.unconfirmed.values():
                self._note_loss(kind, "it ended")
            self.ended = True
            self.observations = 0
            self.unconfirmed.clear()
            self.changed.notify_all()

    def list_unreceived(self) -> None:
        """List what no writer will get; one that is behind still writes what it has received."""
        with self.changed:
            for number in self.mailbox.unreceived():
                kind = self.unconfirmed.pop(number, None)
                self.observations -= isinstance(kind, int)
                self._note_loss(kind, "it was behind when the run ended")
            self.changed.notify_all()

    def _note_loss(self, kind: object, why: str) -> None:
        """List what was sent to a writer, or should have been, and is lost."""
        if isinstance(kind, int):
            self._gaps.lost_step("writer", "record", kind, why)
        elif isinstance(kind, Alert):
            self._gaps.lost_step("writer", "alert", kind.step, why)
        elif isinstance(kind, Rest):
            self._gaps.lost_step("writer", "record", kind.step, why)
