"""Triton's real launcher on a driver library that writes down what it is asked."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from simulated_cuda.build import SOURCES, CannotBuildError, cache_folder

STREAM_BITS = 16
"""A raw stream is its device above these bits, and the number of the stream plus one in them."""


@dataclass(frozen=True)
class Launch:
    """One kernel that Triton launched."""

    kernel: str
    grid: int
    device: int
    stream: int


def driver_environment(folder: Path) -> dict[str, str]:
    """Build the driver library; return what lets Triton find it, and keep what it compiles."""
    compiler = shutil.which("gcc")
    triton = find_spec("triton")
    if compiler is None or triton is None or triton.origin is None:
        raise CannotBuildError("there is no C compiler or no Triton")
    include = Path(triton.origin).parent / "backends/nvidia/include"
    source, target = SOURCES / "recording_driver.c", folder / "libcuda.so.1"
    command = [compiler, "-shared", "-fPIC", "-O0", "-w", f"-I{include}", str(source), "-o"]
    subprocess.run([*command, str(target)], check=True)
    kept = cache_folder().parent / "triton"
    return {
        "LD_LIBRARY_PATH": str(folder),
        "TRITON_LIBCUDA_PATH": str(folder),
        "TRITON_CACHE_DIR": str(kept),
        "RECORDED_LAUNCHES": str(folder / "launches"),
    }


def take() -> tuple[list[Launch], int]:
    """Return the launches since the last call, and how many kernels were loaded."""
    path = Path(os.environ["RECORDED_LAUNCHES"])
    lines = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
    path.unlink(missing_ok=True)
    launches = [
        Launch(kernel, int(grid), int(raw) >> STREAM_BITS, int(raw) % (1 << STREAM_BITS) - 1)
        for what, kernel, grid, raw in lines
        if what == "launch"
    ]
    return launches, sum(line[0] == "load" for line in lines)
