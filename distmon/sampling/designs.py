"""How the gradient and the weight of each parameter are sampled, from its shape alone.

Gradients of language models are row-structured: most of an embedding's squared norm lies in the
rows of a few frequent tokens, which a sample that is spread evenly misses. So every row (or, in a
matrix that is stored the other way round, every column) of a tall matrix is sampled. Gradients need
no snapshot, so reading more of them takes time but little memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Final

from csrc_triton.row_layout import GROUPS, RUN
from distmon.sampling.sample import Sample, choose
from distmon.sampling.sample_numbers import SampleNumbers
from distmon.sampling.samples import Samples

WHOLE_UP_TO: Final = 8192
"""Elements up to which a gradient is read whole."""
RUNS_ELSEWHERE: Final = 1024
TALL: Final = 4096
"""Rows from which on every row is sampled."""
VOCABULARY_RUNS: Final = 3 << 15
"""Runs in a matrix with 4 times as many rows as columns: its squared norm may lie in few rows."""
SHORT_ROW: Final = 4 * RUN
"""Elements up to which the rows of a tall matrix are read whole: reading one run of each moves half
of the cache lines. Where a few rows have most of the gradient, one run of four covered 90%."""
MOST_POINTS: Final = 8192
"""Single elements of a tall weight: each is a cache line to wait for, before and after a step."""
FREE_POINTS: Final = 1 << 17
"""Elements of all weights that are sampled whatever the limits, as far as tall matrices have rows:
tables and snapshot of 1 to 1.5 MB. A model of few parameters may be tables of which a step moves a
hundred rows in 100 000, and a sample of some thousand rows sees a handful of them."""
TABLE_POINTS: Final = 1 << 20
"""What FREE_POINTS is in a model that is mostly tables looked up by rows: 8 to 12 MB. With weights
in bf16 a step changes a fifth of the elements of the rows that it moves: one element of each row
shows a dozen of them, and 8 show a hundred."""
MOST_RUNS: Final = 1 << 22
"""Runs in all tall matrices together: tables of 20 MB over all ranks."""


def gradient_samples(names: Sequence[str], shapes: Sequence[tuple[int, ...]], seed: int) -> Samples:
    """Return the sample of every gradient."""
    by_shape = {shape: _gradient_sample("", shape, seed, tall=True) for shape in {*shapes}}
    samples = Samples(names, (by_shape[shape] for shape in shapes))
    designs = samples.designs
    by_row = [i for i, like in enumerate(designs) if like.rows > 1 and not like.whole]
    tables = [i for i in by_row if is_tall(shapes[i]) and _tallness(shapes[i]) >= 4]
    runs = sum(_runs(designs[i]) for i in tables)
    if runs > MOST_RUNS:  # in as many rows as there is room for, the same share of every table
        for i in tables:
            share = max(RUNS_ELSEWHERE, _runs(designs[i]) * MOST_RUNS // runs)
            designs[i] = _some_rows(names[i], shapes[i], seed, share)
    runs = sum(_runs(designs[i]) for i in by_row)
    # The least tall ones first: the fewer rows for its columns, the less a matrix depends on them.
    for i in sorted({*by_row} - {*tables}, key=lambda i: _tallness(shapes[i])):
        if runs <= MOST_RUNS:
            break
        runs -= _runs(designs[i])
        designs[i] = _gradient_sample(names[i], shapes[i], seed, tall=False)
    return samples


def weight_samples(
    names: Sequence[str], shapes: Sequence[tuple[int, ...]], sample_size: int, seed: int
) -> Samples:
    """Return the sample of every weight and its update: `sample_size` elements of each.

    What small parameters leave of 1.5 x `sample_size` x parameters, the elements whose tables and
    snapshot take 12 bytes x `sample_size` x parameters, goes to single elements in as many rows of
    tall matrices, up to MOST_POINTS in each. As far as FREE_POINTS or TABLE_POINTS in all allow,
    every row has one, or a run where that fits: a run is one cache line, as a single element is.
    """
    by_shape = {shape: choose("", prod(shape), sample_size, seed) for shape in {*shapes}}
    samples = Samples(names, (by_shape[shape] for shape in shapes))
    designs = samples.designs
    tables = {i for i, shape in enumerate(shapes) if _is_table(shape) and not designs[i].whole}
    tall = {i for i, shape in enumerate(shapes) if is_tall(shape) and not designs[i].whole}
    in_tables = sum(designs[i].numel for i in tables)
    mostly_tables = 2 * in_tables > sum(like.numel for like in designs)
    most_points = TABLE_POINTS if mostly_tables else FREE_POINTS
    # Of the bias of a head over a vocabulary as few elements move far as rows of the head do, and
    # it is small beside the head.
    vectors = {i for i in tall if len(shapes[i]) == 1}
    if 2 * sum(designs[i].numel for i in vectors) <= most_points:
        for i in vectors:
            designs[i] = whole_sample(names[i], designs[i].numel, seed)
        tall -= vectors
    used = int(SampleNumbers.of(samples).count.sum())
    room = 3 * sample_size * len(samples) // 2 - used
    free = max(0, most_points - used)
    order = sorted(tables | tall, key=lambda i: (shapes[i][0], names[i]))
    matrices = sum(len(shapes[i]) > 1 for i in order)  # a vector has no rows that a step looks up
    for left, i in zip(range(len(order), 0, -1), order, strict=True):
        rows, numel, is_matrix = shapes[i][0], designs[i].numel, len(shapes[i]) > 1
        most = sample_size + (free // matrices if is_matrix else 0)
        if RUN * rows <= min(numel, most):
            designs[i] = Sample(names[i], numel, seed, row_strata=rows, cell_strata=1, rows=rows)
        elif i in tall:
            points = min(numel if i in tables and mostly_tables else rows, most)
            points = max(points, min(rows, MOST_POINTS, sample_size + room // left))
            designs[i] = Sample(names[i], numel, seed, row_strata=1, cell_strata=points, run=1)
        room, free = (n - (samples[i].count - sample_size) for n in (room, free))
        matrices -= is_matrix
    return samples


def is_tall(shape: tuple[int, ...]) -> bool:
    """Whether every row of a parameter is sampled. A long vector has rows of one element."""
    return len(shape) > 0 and shape[0] >= TALL


def _is_table(shape: tuple[int, ...]) -> bool:
    """Whether a matrix is likely to be looked up by rows: few layers are that narrow."""
    return len(shape) == 2 and shape[0] >= 16 * shape[1]


def _gradient_sample(name: str, shape: tuple[int, ...], seed: int, tall: bool) -> Sample:
    numel = prod(shape)
    if numel <= WHOLE_UP_TO:
        return whole_sample(name, numel, seed)
    if tall and is_tall(shape):
        rows, length = shape[0], numel // shape[0]
        if length < RUN and numel > MOST_RUNS * RUN:  # rows shorter than a run, too many for whole
            return choose(name, numel, VOCABULARY_RUNS * RUN, seed)
        if length <= SHORT_ROW and numel <= MOST_RUNS * RUN:
            return whole_sample(name, numel, seed)
        runs = max(1, VOCABULARY_RUNS // rows) if rows >= 4 * length else 1
        return Sample(name, numel, seed, row_strata=rows, cell_strata=runs, rows=rows)
    if tall and len(shape) > 1 and shape[-1] >= max(TALL, 4 * (numel // shape[-1])):
        # Stored the other way round: each of the 8 groups has a run in every cell of columns.
        rows, cells = numel // shape[-1], -(-shape[-1] // RUN)
        return Sample(name, numel, seed, min(GROUPS, rows), cells, rows=rows)
    return choose(name, numel, RUNS_ELSEWHERE * RUN, seed)


def _some_rows(name: str, shape: tuple[int, ...], seed: int, runs: int) -> Sample:
    """Return a sample of one run in so many rows, or of as many runs in every row."""
    rows = shape[0]
    return Sample(name, prod(shape), seed, min(rows, runs), max(1, runs // rows), rows=rows)


def whole_sample(name: str, numel: int, seed: int) -> Sample:
    """Return the sample that is the whole parameter."""
    return Sample(name, numel, seed, row_strata=1, cell_strata=-(-numel // RUN))


def _runs(sample: Sample) -> int:
    return sample.row_strata * min(sample.cell_strata, sample.cells)


def _tallness(shape: tuple[int, ...]) -> float:
    numel = prod(shape)
    return max(shape[0] ** 2 / numel, shape[-1] ** 2 / numel)
