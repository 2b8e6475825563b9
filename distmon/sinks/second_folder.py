"""A second folder (`spool_dir`) where entries wait while the run folder cannot be written.

It is a run folder itself, so that `distmon show` reads it. Its entries are moved back as soon as
the run folder can be written: by this run, or by the next one that continues the run folder.
"""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final, Protocol

from distmon.errors import RunFolderError
from distmon.record.record import Record
from distmon.rules.alert import Alert
from distmon.runs.run_folder import RunFolder
from distmon.runs.run_json import RUN_FILE
from distmon.sinks.base import Sink
from distmon.untrusted.files import real_folder, remove

log = logging.getLogger("distmon")
MOST_BYTES: Final = 1 << 30
"""Of all files in the second folder; entries beyond wait in memory."""
RETRY_S: Final = 1.0
"""Pause before the run folder is tried again; it doubles up to `LONGEST_RETRY_S`."""
LONGEST_RETRY_S: Final = 30.0
_STORAGE_ERRORS: Final = (OSError, RunFolderError)


class MovableSink(Sink, Protocol):
    """A sink whose files consist of entries that another folder can hold."""

    def take_in(self, folder: RunFolder) -> int:
        """Move the entries of this sink in `folder` to its own files; return their number."""


class TwoFolderSink:
    """Writes to the run folder, and to the second folder while that fails."""

    writes_files = True

    def __init__(
        self,
        name: str,
        folder: RunFolder,
        second: Path,
        open_in: Callable[[RunFolder], MovableSink],
    ) -> None:
        """Open one of the folders; raises OSError when neither can be written."""
        self._name = name
        self._folder = folder
        self._second = folder.at(second)
        self._open_in = open_in
        self._here: MovableSink | None = None
        self._there: MovableSink | None = None
        self._pause, self._next_try = RETRY_S, 0.0
        try:
            self._return()
        except _STORAGE_ERRORS as error:
            self._leave(error)

    def record(self, record: Record) -> None:
        self._write(lambda sink: sink.record(record))

    def alert(self, alert: Alert) -> None:
        self._write(lambda sink: sink.alert(alert))

    def close(self) -> None:
        """Close the files; entries that cannot be moved back stay, and are named."""
        if self._there is not None:
            try:
                self._return()
            except _STORAGE_ERRORS as error:
                log.warning(
                    'distmon: the sink "%s" cannot write to %s (%s); what it could not write is in '
                    "%s, and is moved when a run with the same spool_dir continues the run folder",
                    self._name,
                    self._folder.path,
                    error,
                    self._second.path,
                )
                self._there.close()
        if self._here is not None:
            self._here.close()

    def _write(self, act: Callable[[Sink], None]) -> None:
        if self._here is not None and self._written_here(act):
            return
        if self._there is not None and time.monotonic() >= self._next_try:
            try:
                self._return()
            except _STORAGE_ERRORS:
                self._pause = min(2 * self._pause, LONGEST_RETRY_S)
                self._next_try = time.monotonic() + self._pause
            else:
                self._write(act)
                return
        assert self._there is not None
        _check_room(self._second.path)
        act(self._there)

    def _written_here(self, act: Callable[[Sink], None]) -> bool:
        """Write to the run folder, which is opened again if need be; False when that fails."""
        for _ in range(2):
            assert self._here is not None
            try:
                act(self._here)
            except OSError as error:
                _drop(self._here)
                self._here = None
                try:
                    self._return()
                except _STORAGE_ERRORS:
                    self._leave(error)
                    return False
            else:
                return True
        _drop(self._here)
        self._here = None
        self._leave(OSError(errno.EIO, "it fails as often as it is opened"))
        return False

    def _return(self) -> None:
        """Open the files in the run folder, and move there what waits."""
        here = self._open_in(self._folder)
        try:
            moved = here.take_in(self._second)
        except BaseException:
            _drop(here)
            raise
        self._here = here
        away = self._there is not None
        _drop(self._there)
        self._there = None
        _remove_if_empty(self._second.path)
        if away or moved:
            log.warning(
                'distmon: the sink "%s" works again; %d entries were moved from %s to %s',
                self._name,
                moved,
                self._second.path,
                self._folder.path,
            )

    def _leave(self, error: Exception) -> None:
        """Open the files in the second folder."""
        try:
            _own_folder(self._second.path)
            self._there = self._open_in(self._second)
        except RunFolderError as failed:
            raise OSError(errno.EIO, str(failed)) from None
        self._pause, self._next_try = RETRY_S, time.monotonic() + RETRY_S
        log.warning(
            'distmon: the sink "%s" cannot write to %s (%s); entries wait in %s',
            self._name,
            self._folder.path,
            error,
            self._second.path,
        )


def _own_folder(path: Path) -> None:
    """Create the folder; OSError when it belongs to another user or is a link."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if os.lstat(real_folder(path)).st_uid != os.geteuid():
        raise OSError(errno.EPERM, f"{path} belongs to another user")


def _check_room(path: Path) -> None:
    with os.scandir(path) as found:
        used = sum(entry.stat(follow_symlinks=False).st_size for entry in found)
    if used > MOST_BYTES:
        raise OSError(errno.ENOSPC, f"{path} has {used} bytes")


def _remove_if_empty(path: Path) -> None:
    """Remove the folder unless something waits in it."""
    with suppress(OSError):
        if {*os.listdir(path)} <= {RUN_FILE}:
            remove(path / RUN_FILE)
            path.rmdir()


def _drop(sink: Sink | None) -> None:
    """Close a sink, whatever that raises."""
    if sink is not None:
        with suppress(Exception):
            sink.close()
