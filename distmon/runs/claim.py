"""One writer per run folder: the file `.claim` says which process writes to it.

Made by exclusive creation, which is atomic also on NFS; no lock of the file system is needed. A
claim whose process has ended is taken over: on the same machine that is known from the process
table, elsewhere from the heartbeat, a change of the file's time every few seconds.
"""

from __future__ import annotations

import json
import os
import platform
import threading
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from distmon.untrusted.documents import parse_json
from distmon.untrusted.files import create_exclusively, read_regular, remove
from distmon.untrusted.values import BadValueError, count, structure, text

CLAIM_FILE: Final = ".claim"
PERIOD_S: Final = 10.0
"""Time between two heartbeats."""
DEAD_AFTER_S: Final = 60.0
"""A process on another machine that has missed this much counts as ended."""
RELEASE_S: Final = 5.0
"""Longest wait when a folder is given up; a claim that is left counts as that of a process that has
ended."""
_ATTEMPTS: Final = 5


@dataclass(frozen=True)
class Owner:
    """The process that a claim belongs to."""

    host: str
    pid: int
    started: str
    """When the process started, in clock ticks since the boot; tells it from a later one."""
    boot: str
    """Id of the boot of the machine."""
    namespace: str
    """Of process numbers: containers on one machine have their own."""
    job: str
    """Name and number of restarts of the job; empty where they are unknown."""
    restarts: int
    token: str

    @classmethod
    def this_process(cls, environ: Mapping[str, str] = os.environ) -> Owner:
        """Describe this process."""
        restarts = environ.get("TORCHELASTIC_RESTART_COUNT", "")
        return cls(
            host=platform.node(),
            pid=os.getpid(),
            started=_started(os.getpid()),
            boot=_content("/proc/sys/kernel/random/boot_id"),
            namespace=_link("/proc/self/ns/pid"),
            job=environ.get("TORCHELASTIC_RUN_ID", "") if restarts else "",
            restarts=int(restarts) if restarts.isascii() and restarts.isdigit() else 0,
            token=uuid.uuid4().hex,
        )

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


_OWNER: Final = structure(
    {"host": text, "pid": count, "token": text},
    {
        "started": (text, ""),
        "boot": (text, ""),
        "namespace": (text, ""),
        "job": (text, ""),
        "restarts": (count, 0),
    },
)


class Claim:
    """A claim of this process, kept alive by a thread until `release`."""

    def __init__(self, path: Path, owner: Owner) -> None:
        self._path = path
        self._owner = owner
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="distmon-claim", daemon=True)
        self._thread.start()

    def __reduce__(self) -> Any:
        # A copy of the folder in another process does not own it.
        return type(None), ()

    def release(self) -> None:
        """Give the folder up. Safe to call twice, and in a forked child, where it does nothing."""
        if self._ended.is_set() or os.getpid() != self._owner.pid:
            return
        self._ended.set()
        self._thread.join(RELEASE_S)  # unless the file system hangs

    def _beat(self) -> None:
        while not self._ended.wait(PERIOD_S):
            with suppress(OSError):
                self._renew()
        with suppress(OSError):
            found = _read(self._path)
            if found is not None and found.token == self._owner.token:
                remove(self._path)

    def _renew(self) -> None:
        try:
            os.utime(self._path, follow_symlinks=False)
        except FileNotFoundError:
            # The folder was replaced, and is written again: no other process may claim it.
            _create(self._path, self._owner)


def claim(folder: Path, owner: Owner | None = None) -> Claim | Owner:
    """Claim a folder that exists; return the owner instead when a live process has it.

    Raises OSError when the folder cannot be written.
    """
    own = owner or Owner.this_process()
    path = folder / CLAIM_FILE
    found: Owner | None = None
    for _ in range(_ATTEMPTS):
        if _create(path, own):
            return Claim(path, own)
        found = _read(path)
        if found is not None and _is_alive(found, own, path):
            return found
        _set_aside(path, found)
    return found or own


def _create(path: Path, owner: Owner) -> bool:
    # Written beside and linked, so that no reader sees half of it.
    staged = path.with_name(f"{CLAIM_FILE}.{owner.token}")
    try:
        with create_exclusively(staged) as file:
            file.write(json.dumps(asdict(owner)).encode())
        try:
            os.link(staged, path)
        except FileExistsError:
            return False
        except OSError:
            # A file system without links: exclusive creation, which may be read half written.
            try:
                with create_exclusively(path) as file:
                    file.write(json.dumps(asdict(owner)).encode())
            except FileExistsError:
                return False
        return True
    finally:
        with suppress(OSError):
            remove(staged)


def _set_aside(path: Path, expected: Owner | None) -> None:
    """Remove a dead claim; one that another process has just made is put back."""
    aside = path.with_name(f"{CLAIM_FILE}.{uuid.uuid4().hex}")
    try:
        os.rename(path, aside)
    except FileNotFoundError:
        return
    found = _read(aside)
    if found is not None and found != expected:
        with suppress(OSError):
            os.link(aside, path)
    with suppress(OSError):
        remove(aside)


def _is_alive(owner: Owner, own: Owner, path: Path) -> bool:
    if owner.job and owner.job == own.job and owner.restarts < own.restarts:
        return False  # the launcher ends all processes of a job before it restarts them
    if owner.host == own.host and owner.boot and own.boot:
        if owner.boot != own.boot:
            return False
        if owner.namespace == own.namespace:
            return bool(owner.started) and _started(owner.pid) == owner.started
    return _age(path) < DEAD_AFTER_S


def _age(path: Path) -> float:
    """Return the time since the last heartbeat, by the clock of the file system."""
    trial = path.with_name(f"{CLAIM_FILE}.{uuid.uuid4().hex}")
    with create_exclusively(trial):
        pass
    try:
        return os.lstat(trial).st_mtime - os.lstat(path).st_mtime
    except FileNotFoundError:
        return DEAD_AFTER_S
    finally:
        remove(trial)


def _read(path: Path) -> Owner | None:
    """Return the owner; None when there is no claim, or none that can be understood."""
    try:
        return Owner(**_OWNER(parse_json(read_regular(path, 1 << 16, follow_links=False))))
    except (OSError, ValueError, BadValueError):
        return None


def _started(pid: int) -> str:
    """Return the start time of a process; empty when there is none."""
    # The name of the program, in parentheses, may contain anything.
    fields = _content(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return fields[19] if len(fields) > 19 and fields[0] not in ("Z", "X") else ""


def _content(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""
