"""`params.arrow`: the history of every parameter, for pandas, polars and DuckDB."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa

from distmon.record.record import Record
from distmon.rules.alert import Alert
from distmon.runs import params_file
from distmon.runs.arrow_stream import Damage, messages
from distmon.runs.run_folder import RunFolder
from distmon.sinks.atomic_append import append_atomically, check_in_place
from distmon.sinks.base import SinkContext
from distmon.sinks.moved_entries import move_entries
from distmon.untrusted.files import open_for_append, open_regular, set_aside_other_than_file

log = logging.getLogger("distmon")
BYTES_PER_OBSERVATION: Final = 4 << 20
"""What the file may grow by on average; of a larger model not every observation is written."""


def preload() -> None:
    """Let pyarrow import what it imports when it converts its first array: pandas, if installed."""
    pa.array(np.zeros(1), pa.float64())


def open_sink(context: SinkContext) -> ArrowSink:
    """Return the sink of a monitor."""
    return ArrowSink(context.folder)


class ArrowSink:
    """Appends one batch per observation, so a crash loses at most the batch being written.

    Of a model whose batches are above BYTES_PER_OBSERVATION only one observation in several is
    written, those with an alert and the last one besides.

    It writes no end-of-stream marker: readers stop at the end of the file, and the next attempt can
    append.
    """

    writes_files = True

    def __init__(self, folder: RunFolder) -> None:
        self._attempt = folder.attempt
        self._path = folder.params_path
        folder.restore()
        self._descriptor = _open_history(folder.params_path)
        self._stride = 1
        """Observations for each one that is written."""
        self._passed = 0
        """Observations since the last one that was written."""
        self._unwritten: Record | None = None

    def record(self, record: Record) -> None:
        if not len(record.params):
            return
        if self._passed + 1 < self._stride:
            self._passed += 1
            self._unwritten = record
        else:
            self._write(record)

    def alert(self, alert: Alert) -> None:  # noqa: ARG002
        """Write what the alert was found in."""
        self._write_rest()

    def _write_rest(self) -> None:
        if self._unwritten is not None:
            self._write(self._unwritten)

    def _write(self, record: Record) -> None:
        message = params_file.batch_message(record, self._attempt)
        check_in_place(self._descriptor, self._path)
        append_atomically(self._descriptor, message)
        self._unwritten, self._passed = None, 0
        stride = -(-len(message) // BYTES_PER_OBSERVATION)
        if stride > 1 and self._stride == 1:
            log.warning(
                "distmon: the history of %d parameters takes %.0f MB for each observation; one in "
                "%d is written, besides those with an alert and the last",
                len(record.params),
                len(message) / 1e6,
                stride,
            )
        self._stride = stride

    def take_in(self, folder: RunFolder) -> int:
        """Move the batches of another folder here; return their number."""
        source = folder.params_path
        if os.path.lexists(source) and _end_of_usable_part(source) is None:
            # Other columns: of an older version, which the run has been resumed without.
            shutil.move(source, params_file.next_set_aside(self._path))
        return move_entries(source, self._path, self._descriptor, _whole_batches)

    def close(self) -> None:
        try:
            self._write_rest()
            os.fsync(self._descriptor)
        finally:
            os.close(self._descriptor)


def _open_history(path: Path) -> int:
    """Open the file at the end of its last whole batch, ready to append."""
    set_aside_other_than_file(path)
    end = _end_of_usable_part(path) if path.exists() else 0
    if end is None:
        path.rename(params_file.next_set_aside(path))
        end = 0
    descriptor = open_for_append(path)
    try:
        os.ftruncate(descriptor, end)
        if end == 0:
            append_atomically(descriptor, params_file.schema_message())
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _whole_batches(path: Path) -> Iterator[bytes]:
    """Yield the bytes of each batch of this version's columns."""
    with open_regular(path, follow_links=False) as file:
        for message in messages(path, 0, Damage()):
            if not message.is_schema:
                file.seek(message.start)
                yield file.read(message.end - message.start)


def _end_of_usable_part(path: Path) -> int | None:
    """Return the offset where new batches are appended; None when the schema differs."""
    expected = params_file.schema_message()
    end = 0
    for message, offset in params_file.whole_messages(path):
        if end == 0:
            try:
                found = pa.ipc.read_schema(message)
            except (pa.ArrowException, OSError):
                return None
            if not found.equals(params_file.schema()):
                return None
        end = offset
    if end == 0 and not expected.startswith(path.read_bytes()[: len(expected) + 1]):
        # Neither this schema nor the start of it, as a crash leaves: another program's file.
        return None
    return end
