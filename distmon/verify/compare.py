"""Compare the records of all ranks with the unsharded reference. A pure function of both."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import nan
from typing import Final

import numpy as np

from csrc_triton.row_layout import BIN_WIDTH, HALF_BINS
from distmon.record.record import Record
from distmon.verify.columns import COLUMNS, TOTALS
from distmon.verify.compare_inside import SPECTRA_FROM, compare_activity, compare_spectra
from distmon.verify.cost import bytes_of_observation, cost_problems
from distmon.verify.coverage import Coverage, coverage
from distmon.verify.difference import Difference, relative
from distmon.verify.expected import Expected
from distmon.verify.expected_row import Floats
from distmon.verify.observe import Observed
from distmon.verify.parallelisms import Limits

_LOSS_ROUNDINGS: Final = 16
"""A model may compute its loss in float32; the mean over ranks then rounds a few times more."""
_COUNT_LIMIT = 1e-12
"""Counts must be equal; this allows for rounding in the quotient of two counts."""


@dataclass(frozen=True)
class Comparison:
    """One parallelism compared with the unsharded reference."""

    differences: tuple[Difference, ...]
    """One for each column."""
    problems: tuple[str, ...]
    """Everything else that is wrong, one sentence each."""
    sampled: tuple[int, ...]
    """Number of elements that each rank reads."""
    sample: int
    """Number of elements in the samples of all parameters."""
    collectives: int
    """Collectives per observation; the maximum over ranks and observations."""
    nbytes: int
    """Bytes that one rank sends per observation; the maximum over ranks and observations."""
    coverage: Coverage
    """Error bars against the truth of all elements."""
    not_compared: tuple[str, ...]
    """Parameters whose gradient is rounding noise; their gradients and updates are not compared."""

    @property
    def ok(self) -> bool:
        return not self.problems and not self.off

    @property
    def off(self) -> tuple[Difference, ...]:
        """The columns that differ by more than their limit."""
        return tuple(d for d in self.differences if d.is_off)

    def worst(self, kind: str) -> Difference | None:
        """Return the largest difference of this kind, preferring those beyond their limit."""
        mine = [d for d in self.differences if d.kind == kind]
        return max(mine, key=lambda d: (d.is_off, d.size), default=None)


def compare(
    expected: Sequence[Expected], ranks: Sequence[Observed], limits: Limits, interval: int
) -> Comparison:
    """Compare the records of all ranks with the reference of the same steps."""
    first = ranks[0]
    names = expected[0].names
    problems = _incomparable(expected, ranks)
    differences: list[Difference] = []
    covered = Coverage(0, 0, 0, ())
    if not problems:
        problems += _reported_problems(ranks)
        problems += _mismatched_ranks(ranks)
        order = [first.records[0].params.names.index(name) for name in names]
        for i, (truth, record) in enumerate(zip(expected, first.records, strict=True)):
            differences += _record(truth, record, order, limits)
            differences += compare_activity(truth, record, first.watched, limits)
            if i >= SPECTRA_FROM:
                began = expected[i - first.spectra_lag]
                differences += compare_spectra(began, record, first.watched, limits)
        covered = coverage(expected, first.records, order, limits)
        problems += covered.problems
        problems += _uneven_replicas(expected[0], ranks)
        problems += cost_problems(ranks, bytes_of_observation(expected[0], ranks, interval))
    noise = np.any([truth.noise for truth in expected], axis=0)
    return Comparison(
        differences=_worst_by_column(differences),
        problems=tuple(dict.fromkeys(problems)),
        sampled=tuple(sum(rank.sampled.values()) for rank in ranks),
        sample=int(expected[0].sampled.sum()),
        collectives=max((n for rank in ranks for n in rank.collectives), default=0),
        nbytes=max((n for rank in ranks for n in rank.nbytes), default=0),
        coverage=covered,
        not_compared=tuple(np.array(names)[noise]),
    )


def _incomparable(expected: Sequence[Expected], ranks: Sequence[Observed]) -> list[str]:
    """Return the problems that make a comparison by numbers impossible."""
    steps = [truth.step for truth in expected]
    for i, rank in enumerate(ranks):
        if [record.step for record in rank.records] != steps:
            return [f"the steps of the records on rank {i} are not {steps}"]
        if any(r.params.names != ranks[0].records[0].params.names for r in rank.records):
            return [f"the records on rank {i} have different parameters from those on rank 0"]
    names = ranks[0].records[0].params.names
    findings = (
        ("not observed", set(expected[0].names) - set(names)),
        ("observed, but not in the model", set(names) - set(expected[0].names)),
        ("observed twice", {name for name in names if names.count(name) > 1}),
    )
    return [
        f"{len(some)} parameters are {words}: {', '.join(sorted(some)[:3])}"
        for words, some in findings
        if some
    ]


def _reported_problems(ranks: Sequence[Observed]) -> Iterator[str]:
    """Yield the problems that the records themselves report."""
    for record in (record for rank in ranks for record in rank.records):
        at = f"step {record.step}: "
        yield from (at + fault for fault in record.faults)
        if not record.applied:
            yield at + "the record reports a skipped step"
        if record.has_nonfinite:
            yield at + "the record reports non-finite values"
        if record.desync is not None:
            diverged = ", ".join(map(str, record.desync.ranks))
            params = ", ".join(record.desync.params[:3])
            yield at + f"the record reports that rank {diverged} diverged in {params}"


def _mismatched_ranks(ranks: Sequence[Observed]) -> Iterator[str]:
    """Yield the first column that is not bitwise equal on all ranks."""
    for i, rank in enumerate(ranks[1:], 1):
        for first, other in zip(ranks[0].records, rank.records, strict=True):
            for name, values in first.params.columns.items():
                if not np.array_equal(values, other.params.columns[name], equal_nan=True):
                    yield f"step {first.step}: {name} on rank {i} differs from that on rank 0"
                    return


def _record(
    truth: Expected, record: Record, order: list[int], limits: Limits
) -> Iterator[Difference]:
    """Yield the worst parameter of every column of one record."""
    found = {**record.params.columns, **record.params.percentiles}
    skipped = truth.skipped(limits)
    for column in COLUMNS:
        want, have = truth.columns[column.name], found[column.name][order]
        scale = _scale(truth, column.scale, want)
        size = relative(want, have, scale)
        if column.name.startswith(("grad_", "update_")) or column.name == "has_grad":
            size = np.where(skipped, 0.0, size)
        limit = getattr(limits, column.limit) if column.limit else _COUNT_LIMIT
        if column.kind == "percentiles" and limits.bins > 0:
            # Rounding may move an element into the next bin, and the percentile by a bin's width.
            with np.errstate(divide="ignore", invalid="ignore"):
                width = BIN_WIDTH * np.abs(want) / scale
            size = np.maximum(size - np.where(np.isfinite(width), width, 0.0), 0.0)
        yield _worst(column.name, column.kind, size, limit, truth, want, have)
    if record.params.grad_histogram is not None:
        moved = _moved(truth.histogram, record.params.grad_histogram[order].astype(np.float64))
        moved = np.where(skipped, 0.0, moved)
        zero = np.zeros(len(moved))
        yield _worst("grad_histogram", "percentiles", moved, limits.bins, truth, zero, moved)
    for tag, kind in TOTALS.items():
        if truth.noise.any() and not tag.endswith("_norm"):
            continue  # a median or a count may depend on a parameter that is not compared
        if kind == "gradients" and (skipped & ~truth.noise).any():
            continue
        a, b = truth.totals[tag], record.metrics.get(tag, nan)
        limit = _COUNT_LIMIT if kind == "counts" else getattr(limits, kind)
        yield Difference(tag, kind, _relative_scalar(a, b), limit, "", truth.step, a, b)
    for step, a in truth.losses.items():
        b = record.losses.get(step, nan)
        limit = max(limits.loss, _LOSS_ROUNDINGS * truth.loss_eps)
        yield Difference("loss", "loss", _relative_scalar(a, b), limit, "", step, a, b)


def _scale(truth: Expected, scale: str, want: Floats) -> Floats:
    if not scale:
        return np.ones_like(want)
    squares = sum((truth.columns[name] ** 2 for name in scale.split()), np.zeros_like(want))
    return np.asarray(np.sqrt(squares))


def _relative_scalar(want: float, have: float) -> float:
    return float(relative(np.array([want]), np.array([have]), np.array([abs(want)]))[0])


def _moved(want: Floats, have: Floats) -> Floats:
    """Return the fraction of each parameter's counts that are in a different bin."""
    # A zero may be in either of the two innermost bins, depending on its sign.
    want, have = want.copy(), have.copy()
    for counts in (want, have):
        counts[:, HALF_BINS] += counts[:, HALF_BINS - 1]
        counts[:, HALF_BINS - 1] = 0
    total = np.maximum(want.sum(1), 1)
    moved: Floats = np.abs(want - have).sum(1) / 2 / total
    return moved


def _worst(
    column: str,
    kind: str,
    size: Floats,
    limit: float,
    truth: Expected,
    want: Floats,
    have: Floats,
) -> Difference:
    i = int(np.argmax(size))
    values = (float(x[i]) for x in (want, have))
    return Difference(column, kind, float(size[i]), limit, truth.names[i], truth.step, *values)


def _worst_by_column(differences: Sequence[Difference]) -> tuple[Difference, ...]:
    worst: dict[str, Difference] = {}
    for difference in differences:
        old = worst.get(difference.column)
        if old is None or difference.size > old.size:
            worst[difference.column] = difference
    return tuple(worst.values())


def _uneven_replicas(truth: Expected, ranks: Sequence[Observed]) -> Iterator[str]:
    """Yield parameters whose sampled elements are not all read by the same number of ranks."""
    for name, sample in zip(truth.names, truth.sampled.tolist(), strict=True):
        read = sum(rank.sampled.get(name, 0) for rank in ranks)
        if sample and (read < sample or read % sample):
            yield f"{read} elements of {name} are read, not a multiple of its sample of {sample}"
