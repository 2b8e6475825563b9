"""Bootstrap over rounds: how certain a ratio of times is.

In one round all contenders take turns, so what slows the machine for a while slows all of them.
Rounds are resampled with replacement, both sides of a ratio together. Percentile method with a
fixed seed: the same files give the same interval.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from distmon.bench.costs import ratio
from distmon.bench.formatting import times
from distmon.bench.results import Pairs

SEED: Final = 0
RESAMPLES: Final = 10_000


@dataclass(frozen=True)
class Interval:
    """An estimate and its confidence interval."""

    estimate: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{times(self.estimate)} ({times(self.low)} to {times(self.high)})"


def ratio_interval(pairs: Pairs, confidence: float = 0.95) -> Interval:
    """Return the interval of median over median; denominators must be above 0."""
    resampled = _resampled_ratios(pairs, np.random.default_rng(SEED))
    return _interval(ratio(pairs), resampled, confidence)


def change_interval(old: Pairs, new: Pairs, confidence: float = 0.95) -> Interval:
    """Return the interval of the ratio of `new` over that of `old`, two independent runs."""
    generator = np.random.default_rng(SEED)
    olds = _resampled_ratios(old, generator)
    return _interval(ratio(new) / ratio(old), _resampled_ratios(new, generator) / olds, confidence)


def _resampled_ratios(pairs: Pairs, generator: np.random.Generator) -> NDArray[np.float64]:
    rounds = pairs.shape[1]
    drawn = generator.integers(rounds, size=(RESAMPLES, rounds))
    medians = np.median(pairs[:, drawn], axis=2)
    ratios: NDArray[np.float64] = medians[0] / medians[1]
    return ratios


def _interval(estimate: float, resampled: NDArray[np.float64], confidence: float) -> Interval:
    tail = (1 - confidence) / 2
    low, high = np.quantile(resampled, (tail, 1 - tail))
    return Interval(estimate, float(low), float(high))
