"""Appending to a file so that it never holds half an entry by our own doing."""

from __future__ import annotations

import os
from pathlib import Path


def open_for_append(path: Path) -> int:
    """A descriptor whose every write lands at the end of the file."""
    return os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)


def append_whole(descriptor: int, data: bytes) -> None:
    """Write `data` in one call, or leave the file as it was and raise `OSError` (disk full)."""
    start = os.fstat(descriptor).st_size
    try:
        written = os.write(descriptor, data)
        while written < len(data):
            written += os.write(descriptor, data[written:])
    except OSError:
        os.ftruncate(descriptor, start)
        raise
