"""The runs below a folder. A run is known by its relative path, and by nothing else."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any, Final

from distmon.errors import DistmonError, RunFolderError
from distmon.report.encoding import number
from distmon.report.recent import RecentRun
from distmon.runs.run_json import RUN_FILE

MOST_RUNS: Final = 2000
DEPTH: Final = 6
KEPT: Final = 20


class RunCatalog:
    """Finds runs by walking the folder, so that no name that a client sends becomes a path."""

    def __init__(self, root: Path) -> None:
        if not root.is_dir():
            raise RunFolderError(f"{root} is not a folder with runs")
        self.root = root.resolve()
        self._found: dict[str, Path] = {}
        self._recent: dict[str, RecentRun] = {}

    def find(self) -> dict[str, Path]:
        """Return the folder of each run by its name; links are not followed."""
        found: dict[str, Path] = {}
        for folder, below, files in os.walk(self.root, followlinks=False):
            here = Path(folder)
            relative = here.relative_to(self.root)
            below[:] = sorted(b for b in below if not b.startswith("."))
            if RUN_FILE in files and not (here / RUN_FILE).is_symlink():
                found[relative.as_posix() if relative.parts else here.name] = here
                below.clear()
            elif len(relative.parts) >= DEPTH:
                below.clear()
            if len(found) >= MOST_RUNS:
                break
        self._found = found
        return found

    def path_of(self, name: str) -> Path | None:
        """Return the folder of a run that exists, else None."""
        return self._found.get(name) or self.find().get(name)

    def summaries(self) -> list[dict[str, Any]]:
        """Return one line per run, newest first."""
        found = self.find()
        self._recent = {n: run for n, run in self._recent.items() if n in found}
        lines = [self._summary(name, path) for name, path in found.items()]
        return sorted(lines, key=lambda line: -(line["time"] or 0))

    def _summary(self, name: str, path: Path) -> dict[str, Any]:
        run = self._recent.get(name) or RecentRun(path, kept=KEPT, params=False)
        self._recent[name] = run
        try:
            run.update()
        except DistmonError as error:
            return {"name": name, "state": "unreadable", "why": str(error), "time": None}
        state, why = run.state(time.time())
        last = run.records[-1] if run.records else None
        attempts = run.info["attempts"]
        return {
            "name": name,
            "state": state,
            "why": why,
            "time": last.get("time") if last else None,
            "step": last["step"] if last else None,
            "loss": number(next(iter(run.series("train/step_loss_ema")[-1:]), None)),
            "ranks": attempts[-1].get("world_size") if attempts else None,
            "alerts": run.alert_counts,
        }
