"""The compiled module: the one in the cache, built once where it is missing."""

from __future__ import annotations

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
