"""Append to a file all or nothing, so that a full disk leaves no partial entry."""

from __future__ import annotations

import os
from pathlib import Path


def open_for_append(path: Path) -> int:
    """Open a file so that every write goes to its end, and return the descriptor."""
    return os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)


def append_atomically(descriptor: int, data: bytes) -> None:
    """Append `data`; on error (disk full) restore the file's length and re-raise the OSError."""
    start = os.fstat(descriptor).st_size
    try:
        written = os.write(descriptor, data)
        while written < len(data):
            written += os.write(descriptor, data[written:])
    except OSError:
        os.ftruncate(descriptor, start)
        raise
