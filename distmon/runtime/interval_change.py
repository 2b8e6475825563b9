"""A change of the interval that takes effect on all ranks at the same step.

Rank 0 proposes it in its slot of one observation. In the next observation each rank acknowledges
the proposal if it has arrived there by then. At the one after that, all ranks that know of the
proposal know whether all have acknowledged it: then it is in effect, else rank 0 proposes again.
Only a rank that knows of a proposal ever waits, for an observation that is a whole interval old.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

Fields = Mapping[str, NDArray[np.float64]]


class IntervalChange:
    """The proposal that is on its way, if any, as this rank knows it. Pure; no tensors."""

    def __init__(self) -> None:
        self.wanted = 0
        """Rank 0: what to propose; 0 for nothing."""
        self._sent = 0
        self._arrived = 0
        self._proposed: dict[int, int] = {}
        self._acknowledged: dict[int, bool] = {}

    def send(self) -> dict[str, float]:
        """Return the slot fields of the observation that is sent now."""
        self._sent += 1
        return {
            "proposed_interval": float(self.wanted),
            "acknowledged_interval": float(self._proposed.get(self._sent - 1, 0)),
        }

    def arrive(self, fields: Fields) -> None:
        """Take in the slots of the next observation that has arrived."""
        self._arrived += 1
        before = self._proposed.get(self._arrived - 1, 0)
        if before:
            # A rank that failed to observe has acknowledged nothing.
            self._acknowledged[self._arrived] = bool(
                (fields["acknowledged_interval"] == before).all()
            )
        if proposed := int(fields["proposed_interval"][0]):
            self._proposed[self._arrived] = proposed

    @property
    def must_wait(self) -> bool:
        """Whether a proposal is decided on by the observation before the one just sent, which has
        not arrived."""
        return self._sent - 2 in self._proposed and self._arrived < self._sent - 1

    def take(self) -> int | None:
        """Return the interval that is in effect from now on; call it after `send`, at every
        observation, once `must_wait` is False."""
        proposed = self._proposed.pop(self._sent - 2, None)
        agreed = self._acknowledged.pop(self._sent - 1, False)
        if proposed is None or not agreed:
            return None
        if self.wanted == proposed:
            self.wanted = 0
        return proposed
