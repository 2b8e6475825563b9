"""Step time, tokens and samples since the last observation, by the host's clock."""

from __future__ import annotations

from distmon.collect.losses import Number, NumberSum


class StepClock:
    """Counts steps and tokens between observations."""

    def __init__(self) -> None:
        self._start: float | None = None
        self._last = 0.0
        self._intervals = 0
        self._tokens = NumberSum()
        self._samples = NumberSum()

    def tick(self, now: float, tokens: Number | None, samples: Number | None = None) -> None:
        """Count a completed step. The first one only starts the clock: its beginning is unknown."""
        self._last = now
        if self._start is None:
            self._start = self._last
        else:
            self._intervals += 1
            self._tokens.add(tokens)
            self._samples.add(samples)

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
