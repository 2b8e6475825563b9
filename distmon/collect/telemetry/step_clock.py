"""Step time, tokens and samples since the last observation, by the host's clock."""

from __future__ import annotations

from collections import deque
from typing import Final

from distmon.collect.losses import Number, NumberSum

RECENT: Final = 64
"""Steps whose times are kept."""


class StepClock:
    """Counts steps and tokens between observations."""

    def __init__(self) -> None:
        self._start: float | None = None
        self._last = 0.0
        self._recent: deque[float] = deque(maxlen=RECENT)
        self._intervals = 0
        self._tokens = NumberSum()
        self._samples = NumberSum()

    def tick(self, now: float, tokens: Number | None, samples: Number | None = None) -> None:
        """Count a completed step. The first one only starts the clock: its beginning is unknown."""
        before, self._last = self._last, now
        if self._start is None:
            self._start = self._last
        else:
            self._recent.append(now - before)
            self._intervals += 1
            self._tokens.add(tokens)
            self._samples.add(samples)

    def tick_idle(self, last: float, steps: int, tokens: float, samples: float) -> None:
        """Count several steps after the first one; `last` is the time of the last of them."""
        if steps:
            self._recent.append((last - self._last) / steps)
        self._last = last
        self._intervals += steps
        self._tokens.add(tokens)
        self._samples.add(samples)

    @property
    def longest_recent(self) -> float:
        """Seconds of the longest of the last steps; steps counted together count as their mean."""
        return max(self._recent, default=0.0)

    def take(self) -> dict[str, Number]:
        """Return this rank's mean step time and counts since the last call, and reset them."""
        elapsed = self._last - self._start if self._start is not None else 0.0
        seconds = elapsed / self._intervals if self._intervals else 0.0
        self._start, self._intervals = self._last, 0
        return {
            "step_seconds": seconds,
            "elapsed_seconds": elapsed,
            "tokens": self._tokens.take(),
            "samples": self._samples.take(),
        }
