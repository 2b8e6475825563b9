"""Which of some wanted lines a process executes, without a further dependency.

Only files with wanted lines that were not executed yet are traced line by line, so that a process
soon runs at almost its own speed.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

WANTED = "wanted.json"
EXECUTED = "executed-"


def write_wanted(folder: Path, wanted: Mapping[str, set[int]]) -> None:
    """Say to the processes that trace into `folder` which lines are wanted, by path of the file."""
    content = {name: sorted(lines) for name, lines in wanted.items()}
    (folder / WANTED).write_text(json.dumps(content))


def trace_into(folder: str) -> None:
    """Write the wanted lines that were executed to a file of `folder`, when the process ends."""
    wanted = json.loads((Path(folder) / WANTED).read_text())
    left = {name: set(lines) for name, lines in wanted.items()}

    def local(frame: Any, event: str, _: Any) -> Any:
        lines = left[frame.f_code.co_filename]
        if event == "line":
            lines.discard(frame.f_lineno)
        return local if lines else None

    def entered(frame: Any, _: str, __: Any) -> Any:
        return local if left.get(frame.f_code.co_filename) else None

    def write() -> None:
        sys.settrace(None)
        executed = {name: sorted(set(lines) - left[name]) for name, lines in wanted.items()}
        (Path(folder) / f"{EXECUTED}{os.getpid()}").write_text(json.dumps(executed))

    atexit.register(write)
    threading.settrace(entered)
    sys.settrace(entered)


def read_executed(folder: Path) -> dict[str, set[int]]:
    """Return what all processes have executed, by path of the file."""
    found: dict[str, set[int]] = {}
    for path in folder.glob(f"{EXECUTED}*"):
        for name, lines in json.loads(path.read_text()).items():
            found.setdefault(name, set()).update(lines)
    return found
