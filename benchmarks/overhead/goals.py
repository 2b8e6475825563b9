"""Goals: what distmon aims to cost at most, and whether a run reaches it.

A goal is decided by the median; where it is a ratio of times, the 95% interval of a bootstrap over
rounds is shown. A goal that rests on a wrong answer is missed, whatever its times.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from benchmarks.contenders.wandb_watch import WANDB_WATCH
from benchmarks.intervals import ratio_interval
from benchmarks.scale.growth import Series, series
from distmon.bench import formatting
from distmon.bench.contender import Contender
from distmon.bench.contenders import (
    ALL_NORMS,
    AUTO,
    EXACT,
    GRADIENT_NORMS,
    NAIVE_CLONE,
    SAMPLED,
)
from distmon.bench.costs import COLLECTIVE, cost_of
from distmon.bench.report import Section
from distmon.bench.results import Case, Results

HEADLINE: Final = ("gpt2", "fp32", "none", 1)
"""Workload, dtype, parallel and ranks of the case that most goals are about."""
FLAT: Final = 1.3
"""Growth that still counts as flat, for 10 times the elements and from 1 rank to one per core."""
FEWEST_TENSORS: Final = 1000
"""Tensors from which on the time for each counts; below, it is the time of the whole."""
LINEAR: Final = 1.1
"""Largest slope that still counts as linear."""


@dataclass(frozen=True)
class Outcome:
    """What was measured for a goal."""

    measured: str
    reached: bool
    rests_on: Sequence[tuple[Case, str]]
    """Cases and contenders whose times were used."""


@dataclass(frozen=True)
class Goal:
    """A limit, and the function of the results that is held against it."""

    name: str
    limit: str
    evaluate: Callable[[Results, Case], Outcome | None]
    """None when it was not measured. The case is the headline case."""


def _time_ratio(
    over: Contender,
    under: Contender,
    reached: Callable[[float], bool],
    results: Results,
    case: Case,
) -> Outcome | None:
    pairs = results.pairs(case, over.name, under.name)
    if not pairs.size or not (pairs[1] > 0).all():
        return None
    found = ratio_interval(pairs)
    rests_on = [(case, over.name), (case, under.name)]
    return Outcome(str(found), reached(found.estimate), rests_on)


def _memory(least: float, results: Results, case: Case) -> Outcome | None:
    ours = results.median(case, SAMPLED.name, "extra_memory")
    theirs = results.median(case, NAIVE_CLONE.name, "extra_memory")
    if ours is None or theirs is None:
        return None
    measured = f"{formatting.size(ours)} against {formatting.size(theirs)}"
    if ours > 0:
        measured = f"{formatting.times(theirs / ours)}: {measured}"
    return Outcome(measured, theirs >= least * ours, [(case, SAMPLED.name)])


def _share(
    contender: Contender, interval: int, most: float, results: Results, case: Case
) -> Outcome | None:
    cost = cost_of(results, case, contender.name)
    share = None if cost is None else cost.share(interval)
    if share is None:
        return None
    return Outcome(formatting.share(share), share < most, [(case, contender.name)])


def _longest(results: Results, axis: str) -> Series | None:
    """Return the line of the sampled monitor with the most sizes, preferably on one rank, fp32."""
    lines = [line for line in series(results, axis) if line.contender == SAMPLED.name]

    def fitness(line: Series) -> tuple[bool, bool, int, float]:
        first = line.cases[0]
        return first.ranks == 1, first.dtype == "fp32", len(line.x), line.x[-1] / line.x[0]

    return max(lines, key=fitness, default=None)


def _on(line: Series) -> list[tuple[Case, str]]:
    return [(case, line.contender) for case in line.cases]


def _flat_in_elements(results: Results, _: Case) -> Outcome | None:
    line = _longest(results, "elements")
    if line is None or line.slope is None:
        return None
    grown = line.slope.growth(10)
    details = f"slope {line.slope_text}: {line.listed(line.medians)}"
    return Outcome(f"{formatting.times(grown)} ({details})", grown < FLAT, _on(line))


def _linear_in_tensors(most: float, results: Results, _: Case) -> Outcome | None:
    line = _longest(results, "tensors")
    if line is None or line.slope is None:
        return None
    each = [median / x for median, x in zip(line.medians, line.x, strict=True)]
    counted = [time for time, x in zip(each, line.x, strict=True) if x >= FEWEST_TENSORS]
    reached = max(counted, default=0.0) <= most and line.slope.slope <= LINEAR
    return Outcome(f"{line.listed(each)} (slope {line.slope_text})", reached, _on(line))


def _few_tensors(least: float, results: Results, _: Case) -> Outcome | None:
    line = _longest(results, "tensors")
    if line is None or line.x[0] > FEWEST_TENSORS:
        return None
    return _time_ratio(NAIVE_CLONE, SAMPLED, lambda found: found >= least, results, line.cases[0])


def _flat_in_ranks(results: Results, _: Case) -> Outcome | None:
    """Up to one rank per core: more of them wait for a core, not for the monitor."""
    for line in series(results, "ranks"):
        if line.contender != SAMPLED.name or line.x[0] != 1:
            continue
        alone = [results.median(case, COLLECTIVE, "collective") or 0.0 for case in line.cases]
        own = [median - each for median, each in zip(line.medians, alone, strict=True)]
        pairs = [*zip(line.x, own, strict=True)][1:]
        grown = [seconds / own[0] for ranks, seconds in pairs if ranks <= results.machine.cores]
        if grown:
            details = f"{line.listed(own)} ranks of {line.cases[0].parallel}"
            measured = f"{formatting.times(max(grown))} ({details})"
            return Outcome(measured, max(grown) < FLAT, _on(line))
    return None


def _constant_tags(results: Results, _: Case) -> Outcome | None:
    line = _longest(results, "tensors")
    tags = [] if line is None else [results.median(c, SAMPLED.name, "tags") for c in line.cases]
    if line is None or None in tags:
        return None
    pairs = zip(tags, line.x, strict=True)
    listed = ", ".join(f"{number:.0f} at {formatting.count(x)}" for number, x in pairs)
    return Outcome(listed, len(set(tags)) == 1, ())  # no answer is needed for it


def _faster(slower: Contender, least: float) -> Goal:
    evaluate = partial(_time_ratio, slower, SAMPLED, lambda found: found >= least)
    name = f"sampled observation against {slower.name}"
    return Goal(name, f"at least {least:g}x faster", evaluate)


def _small_share(contender: Contender, interval: int, most: float) -> Goal:
    name = f"share of the training time of {contender.name} at interval {interval}"
    return Goal(name, f"under {100 * most:g}%", partial(_share, contender, interval, most))


GOALS: Final[tuple[Goal, ...]] = (
    _faster(NAIVE_CLONE, 100),
    _faster(WANDB_WATCH, 1000),
    _faster(GRADIENT_NORMS, 15),
    Goal("extra memory against naive clone", "at least 300x less", partial(_memory, 300)),
    _small_share(SAMPLED, 1, 0.002),
    _small_share(SAMPLED, 100, 5e-5),
    _small_share(AUTO, 100, 3e-4),
    Goal("10 times the elements in the same tensors", "under 1.3x the time", _flat_in_elements),
    Goal(
        "the fewest small tensors, against naive clone",
        "at least 5x faster",
        partial(_few_tensors, 5),
    ),
    Goal(
        "time for each tensor",
        f"linear, at most 8 us from {FEWEST_TENSORS} tensors on",
        partial(_linear_in_tensors, 8e-6),
    ),
    Goal(
        "from 1 rank to one per core, without the collective", "under 1.3x the time", _flat_in_ranks
    ),
    Goal(
        "exact observation against one foreach_norm of weights and gradients",
        "at most 1.3x",
        partial(_time_ratio, EXACT, ALL_NORMS, lambda found: found <= 1.3),
    ),
    Goal("tags written, whatever the number of tensors", "the same number", _constant_tags),
)


def goal_section(results: Results) -> Section:
    """Return all goals; without rows for a run without the headline case."""
    headline = [
        case
        for case in results.cases
        if (case.workload, case.dtype, case.parallel, case.ranks) == HEADLINE
    ]
    rows = [_row(goal, results, headline[0]) for goal in GOALS] if headline else []
    missed = sum(row[-1] != "reached" for row in rows)
    title = f"goals: {len(rows) - missed} of {len(rows)} reached"
    return Section(title, ("goal", "limit", "measured", "outcome"), rows)


def _row(goal: Goal, results: Results, case: Case) -> list[str]:
    outcome = goal.evaluate(results, case)
    if outcome is None:
        return [goal.name, goal.limit, "", "not measured"]
    wrong = [who for where, who in outcome.rests_on if (where, who) in results.wrong_answers]
    measured = f"{outcome.measured}; answer wrong: {wrong[0]}" if wrong else outcome.measured
    reached = outcome.reached and not wrong
    return [goal.name, goal.limit, measured, "reached" if reached else "missed"]
