"""Is a difference more than noise: a moving-block bootstrap of a mean.

Neighboring steps are not independent (a moving average, a slow machine, a schedule), so whole
blocks of them are drawn.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np
from numpy.typing import NDArray

FEWEST: Final = 8
"""Points below which no verdict is given."""
RESAMPLES: Final = 2000
CONFIDENCE: Final = 0.99
"""Of the interval: with twenty metrics, 95% would call one of them better or worse by chance."""


def mean_interval(differences: NDArray[np.float64], seed: int = 0) -> tuple[float, float] | None:
    """Return the interval that holds the mean difference; None for too few points.

    Circular blocks, and a factor for the few independent blocks that there are (Student's t would
    give the same for blocks that do not overlap).
    """
    count = len(differences)
    if count < FEWEST:
        return None
    length = block_length(differences)
    blocks = math.ceil(count / length)
    draw = np.random.default_rng(seed)
    starts = draw.integers(0, count, size=(RESAMPLES, blocks))
    places = (starts[:, :, None] + np.arange(length)).reshape(RESAMPLES, -1)[:, :count] % count
    means = differences[places].mean(axis=1)
    tail = 50 * (1 - CONFIDENCE)
    low, high = np.percentile(means, [tail, 100 - tail])
    middle = float(differences.mean())
    widening = math.sqrt(blocks / max(1, blocks - 1)) * (1 + 3 / blocks)
    return middle + (float(low) - middle) * widening, middle + (float(high) - middle) * widening


def block_length(values: NDArray[np.float64]) -> int:
    """Return twice the lag at which the autocorrelation has vanished, within n^(1/3) and n/4."""
    count = len(values)
    shortest: int = max(1, round(count ** (1 / 3)))
    longest: int = max(1, count // 4)
    centered = values - values.mean()
    power = float(centered @ centered)
    if power <= 0:
        return min(shortest, longest)
    limit = 2 / math.sqrt(count)
    lag = 1
    while lag < longest and float(centered[lag:] @ centered[:-lag]) / power > limit:
        lag += 1
    return max(1, min(longest, max(shortest, 2 * (lag - 1))))
