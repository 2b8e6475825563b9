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
    """The proposals that are on their way, as this rank knows them. Pure; no tensors.

    Observations are known by their number, which is the same on all ranks.
    """

    def __init__(self) -> None:
        self.wanted = 0
        """Rank 0: what to propose; 0 for nothing."""
        self._newest = 0
        self._proposed: dict[int, int] = {}
        self._acknowledged: dict[int, bool] = {}

    def send(self, number: int) -> dict[str, float]:
        """Return the slot fields of observation `number`, which is sent now."""
        return {
            "proposed_interval": float(self.wanted),
            "acknowledged_interval": float(self._proposed.get(number - 1, 0)),
        }

    def arrive(self, number: int, fields: Fields) -> None:
        """Take in the slots of observation `number`, the next one that has arrived."""
        self._newest = number
        if before := self._proposed.get(number - 1, 0):
            # A rank that failed to observe has acknowledged nothing.
            self._acknowledged[number] = bool((fields["acknowledged_interval"] == before).all())
        if proposed := int(fields["proposed_interval"][0]):
            self._proposed[number] = proposed

    def must_wait(self, number: int) -> bool:
        """Return whether a proposal takes effect at observation `number`, or does not, and the
        observation that decides on it is missing."""
        return number - 2 in self._proposed and self._newest < number - 1

    def take(self, number: int) -> int | None:
        """Return the interval that is in effect from observation `number` on; None for no change.

        Call it at every observation, after `send`, once `must_wait` is False.
        """
        proposed = self._proposed.pop(number - 2, None)
        agreed = self._acknowledged.pop(number - 1, False)
        if proposed is None or not agreed:
            return None
        if self.wanted == proposed:
            self.wanted = 0
        return proposed
