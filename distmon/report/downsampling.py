"""Fewer points of a long history: bins of neighboring observations."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Reduction = Literal["mean", "min", "max"]


def bin_edges(count: int, bins: int) -> NDArray[np.int64]:
    """Return the first index of each bin: at most `bins`, equal in size up to one."""
    bins = max(1, min(count, bins))
    return (np.arange(bins) * count // bins).astype(np.int64)


def last_of(steps: NDArray[np.int64], edges: NDArray[np.int64]) -> list[int]:
    """Return the last step of each bin."""
    ends = [*edges[1:], len(steps)]
    return [int(steps[end - 1]) for end in ends] if len(steps) else []


def binned(values: Array, edges: NDArray[np.int64], how: Reduction = "mean") -> Array:
    """Reduce along the last axis; NaN where a bin has no value. Inf stays."""
    if values.shape[-1] == len(edges):
        return values
    if not values.shape[-1]:
        return values
    if how == "mean":
        present = ~np.isnan(values)
        total = np.add.reduceat(np.where(present, values, 0.0), edges, axis=-1)
        count = np.add.reduceat(present.astype(np.float64), edges, axis=-1)
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.where(count > 0, total / count, np.nan)
    return (np.fmin if how == "min" else np.fmax).reduceat(values, edges, axis=-1)


class StreamingGrid:
    """Sums of values by metric, row and column, where a column is one or more observations.

    Observations arrive one by one, and their number is not known: whenever the grid is full,
    neighboring columns are merged. So a file of any length is read once, in bounded memory.
    """

    def __init__(self, metrics: tuple[str, ...], rows: int, columns: int) -> None:
        self.metrics = metrics
        self._capacity = 2 * max(2, columns)
        shape = (len(metrics), rows, self._capacity)
        self._sums: NDArray[np.float32] = np.zeros(shape, np.float32)
        self._counts: NDArray[np.float32] = np.zeros(shape, np.float32)
        self._first: list[int] = []
        self._last: list[int] = []
        self._width = 1
        self._in_column = 0

    def grow(self, rows: int) -> None:
        """Add rows for parameters that were not there before."""
        missing = rows - self._sums.shape[1]
        if missing > 0:
            pad = ((0, 0), (0, missing), (0, 0))
            self._sums, self._counts = np.pad(self._sums, pad), np.pad(self._counts, pad)

    def add(self, step: int, rows: NDArray[np.int64], values: NDArray[Any]) -> None:
        """Add one observation: `values[metric, i]` belongs to row `rows[i]`; NaN is no value."""
        if not self._last or self._in_column == self._width:
            if len(self._last) == self._capacity:
                self._merge()
            self._first.append(step)
            self._last.append(step)
            self._in_column = 0
        self._last[-1] = step
        self._in_column += 1
        at = len(self._last) - 1
        with np.errstate(over="ignore"):
            kept = np.nan_to_num(values.astype(np.float32), nan=0.0, posinf=np.inf, neginf=-np.inf)
        with np.errstate(invalid="ignore"):
            self._sums[:, rows, at] += kept
        self._counts[:, rows, at] += ~np.isnan(values)

    def _merge(self) -> None:
        half = self._capacity // 2
        for array in (self._sums, self._counts):
            with np.errstate(invalid="ignore"):
                array[:, :, :half] = array[:, :, 0::2] + array[:, :, 1::2]
            array[:, :, half:] = 0
        self._first = self._first[0::2]
        self._last = self._last[1::2]
        self._width *= 2
        self._in_column = self._width

    @property
    def steps(self) -> NDArray[np.int64]:
        """Last step of each column."""
        return np.array(self._last, np.int64)

    def means(self, metric: str, rows: NDArray[np.int64], columns: int) -> tuple[list[int], Array]:
        """Return the last step of each of at most `columns` columns, and the means by row."""
        used = len(self._last)
        edges = bin_edges(used, columns)
        at = self.metrics.index(metric)
        if not used:
            return [], np.zeros((len(rows), 0))
        with np.errstate(invalid="ignore", divide="ignore"):
            sums = np.add.reduceat(self._sums[at, rows, :used].astype(np.float64), edges, axis=1)
            counts = np.add.reduceat(self._counts[at, rows, :used], edges, axis=1)
            means = np.where(counts > 0, sums / counts, np.nan)
        # Inf - Inf is NaN; both mean that a value was not finite.
        return last_of(self.steps, edges), np.where((counts > 0) & np.isnan(means), np.inf, means)
