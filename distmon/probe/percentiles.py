"""What the bins of the gradient histogram stand for, and percentiles from their counts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from csrc_triton.row_layout import HALF_BINS, KEY_BASE, KEY_SHIFT

Floats = NDArray[np.float64]
_ROWS = 64


def magnitude_edges() -> Floats:
    """Lower edges of the HALF_BINS magnitude bins; the first is 0."""
    keys = np.arange(KEY_BASE, KEY_BASE + HALF_BINS, dtype=np.uint32) << np.uint32(KEY_SHIFT)
    edges = keys.view(np.float32).astype(np.float64)
    edges[0] = 0.0
    return edges


def bin_values() -> Floats:
    """The value that stands for each bin: its middle, 0 in the two innermost ones.

    The outermost bins are open: they stand for infinity until clipped by the measured extremes.
    """
    edges = magnitude_edges()
    middle = np.append((edges[:-1] + edges[1:]) / 2, np.inf)
    middle[0] = 0.0
    return np.concatenate((-middle[::-1], middle))


def percentiles(
    counts: NDArray[np.floating[Any]], lowest: Floats, highest: Floats, quantiles: Sequence[float]
) -> list[Floats]:
    """Percentiles of each row from its bin counts, one array of [rows] per quantile.

    Follows numpy's linear rule between order statistics, each taken as the middle of its bin and
    clipped to the measured `lowest` and `highest`; rows without counts give NaN.
    """
    values = bin_values()
    result = [np.full(len(counts), np.nan) for _ in quantiles]
    # By a few rows at a time: what is computed on the way is larger than all parameters' samples.
    for first in range(0, len(counts), _ROWS):
        rows = slice(first, first + _ROWS)
        cumulative = np.cumsum(counts[rows], axis=1, dtype=np.float64)
        total = cumulative[:, -1]
        for quantile, found in zip(quantiles, result, strict=True):
            rank = np.maximum(total - 1, 0) * (quantile / 100)
            below = np.floor(rank)
            fraction = rank - below
            ends = []
            for position in (below, np.minimum(below + 1, np.maximum(total - 1, 0))):
                # The element at this rank is in the first bin whose cumulative count exceeds it.
                # Half a count of slack absorbs rounding where counts were divided by replicas.
                bins = np.argmax(cumulative > position[:, None] + 0.5, axis=1)
                ends.append(np.clip(values[bins], lowest[rows], highest[rows]))
            estimate = ends[0] * (1 - fraction) + ends[1] * fraction
            found[rows] = np.where(total > 0.5, estimate, np.nan)
    return result
