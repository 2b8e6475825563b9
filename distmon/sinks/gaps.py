"""What a run folder says of records that it lacks: `gaps.jsonl` and `ends.jsonl`.

`gaps.jsonl` counts what sinks could not deliver. `ends.jsonl` has the last observation of each
attempt, so that records which are missing after the last one that was written show, too.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any, Final, NamedTuple

from distmon.own_threads import run_within
from distmon.record.record import Record
from distmon.rules.alert import Alert
from distmon.runs.run_folder import ENDS_FILE, GAPS_FILE, RunFolder
from distmon.runs.run_json import strict_json
from distmon.sinks.atomic_append import append_atomically
from distmon.untrusted.files import open_for_append, set_aside_other_than_file

WRITE_S: Final = 5.0
"""Longest wait at the end of a run for a file system that does not answer."""


class LastObservation(NamedTuple):
    """How far a monitor has observed."""

    number: int
    """Observations so far; they are numbered from 1."""
    step: int


class GapLog:
    """Collects losses by sink and reason, and appends them to `gaps.jsonl` when it can."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        """Never held while a file is written: the training thread counts losses, too."""
        self._writing = threading.Lock()
        self._lost: dict[tuple[str, str, str], dict[str, Any]] = {}

    def lost(self, sink: str, item: Record | Alert, reason: str) -> None:
        """Count an item that a sink has not delivered and will not."""
        what = "alert" if isinstance(item, Alert) else "record"
        self.lost_step(sink, what, item.step, reason)

    def lost_step(self, sink: str, what: str, step: int, reason: str) -> None:
        """Count a record or alert of a step."""
        self._add(
            {
                "attempt": self._folder.attempt,
                "sink": sink,
                "what": what,
                "reason": reason,
                "count": 1,
                "step": step,
                "last_step": step,
            }
        )

    def _add(self, more: dict[str, Any]) -> None:
        key = (more["sink"], more["what"], more["reason"])
        with self._lock:
            gap = self._lost.setdefault(key, {**more, "count": 0})
            gap["count"] += more["count"]
            gap["step"] = min(gap["step"], more["step"])
            gap["last_step"] = max(gap["last_step"], more["last_step"])

    def write(self) -> None:
        """Append what is not in the file yet; where that fails, with the next call."""
        with self._writing:
            with self._lock:
                lost, self._lost = self._lost, {}
            if lost and not self._append(GAPS_FILE, [*lost.values()]):
                for gap in lost.values():
                    self._add(gap)

    def end(self, last: LastObservation) -> None:
        """Write what is lost, and how far the attempt has observed; waits `WRITE_S` at most.

        Written by the training process: a writer process may be late or gone by then.
        """

        def work() -> None:
            self.write()
            if self._folder.resumed_from is not None:  # else it is no attempt
                self._append(ENDS_FILE, [self._end_entry(last)])

        run_within(WRITE_S, work, "run-end")

    def _end_entry(self, last: LastObservation) -> dict[str, Any]:
        return {
            "attempt": self._folder.attempt,
            "step": last.step,
            "observations": last.number,
        }

    def _append(self, name: str, entries: list[dict[str, Any]]) -> bool:
        """Append to a file of the run folder, or of the second one; return whether it was."""
        now = time.time()
        lines = "".join(strict_json({**entry, "time": now}) + "\n" for entry in entries).encode()
        folders = (self._folder.path, self._folder.second)
        return any(_appended(folder / name, lines) for folder in folders if folder is not None)


def _appended(path: Path, lines: bytes) -> bool:
    try:
        set_aside_other_than_file(path)
        descriptor = open_for_append(path)
        try:
            append_atomically(descriptor, lines)
        finally:
            os.close(descriptor)
    except OSError:
        return False
    return True
