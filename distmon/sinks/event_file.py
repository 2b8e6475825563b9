"""A TensorBoard event file, written as other files of the run folder: whole entries, or an error.

TensorBoard's own writer has a thread, which prints a traceback and ends when the disk fails.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from distmon.sinks.atomic_append import append_atomically, check_in_place
from distmon.untrusted.files import open_for_append, real_folder


class EventFile:
    """Appends events to a new file; raises OSError when the file is gone or cannot be written."""

    def __init__(self, folder: Path, attempt: int, first: Any) -> None:
        """`first` is the event with the version of the format; needs the package tensorboard."""
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._packed = _Packed()
        self._writer: Any = RecordWriter(self._packed)
        self._first: Any = first
        ending = f".attempt{attempt}"
        found = [*real_folder(folder).glob(f"events.out.tfevents.*{ending}")]
        self.continues = any(os.lstat(file).st_size for file in found)
        """Whether this attempt has an event file already: this one continues it."""
        now = time.time_ns() // 1000
        # TensorBoard reads files in the order of their names: those of one second, too.
        name = f"events.out.tfevents.{now // 10**6:010d}.{now % 10**6:06d}"
        self._path = folder / f"{name}.{platform.node()}.{os.getpid()}{ending}"
        self._descriptor = open_for_append(self._path)

    def append(self, events: Iterable[Any]) -> None:
        """Write all of the events, or none."""
        check_in_place(self._descriptor, self._path)
        first = [] if self._first is None else [self._first]
        for event in (*first, *events):
            self._writer.write(event.SerializeToString())
        append_atomically(self._descriptor, self._packed.take())
        self._first = None

    def close(self) -> None:
        """Let go of the file."""
        try:
            os.fsync(self._descriptor)
        finally:
            os.close(self._descriptor)


class _Packed:
    """What TensorBoard's record writer writes to: collects bytes."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []

    def write(self, data: bytes) -> None:
        self._parts.append(data)

    def take(self) -> bytes:
        data, self._parts = b"".join(self._parts), []
        return data
