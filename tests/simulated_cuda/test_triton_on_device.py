"""The Triton probe on the simulated device."""

from __future__ import annotations

import pytest

from simulated_cuda.child import assert_passed, names_of

pytestmark = pytest.mark.usefixtures("device_library")
CHECKS = "simulated_cuda.triton_checks"


@pytest.mark.parametrize("name", names_of(CHECKS))
def test_triton(name: str) -> None:
    assert_passed(CHECKS, name, TRITON_INTERPRET="1", SIMULATED_CUDA_READABLE="1")
