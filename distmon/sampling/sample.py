"""Which elements of a parameter are read.

A sample is chosen in the index space of the unsharded parameter from its name and a seed, so it is
the same on every rank, under every sharding and after every resume.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from csrc_triton.row_layout import GROUPS, RUN

Indices = NDArray[np.int64]
Design = tuple[int, int, int, int, int]
"""Elements of the parameter, row strata, cell strata, rows and run of a sample."""
REPLICA_CLASSES = 4
"""Ways of sharding within one model whose replicas are compared separately."""


@dataclass(frozen=True, slots=True)
class Sample:
    """A stratified sample of one parameter, seen as `rows` rows of equal length.

    Each row is cut into cells of `run` neighboring elements (the last one may be shorter). Rows are
    split into `row_strata` equal parts and the cells of a row into `cell_strata`; in each of the
    row_strata x cell_strata rectangles one cell is drawn uniformly, and all its elements are read.
    So every element is equally likely to be read, and sums over the sample are unbiased.

    The indices are computed on request: kept for every parameter they would be 8 KB each, on every
    rank. `draw` computes those of many samples of one design at once.
    """

    name: str
    numel: int
    seed: int
    row_strata: int
    cell_strata: int
    rows: int = 1
    run: int = RUN

    @property
    def design(self) -> Design:
        """All but name and seed: samples of one design differ in the random numbers only."""
        return self.numel, self.row_strata, self.cell_strata, self.rows, self.run

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

    @property
    def count(self) -> int:
        """Elements in the sample."""
        return int(count_elements(self, [self.name])[0])

    @property
    def by_lane(self) -> bool:
        """Whether an element's group is its place within its run instead of the run's number.

        Where every row is sampled, each place within the runs is a sample of all rows by itself, so
        the spread between groups is that within rows, however much the rows differ.
        """
        return self.row_strata == self.rows > 1 and not self.whole

    @property
    def starts(self) -> Indices:
        """Flat index of the first element of each run in the unsharded parameter."""
        return np.asarray(draw(self, [self.name], 0, self.numel).starts[0])

    def lengths(self, starts: Indices) -> Indices:
        """Elements in each of the runs that begin at `starts`."""
        if self.whole:
            return np.minimum(self.run, self.numel - starts)
        return np.minimum(self.run, self.row_length - starts % self.row_length)

    def groups(self, numbers: Indices) -> Indices:
        """Group of each of the runs with these numbers; if `by_lane`, that of its first element."""
        if self.whole or self.row_strata == 1:
            return numbers % GROUPS
        if self.by_lane:
            return np.zeros_like(numbers)
        return numbers // self.cell_strata % GROUPS

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
        numbers = np.arange(len(starts), dtype=np.int64)
        groups = np.repeat(self.groups(numbers)[:, None], self.run, axis=1)
        if self.by_lane:
            groups += lanes
        return groups[lanes < self.lengths(starts)[:, None]]

    @property
    def group_share(self) -> NDArray[np.float64]:
        """Share of the sample that falls into each of the GROUPS."""
        return np.asarray(group_shares(self, [self.name])[0])


@dataclass(frozen=True)
class DrawnRuns:
    """Runs of several samples of one design."""

    numbers: Indices
    """[runs]: number of each run within its sample."""
    starts: Indices
    """[samples, runs]: flat index of its first element in the unsharded parameter."""
    lengths: Indices
    """[samples, runs]"""


def choose(name: str, numel: int, sample_size: int, seed: int) -> Sample:
    """Sample about `sample_size` elements of a parameter in runs of RUN, spread evenly over it."""
    return Sample(name, numel, seed, row_strata=1, cell_strata=-(-sample_size // RUN))


def draw(s: Sample, names: Sequence[str], begin: int, end: int) -> DrawnRuns:
    """Return the runs of samples like `s` of these names in the strata that meet `begin` to `end`.

    A rank of many holds a short range of each parameter, and strata lie in the order of the
    elements, so only the few that may fall into it are computed.
    """
    if s.whole:
        numbers = np.arange(begin // s.run, -(-end // s.run), dtype=np.int64)
        starts = np.broadcast_to(numbers * s.run, (len(names), len(numbers)))
        return DrawnRuns(numbers, starts, s.lengths(starts))
    row, last_row = begin // s.row_length, (end - 1) // s.row_length
    row_strata = _strata_of(row, last_row, s.rows, s.row_strata)
    cell_strata = np.arange(s.cell_strata, dtype=np.int64)
    if row == last_row:  # else all cells of a row between them
        first, last = begin - row * s.row_length, end - 1 - row * s.row_length
        cell_strata = _strata_of(first // s.run, last // s.run, s.cells, s.cell_strata)
    numbers = row_strata[:, None] * s.cell_strata + cell_strata
    cells = _points(_uniform(s, names, "", numbers), s.cells, s.cell_strata, cell_strata)
    rows = row_strata[:, None]
    if s.row_strata < s.rows:
        uniform = _uniform(s, names, "rows", numbers)
        rows = _points(uniform, s.rows, s.row_strata, rows)
    starts = (rows * s.row_length + cells * s.run).reshape(len(names), -1)
    return DrawnRuns(numbers.reshape(-1), starts, s.lengths(starts))


def count_elements(s: Sample, names: Sequence[str]) -> Indices:
    """Return the number of elements in each of the samples like `s` of these names."""
    if s.whole:
        return np.full(len(names), s.numel)
    missing = _drew_short_cell(s, names).sum(1) * _missing_in_short_cell(s)
    return np.asarray(s.row_strata * s.cell_strata * s.run - missing)


def group_shares(s: Sample, names: Sequence[str]) -> NDArray[np.float64]:
    """Return how the elements of samples like `s` of these names fall into the GROUPS.

    A row for each of them, or one for all where chance brings no short cells into some.
    """
    if s.whole:
        full, rest = divmod(s.numel, s.run)
        found = (full // GROUPS + (np.arange(GROUPS) < full % GROUPS)) * s.run
        found[full % GROUPS] += rest
        return found[None] / s.numel if s.numel else np.full((1, GROUPS), 1 / GROUPS)
    runs, lanes = s.row_strata * s.cell_strata, np.arange(GROUPS)
    lost = _missing_in_short_cell(s)
    short = _drew_short_cell(s, names if lost else names[:1])
    if s.by_lane:
        cut = (lanes >= s.run - lost) & (lanes < s.run)
        found = (lanes < s.run) * runs - np.where(cut, short.sum(1)[:, None], 0)
    else:
        groups = s.groups(np.arange(runs, dtype=np.int64))
        last = groups[s.cell_strata - 1 :: s.cell_strata]
        missing = lost * np.stack([short[:, last == g].sum(1) for g in range(GROUPS)], 1)
        found = np.bincount(groups, minlength=GROUPS) * s.run - missing
    return np.asarray(found / found.sum(1, keepdims=True))


def _missing_in_short_cell(sample: Sample) -> int:
    """Return by how many elements the last cell of a row is shorter than the others."""
    return -sample.row_length % sample.run


def _drew_short_cell(s: Sample, names: Sequence[str]) -> NDArray[np.bool_]:
    """Return [names, row_strata]: whether the last stratum of the row drew a shorter cell."""
    if not _missing_in_short_cell(s):
        return np.zeros((len(names), s.row_strata), dtype=bool)
    last = np.array([s.cell_strata - 1])
    numbers = np.arange(s.row_strata, dtype=np.int64)[:, None] * s.cell_strata + last
    drawn = _points(_uniform(s, names, "", numbers), s.cells, s.cell_strata, last)
    return np.broadcast_to(drawn[..., 0] == s.cells - 1, (len(names), s.row_strata))


def _strata_of(first: int, last: int, available: int, strata: int) -> Indices:
    """Return the strata from which an item from `first` to `last` may be drawn."""
    if strata >= available:
        return np.arange(first, last + 1, dtype=np.int64)
    # One more on each side: rounding may move a point by an item.
    begin = max(0, int(first * strata / available) - 1)
    end = min(strata, int(last * strata / available) + 2)
    return np.arange(begin, end, dtype=np.int64)


def _points(uniform: NDArray[np.float64], available: int, strata: int, stratum: Indices) -> Indices:
    """Return which of the `available` items is drawn from each stratum."""
    if strata >= available:
        return np.broadcast_to(stratum, uniform.shape)
    points = (stratum + uniform) * (available / strata)
    # Rounding must not carry a point beyond its stratum, least of all into the last item, which may
    # be a shorter cell.
    last = np.where(stratum < strata - 1, available - 2, available - 1)
    return np.minimum(points.astype(np.int64), last)


def _uniform(s: Sample, names: Sequence[str], axis: str, numbers: Indices) -> NDArray[np.float64]:
    """Numbers in [0, 1), [names, *numbers.shape], by name, seed and number only (splitmix64)."""
    texts = (f"{s.seed}{axis}:{name}".encode() for name in names)
    digests = b"".join(hashlib.blake2b(text, digest_size=8).digest() for text in texts)
    seeds = np.frombuffer(digests, dtype="<u8").reshape(-1, *(1,) * numbers.ndim)
    with np.errstate(over="ignore"):
        z = seeds + np.uint64(0x9E3779B97F4A7C15) * (numbers.astype(np.uint64) + np.uint64(1))
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z ^= z >> np.uint64(31)
    return np.asarray((z >> np.uint64(11)).astype(np.float64) * 2.0**-53)


def hash48(*texts: str) -> int:
    """Return a hash that a float64 holds exactly."""
    return hash48_of(texts)


def hash48_of(texts: Iterable[str]) -> int:
    """Return `hash48` of many texts, without holding all of them."""
    digest = hashlib.blake2b(digest_size=6)
    for number, text in enumerate(texts):
        digest.update(f"\n{text}".encode() if number else text.encode())
    return int.from_bytes(digest.digest(), "little")
