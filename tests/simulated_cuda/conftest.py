from __future__ import annotations

import pytest

from simulated_cuda.build import CannotBuildError, library


@pytest.fixture(scope="session")
def device_library() -> None:
    """Build the simulated device once; skip where that is not possible."""
    try:
        library()
    except CannotBuildError as error:
        pytest.skip(f"no simulated device: {error}")
