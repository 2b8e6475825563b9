"""Building is asked for, safe when many do it at once, and a broken file is never loaded."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import distmon
from distmon.cli import doctor
from distmon.native import NativeModule, load, loading, status
from distmon.native.__main__ import main
from distmon.native.build import NativeBuildError, build, cache_folder
from distmon.native.compiling import build_key, checksum
from distmon.native.loading import check_against_python


def _compiler(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Stands for a compiler; `$out` is the file that it was told to write."""
    path = folder / "compiler"
    path.write_text(
        '#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\nout="$2"\n' + script, encoding="utf-8"
    )
    path.chmod(0o755)
    monkeypatch.setenv("CXX", str(path))


def test_attaching_neither_builds_nor_complains(
    cache: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with caplog.at_level(logging.WARNING, "distmon"):
        distmon.attach(model, optimizer, run_dir=tmp_path / "run", sinks=[]).close()
        assert load() is None
    assert not cache.exists()
    assert not [m for m in caplog.messages if "native" in m]


def test_many_build_at_once_and_only_finished_files_are_seen(
    finished: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Each result differs, as those of a compiler that writes its paths into the file do.
    _compiler(tmp_path, monkeypatch, f'cp {finished} "$out"; sleep 0.2; echo $$ >> "$out"')
    with ThreadPoolExecutor(6) as threads:
        waiting = [threads.submit(build) for _ in range(6)]
        while not all(w.done() for w in waiting):
            found = status()
            assert found.module is not None or found.path is None, found.reason
    assert status().module is not None
    assert status().path in {w.result().path for w in waiting}
    assert not [*cache.glob("building-*")]
    assert main() == 0


def test_a_new_build_replaces_a_broken_one(
    finished: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.mkdir(parents=True)
    broken = cache / f"distmon_native-{build_key()}-{'0' * 16}.so"
    broken.write_bytes(b"")
    _compiler(tmp_path, monkeypatch, f'cp {finished} "$out"')
    assert main() == 0
    assert [p.name for p in cache.iterdir()] == [finished.name]


@pytest.mark.parametrize("kind", ["cut", "no module", "unreadable"])
def test_a_broken_file_is_ignored_with_one_line(
    kind: str, finished: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache.mkdir(parents=True)
    content = b"not a library"
    name = f"distmon_native-{build_key()}-{checksum(content)}.so"
    if kind == "cut":
        content, name = finished.read_bytes()[:5000], finished.name
    if kind == "unreadable":
        (cache / name).mkdir()
    else:
        (cache / name).write_bytes(content)
    with caplog.at_level(logging.WARNING, "distmon"):
        assert load() is None
    (line,) = caplog.messages
    assert str(cache / name) in line
    assert "python -m distmon.native" in line


def test_a_file_of_another_torch_or_source_is_not_looked_at(finished: Path, cache: Path) -> None:
    cache.mkdir(parents=True)
    other = finished.name.replace(build_key(), "0123456789abcdef")
    shutil.copy(finished, cache / other)
    assert status().path is None
    assert (cache / other).exists()


def test_without_a_compiler_there_is_one_sentence(
    cache: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("CXX", "/no/such/compiler")
    assert main() == 2
    said = capsys.readouterr().err.splitlines()
    assert said == [
        "distmon: the native module needs a C++ compiler: /no/such/compiler is not there"
    ]
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NativeBuildError, match="needs a C\\+\\+ compiler and there is none"):
        build()
    _compiler(tmp_path, monkeypatch, 'echo "x.cpp:1: error: no" >&2; echo more >&2; exit 1')
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    assert main() == 2
    (sentence,) = capsys.readouterr().err.splitlines()
    assert sentence.endswith("x.cpp:1: error: no")
    assert not [*cache.iterdir()]


def test_a_cache_that_cannot_be_written_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(NativeBuildError, match=r"cannot be written to .*file/distmon/native"):
        build()
    assert status().path is None


def test_a_relative_cache_folder_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "here")
    assert cache_folder() == Path.home() / ".cache" / "distmon" / "native"


@pytest.fixture
def no_home(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container that runs as any user."""
    assert not cache.exists()

    def unknown(user: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {user}")

    monkeypatch.setattr("pwd.getpwuid", unknown)
    for variable in ("XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(variable, raising=False)


@pytest.mark.usefixtures("no_home")
def test_what_pip_built_needs_no_home_folder(finished: Path, tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    shutil.copy(finished, tmp_path / "package")
    assert status().path == tmp_path / "package" / finished.name
    assert status().module is not None


@pytest.mark.usefixtures("no_home")
def test_a_user_without_a_home_folder_attaches(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = status()
    assert found.module is None
    assert found.reason.startswith("this user has no home folder")
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    distmon.attach(model, optimizer, run_dir=tmp_path / "run", sinks=[]).close()
    assert main() == 2
    (sentence,) = capsys.readouterr().err.splitlines()
    assert "set XDG_CACHE_HOME or HOME" in sentence


def test_what_is_built_is_writable_for_this_user_only(
    finished: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _compiler(tmp_path, monkeypatch, f'cp {finished} "$out"; chmod 777 "$out"')
    before = os.umask(0)
    try:
        path = build().path
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o755
    assert cache.stat().st_mode & 0o777 == 0o700
    assert cache.parent.stat().st_mode & 0o777 == 0o700
    assert status().module is not None


@pytest.mark.parametrize(
    "changed", ["torch.__version__", "torch.version.git_version", "sys.version"]
)
def test_a_build_for_another_version_is_not_loaded(
    changed: str, finished: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.mkdir(parents=True, mode=0o700)
    shutil.copy(finished, cache)
    assert status().module is not None
    monkeypatch.setattr(changed, "2.99.0")
    assert status().path is None


class _Lies:
    """Reads what the module reads, apart from one number."""

    def __init__(self, module: NativeModule, column: int) -> None:
        self._module, self._column = module, column

    def place_reader(self, *arguments: object) -> _Lies:
        self._reader = self._module.place_reader(*arguments)  # type: ignore[arg-type]
        self._out: NDArray[np.int64] = arguments[-1]  # type: ignore[assignment]
        return self

    def read_weights(self) -> list[int]:
        unread = self._reader.read_weights()
        self._out[2, self._column] += 1
        return unread

    def read_grads(self) -> list[int]:
        return self._reader.read_grads()


@pytest.mark.parametrize("column", [0, 1, 2])
def test_a_module_that_disagrees_with_python_is_not_used(
    column: int, finished: Path, native: NativeModule, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_against_python(native)
    with pytest.raises(RuntimeError, match="it does not see"):
        check_against_python(_Lies(native, column))  # type: ignore[arg-type]
    monkeypatch.setattr(loading, "check_against_python", lambda _: 1 / 0)
    assert status().reason.startswith(f"{finished} cannot be used")


def _finding() -> doctor.Finding:
    (finding,) = [f for f in doctor.examine() if f.what == "native module"]
    return finding


def test_doctor_says_whether_it_is_there(finished: Path, cache: Path) -> None:
    finding = _finding()
    assert finding.verdict == "absent"
    assert "python -m distmon.native" in finding.detail
    cache.mkdir(parents=True)
    shutil.copy(finished, cache)
    finding = _finding()
    assert finding.verdict == "ok"
    assert str(cache / finished.name) in finding.detail


SETUP = Path(distmon.__file__).parents[1] / "setup.py"


@pytest.mark.skipif(not SETUP.exists(), reason="not a checkout")
def test_pip_builds_it_where_there_is_a_compiler(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step that `pip install` runs in an environment with torch."""

    def build_extensions() -> str:
        command = [sys.executable, str(SETUP), "build_ext", "--build-lib", str(tmp_path / "lib")]
        command += ["--build-temp", str(tmp_path / "temp")]
        ran = subprocess.run(command, cwd=SETUP.parent, capture_output=True, text=True, check=True)
        return ran.stdout + ran.stderr

    folder = tmp_path / "lib" / "distmon" / "native"
    monkeypatch.setenv("CXX", "/no/such/compiler")
    assert "the native module needs a C++ compiler: /no/such/compiler is not" in build_extensions()
    assert not [*folder.iterdir()]
    _compiler(tmp_path, monkeypatch, f'cp {finished} "$out"')
    build_extensions()
    assert [path.name for path in folder.iterdir()] == [finished.name]
