"""Describe the machine and the state of the repository that a run was measured on."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from dataclasses import dataclass
from datetime import datetime
from importlib import metadata
from pathlib import Path
from typing import Final

import torch

PACKAGES: Final = ("torch", "triton", "numpy", "distmon", "wandb", "tensorboard", "mosaicml")
BUSY: Final = 0.25
"""Load per core from which on other processes slow down what is measured."""


@dataclass(frozen=True)
class Machine:
    """The conditions of a whole run; every row of its results has them."""

    command: str = ""
    date: str = ""
    """When it began, ISO 8601 with time zone."""
    device: str = ""
    """The accelerator, or the processor when there is none."""
    cores: int = 0
    threads: int = 0
    load: float = 0.0
    """Running processes, mean over the minute before the run."""
    versions: str = ""
    commit: str = ""

    @property
    def line(self) -> str:
        """Everything but the command in one line."""
        cores = f"{self.cores} cores, {self.threads} threads"
        commit = f"commit {self.commit or 'unknown'}"
        load = f"load {self.load:.1f} before"
        known = (self.device, cores, self.versions, commit, load, self.date.partition("T")[0])
        return ", ".join(filter(None, known))

    @property
    def warning(self) -> str:
        """Why not to rely on the times of this run; empty when nothing speaks against it."""
        if self.load <= BUSY * self.cores:
            return ""
        return (
            f"the machine was busy before the run (load {self.load:.1f} on {self.cores} cores); "
            "do not rely on these times"
        )


def this_machine() -> Machine:
    """Return what is known when a run begins."""
    return Machine(
        command=_command(),
        date=datetime.now().astimezone().isoformat(timespec="seconds"),
        device=torch.cuda.get_device_name() if torch.cuda.is_available() else _processor(),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else _cores(),
        threads=torch.get_num_threads(),
        load=os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0,
        versions=_versions(),
        commit=_commit(),
    )


def _command() -> str:
    """Return what was typed, without the folders of this machine."""
    main = sys.modules["__main__"].__spec__
    if main is not None:  # started with -m
        started = ["python", "-m", main.name.removesuffix(".__main__")]
    else:
        started = [Path(sys.argv[0]).name]
    return shlex.join([*started, *sys.argv[1:]])


def _cores() -> int:
    return os.cpu_count() or 1


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:  # only Linux has this file
        pass
    return platform.processor() or platform.machine()


def _versions() -> str:
    found = [f"python {platform.python_version()}"]
    for package in PACKAGES:
        try:
            found.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            continue  # not every run needs every package
    return ", ".join(found)


def _commit() -> str:
    """Return the commit of the checkout that this file is in; empty when it is none."""
    head = _git("rev-parse", "--short", "HEAD")
    changed = head and _git("status", "--porcelain", "--untracked-files=no")
    return f"{head} with changes" if changed else head


def _git(*arguments: str) -> str:
    try:
        found = subprocess.run(
            ["git", *arguments],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=False,
        )
    except OSError:  # there is no git
        return ""
    return found.stdout.strip()
