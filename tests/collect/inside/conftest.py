"""Settings of the tests of what is inside a model."""

from __future__ import annotations

import pytest
import torch._dynamo.utils


@pytest.fixture(autouse=True)
def _nothing_was_compiled() -> None:
    """Forget what other tests of this process have compiled: calls are not watched after it."""
    torch._dynamo.utils.counters.clear()
