"""The run folder: the paths of its files, and `run.json` with config, versions and attempts.

Each start of a process on the same folder is an *attempt*, numbered from 0. An attempt that resumes
from step r replaces the steps after r of earlier attempts; `distmon.runs.reader` applies that rule.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, Self

from distmon.errors import RunFolderError
from distmon.runs.claim import Claim
from distmon.runs.entries import FORMAT
from distmon.runs.run_json import RUN_FILE, installed_versions, read_info, readable_json
from distmon.untrusted.files import (
    replace_file,
    set_aside_other_than_file,
)

RECORDS_FILE: Final = "records.jsonl"
ALERTS_FILE: Final = "alerts.jsonl"
GAPS_FILE: Final = "gaps.jsonl"
ENDS_FILE: Final = "ends.jsonl"
PARAMS_FILE: Final = "params.arrow"
TENSORBOARD_DIR: Final = "tb"


class RunFolder:
    """One run on disk, open for writing. Created by `RunFolder.open`, on rank 0 only."""

    def __init__(self, path: Path, info: dict[str, Any], now: Callable[[], datetime]) -> None:
        self.path = path
        self.attempt: int = 1 + max((entry["attempt"] for entry in info["attempts"]), default=-1)
        """Number of this attempt, known before `begin_attempt`."""
        self.resumed_from: int | None = None
        """Step after which this attempt continues; None until `begin_attempt`."""
        self.world_size: int | None = None
        """World size of this attempt; None until `begin_attempt`."""
        self.claim: Claim | None = None
        """That this process alone writes here; None where nothing was claimed."""
        self.second: Path | None = None
        """Where entries wait while this folder cannot be written; None: in memory only."""
        self._info = info
        self._unwritten = False
        """Whether `run.json` lacks this attempt because it could not be written."""
        self._known: object = None
        """Version of `run.json` that is known to be intact."""
        self._now = now
        # The wandb sink stores its id from its own thread while the trainer begins the attempt.
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        """Return what another process needs to write to the same attempt."""
        return {k: v for k, v in vars(self).items() if k not in ("_lock", "_now")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _lock=threading.Lock(), _now=lambda: datetime.now(UTC))

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        *,
        config: Mapping[str, Any],
        parameters: Sequence[Mapping[str, Any]],
        reading: Mapping[str, Any] | None = None,
        versions: Mapping[str, str] | None = None,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> Self:
        """Create the folder or continue it; raise RunFolderError if it cannot be read or written.

        `config` and `parameters` are JSON-serializable; `parameters` has one dict per parameter:
        name, shape, dtype, requires_grad, sampled element count; `reading` is what
        `SamplePlan.describe` returns. An existing `run.json` is changed by `begin_attempt`, not
        here.
        """
        folder = Path(path)
        check_writable(folder)
        exists = os.path.lexists(folder / RUN_FILE)
        info = read_info(folder) if exists else _no_attempts()
        info["format"] = FORMAT
        info["config"] = dict(config)
        info["versions"] = dict(installed_versions() if versions is None else versions)
        info["parameters"] = [dict(row) for row in parameters]
        info["reading"] = dict(reading or {})
        opened = cls(folder, info, now)
        if not exists:
            opened._write()
        return opened

    @classmethod
    def missing(cls, path: Path, **described: Any) -> Self:
        """Return a folder that cannot be opened now; sinks write to it as soon as they can."""
        info = {"format": FORMAT, "reading": {}, "versions": installed_versions()}
        return cls(path, _no_attempts() | info | described, lambda: datetime.now(UTC))

    def begin_attempt(self, *, resumed_from: int, world_size: int) -> None:
        """Add this attempt to `run.json`. Called once, at the first step.

        `resumed_from` is the last step that is kept from earlier attempts, 0 for a fresh start.
        """
        if self.resumed_from is not None:
            raise RunFolderError(f"attempt {self.attempt} of {self.path} has already begun")
        self.note_attempt(resumed_from=resumed_from, world_size=world_size)
        with self._lock:
            self._unwritten = True
            self._write()

    def restore(self) -> None:
        """Write `run.json` where it was removed or damaged, or could not be written before."""
        with self._lock:
            found = _version(self.path / RUN_FILE)
            unchanged = found is not None and found == self._known and not self._unwritten
            if self.resumed_from is None or unchanged:
                return
            if self._unwritten or not self._is_intact():
                self.path.mkdir(parents=True, exist_ok=True)
                self._write()
            else:  # another process of this run has added to it
                self._known = found

    def _is_intact(self) -> bool:
        """Return whether `run.json` can be read and has this attempt."""
        try:
            attempts = read_info(self.path)["attempts"]
        except RunFolderError:
            return False
        return self.attempt in {entry["attempt"] for entry in attempts}

    def note_attempt(self, *, resumed_from: int, world_size: int) -> None:
        """Follow an attempt that another process adds to `run.json`. Safe to call twice."""
        entry = {
            "attempt": self.attempt,
            "resumed_from": resumed_from,
            "started": self._now().astimezone(UTC).isoformat(timespec="seconds"),
            "world_size": world_size,
        }
        with self._lock:
            # A new list: another thread may be pickling the one before.
            self._info["attempts"] = _by_number(self._info["attempts"], [entry])
        self.resumed_from, self.world_size = resumed_from, world_size

    def continue_attempt(self) -> None:
        """Take over an attempt that was noted here from a process that ended.

        What that process stored in `run.json` is kept, and the attempt is added if it is missing.
        """
        with self._lock:
            try:
                stored = read_info(self.path)
            except RunFolderError:  # removed or damaged
                stored = _no_attempts()
            known = {entry["attempt"] for entry in stored["attempts"]}
            self._info["attempts"] = _by_number(self._info["attempts"], stored["attempts"])
            self._info["wandb_id"] = stored.get("wandb_id") or self._info.get("wandb_id")
            if self.attempt not in known:
                self._unwritten = True
                self._write()

    def at(self, path: Path) -> Self:
        """Return the same attempt in another folder, which is not claimed."""
        other = type(self)(path, self._info, self._now)
        other.attempt, other._unwritten = self.attempt, False
        other.resumed_from, other.world_size = self.resumed_from, self.world_size
        other._lock = self._lock  # several sinks may restore it at the same time
        return other

    def release(self) -> None:
        """Let another process continue this folder. Safe to call twice."""
        if self.claim is not None:
            self.claim.release()

    @property
    def config(self) -> Mapping[str, Any]:
        """The configuration of this attempt, as plain values."""
        return dict(self._info["config"])

    @property
    def parameters(self) -> list[dict[str, Any]]:
        """The parameter table of this attempt."""
        return list(self._info["parameters"])

    @property
    def reading(self) -> Mapping[str, Any]:
        """How much of every tensor is read, as `SamplePlan.describe` returns it."""
        return dict(self._info["reading"])

    @property
    def versions(self) -> Mapping[str, str]:
        """Package versions of this attempt."""
        return dict(self._info["versions"])

    @property
    def wandb_id(self) -> str | None:
        """Id of this folder's wandb run; None until there is one."""
        value = self._info.get("wandb_id")
        return None if value is None else str(value)

    def keep_wandb_id(self, wandb_id: str) -> None:
        """Store the id so that the next attempt resumes the same wandb run."""
        with self._lock:
            self._info["wandb_id"] = wandb_id
            self._write()

    @property
    def records_path(self) -> Path:
        """Path of the records, one JSON line per observation."""
        return self.path / RECORDS_FILE

    @property
    def alerts_path(self) -> Path:
        """Path of the alerts, one JSON line per alert."""
        return self.path / ALERTS_FILE

    @property
    def gaps_path(self) -> Path:
        """Path of what sinks could not deliver, one JSON line per gap."""
        return self.path / GAPS_FILE

    @property
    def ends_path(self) -> Path:
        """Path of how far each attempt had observed when its monitor was closed."""
        return self.path / ENDS_FILE

    @property
    def params_path(self) -> Path:
        """Path of the per-parameter history, an Arrow stream."""
        return self.path / PARAMS_FILE

    @property
    def tensorboard_path(self) -> Path:
        """Path of the TensorBoard event files."""
        return self.path / TENSORBOARD_DIR

    def _write(self) -> None:
        target = self.path / RUN_FILE
        try:
            set_aside_other_than_file(target)
            replace_file(target, readable_json(self._info).encode())
            _sync_directory(self.path)
            self._unwritten, self._known = False, _version(target)
        except OSError as error:
            raise RunFolderError(f"cannot write {target}: {error.strerror or error}") from None


def _no_attempts() -> dict[str, Any]:
    return {"attempts": [], "wandb_id": None}


def _version(path: Path) -> object:
    """Return what changes with every write to a file, and when it is replaced."""
    try:
        found = os.lstat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _by_number(*attempts: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Return the attempts in order; of two with the same number the later one."""
    found = {entry["attempt"]: entry for entries in attempts for entry in entries}
    return [found[number] for number in sorted(found)]


def check_writable(folder: Path) -> None:
    """Create the folder if it is missing; RunFolderError when it cannot be written."""
    # A trial file and not os.access: root passes os.access on read-only file systems.
    trial = folder / f".writable.{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        trial.touch()
        trial.unlink()
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        raise RunFolderError(
            f"cannot write the run folder {folder}: {getattr(error, 'strerror', None) or error}; "
            "expected a directory that can be created and written"
        ) from None


def _sync_directory(folder: Path) -> None:
    """Sync the directory, so that a rename survives a power failure."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        # Some network file systems refuse to sync a directory; the file itself is synced.
        with suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
