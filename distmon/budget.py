"""Keeps the monitor's own cost below a share of the training time, by looking less often."""

from __future__ import annotations

import math
from dataclasses import dataclass

from distmon.record import Record

LARGEST_STRETCH = 1000
"""Times the configured interval; a run is never left without observations for good."""


@dataclass(frozen=True)
class Stretch:
    """A change of the interval, and why."""

    before: int
    after: int
    cost: float
    limit: float

    def __str__(self) -> str:
        compared = "above" if self.after > self.before else "well below"
        return (
            f"observing costs {self.cost:.2%} of the training time, {compared} the budget of "
            f"{self.limit:.3g}: the interval goes from {self.before} to {self.after} steps"
        )


class Budget:
    """Judges the cost from reduced records alone, so every rank comes to the same interval."""

    def __init__(self, limit: float | None, interval: int, settle_s: float) -> None:
        """`settle_s`: training time to judge by; shorter than that, chance decides."""
        self._limit = limit
        self._base = interval
        self._settle_s = settle_s
        self._own = self._elapsed = 0.0
        self.interval = interval
        """Steps from one observation to the next, now."""

    @property
    def multiple(self) -> int:
        """How many times the configured interval it is; what a checkpoint keeps."""
        return self.interval // self._base

    def resume(self, multiple: int) -> int:
        """Go on with what an earlier process had come to; returns the interval."""
        if self._limit is not None:
            self.interval = self._base * multiple
        return self.interval

    def judge(self, record: Record) -> Stretch | None:
        """Take in one record; a change when the cost is off its budget."""
        seconds = record.ranks.get("monitor_seconds")
        elapsed = record.ranks.get("elapsed_seconds")
        if self._limit is None or seconds is None or elapsed is None:
            return None
        self._own += float(seconds.max())
        self._elapsed += float(elapsed.max())
        if self._elapsed <= self._settle_s or self._elapsed <= 0:
            return None
        cost, self._own, self._elapsed = self._own / self._elapsed, 0.0, 0.0
        # In whole multiples of what the user asked for, so that observed steps stay round numbers.
        wanted = math.ceil(self.interval / self._base * cost / self._limit)
        if cost <= self._limit and 2 * wanted > self.multiple:
            return None
        before = self.interval
        self.interval = self._base * min(max(1, wanted), LARGEST_STRETCH)
        if self.interval == before:
            return None
        return Stretch(before, self.interval, cost, self._limit)
