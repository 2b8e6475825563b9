"""Start scripts as a user does: with plain Python, with torchrun, and with `distmon run`."""

from __future__ import annotations

import contextlib
import io
import os
import runpy
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from forked_python import run_script

import distmon

ROOT = Path(distmon.__file__).parents[1]
EXAMPLES = ROOT / "examples"
DISTMON_RUN = [sys.executable, "-m", "distmon.cli.main", "run"]


@dataclass(frozen=True)
class Outcome:
    """How a process ended."""

    code: int
    out: str
    err: str


def start(command: Sequence[str], folder: Path, **environment: str) -> subprocess.Popen[str]:
    """Start a command in `folder`, on one thread."""
    return subprocess.Popen(
        [*command],
        cwd=folder,
        env=_environ(**environment),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _environ(PYTHONPATH: str = "", **environment: str) -> dict[str, str]:
    return {
        **{k: v for k, v in os.environ.items() if k != "DISTMON_WRITER"},
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [PYTHONPATH])]),
        "DS_ACCELERATOR": "cpu",
        **environment,
    }


def finish(process: subprocess.Popen[str]) -> Outcome:
    """Wait for the end."""
    out, err = process.communicate(timeout=500)
    return Outcome(process.returncode, out, err)


def run(command: Sequence[str], folder: Path, **environment: str) -> Outcome:
    """Run a command to its end."""
    return finish(start(command, folder, **environment))


def ranks(count: int) -> list[str]:
    """Options of torchrun for that many processes, on any free port; none for one."""
    return [] if count == 1 else ["--standalone", "--nproc-per-node", str(count)]


def in_this_process(script: Path, folder: Path, *arguments: str) -> str:
    """Run a script here, on one thread, which saves the time of importing; return its output."""
    folder.mkdir()
    threads, argv, output = torch.get_num_threads(), sys.argv, io.StringIO()
    try:
        torch.set_num_threads(1)
        sys.argv = [str(script), *arguments]
        with contextlib.chdir(folder), contextlib.redirect_stdout(output):
            runpy.run_path(str(script), run_name="__main__")
    finally:
        torch.set_num_threads(threads)
        sys.argv = argv
    return output.getvalue()


def monitored(script: Path, folder: Path, *arguments: str, count: int = 1) -> Outcome:
    """Run a script with `distmon run`; the run folder is `run`."""
    folder.mkdir()
    options = [*ranks(count), "--distmon.interval=10", "--distmon.run-dir=run"]
    return run([*DISTMON_RUN, *options, str(script), *arguments], folder)


def plain(script: Path, folder: Path, *arguments: str, count: int = 1) -> str:
    """Run a script without the launcher; return its output."""
    if count == 1:
        return in_this_process(script, folder, *arguments)
    folder.mkdir()
    done = run_script([str(script), *arguments], folder, _environ(), count)
    assert done.returncode == 0, done.stderr
    return done.stdout


def without_distmon(example: str, folder: Path) -> Path:
    """Write an example without the lines that name distmon: an unmodified script."""
    lines = (EXAMPLES / example).read_text().splitlines(keepends=True)
    script = folder / example
    script.write_text("".join(line for line in lines if "distmon" not in line.lower()))
    return script


def records(folder: Path) -> list[dict[str, Any]]:
    """Return the observations of a run."""
    return [r for r in distmon.read_run(folder).records if not r.get("partial")]
