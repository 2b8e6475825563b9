"""Compare what a record has of the inside of the model with the unsharded reference."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import nan
from typing import Final

import numpy as np

from distmon.record.record import Record
from distmon.verify.columns import ACTIVITY_COLUMNS, SPECTRA_COLUMNS, Column
from distmon.verify.difference import Difference, relative
from distmon.verify.expected import Expected
from distmon.verify.expected_inside import Statistics
from distmon.verify.parallelisms import Limits

Watched = Mapping[str, Sequence[str]]
"""Modules, routers and matrices that are watched, by kind."""
SPECTRA_FROM: Final = 2
"""Index of the observation from which on spectral norms are compared: the third. Each sweep begins
with the vectors of the one before it, and the first begins with random ones."""
ESTIMATE_LIMITS: Final = {"spectral_norm": 0.01, "stable_rank": 0.02}
"""An iteration ends before it has every digit; the norm is squared in the stable rank."""


def compare_activity(
    truth: Expected, record: Record, watched: Watched, limits: Limits
) -> Iterator[Difference]:
    """Yield the worst row of every column of activations, attention and experts."""
    for column in ACTIVITY_COLUMNS:
        yield from _column(column, truth, record, watched, limits)


def compare_spectra(
    truth: Expected, record: Record, watched: Watched, limits: Limits
) -> Iterator[Difference]:
    """Yield the worst matrix of every column; `truth` is of the step whose weights were read."""
    for column in SPECTRA_COLUMNS:
        yield from _column(column, truth, record, watched, limits)


def _column(
    column: Column, truth: Expected, record: Record, watched: Watched, limits: Limits
) -> Iterator[Difference]:
    """Yield the worst row of those that both the reference and the monitor watch, if any."""
    table = record.inside.get(column.kind)
    rows = {} if table is None else {name: table.row(name) for name in table.names}
    wanted = truth.inside[column.kind]
    names = [name for name in watched.get(column.kind, ()) if name in wanted]
    if not names:
        return
    want = np.array([wanted[name][column.name] for name in names])
    have = np.array([rows.get(name, {}).get(column.name, nan) for name in names])
    scale = np.array([wanted[name][column.scale] if column.scale else 1.0 for name in names])
    size = relative(want, have, np.abs(scale))
    if column.kind == "activations":
        size = np.where([_not_comparable(column, wanted[n], rows.get(n)) for n in names], 0, size)
    i = int(np.argmax(size))
    limit = max(getattr(limits, column.limit), ESTIMATE_LIMITS.get(column.name, 0.0))
    yield Difference(
        column=f"{column.kind}: {column.name}",
        kind=column.kind,
        size=float(size[i]),
        limit=limit,
        parameter=names[i],
        step=record.step,
        expected=float(want[i]),
        found=float(have[i]),
    )


def _not_comparable(column: Column, want: Statistics, have: Mapping[str, float] | None) -> bool:
    if have is None:
        return False
    if column.name == "dead_fraction":  # units are another dimension, as after a convolution
        return have["units"] != want["units"]
    # An activation that is an output of the model is not counted.
    return column.name == "saturated_fraction" and bool(np.isnan(have[column.name]))
