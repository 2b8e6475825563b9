"""`gaps.jsonl`: what sinks could not deliver, counted in the run folder."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

from distmon.record.record import Record
from distmon.rules.alert import Alert
from distmon.runs.run_folder import GAPS_FILE, RunFolder, strict_json
from distmon.sinks.atomic_append import append_atomically
from distmon.untrusted.files import open_for_append, set_aside_other_than_file


class GapLog:
    """Collects losses by sink and reason, and appends them to `gaps.jsonl` when it can."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._lost: dict[tuple[str, str, str], dict[str, Any]] = {}

    def lost(self, sink: str, item: Record | Alert, reason: str) -> None:
        """Count an item that a sink has not delivered and will not."""
        what = "alert" if isinstance(item, Alert) else "record"
        self.lost_step(sink, what, item.step, reason)

    def lost_step(self, sink: str, what: str, step: int, reason: str) -> None:
        """Count a record or alert of a step."""
        with self._lock:
            gap = self._lost.setdefault(
                (sink, what, reason),
                {
                    "attempt": self._folder.attempt,
                    "sink": sink,
                    "what": what,
                    "reason": reason,
                    "count": 0,
                    "step": step,
                    "last_step": step,
                },
            )
            gap["count"] += 1
            gap["step"], gap["last_step"] = min(gap["step"], step), max(gap["last_step"], step)

    def write(self) -> None:
        """Append what is not in the file yet; where that fails, with the next call."""
        with self._lock:
            gaps = [{**gap, "time": time.time()} for gap in self._lost.values()]
            if not gaps:
                return
            lines = "".join(strict_json(gap) + "\n" for gap in gaps).encode()
            second = self._folder.second
            places = [self._folder.gaps_path, *([] if second is None else [second / GAPS_FILE])]
            if any(_appended(path, lines) for path in places):
                self._lost.clear()


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
