"""Move whole entries from one file to another; a crash in between loses and repeats none."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from hashlib import blake2b
from pathlib import Path

from distmon.sinks.atomic_append import append_atomically
from distmon.untrusted.files import open_regular, remove

Entries = Callable[[Path], Iterator[bytes]]
"""Yields the whole entries of a file; FileNotFoundError when there is none."""


def move_entries(source: Path, target: Path, descriptor: int, entries: Entries) -> int:
    """Append the entries of `source` to `target`, open as `descriptor`; return their number.

    `source` is removed when all are there. Those that an earlier call has moved are left out.
    """
    if not os.path.lexists(source):
        return 0
    known = {_digest(entry) for entry in entries(target)}
    moved = 0
    for entry in entries(source):
        if _digest(entry) not in known:
            append_atomically(descriptor, entry)
            moved += 1
    os.fsync(descriptor)
    remove(source)
    return moved


def whole_lines(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file; not one that a crash has cut."""
    with open_regular(path, follow_links=False) as file:
        yield from (line for line in file if line.endswith(b"\n") and line.strip())


def _digest(entry: bytes) -> bytes:
    return blake2b(entry, digest_size=16).digest()
