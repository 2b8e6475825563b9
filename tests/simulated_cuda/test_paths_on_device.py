"""Rarely taken paths of the accelerator code, on the simulated device."""

from __future__ import annotations

import pytest

from simulated_cuda.child import assert_passed, names_of

pytestmark = pytest.mark.usefixtures("device_library")
CHECKS = "simulated_cuda.path_checks"


@pytest.mark.parametrize("name", names_of(CHECKS))
def test_paths(name: str) -> None:
    assert_passed(CHECKS, name)
