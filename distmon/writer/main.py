"""The writer process: started by `runtime.writer_start`, ends when the training process does."""

from __future__ import annotations

import logging
import os
import select
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from distmon.sinks import preload
from distmon.writer.answers import AnswerPipe
from distmon.writer.evaluator import Evaluated
from distmon.writer.mailbox import FLUSH, PRINTED, Inbox, Notes
from distmon.writer.session import (
    Assignment,
    Failure,
    Load,
    LogForwarder,
    Request,
    Session,
    Texts,
)

FLUSH_S: Final = 30.0
"""Time to flush the sinks after the training process has ended without closing its monitor."""
ANSWER_DELAY_S: Final = 0.25
"""How long an answer waits for others, unless the training process waits for it, or acts on it."""
_NICENESS: Final = 5
"""Where all cores are busy, training comes first."""


def _stand_back() -> None:
    """Never take the core from the training that sends a message, only one that is free."""
    with suppress(OSError):
        os.nice(_NICENESS)
    if hasattr(os, "SCHED_BATCH"):
        with suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def main(notes: int, answers: int, memory: int, parent: int, sinks: list[str]) -> None:
    """Serve one monitor. `notes`, `answers` and `memory` are file descriptors."""
    # Ctrl-C and the end of a job signal all processes; this one ends when it has flushed.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    _stand_back()
    preload(sinks)
    pipe = AnswerPipe(answers, ANSWER_DELAY_S)
    texts = Texts(pipe.send)
    logger = logging.getLogger("distmon")
    logger.propagate = False
    logger.setLevel(logging.INFO)
    logger.addHandler(LogForwarder(pipe.send))
    pipe.send(("ready", os.getpid()))
    pipe.flush()
    session = _serve(notes, Inbox(memory), parent, texts, pipe.flush)
    pipe.flush()
    if session is not None:  # the training process has not closed it
        logger.handlers = [logging.StreamHandler()]
        session.close(FLUSH_S)
        with suppress(OSError, ValueError):
            sys.stdout.write(texts.rest())
            sys.stdout.flush()
    _end_by_itself()


def _serve(
    notes: int, inbox: Inbox, parent: int, texts: Texts, flush: Callable[[], None]
) -> Session | None:
    """Handle messages until there are no more; return a session that is still open."""
    session: Session | None = None
    split = Notes()
    while True:
        # A child that the training process has forked may keep the pipe open after its end.
        if not select.select([notes], [], [], 1.0)[0]:
            if os.getppid() != parent:
                return session
            continue
        data = os.read(notes, 1 << 16)
        if not data:
            return session
        for number, offset, length in split.feed(data):
            if offset == PRINTED:
                texts.printed(number)
                continue
            if offset == FLUSH:
                flush()
                continue
            try:
                message = inbox.read(number, offset, length)
            except Exception as error:
                texts.answer(("done", number, Failure.of(error)))
                continue
            if isinstance(message, Assignment):
                session = Session(message, texts)
                result = None
            else:
                assert session is not None
                result = session.handle(message)
            inbox.handled(number)
            texts.answer(("done", number, result))
            if isinstance(message, Request | Load) or is_urgent(result):
                flush()
            if message == Request("close"):
                return None


def is_urgent(result: object) -> bool:
    """Return whether something follows from an evaluation in the training process."""
    return isinstance(result, Evaluated) and bool(
        result.alerts or result.failures or result.read_in_full
    )


def _end_by_itself() -> None:
    """Do not let a sink that hangs keep the process."""
    watchdog = threading.Timer(FLUSH_S, os._exit, args=(0,))
    watchdog.daemon = True
    watchdog.start()
