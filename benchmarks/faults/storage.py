"""Faults of the disk: folders and files that vanish, are replaced, fill up or were there before."""

from __future__ import annotations

import ctypes
import json
import os
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.faults.scene import Act, Fault, Scene

FILES = ("records.jsonl", "alerts.jsonl", "params.arrow", "run.json")


def faults() -> Iterator[Fault]:
    """Yield all of them."""
    yield from _in_the_middle()
    yield from _full()
    yield from _before()


def _in_the_middle() -> Iterator[Fault]:
    ways: dict[str, Act] = {
        "deleted": _removed,
        "renamed": lambda s: s.run.rename(s.folder / "elsewhere"),
        "replaced by a file": _replaced(lambda run: run.touch()),
        "replaced by a link": _replaced(lambda run: run.symlink_to("nowhere")),
        "replaced by an empty folder": _replaced(lambda run: run.mkdir()),
    }
    for how, act in ways.items():
        yield Fault("disk", f"run folder {how}", middle=act, takes=True)
        yield Fault(
            "disk", f"run folder {how}, then usable again", None, act, _make_folder, takes=True
        )
    for name in FILES:
        for how, change in {
            "deleted": lambda p: p.unlink(missing_ok=True),
            "replaced by a folder": lambda p: (p.unlink(missing_ok=True), p.mkdir()),
            "replaced by a link": lambda p: (p.unlink(missing_ok=True), p.symlink_to("/dev/null")),
            "replaced by a pipe": lambda p: (p.unlink(missing_ok=True), os.mkfifo(p)),
            "truncated to nothing": lambda p: p.exists() and os.truncate(p, 0),
            "cut in its middle": lambda p: p.exists() and os.truncate(p, p.stat().st_size // 2),
            "filled with garbage": lambda p: p.write_bytes(os.urandom(5000)),
        }.items():

            def act(scene: Scene, name: str = name, change=change) -> None:  # type: ignore[no-untyped-def]
                time.sleep(0.1)
                change(scene.run / name)

            yield Fault("disk", f"{name} {how}", middle=act, takes=name == "records.jsonl")


def _full() -> Iterator[Fault]:
    for size in ("32k", "128k"):
        yield Fault("disk", f"full: a file system of {size}", before=_small_mount(size))
    yield Fault(
        "disk", "full, then space again", _small_mount("64k"), None, lambda s: _remount(s, "64m")
    )
    yield Fault(
        "disk",
        "read-only, then writable again",
        _small_mount("64m"),
        lambda s: _mount(["-o", "remount,ro", str(s.folder)]),
        lambda s: _mount(["-o", "remount,rw", str(s.folder)]),
    )
    yield Fault(
        "disk", "read-only for good", _small_mount("64m"),
        lambda s: _mount(["-o", "remount,ro", str(s.folder)]),
    )  # fmt: skip
    yield Fault(
        "disk", "unmounted", _small_mount("64m"),
        lambda s: subprocess.run(["umount", "-l", str(s.folder)], check=True) and None, takes=True,
    )  # fmt: skip

    yield Fault("disk", "files may not grow", middle=_limited("FSIZE", 20_000))
    yield Fault(
        "disk", "files may not grow for a while", None,
        _limited("FSIZE", 20_000), _limited("FSIZE", resource.RLIM_INFINITY),
    )  # fmt: skip
    yield Fault(
        "disk", "no file can be opened for a while", None,
        _limited("NOFILE", 3), _limited("NOFILE", 1024),
    )  # fmt: skip


def _limited(name: str, soft: int) -> Act:
    """Set a limit of the training, and of the writer process if there is one."""

    def act(scene: Scene) -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        kind = getattr(resource, f"RLIMIT_{name}")
        writer = getattr(scene.monitor.cycle.worker, "process", None)
        for pid in (os.getpid(), *([] if writer is None else [writer.pid])):
            hard = resource.prlimit(pid, kind)[1]
            limit = soft if hard == resource.RLIM_INFINITY else min(soft, hard)
            resource.prlimit(pid, kind, (limit, hard))

    return act


def _before() -> Iterator[Fault]:
    contents = {
        "empty": b"",
        "garbage": os.urandom(300),
        "a list": b"[]",
        "of another program": b'{"name": "app"}',
        "of a newer format": b'{"format": 99, "attempts": []}',
        "nested deeply": b"[" * 100_000,
    }
    for what, content in contents.items():
        yield Fault(
            "disk", f"run.json {what} before the start", before=_prepared("run.json", content)
        )
    for name in ("records.jsonl", "params.arrow"):
        yield Fault(
            "disk", f"{name} garbage before the start", before=_prepared(name, os.urandom(999))
        )
        yield Fault("disk", f"{name} cut before the start", before=_prepared(name, b'{"step": 1,'))
    for what, path in {
        "is a file": "/etc/passwd",
        "is in a file": "/etc/passwd/run",
        "cannot exist": "/proc/nothing/run",
        "is too long": "x" * 5000,
        "contains NUL": "a\x00b",
        "is a device": "/dev/null",
    }.items():
        yield Fault("disk", f"run_dir {what}", before=_config(run_dir=path))
    yield Fault("disk", "another run writes to the folder", before=_claimed)
    dead = {"host": os.uname().nodename, "pid": 2**22 - 7, "token": "x", "started": "1"}
    claim_file = json.dumps(dead).encode()
    yield Fault("disk", "claim of a dead process", before=_prepared(".claim", claim_file))
    yield Fault("disk", "claim is garbage", before=_prepared(".claim", b"\xff"))
    yield Fault("disk", "the directory for temporary files is gone", before=_no_temporary)


def _removed(scene: Scene) -> None:
    """Remove the run folder; renamed first, or the writer adds files while it is emptied."""
    going = scene.folder / "removed"
    scene.run.rename(going)
    shutil.rmtree(going, ignore_errors=True)


def _replaced(make: Callable[[Path], None]) -> Act:
    def act(scene: Scene) -> None:
        _removed(scene)
        make(scene.run)

    return act


def _prepared(name: str, content: bytes) -> Act:
    def act(scene: Scene) -> None:
        scene.run.mkdir()
        (scene.run / name).write_bytes(content)

    return act


def _config(**values: object) -> Act:
    return lambda scene: scene.config.update(values)


def _claimed(scene: Scene) -> None:
    from distmon.runs.claim import claim

    scene.run.mkdir()
    claim(scene.run)


def _no_temporary(scene: Scene) -> None:
    import tempfile

    tempfile.tempdir = str(scene.folder / "gone")
    scene.config["run_dir"] = "/proc/nothing"


def _make_folder(scene: Scene) -> None:
    moved = scene.folder / "moved"
    if scene.run.is_symlink() or scene.run.is_file():
        scene.run.unlink()
    if moved.exists():
        moved.rename(scene.run)
    scene.run.mkdir(exist_ok=True)


def _small_mount(size: str) -> Act:
    def act(scene: Scene) -> None:
        if ctypes.CDLL(None, use_errno=True).unshare(0x00020000):
            raise OSError(ctypes.get_errno(), "unshare")
        subprocess.run(["mount", "--make-rprivate", "/"], check=True)
        _mount(["-t", "tmpfs", "-o", f"size={size}", "none", str(scene.folder)])

    return act


def _remount(scene: Scene, size: str) -> None:
    _mount(["-o", f"remount,size={size}", str(scene.folder)])


def _mount(arguments: list[str]) -> None:
    subprocess.run(["mount", *arguments], check=True)
