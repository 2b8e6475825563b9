"""Which elements of a parameter are read.

A sample is chosen in the index space of the unsharded parameter from its name and a seed, so it is
the same on every rank, under every sharding and after every resume.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from csrc_triton.row_layout import GROUPS, RUN

Indices = NDArray[np.int64]


@dataclass(frozen=True)
class Sample:
    """A stratified sample of one parameter, seen as `rows` rows of equal length.

    Each row is cut into cells of `run` neighboring elements (the last one may be shorter). Rows are
    split into `row_strata` equal parts and the cells of a row into `cell_strata`; in each of the
    row_strata x cell_strata rectangles one cell is drawn uniformly, and all its elements are read.
    So every element is equally likely to be read, and sums over the sample are unbiased.

    The indices are computed on request: kept for every parameter they would be 8 KB each, on every
    rank.
    """

    name: str
    numel: int
    seed: int
    row_strata: int
    cell_strata: int
    rows: int = 1
    run: int = RUN

    @property
    def row_length(self) -> int:
        """Elements in a row."""
        return self.numel // self.rows

    @property
    def cells(self) -> int:
        """Cells in a row."""
        return -(-self.row_length // self.run)

    @property
    def whole(self) -> bool:
        """Whether every element is read, so that nothing is estimated."""
        return self.row_strata >= self.rows and self.cell_strata >= self.cells

    @property
    def expansion(self) -> float:
        """A sum over the sample times this is an unbiased estimate of the sum over all elements."""
        if self.whole:
            return 1.0
        return (self.rows / self.row_strata) * (self.cells / self.cell_strata)

    @cached_property
    def count(self) -> int:
        """Elements in the sample."""
        if self.whole:
            return self.numel
        full = self.row_strata * self.cell_strata * self.run
        short = self.row_length % self.run
        if not short:
            return full
        # Only the last cell of a row is shorter than the others, and only the last stratum has it.
        last = self._cells(first=self.cell_strata - 1) == self.cells - 1
        return full - int(last.sum()) * (self.run - short)

    @property
    def by_lane(self) -> bool:
        """Whether an element's group is its place within its run instead of the run's number.

        Where every row is sampled, each place within the runs is a sample of all rows by itself, so
        the spread between groups is that within rows, however much the rows differ.
        """
        return self.row_strata == self.rows > 1

    @property
    def starts(self) -> Indices:
        """Flat index of the first element of each run in the unsharded parameter."""
        if self.whole:
            return np.arange(0, self.numel, self.run, dtype=np.int64)
        rows = np.arange(self.rows, dtype=np.int64)[:, None]
        if self.row_strata < self.rows:
            rows = _points(self._uniform("rows", 0).T, self.rows, self.row_strata).T
        return (rows * self.row_length + self._cells() * self.run).reshape(-1)

    def lengths(self, starts: Indices) -> Indices:
        """Elements in each of the runs that begin at `starts`."""
        if self.whole:
            return np.minimum(self.run, self.numel - starts)
        return np.minimum(self.run, self.row_length - starts % self.row_length)

    def groups(self, runs: int) -> Indices:
        """Group of each run; for a sample `by_lane`, that of its first element."""
        number = np.arange(runs, dtype=np.int64)
        if self.whole or self.row_strata == 1:
            return number % GROUPS
        if self.by_lane:
            return np.zeros(runs, dtype=np.int64)
        return number // self.cell_strata % GROUPS

    @property
    def indices(self) -> Indices:
        """Flat indices into the unsharded parameter, run after run."""
        if self.whole:
            return np.arange(self.numel, dtype=np.int64)
        starts = self.starts
        elements = starts[:, None] + np.arange(self.run)
        return elements[np.arange(self.run) < self.lengths(starts)[:, None]]

    @property
    def element_groups(self) -> Indices:
        """Group of each of the `indices`."""
        starts = self.starts
        lanes = np.arange(self.run)
        groups = np.repeat(self.groups(len(starts))[:, None], self.run, axis=1)
        if self.by_lane and not self.whole:
            groups += lanes
        return groups[lanes < self.lengths(starts)[:, None]]

    @property
    def group_share(self) -> NDArray[np.float64]:
        """Share of the sample that falls into each of the GROUPS."""
        if not self.count:
            return np.full(GROUPS, 1 / GROUPS)
        return np.bincount(self.element_groups, minlength=GROUPS) / self.count

    def _cells(self, first: int = 0) -> Indices:
        """Cell drawn in each rectangle, [row_strata, cell_strata - first]; see `_points`."""
        return _points(self._uniform("", first), self.cells, self.cell_strata, first)

    def _uniform(self, axis: str, first: int) -> NDArray[np.float64]:
        """Numbers in [0, 1) for [row_strata, cell_strata - first] rectangles."""
        numbers = np.arange(self.row_strata, dtype=np.uint64)[:, None] * np.uint64(self.cell_strata)
        columns = np.arange(first + 1, self.cell_strata + 1, dtype=np.uint64)
        return _uniform(self.name, f"{self.seed}{axis}", numbers + columns)


def choose(name: str, numel: int, sample_size: int, seed: int) -> Sample:
    """Sample about `sample_size` elements of a parameter in runs of RUN, spread evenly over it."""
    return Sample(name, numel, seed, row_strata=1, cell_strata=-(-sample_size // RUN))


def _points(uniform: NDArray[np.float64], available: int, strata: int, first: int = 0) -> Indices:
    """Draw one of the `available` items in each of the strata from `first` on (last axis)."""
    if strata >= available:
        return np.broadcast_to(np.arange(first, available, dtype=np.int64), uniform.shape)
    stratum = np.arange(first, strata, dtype=np.float64)
    points = (stratum + uniform) * (available / strata)
    # Rounding must not carry a point beyond its stratum, least of all into the last item, which may
    # be a shorter cell.
    last = np.where(stratum < strata - 1, available - 2, available - 1)
    return np.minimum(points.astype(np.int64), last)


def _uniform(name: str, seed: str, places: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Uniform numbers in [0, 1) by name, seed and place in the sequence only (splitmix64)."""
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    with np.errstate(over="ignore"):
        z = np.uint64(int.from_bytes(digest, "little")) + np.uint64(0x9E3779B97F4A7C15) * places
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z ^= z >> np.uint64(31)
    return (z >> np.uint64(11)).astype(np.float64) * 2.0**-53


def hash48(*texts: str) -> int:
    """Return a hash that a float64 holds exactly."""
    digest = hashlib.blake2b("\n".join(texts).encode(), digest_size=6).digest()
    return int.from_bytes(digest, "little")
