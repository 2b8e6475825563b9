"""A line of block characters for a terminal."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import numpy as np

from distmon.report.downsampling import bin_edges, binned

LEVELS: Final = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float], width: int, *, log: bool = False) -> str:
    """Return at most `width` characters; `x` where a value is not finite, space where none is."""
    array = np.array(values, np.float64)
    if not len(array):
        return ""
    edges = bin_edges(len(array), width)
    finite = np.where(np.isfinite(array), array, np.nan)
    means = binned(finite, edges)
    if log:
        with np.errstate(divide="ignore", invalid="ignore"):
            means = np.log10(np.where(means > 0, means, np.nan))
    bad = binned((~np.isfinite(array)).astype(np.float64), edges, "max")
    known = means[np.isfinite(means)]
    low, high = (known.min(), known.max()) if len(known) else (0.0, 0.0)
    return "".join(
        _character(float(value), low, high) if not wrong else "x"
        for value, wrong in zip(means, bad, strict=True)
    )


def _character(value: float, low: float, high: float) -> str:
    if math.isnan(value):
        return " "
    share = (value - low) / (high - low) if high > low else 0.0
    return LEVELS[min(len(LEVELS) - 1, int(share * len(LEVELS)))]
