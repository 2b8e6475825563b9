"""Steps with the monitor on the simulated device."""

from __future__ import annotations

import pytest

from simulated_cuda.child import assert_passed, names_of

pytestmark = pytest.mark.usefixtures("device_library")
CHECKS = "simulated_cuda.monitor_step_checks"


@pytest.mark.parametrize("name", names_of(CHECKS))
def test_monitor_steps(name: str) -> None:
    assert_passed(CHECKS, name)
