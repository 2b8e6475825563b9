"""Building is asked for, safe when many do it at once, and what is broken is never loaded."""

from __future__ import annotations

import logging
import shutil
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
from distmon.native.build import NativeBuildError, build, build_key, cache_folder, checksum


@pytest.fixture
def finished(native: NativeModule) -> Path:
    """The file that works."""
    path = status().path
    assert path is not None
    assert native is not None
    return path


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "distmon" / "native"


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


class _Lies:
    """Sees what the module sees, apart from one number."""

    def __init__(self, module: NativeModule, column: int) -> None:
        self.locate_tensors = module.locate_tensors
        self._module, self._column = module, column

    def read_places(self, *arguments: object) -> list[int]:
        unread = self._module.read_places(*arguments)  # type: ignore[arg-type]
        out: NDArray[np.int64] = arguments[-1]  # type: ignore[assignment]
        out[2, self._column] = out[0, self._column] if self._column == 1 else 1 - out[2, 2]
        return unread


@pytest.mark.parametrize("column", [0, 1, 2])
def test_a_module_that_disagrees_with_python_is_not_used(
    column: int, finished: Path, native: NativeModule, monkeypatch: pytest.MonkeyPatch
) -> None:
    loading._try_out(native)
    with pytest.raises(RuntimeError, match="it does not"):
        loading._try_out(_Lies(native, column))  # type: ignore[arg-type]
    monkeypatch.setattr(loading, "_try_out", lambda _: 1 / 0)
    assert loading._try(finished).reason.startswith(f"{finished} cannot be used")


def test_addresses_of_tensors_are_not_guessed(native: NativeModule) -> None:
    tensor = torch.ones(3)
    try:
        assert not native.locate_tensors([(tensor, 12345)])
        out, numels = np.zeros((1, 3), np.int64), np.array([3])
        with pytest.raises(RuntimeError, match="locate_tensors"):
            native.read_places([tensor], [None], False, tensor, bytes(256), numels, out)
    finally:
        loading._try_out(native)


def test_doctor_says_whether_it_is_there(finished: Path, cache: Path) -> None:
    (line,) = [*doctor._native()]
    assert line.verdict == "absent"
    assert "python -m distmon.native" in line.detail
    cache.mkdir(parents=True)
    shutil.copy(finished, cache)
    (line,) = [*doctor._native()]
    assert line.verdict == "ok"
    assert str(cache / finished.name) in line.detail
