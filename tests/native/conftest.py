"""The compiled module: the one in the cache, built once where it is missing."""

from __future__ import annotations

from pathlib import Path

import pytest

from distmon.native import NativeModule, status
from distmon.native.build import NativeBuildError, build


@pytest.fixture(scope="session")
def native() -> NativeModule:
    """Skips where there is no compiler; a compiler that refuses the source is a failure."""
    if status().module is None:
        try:
            build()
        except NativeBuildError as error:
            if "needs a C++ compiler" in str(error):
                pytest.skip(str(error))
            raise
    found = status()
    assert found.module is not None, found.reason
    return found.module


@pytest.fixture(scope="session")
def finished(native: NativeModule) -> Path:
    """The file that works."""
    path = status().path
    assert path is not None
    assert native is not None
    return path


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the module is looked for: an empty cache, and none beside the sources."""
    monkeypatch.setattr("distmon.native.build.PACKAGE_FOLDER", tmp_path / "package")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "distmon" / "native"
