"""Which lines of the package a process executes, without a further dependency."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PACKAGES = tuple(f"{ROOT / name}{os.sep}" for name in ("distmon", "csrc_triton"))


def trace_into(folder: str) -> None:
    """Note every executed line of the package in a file of `folder`, when the process ends."""
    seen: set[tuple[str, int]] = set()

    def local(frame: Any, event: str, _: Any) -> Any:
        if event == "line":
            seen.add((frame.f_code.co_filename, frame.f_lineno))
        return local

    def entered(frame: Any, _: str, __: Any) -> Any:
        return local if frame.f_code.co_filename.startswith(PACKAGES) else None

    def write() -> None:
        sys.settrace(None)
        lines = "\n".join(f"{name}\t{line}" for name, line in sorted(seen))
        (Path(folder) / f"lines-{os.getpid()}").write_text(lines)

    atexit.register(write)
    threading.settrace(entered)
    sys.settrace(entered)


def read_lines(folder: Path, root: Path) -> set[tuple[str, int]]:
    """Return what all processes have noted: paths below `root`, and line numbers."""
    found = set()
    for path in folder.glob("lines-*"):
        for line in path.read_text().splitlines():
            name, number = line.split("\t")
            found.add((Path(name).relative_to(root).as_posix(), int(number)))
    return found
