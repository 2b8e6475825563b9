"""On what and under which conditions a run was measured."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping
from datetime import datetime
from importlib import metadata
from pathlib import Path
from typing import Final

import torch

from distmon_benchmarks.results import Context

PACKAGES: Final = ("torch", "triton", "numpy", "distmon", "wandb", "tensorboard", "mosaicml")


def context(conditions: Mapping[str, str]) -> Context:
    """Everything that is known when a run begins."""
    commit, dirty = _commit()
    cpu = _cpu()
    return Context(
        command=_command(),
        date=datetime.now().astimezone().isoformat(timespec="seconds"),
        device=torch.cuda.get_device_name() if torch.cuda.is_available() else cpu,
        cpu=cpu,
        cores=cores(),
        threads=torch.get_num_threads(),
        load_before=load(),
        versions=_versions(),
        commit=commit,
        dirty=dirty,
        conditions=dict(conditions),
    )


def _command() -> str:
    script = Path(sys.argv[0])
    started = ["distmon"] if script.name == "distmon" else ["python", _short(sys.argv[0])]
    return shlex.join([*started, *sys.argv[1:]])


def cores() -> int:
    """Those that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def load() -> float:
    """Running processes, mean over the last minute; 0 where the system does not tell."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0


def _short(path: str) -> str:
    """Relative to here, where it lies below; else the name alone: where things lie is private."""
    full = Path(path).resolve()
    here = Path.cwd()
    return str(full.relative_to(here)) if full.is_relative_to(here) else full.name


def _cpu() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def _commit() -> tuple[str, bool]:
    """Of the folder that this file lies in; `unknown` when it is no checkout."""
    head = _git("rev-parse", "--short", "HEAD")
    return head or "unknown", bool(head and _git("status", "--porcelain", "--untracked-files=no"))


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
