"""An observation on its way to the writer process: its buffers as they are, and a few numbers.

The training thread copies two arrays to shared memory; slots, losses and rows are read there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from distmon.record.observation import Observation
from distmon.reduce.findings import Desync, NonFinite
from distmon.reduce.reduced_view import BufferSizes, ReducedView

KIND: Final = "observation"
"""The first part of such a message."""


def to_message(
    view: ReducedView,
    numbers: tuple[int, int, int],
    losses: Mapping[int, float],
    found: tuple[NonFinite | None, Desync | None, Mapping[str, float] | None],
    mfu_source: str,
) -> tuple[Any, ...]:
    """Return what is sent, see `Observation.from_view`.

    Its arrays are those of `view`, which may not change until it is sent.
    """
    return KIND, mfu_source, numbers, losses, found, tuple(view.sizes), *view.raw


def from_message(
    numbers: tuple[int, int, int],
    losses: Mapping[int, float],
    found: tuple[NonFinite | None, Desync | None, Mapping[str, float] | None],
    sizes: tuple[int, ...],
    added: Any,
    highest: Any,
) -> Observation:
    """Return the observation that `to_message` was given."""
    view = ReducedView(
        BufferSizes(*sizes),
        np.frombuffer(added, dtype=np.float64),
        np.frombuffer(highest, dtype=np.float32),
    )
    return Observation.from_view(view, numbers, losses, found)
