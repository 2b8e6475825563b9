"""The monitor on a device without float64."""

from __future__ import annotations

import pytest

from simulated_cuda.child import assert_passed, names_of

pytestmark = pytest.mark.usefixtures("device_library")
MODULE = "simulated_cuda.no_float64_checks"


@pytest.mark.parametrize("name", names_of(MODULE))
def test_no_float64(name: str) -> None:
    assert_passed(MODULE, name, SIMULATED_CUDA_NO_FLOAT64="1")
