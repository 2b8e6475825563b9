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
    """Share of the training time that observing takes."""
    room: float
    """What the budget leaves for it."""

    def __str__(self) -> str:
        compared = "above" if self.after > self.before else "well below"
        return (
            f"observing costs {100 * self.cost:.3g}% of the training time, {compared} the "
            f"{100 * self.room:.3g}% that the budget leaves for it: the interval goes from "
            f"{self.before} to {self.after} steps"
        )


class Budget:
    """Judges the cost from reduced records alone, so every rank comes to the same interval.

    What the monitor does in every step is spent whatever the interval is. It takes from the budget,
    but a quarter is left for observing: where steps are so short that they take more, looking less
    and less often would not help.
    """

    def __init__(self, limit: float | None, interval: int, settle_s: float) -> None:
        """`settle_s`: training time to judge by; shorter than that, chance decides."""
        self._limit = limit
        self._base = interval
        self._settle_s = settle_s
        self._own = self._in_steps = self._elapsed = 0.0
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
        dearest = int(seconds.argmax())
        self._own += float(seconds[dearest])
        self._in_steps += float(record.ranks["monitor_step_seconds"][dearest])
        self._elapsed += float(elapsed.max())
        if self._elapsed <= self._settle_s or self._elapsed <= 0:
            return None
        in_steps = self._in_steps / self._elapsed
        cost = self._own / self._elapsed - in_steps
        self._own = self._in_steps = self._elapsed = 0.0
        room = max(self._limit - in_steps, self._limit / 4)
        # In whole multiples of what the user asked for, so that observed steps stay round numbers.
        wanted = math.ceil(self.multiple * cost / room)
        if cost <= room and 2 * wanted > self.multiple:
            return None
        before = self.interval
        self.interval = self._base * min(max(1, wanted), LARGEST_STRETCH)
        if self.interval == before:
            return None
        return Stretch(before, self.interval, cost, room)
