"""What distmon wants to cost at most, held against what was measured.

A verdict is about the median. Where a goal is a ratio of times, the range behind it is the 95%
interval of a bootstrap over rounds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from distmon_benchmarks import wording
from distmon_benchmarks.growth import Axis, Series, series, slope_text
from distmon_benchmarks.intervals import Interval, ratio_interval
from distmon_benchmarks.results import Case
from distmon_benchmarks.summary import (
    ALL_NORMS,
    COLLECTIVE,
    EXACT,
    GRADIENT_NORMS,
    NAIVE,
    SAMPLED,
    WANDB,
    Summary,
    is_headline,
)

Verdict = Literal["reached", "missed", "not measured"]

FASTER: Final = ((NAIVE, 100.0), (WANDB, 1000.0), (GRADIENT_NORMS, 15.0))
"""How many times faster than these a sampled observation is to be."""
LESS_MEMORY: Final = 300.0
SHARES: Final = ((1, 0.002), (100, 0.0001))
"""Interval, and the share of the training time that is allowed there."""
FLAT: Final = 1.3
"""Growth that still counts as flat, for 10 times the elements and from 1 rank to one per core."""
LINEAR: Final = 1.1
"""Largest slope that still counts as linear."""
SECONDS_PER_TENSOR: Final = 8e-6
EXACT_OVER_NORMS: Final = 1.5


@dataclass(frozen=True)
class Judged:
    """One goal and what became of it."""

    goal: str
    limit: str
    measured: str
    verdict: Verdict


def judge(summary: Summary) -> list[Judged]:
    """All goals, in order; empty for a run without the model that they speak of."""
    case = summary.headline
    if case is None or not is_headline(case):
        return []
    return [
        *_faster(summary, case),
        _less_memory(summary, case),
        *_shares(summary, case),
        _flat_in_elements(summary),
        _linear_in_tensors(summary),
        _flat_in_ranks(summary),
        _exact(summary, case),
        _constant_tags(summary),
    ]


def _faster(summary: Summary, case: Case) -> Iterator[Judged]:
    for slower, least in FASTER:
        goal = f"sampled observation against {slower}"
        limit = f"at least {least:g}x faster"
        ratio = _ratio(summary, case, slower, SAMPLED)
        if ratio is None:
            yield _not_measured(goal, limit)
        else:
            yield _judged(goal, limit, _range(ratio), ratio.estimate >= least)


def _exact(summary: Summary, case: Case) -> Judged:
    goal = "exact observation against one foreach_norm of weights and gradients"
    limit = f"at most {EXACT_OVER_NORMS:g}x"
    ratio = _ratio(summary, case, EXACT, ALL_NORMS)
    if ratio is None:
        return _not_measured(goal, limit)
    return _judged(goal, limit, _range(ratio), ratio.estimate <= EXACT_OVER_NORMS)


def _less_memory(summary: Summary, case: Case) -> Judged:
    goal = f"extra memory against {NAIVE}"
    limit = f"at least {LESS_MEMORY:g}x less"
    ours = summary.median(case, SAMPLED, "extra_memory")
    theirs = summary.median(case, NAIVE, "extra_memory")
    if ours is None or theirs is None:
        return _not_measured(goal, limit)
    measured = f"{wording.size(ours)} against {wording.size(theirs)}"
    if ours > 0:
        measured = f"{wording.times(theirs / ours)}: {measured}"
    return _judged(goal, limit, measured, theirs >= LESS_MEMORY * ours)


def _shares(summary: Summary, case: Case) -> Iterator[Judged]:
    cost = summary.cost(case, SAMPLED)
    for interval, most in SHARES:
        goal = f"share of the training time at interval {interval}"
        limit = f"under {100 * most:g}%"
        share = None if cost is None else cost.share(interval)
        if share is None:
            yield _not_measured(goal, limit)
        else:
            yield _judged(goal, limit, wording.share(share), share < most)


def _flat_in_elements(summary: Summary) -> Judged:
    goal = "10 times the elements in the same tensors"
    limit = f"under {FLAT:g}x the time"
    line = _longest(summary, "elements")
    slope = None if line is None else line.fit()
    if line is None or slope is None:
        return _not_measured(goal, limit)
    grown = slope.growth(10)
    measured = f"{wording.times(grown)} (slope {slope_text(slope)}: {_listed(line, line.medians)})"
    return _judged(goal, limit, measured, grown < FLAT)


def _linear_in_tensors(summary: Summary) -> Judged:
    goal = "time for each tensor"
    limit = f"linear, at most {1e6 * SECONDS_PER_TENSOR:g} us at every number of tensors"
    line = _longest(summary, "tensors")
    slope = None if line is None else line.fit()
    if line is None or slope is None:
        return _not_measured(goal, limit)
    each = line.per_unit()
    reached = max(each) <= SECONDS_PER_TENSOR and slope.slope <= LINEAR
    return _judged(goal, limit, f"{_listed(line, each)} (slope {slope_text(slope)})", reached)


def _flat_in_ranks(summary: Summary) -> Judged:
    """Judged up to one rank per core: more of them wait for a core, not for the monitor."""
    goal = "from 1 rank to one per core, without the collective"
    limit = f"under {FLAT:g}x the time"
    for line in series(summary, "ranks"):
        if line.contender != SAMPLED or line.x[0] != 1:
            continue
        own = [
            median - (summary.median(case, COLLECTIVE, "collective") or 0.0)
            for case, median in zip(line.cases, line.medians, strict=True)
        ]
        judged = [
            seconds / own[0]
            for ranks, seconds in zip(line.x, own, strict=True)
            if 1 < ranks <= summary.context.cores
        ]
        if judged:
            parallel = line.cases[0].parallel
            measured = f"{wording.times(max(judged))} ({_listed(line, own)} ranks of {parallel})"
            return _judged(goal, limit, measured, max(judged) < FLAT)
    return _not_measured(goal, limit)


def _constant_tags(summary: Summary) -> Judged:
    goal, limit = "tags written, whatever the number of tensors", "the same number"
    line = _longest(summary, "tensors")
    tags = [] if line is None else [summary.median(c, SAMPLED, "tags") for c in line.cases]
    if line is None or None in tags:
        return _not_measured(goal, limit)
    listed = ", ".join(
        f"{number:.0f} at {wording.count(tensors)}"
        for tensors, number in zip(line.x, tags, strict=True)
        if number is not None
    )
    return _judged(goal, limit, listed, len(set(tags)) == 1)


def _longest(summary: Summary, axis: Axis) -> Series | None:
    """The line of the sampled monitor with the most sizes, on one rank and in fp32 if there is."""
    lines = [line for line in series(summary, axis) if line.contender == SAMPLED]

    def fitness(line: Series) -> tuple[bool, bool, int, float]:
        first = line.cases[0]
        reach = line.x[-1] / line.x[0]
        return first.ranks == 1, first.dtype == "fp32", len(line.x), reach

    return max(lines, key=fitness, default=None)


def _listed(line: Series, seconds: Sequence[float]) -> str:
    """`1.1 ms at 100, 9.8 ms at 1k`."""
    pairs = zip(seconds, line.x, strict=True)
    return ", ".join(f"{wording.seconds(value)} at {wording.count(x)}" for value, x in pairs)


def _ratio(summary: Summary, case: Case, over: str, under: str) -> Interval | None:
    pairs = summary.pairs(case, over, under)
    return None if pairs is None else ratio_interval(pairs)


def _range(ratio: Interval) -> str:
    low, high = wording.times(ratio.low), wording.times(ratio.high)
    return f"{wording.times(ratio.estimate)} ({low} to {high})"


def _judged(goal: str, limit: str, measured: str, reached: bool) -> Judged:
    return Judged(goal, limit, measured, "reached" if reached else "missed")


def _not_measured(goal: str, limit: str) -> Judged:
    return Judged(goal, limit, "", "not measured")
