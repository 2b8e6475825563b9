"""A change of the interval: proposed, acknowledged and in effect with the observations."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from distmon.runtime.proposals import Proposals

Fields = Mapping[str, NDArray[np.float64]]


class IntervalChange:
    """Proposes in the rank slots of the observations. Pure; no tensors."""

    def __init__(self) -> None:
        self.wanted = 0
        """Rank 0: what to propose; 0 for nothing."""
        self._asked_in = 0
        self._proposals = Proposals[int]()
        self.must_wait = self._proposals.must_wait

    def send(self, number: int) -> dict[str, float]:
        """Return the slot fields of observation `number`, which is sent now."""
        proposed = 0
        if self.wanted and not self._asked_in:
            proposed, self._asked_in = self.wanted, number
        return {
            "proposed_interval": float(proposed),
            "acknowledged_interval": float(self._proposals.known or 0),
        }

    def arrive(self, number: int, fields: Fields) -> None:
        """Take in the slots of observation `number`, the next one that has arrived."""
        # A rank that failed to observe has acknowledged nothing.
        known = self._proposals.known
        acknowledged = known is not None and bool((fields["acknowledged_interval"] == known).all())
        proposed = int(fields["proposed_interval"][0])
        if number == self._asked_in and not proposed:
            self._asked_in = 0  # rank 0 failed to send it
        self._proposals.arrive(number, proposed or None, acknowledged)

    def take(self, number: int) -> int | None:
        """Return the interval that is in effect from observation `number` on; None for no change.

        Call it at every observation, after `send`, once `must_wait` is False.
        """
        interval = self._proposals.take(number)
        if interval is not None:
            self.wanted = self._asked_in = 0
        return interval
