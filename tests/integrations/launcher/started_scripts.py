"""Start scripts as a user does: with plain Python, with torchrun, and with `distmon run`."""

from __future__ import annotations

import contextlib
import io
import os
import runpy
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

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
    path = os.pathsep.join([str(ROOT), *filter(None, [environment.pop("PYTHONPATH", "")])])
    return subprocess.Popen(
        [*command],
        cwd=folder,
        env={
            **{k: v for k, v in os.environ.items() if k != "DISTMON_WRITER"},
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": path,
            "DS_ACCELERATOR": "cpu",
            **environment,
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> Outcome:
    """Wait for the end."""
    out, err = process.communicate(timeout=500)
    return Outcome(process.returncode, out, err)


def run(command: Sequence[str], folder: Path, **environment: str) -> Outcome:
    """Run a command to its end."""
    return finish(start(command, folder, **environment))


def ranks(count: int) -> list[str]:
    """Options of torchrun for that many processes; none for one."""
    if count == 1:
        return []
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return ["--nproc-per-node", str(count), "--master-port", str(port)]


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
    torchrun = [sys.executable, "-m", "torch.distributed.run", *ranks(count)]
    done = run([*torchrun, str(script), *arguments], folder)
    assert done.code == 0, done.err
    return done.out


def without_distmon(example: str, folder: Path) -> Path:
    """Write an example without the lines that name distmon: an unmodified script."""
    lines = (EXAMPLES / example).read_text().splitlines(keepends=True)
    script = folder / example
    script.write_text("".join(line for line in lines if "distmon" not in line.lower()))
    return script


def records(folder: Path) -> list[dict[str, Any]]:
    """Return the observations of a run."""
    return [r for r in distmon.read_run(folder).records if not r.get("partial")]
