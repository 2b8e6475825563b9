"""What the bins of the gradient histogram stand for, and percentiles from their counts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from csrc_triton.row_layout import BINS, HALF_BINS, KEY_BASE, KEY_SHIFT, count_bits

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


def unpack_bins(words: Floats) -> NDArray[np.float32]:
    """Return the counts [rows, BINS] that [rows, words] hold; see `row_layout`."""
    bits = count_bits(words.shape[1])
    packed = words.astype(np.int64)
    places = BINS // words.shape[1]
    mask = (1 << bits) - 1
    return np.concatenate(
        [((packed >> (bits * k)) & mask).astype(np.float32) for k in range(places)], axis=1
    )


def percentiles(
    counts: NDArray[np.floating[Any]], lowest: Floats, highest: Floats, quantiles: Sequence[float]
) -> list[Floats]:
    """Percentiles of each row from its bin counts, one array of [rows] per quantile.

    Follows numpy's linear rule between order statistics. The elements of a bin are taken as evenly
    spread over it, within the measured `lowest` and `highest`; rows without counts give NaN.
    """
    begins, ends = _bin_ends()
    result = [np.full(len(counts), np.nan) for _ in quantiles]
    # By a few rows at a time: what is computed on the way is larger than all parameters' samples.
    for first in range(0, len(counts), _ROWS):
        rows = slice(first, first + _ROWS)
        row = np.arange(len(counts[rows]))
        cumulative = np.cumsum(counts[rows], axis=1, dtype=np.float64)
        last = np.maximum(cumulative[:, -1] - 1, 0)
        for quantile, found in zip(quantiles, result, strict=True):
            rank = last * (quantile / 100)
            below = np.floor(rank)
            values = []
            for position in (below, np.minimum(below + 1, last)):
                # The element at this rank is in the first bin whose cumulative count exceeds it.
                # Half a count of slack absorbs rounding where counts were divided by replicas.
                bins = np.argmax(cumulative > position[:, None] + 0.5, axis=1)
                count = counts[rows][row, bins]
                before = cumulative[row, bins] - count
                share = np.clip((position - before + 0.5) / np.maximum(count, 1), 0, 1)
                low = np.clip(begins[bins], lowest[rows], highest[rows])
                high = np.clip(ends[bins], lowest[rows], highest[rows])
                values.append(low + share * (high - low))
            fraction = rank - below
            estimate = values[0] * (1 - fraction) + values[1] * fraction
            found[rows] = np.where(cumulative[:, -1] > 0.5, estimate, np.nan)
    return result


def _bin_ends() -> tuple[Floats, Floats]:
    """The lowest and the highest value of each bin.

    The two innermost ones stand for 0, the outermost ones, which are open, for infinity until
    clipped by the measured extremes.
    """
    lower = magnitude_edges()
    upper = np.append(lower[1:], np.inf)
    upper[0], lower[-1] = 0.0, np.inf
    return np.concatenate((-upper[::-1], lower)), np.concatenate((-lower[::-1], upper))
