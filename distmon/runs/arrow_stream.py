"""Take an Arrow IPC stream apart, message by message, where any byte may be wrong.

Arrow's own reader allocates what the file asks for and stops at the first damage. Here every length
is checked against the file before anything is read, and after damage the next message is searched.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

import pyarrow as pa

from distmon.untrusted.files import open_regular

MARK: Final = b"\xff\xff\xff\xff"
"""At the start of every message."""
END_OF_STREAM: Final = MARK + b"\x00\x00\x00\x00"
LARGEST_MESSAGE: Final = 1 << 30
"""Bytes of a batch, as stored and also decompressed."""
_LARGEST_HEAD: Final = 16 << 20
_MOST_CANDIDATES: Final = 20_000
"""Places that are tried after damage; a file may consist of nothing but marks."""
_MOST_SEARCHED: Final = 128 << 20
"""Bytes that are searched after damage; of a sparse file there may be any number."""
_SCHEMA, _RECORD_BATCH = 1, 3


@dataclass(frozen=True)
class Message:
    """One message and its place in the file."""

    start: int
    end: int
    content: Any
    """pyarrow Message."""
    is_schema: bool


@dataclass
class Damage:
    """What could not be read of a file."""

    entries: int = 0
    """Damaged parts that were skipped."""
    tail: int = 0
    """Bytes after the last whole message."""


def messages(path: Path, start: int, damage: Damage) -> Iterator[Message]:
    """Yield the whole messages from `start` on; OSError when the file cannot be opened."""
    with open_regular(path, follow_links=False) as file:
        size = file.seek(0, 2)
        offset = start
        candidates = 0
        while offset < size:
            found = _message_at(file, offset, size)
            if found is None:
                file.seek(offset)
                if size - offset == len(END_OF_STREAM) and file.read(8) == END_OF_STREAM:
                    return
                found, candidates = _next_message(file, offset + 1, size, candidates)
                if found is None:
                    damage.tail = size - offset
                    return
                damage.entries += 1
            offset = found.end
            yield found


def _next_message(file: BinaryIO, start: int, size: int, tried: int) -> tuple[Message | None, int]:
    """Return the first message from `start` on, and how many places have been tried."""
    chunk = 1 << 20
    limit = min(size, start + _MOST_SEARCHED)
    while start < limit:
        file.seek(start)
        content = file.read(chunk + len(MARK) - 1)
        at = content.find(MARK)
        while at >= 0:
            tried += 1
            if tried > _MOST_CANDIDATES:
                return None, tried
            found = _message_at(file, start + at, size)
            if found is not None:
                return found, tried
            at = content.find(MARK, at + 1)
        start += chunk
    return None, tried


def _message_at(file: BinaryIO, offset: int, size: int) -> Message | None:
    file.seek(offset)
    prefix = file.read(8)
    if len(prefix) < 8 or prefix[:4] != MARK:
        return None
    head_size = int.from_bytes(prefix[4:], "little", signed=True)
    if not 0 < head_size <= min(_LARGEST_HEAD, size - offset - 8):
        return None
    head = file.read(head_size)
    try:
        root = _Table(head, *struct.unpack_from("<I", head))
        kind, body_size = root.number(1, "<B"), root.number(3, "<q")
        header = root.table(2)
        end = offset + 8 + head_size + body_size
        if kind not in (_SCHEMA, _RECORD_BATCH) or not 0 <= body_size <= LARGEST_MESSAGE:
            return None
        if end > size:
            return None
        body = file.read(body_size)
        if kind == _RECORD_BATCH and _decompressed(header, body) > LARGEST_MESSAGE:
            return None
        content = pa.ipc.read_message(pa.BufferReader(prefix + head + body))
    except (struct.error, ValueError, OSError, pa.ArrowException):
        return None
    return Message(offset, end, content, kind == _SCHEMA)


def _decompressed(batch: _Table, body: bytes) -> int:
    """Return how many bytes a batch asks for: each compressed buffer starts with its length."""
    total = 0
    compressed = batch.has(3)
    for offset, length in batch.structs(2, "<qq"):
        if compressed and length >= 8:
            (asked,) = struct.unpack_from("<q", body, _within(offset, body))
            total += length if asked == -1 else max(0, asked)
        else:
            total += max(0, length)
    return total


class _Table:
    """The parts of a flatbuffer table that are needed; struct.error or ValueError if damaged."""

    def __init__(self, data: bytes, place: int) -> None:
        self._data = data
        self._place = _within(place, data)
        (back,) = struct.unpack_from("<i", data, place)
        self._slots = _within(place - back, data)
        (self._slots_size,) = struct.unpack_from("<H", data, self._slots)

    def has(self, field: int) -> bool:
        return self._at(field) is not None

    def number(self, field: int, form: str) -> int:
        at = self._at(field)
        return 0 if at is None else int(struct.unpack_from(form, self._data, at)[0])

    def table(self, field: int) -> _Table:
        return _Table(self._data, self._target(field))

    def structs(self, field: int, form: str) -> Iterator[Any]:
        if not self.has(field):
            return
        start = self._target(field)
        (count,) = struct.unpack_from("<I", self._data, start)
        step = struct.calcsize(form)
        if count > len(self._data) // step:
            raise ValueError("a list is longer than its message")
        for index in range(count):
            yield struct.unpack_from(form, self._data, start + 4 + index * step)

    def _target(self, field: int) -> int:
        at = self._at(field)
        if at is None:
            raise ValueError("a part is missing")
        (distance,) = struct.unpack_from("<I", self._data, at)
        return _within(at + distance, self._data)

    def _at(self, field: int) -> int | None:
        slot = 4 + 2 * field
        if slot + 2 > self._slots_size:
            return None
        (offset,) = struct.unpack_from("<H", self._data, self._slots + slot)
        return _within(self._place + offset, self._data) if offset else None


def _within(place: int, data: bytes) -> int:
    """Return the place; struct would count a negative one from the end."""
    if not 0 <= place < len(data):
        raise ValueError("a part lies outside of its message")
    return place
