from __future__ import annotations

from pathlib import Path

import pytest
from fake_driver import FakeDriver, bind, build_library, own_copy


@pytest.fixture(scope="session")
def fake_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_library(tmp_path_factory.mktemp("nvml") / "fake.so")


@pytest.fixture(scope="session")
def old_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_library(tmp_path_factory.mktemp("nvml") / "old.so", "-DOLD_DRIVER")


@pytest.fixture
def driver(fake_library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    return bind(own_copy(fake_library, tmp_path), monkeypatch)


@pytest.fixture
def old_driver(old_library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    return bind(own_copy(old_library, tmp_path), monkeypatch)
