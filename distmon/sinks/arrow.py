"""`params.arrow`: the history of every parameter, for pandas, polars and DuckDB."""

from __future__ import annotations

import os
from pathlib import Path

import pyarrow as pa

from distmon import param_history
from distmon.alert import Alert
from distmon.record import Record
from distmon.run_folder import RunFolder
from distmon.sinks.appending import append_whole, open_for_append


class ArrowSink:
    """Appends one batch per observation, so a crash loses at most the batch being written.

    No end-of-stream marker is ever written: readers take the end of the file for it, and the next
    attempt can append.
    """

    def __init__(self, folder: RunFolder) -> None:
        self._attempt = folder.attempt
        self._descriptor = _open_history(folder.params_path)

    def record(self, record: Record) -> None:
        if len(record.params):
            append_whole(self._descriptor, param_history.batch_message(record, self._attempt))

    def alert(self, alert: Alert) -> None:
        """Alerts are not part of this file."""

    def close(self) -> None:
        os.fsync(self._descriptor)
        os.close(self._descriptor)


def _open_history(path: Path) -> int:
    """Open the file at the end of its last whole batch, ready to append."""
    end = _end_of_usable_part(path) if path.exists() else 0
    if end is None:
        path.rename(param_history.next_set_aside(path))
        end = 0
    descriptor = open_for_append(path)
    os.ftruncate(descriptor, end)
    if end == 0:
        append_whole(descriptor, param_history.schema_message())
    return descriptor


def _end_of_usable_part(path: Path) -> int | None:
    """Where new batches may follow; None when the file's columns are not ours."""
    expected = param_history.schema_message()
    end = 0
    for message, offset in param_history.whole_messages(path):
        if end == 0:
            try:
                found = pa.ipc.read_schema(message)
            except (pa.ArrowException, OSError):
                return None
            if not found.equals(param_history.schema()):
                return None
        end = offset
    if end == 0 and not expected.startswith(path.read_bytes()[: len(expected) + 1]):
        # Neither our schema nor the beginning of it that a crash left: somebody else's file.
        return None
    return end
