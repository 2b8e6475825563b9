"""Build the native module into the user's cache, and list finished builds."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from distmon.errors import DistmonError
from distmon.native.compiling import (
    MODULE,
    SOURCE_FOLDER,
    SUFFIX,
    CompileError,
    build_key,
    checksum,
    compile_into,
)

PACKAGE_FOLDER = SOURCE_FOLDER
"""Where `pip install` puts a finished file."""


class NativeBuildError(DistmonError):
    """The native module cannot be built here."""


@dataclass(frozen=True)
class Built:
    """A finished build."""

    path: Path
    seconds: float


def cache_folder() -> Path:
    """Return where builds are kept, `$XDG_CACHE_HOME/distmon/native`.

    NativeBuildError when this user has no home folder.
    """
    # The standard says that a relative path there is to be ignored.
    chosen = Path(os.environ.get("XDG_CACHE_HOME", ""))
    try:
        base = chosen if chosen.is_absolute() else Path.home() / ".cache"
    except RuntimeError:
        raise NativeBuildError(
            "this user has no home folder to keep the native module in; set XDG_CACHE_HOME or HOME"
        ) from None
    return base / "distmon" / "native"


def candidates(folder: Path) -> Iterator[Path]:
    """Yield the finished files in `folder` for this torch, Python and source; normally one."""
    yield from sorted(folder.glob(f"{MODULE}-{build_key()}-*{SUFFIX}"))


def places_to_look() -> Iterator[Path]:
    """Yield the folders that may hold a finished file."""
    yield PACKAGE_FOLDER
    yield cache_folder()


def is_complete(path: Path) -> bool:
    """Return whether a file has the checksum that is in its name."""
    return path.stem.endswith(checksum(path.read_bytes()))


def build() -> Built:
    """Compile into the cache. NativeBuildError says in one sentence why not."""
    begin = time.perf_counter()
    folder = cache_folder()
    try:
        for each in reversed([folder, *folder.parents]):
            each.mkdir(mode=0o700, exist_ok=True)  # `parents=True` would follow the umask
        folder.chmod(0o700)  # one that an older version made may be open to others
        path = compile_into(folder)
        for other in candidates(folder):
            # Complete ones may be about to be loaded by other processes.
            if other.is_file() and not is_complete(other):
                other.unlink(missing_ok=True)
    except OSError as error:
        raise NativeBuildError(
            f"the native module cannot be written to {folder}: {error}"
        ) from None
    except CompileError as error:
        raise NativeBuildError(str(error)) from None
    return Built(path, time.perf_counter() - begin)
