"""A folder of its own for each run, and `latest`, which points at the newest one."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Final

from distmon.errors import RunFolderError

RUNS: Final = Path("runs")
LATEST: Final = "latest"


def new_run_path(
    parent: Path = RUNS,
    command: Sequence[str] | None = None,
    now: Callable[[], datetime] = datetime.now,
) -> Path:
    """Create `<parent>/<script>-<date>-<time>` and point `<parent>/latest` at it; return the path.

    `command` is the command line of the training, whose script names the run.
    """
    name = f"{_script_name(sys.argv if command is None else command)}-{now():%Y%m%d-%H%M%S}"
    try:
        parent.mkdir(parents=True, exist_ok=True)
        path, number = parent / name, 1
        while not _created(path):
            number += 1
            path = parent / f"{name}-{number}"
        _point_latest_at(path)
    except OSError as error:
        raise RunFolderError(
            f"cannot create a run folder in {parent.absolute()}: {error.strerror or error}; "
            "set run_dir to a directory that can be written"
        ) from None
    return path


def run_path_of_model(first: Path, number: int) -> Path:
    """Return the folder of a script's next model, beside that of its first one."""
    return first.with_name(f"{first.name}-model{number}")


def model_label(path: Path) -> str:
    """Return `model2` for a folder of `run_path_of_model`; nothing for that of a first model."""
    found = re.search(r"-(model\d+)$", path.name)
    return found.group(1) if found else ""


def _script_name(command: Sequence[str]) -> str:
    script = Path(command[0]) if command else Path()
    stem = script.parent.name if script.stem == "__main__" else script.stem
    return re.sub(r"[^A-Za-z0-9_.]+", "-", stem).strip("-.") or "run"


def _created(path: Path) -> bool:
    """Create the folder; False when another run has it."""
    try:
        path.mkdir()
    except FileExistsError:
        return False
    return True


def _point_latest_at(path: Path) -> None:
    """Replace the link in one step, unless something else has its name or links are refused."""
    latest = path.parent / LATEST
    if os.path.lexists(latest) and not latest.is_symlink():
        return
    staged = path.parent / f".{LATEST}.{os.getpid()}"
    with suppress(OSError):
        staged.unlink(missing_ok=True)
        staged.symlink_to(path.name, target_is_directory=True)
        os.replace(staged, latest)
