"""Keep the cost of the monitor below a share of the training time, by a longer interval."""

from __future__ import annotations

import math
from dataclasses import dataclass

from distmon.record.telemetry import ObservationCost

LARGEST_STRETCH = 1000
"""Largest multiple of the configured interval, so that a run is always observed."""


@dataclass(frozen=True)
class Stretch:
    """A change of the interval, and why."""

    before: int
    after: int
    cost: float
    """Share of the training time that observing takes."""
    room: float
    """Share that the budget leaves for observing."""

    def __str__(self) -> str:
        compared = "above" if self.after > self.before else "well below"
        return (
            f"observing costs {100 * self.cost:.3g}% of the training time, {compared} the "
            f"{100 * self.room:.3g}% that `budget` leaves for it: the interval goes from "
            f"{self.before} to {self.after} steps (`budget: null` keeps it)"
        )


class Budget:
    """Computes the interval that keeps the cost within the budget, from records.

    The cost of steps that are not observed does not depend on the interval. It is subtracted from
    the budget, but a quarter is left for observing: where steps are so short that they cost more, a
    longer interval would not help.
    """

    def __init__(self, limit: float | None, interval: int, settle_s: float) -> None:
        """`settle_s`: training time between two decisions; shorter times are mostly noise."""
        self._limit = limit
        self._base = interval
        self._settle_s = settle_s
        self._own = self._in_steps = self._elapsed = 0.0
        self.interval = interval
        """Steps from one observation to the next, now."""

    @property
    def multiple(self) -> int:
        """Multiple of the configured interval; what a checkpoint keeps."""
        return self.interval // self._base

    def resume(self, multiple: int) -> int:
        """Continue with the multiple that an earlier process had reached; return the interval."""
        if not 1 <= multiple <= LARGEST_STRETCH:
            raise ValueError(f"a stretch of {multiple} is not between 1 and {LARGEST_STRETCH}")
        if self._limit is not None:
            self.interval = self._base * multiple
        return self.interval

    def evaluate(self, cost: ObservationCost | None) -> Stretch | None:
        """Add the cost of one record; return a change of the interval when it exceeds the budget.

        The change is in effect once `adopt` is called with it, on every rank.
        """
        if self._limit is None or cost is None:
            return None
        self._own += cost.own
        self._in_steps += cost.in_steps
        self._elapsed += cost.elapsed
        if self._elapsed <= self._settle_s or self._elapsed <= 0:
            return None
        in_steps = self._in_steps / self._elapsed
        observing = self._own / self._elapsed - in_steps
        self._own = self._in_steps = self._elapsed = 0.0
        room = max(self._limit - in_steps, self._limit / 4)
        # In whole multiples of the configured interval, so that observed steps stay round numbers.
        wanted = math.ceil(self.multiple * observing / room)
        if observing <= room and 2 * wanted > self.multiple:
            return None
        after = self._base * min(max(1, wanted), LARGEST_STRETCH)
        return None if after == self.interval else Stretch(self.interval, after, observing, room)

    def adopt(self, interval: int) -> None:
        """Continue with an interval that all ranks have agreed on."""
        self.interval = interval
        self._own = self._in_steps = self._elapsed = 0.0
