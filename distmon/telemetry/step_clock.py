"""Step time and tokens since the last observation, from a clock on the host."""

from __future__ import annotations


class StepClock:
    """Counts steps and tokens between observations."""

    def __init__(self) -> None:
        self._start: float | None = None
        self._last = 0.0
        self._intervals = 0
        self._tokens = 0.0
        self._samples = 0.0

    def tick(self, now: float, tokens: float, samples: float = 0.0) -> None:
        """A step is done. The first ever only starts the clock: nothing says when it began."""
        self._last = now
        if self._start is None:
            self._start = self._last
        else:
            self._intervals += 1
            self._tokens += tokens
            self._samples += samples

    def take(self) -> dict[str, float]:
        """This rank's mean step time and tokens; counting starts anew."""
        elapsed = self._last - self._start if self._start is not None else 0.0
        seconds = elapsed / self._intervals if self._intervals else 0.0
        tokens, samples = self._tokens, self._samples
        self._tokens = self._samples = 0.0
        self._start, self._intervals = self._last, 0
        return {
            "step_seconds": seconds,
            "elapsed_seconds": elapsed,
            "tokens": tokens,
            "samples": samples,
        }
