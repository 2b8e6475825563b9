"""Build the extension once, and keep it in a cache folder that only this user can write to."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import stat
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

SOURCES = Path(__file__).parent / "source"
NAME = "simulated_cuda_device"


class CannotBuildError(RuntimeError):
    """There is no compiler, or no cache folder of this user's own."""


def library() -> Path:
    """Return the built extension; builds it where there is none for this source and torch."""
    folder = cache_folder()
    path = folder / f"{NAME}-{_key()}.so"
    if not path.exists():
        # Compiling takes a core for long: the workers of the tests wait for one of them.
        with (folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():
                _compile(path)
    return path


def _key() -> str:
    digest = hashlib.sha256()
    for source in (SOURCES / "module.cpp", *sorted(SOURCES.glob("*.h"))):
        digest.update(source.read_bytes())
    versions = f"{importlib.metadata.version('torch')} {sys.version} {' '.join(_flags())}"
    digest.update(versions.encode())
    return digest.hexdigest()[:16]


def cache_folder() -> Path:
    """Return a folder that only this user can write to."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = root / "distmon-tests" / "simulated_cuda"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    found = folder.stat()
    if found.st_uid != os.geteuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise CannotBuildError(f"others can write to {folder}")
    return folder


def _flags() -> list[str]:
    torch = _torch_folder()
    includes = (
        torch / "include",
        torch / "include/torch/csrc/api/include",
        sysconfig.get_path("include"),
    )
    return [
        *("-std=c++20", "-O1", "-g0", "-fPIC", "-shared", "-w", "-fvisibility=hidden"),
        f"-DTORCH_EXTENSION_NAME={NAME}",
        "-DAT_PER_OPERATOR_HEADERS",  # reading all headers takes longer than compiling
        *(part for include in includes for part in ("-isystem", str(include))),
    ]


def _compile(path: Path) -> None:
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        raise CannotBuildError("there is no C++ compiler")
    libraries = _torch_folder() / "lib"
    # A process that finds the file without the lock finds a whole one.
    handle, unfinished = tempfile.mkstemp(dir=path.parent, suffix=".so")
    os.close(handle)
    command = [
        *(compiler, *_flags(), str(SOURCES / "module.cpp"), "-o", unfinished),
        *(f"-L{libraries}", "-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        Path(unfinished).unlink()
        raise CannotBuildError(f"{compiler} failed:\n{done.stderr[-4000:]}")
    os.replace(unfinished, path)


def _torch_folder() -> Path:
    """Return the folder of torch, without importing it."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        raise CannotBuildError("torch is not installed")
    return Path(found.origin).parent


if __name__ == "__main__":
    print(library())
