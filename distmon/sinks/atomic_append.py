"""Append to a file all or nothing, so that a full disk leaves no partial entry."""

from __future__ import annotations

import errno
import os
from pathlib import Path


def check_in_place(descriptor: int, path: Path) -> None:
    """Raise an OSError when `path` is no longer the open file: removed, replaced, unmounted.

    Otherwise entries would go to a file that cannot be read.
    """
    open_file, named = os.fstat(descriptor), os.stat(path, follow_symlinks=False)
    if (open_file.st_dev, open_file.st_ino) != (named.st_dev, named.st_ino):
        raise FileNotFoundError(errno.ESTALE, "the file was replaced", str(path))


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
