"""Open the run folder of this process: its own, or another one where that is in use or unusable."""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from distmon.errors import RunFolderError
from distmon.own_threads import OwnThread
from distmon.runs.claim import Claim, Owner, claim
from distmon.runs.run_folder import RunFolder, check_writable
from distmon.runs.run_names import RUNS, new_run_path

log = logging.getLogger("distmon")

OPEN_S: Final = 10.0
"""Longest time that the run folder may take to open: all ranks wait for it in `attach`."""
_MOST_RUNS: Final = 1000


def open_run(
    run_dir: Path | None,
    strict: bool,
    described: Mapping[str, Any],
    spool_dir: Path | None = None,
) -> RunFolder:
    """Open and claim `run_dir`, or a new folder when it is None.

    While another process writes to it, this run gets `run_dir-2`. An unusable folder is replaced by
    one in `spool_dir` or among the temporary files; where there is none either, it is written as
    soon as it can be. A job that restarts must not end because of it, unless `strict`.
    """
    try:
        folder = _open_in_time(run_dir or new_run_path(), described)
        if spool_dir is not None:
            folder.second = _second_folder(spool_dir, folder.path)
        return folder
    except RunFolderError as error:
        if strict:
            raise
        try:
            instead = _replacement(spool_dir)
            folder = _open_claimed(Path(instead), described)
        except (OSError, RunFolderError) as problem:
            log.error("distmon: %s; no other folder: %s; trying again later", error, problem)
            return RunFolder.missing(run_dir or RUNS / f"run-{os.getpid()}", **described)
        log.error("distmon: %s; writing this run to %s instead", error, instead)
        return folder


def _open_in_time(path: Path, described: Mapping[str, Any]) -> RunFolder:
    """Open and claim a folder on a thread: a file system may answer late, or never."""
    opened: list[RunFolder | Exception] = []
    lock, late = threading.Lock(), threading.Event()

    def work() -> None:
        found: RunFolder | Exception
        try:
            found = _open_claimed(path, described)
        except Exception as error:
            found = error
        with lock:
            opened.append(found)
            unwanted = late.is_set()
        if unwanted and isinstance(found, RunFolder):
            found.release()

    thread = OwnThread(work, "open-run")
    thread.start()
    thread.join(OPEN_S)
    with lock:
        if not opened:
            late.set()
            raise RunFolderError(f"{path} did not answer within {OPEN_S:g} s")
    if isinstance(opened[0], Exception):
        raise opened[0]
    return opened[0]


def _second_folder(spool_dir: Path, path: Path) -> Path:
    """Return where entries of a run folder wait; the same for every run that continues it."""
    absolute = os.path.abspath(path)
    number = hashlib.blake2b(os.fsencode(absolute), digest_size=6).hexdigest()
    return Path(os.path.abspath(spool_dir)) / f"{os.path.basename(absolute)}-{number}"


def _replacement(spool_dir: Path | None) -> str:
    try:
        if spool_dir is not None:
            spool_dir.mkdir(parents=True, exist_ok=True)
            return tempfile.mkdtemp(prefix="distmon-", dir=spool_dir)
    except (OSError, ValueError) as error:
        log.error("distmon: spool_dir cannot be used: %s", error)
    return tempfile.mkdtemp(prefix="distmon-")


def _open_claimed(wanted: Path, described: Mapping[str, Any]) -> RunFolder:
    owner: Owner | None = None
    for number in range(1, _MOST_RUNS):
        path = wanted if number == 1 else wanted.with_name(f"{wanted.name}-{number}")
        check_writable(path)
        try:
            found = claim(path)
        except OSError as error:
            raise RunFolderError(f"cannot claim {path}: {error.strerror or error}") from None
        if isinstance(found, Claim):
            try:
                folder = RunFolder.open(path, **described)
            except RunFolderError:
                found.release()
                raise
            folder.claim = found
            if owner is not None:
                log.warning(
                    "distmon: %s is in use by %s; writing this run to %s", wanted, owner, path
                )
            return folder
        owner = owner or found
    raise RunFolderError(f"{wanted} and {_MOST_RUNS} folders with its name are in use")
