"""Triton's real launcher, on a driver library that records."""

from __future__ import annotations

from pathlib import Path

import pytest

from simulated_cuda.build import CannotBuildError
from simulated_cuda.child import assert_passed, names_of
from simulated_cuda.recorded_launches import driver_environment

pytestmark = pytest.mark.usefixtures("device_library")
CHECKS = "simulated_cuda.launch_checks"


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder: Path = tmp_path_factory.mktemp("driver")
    try:
        return driver_environment(folder)
    except CannotBuildError as error:
        pytest.skip(f"no recording driver: {error}")


@pytest.mark.parametrize("name", names_of(CHECKS))
def test_launches(name: str, driver: dict[str, str]) -> None:
    assert_passed(CHECKS, name, **driver)
