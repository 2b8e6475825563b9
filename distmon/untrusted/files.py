"""Open files that may be anything: pipes, devices, links, or larger than memory.

Errors are `OSError` with a `strerror` that can end a sentence "cannot read FILE: ...".
"""

from __future__ import annotations

import errno
import logging
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO, Final

log = logging.getLogger("distmon")
PRIVATE: Final = 0o600
"""Mode of files that may hold a secret."""
_KINDS: Final = (
    (stat.S_ISDIR, "it is a directory"),
    (stat.S_ISFIFO, "it is a named pipe, not a file"),
    (stat.S_ISSOCK, "it is a socket, not a file"),
    (stat.S_ISCHR, "it is a device, not a file"),
    (stat.S_ISBLK, "it is a device, not a file"),
)


def open_regular(path: Path, *, follow_links: bool = True) -> BinaryIO:
    """Open a regular file for reading and never wait for it; OSError for everything else.

    Without `follow_links` the file itself must not be a symbolic link: inside a run folder one
    could lead anywhere.
    """
    # O_NONBLOCK: opening a pipe without a writer would wait for one.
    return os.fdopen(_descriptor(path, os.O_RDONLY | os.O_NONBLOCK, follow_links), "rb")


def read_regular(path: Path, limit: int, *, follow_links: bool = True) -> bytes:
    """Return the content of a regular file of at most `limit` bytes; else OSError."""
    with open_regular(path, follow_links=follow_links) as file:
        size = os.fstat(file.fileno()).st_size
        content = file.read(limit + 1) if size <= limit else b""
    if max(size, len(content)) > limit:
        raise OSError(errno.EFBIG, f"it is larger than {size_text(limit)}")
    return content


def open_for_append(path: Path, mode: int = 0o666) -> int:
    """Return a descriptor whose writes go to the end of a regular file, created when missing.

    A symbolic link is refused, as is everything that is no regular file.
    """
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK
    return _descriptor(path, flags, follow_links=False, mode=mode)


def create_exclusively(path: Path, mode: int = 0o666) -> BinaryIO:
    """Create a file that does not exist, not even as a link; FileExistsError when it does."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    return os.fdopen(_descriptor(path, flags, follow_links=False, mode=mode), "wb")


def replace_file(path: Path, content: bytes, mode: int = 0o666) -> None:
    """Write `content` to `path` in one step; what was there is kept when that fails.

    A link at `path` is replaced, not followed.
    """
    staged = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        remove(staged)  # left by a killed process of the same number
        with create_exclusively(staged, mode) as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(staged, path)
    except OSError:
        remove(staged)
        raise


def real_folder(path: Path) -> Path:
    """Create the folder if it is missing and return it; OSError when it is a link or a file."""
    try:
        path.mkdir()
    except FileExistsError:
        found = os.lstat(path)
        if stat.S_ISLNK(found.st_mode):
            raise OSError(errno.ELOOP, "it is a symbolic link, which is not followed") from None
        if not stat.S_ISDIR(found.st_mode):
            raise
    return path


def remove(path: Path) -> None:
    """Remove a file or link if there is one."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        return


def set_aside_other_than_file(path: Path) -> None:
    """Rename a folder, link or pipe in the place of a file that this process writes, and say so.

    Nothing is removed or followed. Without it, a run could not record anything any more.
    """
    try:
        if stat.S_ISREG(os.lstat(path).st_mode):
            return
    except FileNotFoundError:
        return
    numbers = (path.with_name(f"{path.name}.aside-{number}") for number in range(1000))
    aside = next((name for name in numbers if not os.path.lexists(name)), None)
    if aside is not None:
        os.rename(path, aside)
        log.warning("distmon: %s was no regular file; it is now %s", path, aside.name)


def is_file(path: Path) -> bool:
    """Return whether there is a regular file; False also where access is denied."""
    return _is(stat.S_ISREG, path)


def is_folder(path: Path) -> bool:
    """Return whether there is a folder; False also where access is denied."""
    return _is(stat.S_ISDIR, path)


def size_text(size: int) -> str:
    """Return a size for a sentence, such as `64 MiB`."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= unit:
            return f"{size / unit:.3g} {name}"
    return f"{size} bytes"


def _is(kind: Any, path: Path) -> bool:
    try:
        return bool(kind(os.stat(path).st_mode))
    except (OSError, ValueError):
        return False


def _descriptor(path: Path, flags: int, follow_links: bool, mode: int = 0o666) -> int:
    flags |= os.O_CLOEXEC | (0 if follow_links else os.O_NOFOLLOW)
    try:
        descriptor = os.open(path, flags, mode)
    except ValueError:
        raise OSError(errno.EINVAL, "its name contains a NUL character") from None
    except OSError as error:
        # What O_NOFOLLOW says of a link is "too many levels of symbolic links".
        if error.errno == errno.ELOOP and not follow_links:
            raise OSError(errno.ELOOP, "it is a symbolic link, which is not followed") from None
        if error.errno == errno.ENXIO:
            raise OSError(errno.ENXIO, "it is a pipe, socket or device, not a file") from None
        raise
    found = os.fstat(descriptor).st_mode
    if stat.S_ISREG(found):
        return descriptor
    os.close(descriptor)
    raise OSError(errno.EINVAL, next((text for kind, text in _KINDS if kind(found)), "no file"))
