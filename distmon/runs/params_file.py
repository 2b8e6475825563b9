"""`params.arrow`: its schema, and how the stream is read when parts of it are missing.

An Arrow IPC stream is a schema message followed by one message per batch. Each message is
self-contained, so a damaged file can be read except for its damaged messages.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa

from distmon.metrics import PARAM_METRICS, PERCENTILE_METRICS
from distmon.record.record import Record
from distmon.runs.arrow_stream import Damage, messages

_WORTH_COMPRESSING: Final = 128
"""Parameters from which on the columns of a batch are compressed: each is compressed by itself, and
setting that up takes longer than to write the few numbers of a small model."""
VALUE_COLUMNS: Final[tuple[str, ...]] = tuple(m.name for m in (*PARAM_METRICS, *PERCENTILE_METRICS))


@cache
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


@cache
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
        _names(params.names),
    ]
    for name in VALUE_COLUMNS:
        column = values.get(name)
        columns.append(
            pa.nulls(rows, pa.float64()) if column is None else pa.array(column, pa.float64())
        )
    batch = pa.record_batch(columns, schema=schema())
    if rows < _WORTH_COMPRESSING:
        return bytes(batch.serialize())
    stream = io.BytesIO()
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    writer = pa.ipc.new_stream(stream, schema(), options=options)
    writer.write_batch(batch)
    # The writer puts the schema before its first batch; the file has it already.
    return stream.getvalue()[len(schema_message()) :]


@lru_cache(maxsize=4)
def _names(names: tuple[str, ...]) -> Any:
    return pa.array(list(names), pa.string())


def whole_messages(path: Path, start: int = 0) -> Iterator[tuple[Any, int]]:
    """Yield each whole message with the offset of its end; damaged parts are left out."""
    for message in messages(path, start, Damage()):
        yield message.content, message.end


@dataclass
class Position:
    """How far a file was read."""

    offset: int = 0
    """End of the last complete message."""
    schema: Any = None
    """Of the file; None before it was read."""


def read_batches(path: Path, position: Position, damage: Damage) -> Iterator[Any]:
    """Yield the whole batches after `position`, and advance it; `damage` counts the others.

    Their columns have the types of `schema`; a column of another type is left out. Raises OSError
    when the file cannot be opened.
    """
    for message in messages(path, position.offset, damage):
        position.offset = message.end
        try:
            if message.is_schema:
                position.schema = pa.ipc.read_schema(message.content)
                continue
            # Without the schema at its start a file of this version can still be read.
            found = pa.ipc.read_record_batch(message.content, position.schema or schema())
            # Otherwise a damaged string column could crash the reader of the table.
            found.validate(full=True)
            batch = _usable(found)
        except (pa.ArrowException, OSError, ValueError):
            damage.entries += 1
            continue
        yield batch


def _usable(batch: Any) -> Any:
    """Return the columns that readers can rely on; ValueError without step, attempt and name."""
    expected = schema()
    columns: dict[str, Any] = {}
    for at, field in enumerate(batch.schema):
        known = expected.field(field.name).type if field.name in expected.names else pa.float64()
        if field.type == known:
            columns.setdefault(field.name, batch.column(at))
    keys = [columns.get(key) for key in ("step", "attempt", "name")]
    if any(column is None or column.null_count for column in keys):
        raise ValueError("step, attempt or name is missing")
    return pa.record_batch([*columns.values()], names=[*columns])


def set_aside_files(current: Path) -> list[Path]:
    """Return older files with other columns (`params.0.arrow`, ...) in order."""
    numbered: list[tuple[int, Path]] = []
    for path in current.parent.glob(f"{current.stem}.*{current.suffix}"):
        number = path.name.removeprefix(f"{current.stem}.").removesuffix(current.suffix)
        if number.isascii() and number.isdigit() and len(number) < 10:
            numbered.append((int(number), path))
    return [path for _, path in sorted(numbered)]


def next_set_aside(current: Path) -> Path:
    """Return an unused name for a file whose columns differ from the current schema."""
    taken = {path.name for path in set_aside_files(current)}
    number = 0
    while f"{current.stem}.{number}{current.suffix}" in taken:
        number += 1
    return current.with_name(f"{current.stem}.{number}{current.suffix}")
