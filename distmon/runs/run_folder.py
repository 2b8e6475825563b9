"""The run folder: the paths of its files, and `run.json` with config, versions and attempts.

Each start of a process on the same folder is an *attempt*, numbered from 0. An attempt that resumes
from step r replaces the steps after r of earlier attempts; `distmon.runs.reader` applies that rule.
"""

from __future__ import annotations

import json
import math
import os
import platform
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, Final, Self

import numpy as np

from distmon.errors import RunFolderError

RUN_FILE: Final = "run.json"
RECORDS_FILE: Final = "records.jsonl"
ALERTS_FILE: Final = "alerts.jsonl"
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
        self._info = info
        self._now = now
        # The wandb sink stores its id from its own thread while the trainer begins the attempt.
        self._lock = threading.Lock()

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
        _check_writable(folder)
        exists = os.path.lexists(folder / RUN_FILE)
        info = read_info(folder) if exists else {"attempts": [], "wandb_id": None}
        info["config"] = dict(config)
        info["versions"] = dict(installed_versions() if versions is None else versions)
        info["parameters"] = [dict(row) for row in parameters]
        info["reading"] = dict(reading or {})
        opened = cls(folder, info, now)
        if not exists:
            opened._write()
        return opened

    def begin_attempt(self, *, resumed_from: int, world_size: int) -> None:
        """Add this attempt to `run.json`. Called once, at the first step.

        `resumed_from` is the last step that is kept from earlier attempts, 0 for a fresh start.
        """
        if self.resumed_from is not None:
            raise RunFolderError(f"attempt {self.attempt} of {self.path} has already begun")
        entry = {
            "attempt": self.attempt,
            "resumed_from": resumed_from,
            "started": self._now().astimezone(UTC).isoformat(timespec="seconds"),
            "world_size": world_size,
        }
        with self._lock:
            self.resumed_from, self.world_size = resumed_from, world_size
            self._info["attempts"].append(entry)
            self._write()

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
        """How much of every tensor is read, as `SamplePlan.describe` tells it."""
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
    def params_path(self) -> Path:
        """Path of the per-parameter history, an Arrow stream."""
        return self.path / PARAMS_FILE

    @property
    def tensorboard_path(self) -> Path:
        """Path of the TensorBoard event files."""
        return self.path / TENSORBOARD_DIR

    def _write(self) -> None:
        target = self.path / RUN_FILE
        staged = self.path / f".{RUN_FILE}.{os.getpid()}"
        text = strict_json(self._info, indent=2) + "\n"
        try:
            # Plain open and not mkstemp, so that the file gets the permissions of the umask.
            with open(staged, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.replace(staged, target)
            _sync_directory(self.path)
        except OSError as error:
            staged.unlink(missing_ok=True)
            raise RunFolderError(f"cannot write {target}: {error.strerror or error}") from None


def read_info(folder: Path) -> dict[str, Any]:
    """Return the content of `run.json`; raise RunFolderError when it is missing or invalid."""
    target = folder / RUN_FILE
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        raise RunFolderError(f"{folder} is not a run folder: it {what}")
    try:
        info = json.loads(target.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RunFolderError(f"{folder} is not a run folder: it has no {RUN_FILE}") from None
    except OSError as error:
        raise RunFolderError(f"cannot read {target}: {error.strerror or error}") from None
    except ValueError as error:
        raise RunFolderError(
            f"{target} is not valid JSON ({error}); restore it or use another folder"
        ) from None
    if not isinstance(info, dict) or not _are_attempts(info.get("attempts")):
        raise RunFolderError(
            f"{target} was not written by distmon: it has no list of numbered attempts; "
            "use another folder"
        )
    return info


def strict_json(value: Any, indent: int | None = None) -> str:
    """Return standard JSON: NaN and infinities become null, unknown objects their `str`."""
    return json.dumps(_finite(value), indent=indent, allow_nan=False, default=str)


def installed_versions() -> dict[str, str]:
    """Return the versions of Python, platform and the packages that affect the run."""
    found = {"python": platform.python_version(), "platform": platform.platform()}
    for package in ("distmon", "torch", "triton", "numpy", "pyarrow"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def _finite(value: Any) -> Any:
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def _are_attempts(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(entry, dict)
        and isinstance(entry.get("attempt"), int)
        and isinstance(entry.get("resumed_from"), int)
        for entry in value
    )


def _check_writable(folder: Path) -> None:
    # A trial file and not os.access: root passes os.access on read-only file systems.
    trial = folder / f".writable.{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        trial.touch()
        trial.unlink()
    except OSError as error:
        raise RunFolderError(
            f"cannot write the run folder {folder}: {error.strerror or error}; "
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
