"""`params.arrow`: its schema, and how the stream is read when its end is missing.

An Arrow IPC stream is a schema message followed by one message per batch. Each message is
self-contained, so a truncated file can be read up to the end of its last complete message.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa

from distmon.metrics import PARAM_METRICS, PERCENTILE_METRICS
from distmon.record.record import Record

VALUE_COLUMNS: Final[tuple[str, ...]] = tuple(m.name for m in (*PARAM_METRICS, *PERCENTILE_METRICS))
END_OF_STREAM: Final = b"\xff\xff\xff\xff\x00\x00\x00\x00"


def schema() -> Any:
    """Return the schema: step, attempt, name, then every per-parameter metric as float64."""
    return pa.schema(
        [
            pa.field("step", pa.int64()),
            pa.field("attempt", pa.int32()),
            pa.field("name", pa.string()),
            *(pa.field(name, pa.float64()) for name in VALUE_COLUMNS),
        ]
    )


def schema_message() -> bytes:
    """Return the bytes at the start of a new file."""
    return bytes(schema().serialize())


def batch_message(record: Record, attempt: int) -> bytes:
    """Return one observation as the bytes of one message; missing metrics become null."""
    params = record.params
    values = dict(params.columns)
    if params.grad_histogram is not None:
        values.update(params.percentiles)
    rows = len(params)
    columns = [
        pa.array(np.full(rows, record.step), pa.int64()),
        pa.array(np.full(rows, attempt), pa.int32()),
        pa.array(list(params.names), pa.string()),
    ]
    for name in VALUE_COLUMNS:
        column = values.get(name)
        columns.append(
            pa.nulls(rows, pa.float64()) if column is None else pa.array(column, pa.float64())
        )
    stream = io.BytesIO()
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    writer = pa.ipc.new_stream(stream, schema(), options=options)
    writer.write_batch(pa.record_batch(columns, schema=schema()))
    # The writer puts the schema before its first batch; the file has it already.
    return stream.getvalue()[len(schema_message()) :]


def whole_messages(path: Path, start: int = 0) -> Iterator[tuple[Any, int]]:
    """Yield each complete message with the offset of its end; stop where the file is truncated."""
    with pa.OSFile(str(path), "rb") as file:
        file.seek(start)
        try:
            messages = pa.ipc.MessageReader.open_stream(file)
        except (pa.ArrowInvalid, OSError):
            return
        while True:
            try:
                message = messages.read_next_message()
            except (StopIteration, pa.ArrowInvalid, OSError):
                return
            yield message, file.tell()


@dataclass
class Position:
    """How far a file was read."""

    offset: int = 0
    """End of the last complete message."""
    schema: Any = None
    """Of the file; None before it was read."""


def read_batches(path: Path, position: Position) -> Iterator[Any]:
    """Yield the complete batches after `position`, and advance it; None for a damaged batch.

    Raises OSError when the file cannot be opened.
    """
    for message, offset in whole_messages(path, position.offset):
        batch = None
        try:
            if position.schema is None:
                position.schema = pa.ipc.read_schema(message)
                position.offset = offset
                continue
            batch = pa.ipc.read_record_batch(message, position.schema)
            # Without it, a damaged string column could crash the reader of the table.
            batch.validate(full=True)
        except (pa.ArrowException, OSError):
            if position.schema is None:
                return
            batch = None
        position.offset = offset
        yield batch


def bytes_after(path: Path, position: Position) -> int:
    """Return the size of the truncated message at the end."""
    dropped = path.stat().st_size - position.offset
    if dropped == len(END_OF_STREAM) and position.schema is not None:
        with open(path, "rb") as file:
            file.seek(position.offset)
            if file.read() == END_OF_STREAM:
                return 0
    return dropped


def set_aside_files(current: Path) -> list[Path]:
    """Return older files with other columns (`params.0.arrow`, ...) in order."""
    numbered: list[tuple[int, Path]] = []
    for path in current.parent.glob(f"{current.stem}.*{current.suffix}"):
        number = path.name.removeprefix(f"{current.stem}.").removesuffix(current.suffix)
        if number.isdigit():
            numbered.append((int(number), path))
    return [path for _, path in sorted(numbered)]


def next_set_aside(current: Path) -> Path:
    """Return an unused name for a file whose columns differ from the current schema."""
    taken = {path.name for path in set_aside_files(current)}
    number = 0
    while f"{current.stem}.{number}{current.suffix}" in taken:
        number += 1
    return current.with_name(f"{current.stem}.{number}{current.suffix}")
