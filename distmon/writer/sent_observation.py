"""An observation on its way to the writer process: its buffers as they are, and a few numbers.

The training thread copies two arrays to shared memory; slots, losses and rows are read there.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from distmon.record.observation import Observation
from distmon.reduce.findings import Desync, NonFinite
from distmon.reduce.reduced_view import BufferSizes, ReducedView

KIND: Final = "observation"
"""The first part of such a message."""


def to_message(observation: Observation, view: ReducedView, mfu_source: str) -> tuple[Any, ...]:
    """Return what is sent; its arrays are those of `view`, which may not change until it is."""
    return (
        KIND,
        mfu_source,
        (observation.step, observation.interval, observation.number),
        observation.losses,
        (observation.nonfinite, observation.desync, observation.tasks),
        view.sizes,
        pickle.PickleBuffer(view.added.data),
        pickle.PickleBuffer(view.highest.data),
    )


def from_message(
    numbers: tuple[int, int, int],
    losses: Mapping[int, float],
    found: tuple[NonFinite | None, Desync | None, Mapping[str, float] | None],
    sizes: BufferSizes,
    added: Any,
    highest: Any,
) -> Observation:
    """Return the observation that `to_message` was given."""
    view = ReducedView(
        sizes,
        np.frombuffer(added, dtype=np.float64),
        np.frombuffer(highest, dtype=np.float32),
    )
    return Observation.from_view(view, numbers, losses, found)
