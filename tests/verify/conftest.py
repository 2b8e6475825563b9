"""Settings of the tests of `distmon verify`."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True, scope="module")
def _nothing_was_compiled() -> None:
    """Forget what other tests of this process have compiled: attention is not watched after it."""
    import torch._dynamo.utils

    torch._dynamo.utils.counters.clear()
