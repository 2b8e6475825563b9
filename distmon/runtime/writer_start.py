"""Start a writer process: with `exec`, never a bare fork, since the training may use CUDA."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import distmon
from distmon.errors import DistmonError
from distmon.own_threads import OwnThread
from distmon.writer.answers import Answers

START_S: Final = 60.0
"""Longest time that the first writer may take to import what it needs: `attach` waits for it."""
RESTART_S: Final = 600.0
"""The same of another one, which nothing waits for. On a busy machine it needs minutes, and one
that is ended and started again later needs them again."""
FIRST_PAUSE_S: Final = 10.0
"""Pause before a writer is replaced again; it doubles up to `LONGEST_PAUSE_S`."""
LONGEST_PAUSE_S: Final = 600.0
STEADY_S: Final = 600.0
"""A writer that has confirmed messages for so long is replaced at once, as the first one is."""
_PIPE_BYTES: Final = 1 << 20
"""Room for notes: the most that Linux gives without privileges."""
_RUN: Final = (
    "import sys; sys.path[:] = {path!r}; from distmon.writer.main import main; main(**{options!r})"
)


class WriterStartError(DistmonError):
    """The writer process could not be started."""


class Restarts:
    """Paces replacements: the first at once, further ones with longer and longer pauses."""

    def __init__(self) -> None:
        self._tries = 0

    def pause(self, steady_s: float) -> float:
        """Return the seconds to wait; `steady_s`: how long the writer has worked."""
        if steady_s >= STEADY_S:
            self._tries = 0
        # The exponent has a limit, since a month of tries would overflow a float.
        doubled = FIRST_PAUSE_S * 2 ** min(self._tries - 1, 30) if self._tries else 0.0
        self._tries += 1
        return min(LONGEST_PAUSE_S, doubled)


@dataclass
class RunningWriter:
    """A writer process and the pipes to it."""

    process: subprocess.Popen[bytes]
    notes: int
    answers: Answers
    _reading: OwnThread | None = None

    def wait_until_ready(self, seconds: float = START_S) -> None:
        """Return once it has imported everything; raises WriterStartError when it does not."""
        found: list[Any] = []
        # A pipe has no time limit; a thread that waits for it can be left behind.
        thread = OwnThread(lambda: found.append(self.answers.read()), "writer-start")
        try:
            thread.start()
            self._reading = thread
        except RuntimeError as error:  # too many threads
            self.kill()
            raise WriterStartError(str(error)) from error
        thread.join(seconds)
        if not found:
            self.kill()
            raise WriterStartError(f"it was not ready within {seconds:g} s")
        if found[0] is None:
            self.kill()
            raise WriterStartError(f"it ended with code {self.process.wait()}")

    def kill(self) -> None:
        """End the process at once, before anything was sent to it, and close the pipes."""
        self.process.kill()
        self.process.wait()
        os.close(self.notes)
        if self._reading is not None:
            self._reading.join(1.0)  # it reads the end, unless a forked child has the pipe, too
        if self._reading is None or not self._reading.is_alive():
            self.answers.close()


def _enlarge(pipe: int) -> None:
    """Make room for a note of each message that the memory holds, where the system allows it."""
    with suppress(ImportError, OSError, AttributeError):
        import fcntl  # not on every platform

        fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)


def start_writer(memory: int, sinks: Sequence[str]) -> RunningWriter:
    """Start a process that reads messages from `memory`; raises WriterStartError.

    It gets the search path of this process as it is now, made absolute, and no `sitecustomize`: a
    launcher's would attach a monitor to it.
    """
    if getattr(sys, "frozen", False) or not sys.executable:
        raise WriterStartError("this program has no Python interpreter of its own")
    ends: list[int] = []
    try:
        notes_read, notes = os.pipe()
        ends += (notes_read, notes)
        answers_read, answers = os.pipe()
        ends += (answers_read, answers)
        os.set_blocking(notes, False)
        _enlarge(notes)
        options = {
            "notes": notes_read,
            "answers": answers,
            "memory": memory,
            "parent": os.getpid(),
            "sinks": [*sinks],
        }
        home = str(Path(distmon.__file__).resolve().parent.parent)
        path = [os.path.abspath(entry) for entry in sys.path if isinstance(entry, str)]
        code = _RUN.format(path=[*path, home], options=options)
        process = subprocess.Popen(
            [sys.executable, "-S", "-c", code],
            stdin=subprocess.DEVNULL,
            pass_fds=(notes_read, answers, memory),
            start_new_session=True,
        )
    except (OSError, ValueError) as error:
        for end in ends:
            os.close(end)
        raise WriterStartError(f"{type(error).__name__}: {error}") from error
    os.close(notes_read)
    os.close(answers)
    return RunningWriter(process, notes, Answers(answers_read))
