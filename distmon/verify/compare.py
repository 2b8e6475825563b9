"""Compare what the ranks found with the truth. A pure function of both."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf, nan
from typing import Final

import numpy as np

from csrc_triton.row_layout import BINS, HALF_BINS, MAX_COLUMNS, SUM_COLUMNS
from distmon.layout.arrangements import Limits
from distmon.record import Record
from distmon.reduce import SLOT_SIZE
from distmon.verify.columns import COLUMNS, TOTALS
from distmon.verify.expected import Expected, Floats
from distmon.verify.observe import Observed

COLLECTIVES: Final = 2
_COUNT_LIMIT = 1e-12
"""Counts are equal; this is the rounding of a quotient of two of them."""


@dataclass(frozen=True)
class Difference:
    """The worst difference of one column over all parameters and observations."""

    column: str
    kind: str
    size: float
    """Relative to the truth; infinite when one of both was not measured."""
    limit: float
    parameter: str
    """Empty for a number over all parameters."""
    step: int
    expected: float
    found: float

    @property
    def is_off(self) -> bool:
        return self.size > self.limit


@dataclass(frozen=True)
class Comparison:
    """One arrangement against the truth."""

    differences: tuple[Difference, ...]
    """One for each column."""
    problems: tuple[str, ...]
    """Whatever else is wrong, one sentence each."""
    sampled: tuple[int, ...]
    """Elements read by each rank."""
    sample: int
    """Elements in the samples of all parameters."""
    collectives: int
    """Entered by one observation; the most that was seen."""
    nbytes: int
    """Sent by one rank in one observation."""
    not_compared: tuple[str, ...]
    """Parameters whose gradient is rounding noise: theirs and what follows from it is left out."""

    @property
    def ok(self) -> bool:
        return not self.problems and not self.off

    @property
    def off(self) -> tuple[Difference, ...]:
        """The columns that differ by more than their limit."""
        return tuple(d for d in self.differences if d.is_off)

    def worst(self, kind: str) -> Difference | None:
        """The difference of this kind that is nearest to its limit, or furthest beyond it."""
        mine = [d for d in self.differences if d.kind == kind]
        return max(mine, key=lambda d: (d.is_off, d.size), default=None)


def compare(
    expected: Sequence[Expected], ranks: Sequence[Observed], limits: Limits, interval: int
) -> Comparison:
    """Hold the records of all ranks against the truth of the same steps."""
    first = ranks[0]
    names = expected[0].names
    problems = _misfit(expected, ranks)
    differences: list[Difference] = []
    if not problems:
        problems += _complaints(ranks)
        problems += _not_the_same(ranks)
        order = [first.records[0].params.names.index(name) for name in names]
        for truth, record in zip(expected, first.records, strict=True):
            differences += _record(truth, record, order, limits)
        problems += _replicas(expected[0], ranks)
        problems += _cost(ranks, bytes_of_observation(expected[0], ranks, interval))
    noise = np.any([truth.noise for truth in expected], axis=0)
    return Comparison(
        differences=_worst_by_column(differences),
        problems=tuple(dict.fromkeys(problems)),
        sampled=tuple(sum(rank.sampled.values()) for rank in ranks),
        sample=int(expected[0].sampled.sum()),
        collectives=max((n for rank in ranks for n in rank.collectives), default=0),
        nbytes=max((n for rank in ranks for n in rank.nbytes), default=0),
        not_compared=tuple(np.array(names)[noise]),
    )


def bytes_of_observation(truth: Expected, ranks: Sequence[Observed], interval: int) -> int:
    """What one rank sends: a row for each parameter, a slot for each rank, a loss for each step.

    Of a gradient that is still to be added, also the sampled elements and their share.
    """
    row = 8 * len(SUM_COLUMNS) + 8 * BINS + 4 * len(MAX_COLUMNS)
    added = frozenset[str]().union(*(rank.added for rank in ranks))
    samples: dict[str, int] = dict(zip(truth.names, truth.sampled.tolist(), strict=True))
    elements = sum(samples[name] + 1 for name in added)
    return len(truth.names) * row + len(ranks) * 8 * SLOT_SIZE + 2 * 8 * interval + 8 * elements


def _misfit(expected: Sequence[Expected], ranks: Sequence[Observed]) -> list[str]:
    """What makes a comparison by numbers impossible."""
    steps = [truth.step for truth in expected]
    for i, rank in enumerate(ranks):
        if [record.step for record in rank.records] != steps:
            return [f"rank {i} has records of other steps than {steps}"]
        if any(r.params.names != ranks[0].records[0].params.names for r in rank.records):
            return [f"rank {i} has records of other parameters than rank 0"]
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


def _complaints(ranks: Sequence[Observed]) -> Iterator[str]:
    """What the records themselves say is wrong."""
    for record in (record for rank in ranks for record in rank.records):
        at = f"step {record.step}: "
        yield from (at + fault for fault in record.faults)
        if not record.applied:
            yield at + "the optimizer is said to have skipped it"
        if record.has_nonfinite:
            yield at + "something is said not to be finite"
        if record.desync is not None:
            left = ", ".join(map(str, record.desync.ranks))
            params = ", ".join(record.desync.params[:3])
            yield at + f"rank {left} is said to have left its replicas in {params}"


def _not_the_same(ranks: Sequence[Observed]) -> Iterator[str]:
    """Every rank must have the same record, to the last bit."""
    for i, rank in enumerate(ranks[1:], 1):
        for ours, theirs in zip(ranks[0].records, rank.records, strict=True):
            for name, values in ours.params.columns.items():
                if not np.array_equal(values, theirs.params.columns[name], equal_nan=True):
                    yield f"step {ours.step}: {name} on rank {i} is not that of rank 0"
                    return


def _record(
    truth: Expected, record: Record, order: list[int], limits: Limits
) -> Iterator[Difference]:
    """The worst parameter of every column of one record."""
    found = {**record.params.columns, **record.params.percentiles}
    left_out = truth.noise
    if not limits.unowned_gradients:
        left_out = left_out | (truth.columns["in_optimizer"] == 0)
    for column in COLUMNS:
        want, have = truth.columns[column.name], found[column.name][order]
        size = _relative(want, have, _scale(truth, column.scale, want))
        if column.name.startswith(("grad_", "update_")) or column.name in ("frozen", "has_grad"):
            size = np.where(left_out, 0.0, size)
        limit = getattr(limits, column.limit) if column.limit else _COUNT_LIMIT
        yield _worst(column.name, column.kind, size, limit, truth, want, have)
    if record.params.grad_histogram is not None:
        moved = _moved(truth.histogram, record.params.grad_histogram[order].astype(np.float64))
        moved = np.where(left_out, 0.0, moved)
        zero = np.zeros(len(moved))
        yield _worst("grad_histogram", "percentiles", moved, limits.bins, truth, zero, moved)
    for tag, kind in TOTALS.items():
        if truth.noise.any() and not tag.endswith("_norm"):
            continue  # a median or a count may rest on a parameter that is left out
        if kind == "gradients" and (left_out & ~truth.noise).any():
            continue
        a, b = truth.totals[tag], record.metrics.get(tag, nan)
        limit = _COUNT_LIMIT if kind == "counts" else getattr(limits, kind)
        yield Difference(tag, kind, _relative_scalar(a, b), limit, "", truth.step, a, b)
    for step, a in truth.losses.items():
        b = record.losses.get(step, nan)
        yield Difference("loss", "loss", _relative_scalar(a, b), limits.loss, "", step, a, b)


def _scale(truth: Expected, scale: str, want: Floats) -> Floats:
    if not scale:
        return np.ones_like(want)
    squares = sum((truth.columns[name] ** 2 for name in scale.split()), np.zeros_like(want))
    return np.asarray(np.sqrt(squares))


def _relative(want: Floats, have: Floats, scale: Floats) -> Floats:
    """|have - want| / scale; 0 where both are missing or equal, infinite where one is missing."""
    with np.errstate(invalid="ignore", divide="ignore"):
        size = np.abs(have - want) / scale
    size = np.where(np.isnan(size), inf, size)
    return np.where((want == have) | (np.isnan(want) & np.isnan(have)), 0.0, size)


def _relative_scalar(want: float, have: float) -> float:
    return float(_relative(np.array([want]), np.array([have]), np.array([abs(want)]))[0])


def _moved(want: Floats, have: Floats) -> Floats:
    """Share of each parameter's counts that lie in another bin."""
    # A zero may lie in either of the two innermost bins: its sign means nothing.
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


def _replicas(truth: Expected, ranks: Sequence[Observed]) -> Iterator[str]:
    """Every sampled element must be read by the same number of ranks, at least one."""
    for name, sample in zip(truth.names, truth.sampled.tolist(), strict=True):
        read = sum(rank.sampled.get(name, 0) for rank in ranks)
        if sample and (read < sample or read % sample):
            yield f"{read} elements of {name} are read, which is no multiple of its sample {sample}"


def _cost(ranks: Sequence[Observed], nbytes: int) -> Iterator[str]:
    alone = len(ranks) == 1
    collectives = 0 if alone else COLLECTIVES
    for i, rank in enumerate(ranks):
        for n in rank.collectives:
            if n != collectives:
                yield f"rank {i} enters {n} collectives in an observation, not {collectives}"
        for n, record in zip(rank.nbytes, rank.records, strict=True):
            told = record.metrics["performance/monitor_bytes"]
            if told != nbytes or (not alone and n != told):
                yield f"rank {i} sends {n} bytes, tells {told:.0f}, and should need {nbytes}"
