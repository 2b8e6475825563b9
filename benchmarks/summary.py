"""What tables, plots and goals read: the numbers of a run, put together by case and contender."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Final

import numpy as np

from distmon_benchmarks.intervals import Pairs, paired, ratio
from distmon_benchmarks.results import Case, Context, Results, ResultsError, read

BARE: Final = "none"
COLLECTIVE: Final = "all_reduce"
NOT_RACED: Final = (BARE, COLLECTIVE)
"""Rows under these names are what the contenders are held against."""
SAMPLED: Final = "distmon sampled"
EXACT: Final = "distmon exact"
NAIVE: Final = "naive clone"
WANDB: Final = "wandb.watch"
GRADIENT_NORMS: Final = "foreach_norm"
ALL_NORMS: Final = "foreach_norm both"
HEADLINE: Final = ("gpt2", "fp32", "none", 1)
"""Workload, dtype, parallel and ranks that goals speak of and the first table shows."""


@dataclass(frozen=True)
class Spread:
    """The middle of the rounds and how far they lie apart."""

    p20: float
    p50: float
    p80: float
    rounds: int

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        found = [*values]
        p20, p50, p80 = (float(q) for q in np.percentile(found, (20, 50, 80)))
        return cls(p20, p50, p80, len(found))


@dataclass(frozen=True)
class Cost:
    """What one contender costs in one case; None for what was not measured."""

    contender: str
    observation: Spread
    over_sampled: float | None
    """Times as long as the sampled monitor, in the rounds that both took part in."""
    step: float | None
    """Seconds of a bare training step, median."""
    skipped: float
    """Seconds in a step that is not observed; 0 where the contender does nothing in it."""
    memory: float | None
    counts: Mapping[str, float]
    """Medians of the other measures by name: tags, log_bytes, host_syncs, ..."""

    def share(self, interval: int) -> float | None:
        """Part of the training time at this interval, the steps between observations included."""
        if self.step is None or self.step <= 0:
            return None
        return (self.observation.p50 + (interval - 1) * self.skipped) / (interval * self.step)


@dataclass(frozen=True)
class Summary:
    """A run, indexed. `rounds` is by case, contender and measure, then by round."""

    context: Context
    rounds: Mapping[tuple[Case, str, str], Mapping[int, float]]

    @cached_property
    def cases(self) -> list[Case]:
        """In the order in which they were measured."""
        return [*dict.fromkeys(case for case, _, _ in self.rounds)]

    @cached_property
    def contenders(self) -> list[str]:
        """All that were timed, in the order in which they were measured."""
        found = (name for _, name, measure in self.rounds if measure == "observation")
        return [name for name in dict.fromkeys(found) if name not in NOT_RACED]

    @property
    def headline(self) -> Case | None:
        """The case that goals speak of; without it the first case, as for a user's own model."""
        return next((c for c in self.cases if is_headline(c)), next(iter(self.cases), None))

    def values(self, case: Case, contender: str, measure: str) -> list[float]:
        """In the order of rounds; empty when it was not measured."""
        return [*self.rounds.get((case, contender, measure), {}).values()]

    def median(self, case: Case, contender: str, measure: str) -> float | None:
        """None when it was not measured."""
        values = self.values(case, contender, measure)
        return Spread.of(values).p50 if values else None

    def cost(self, case: Case, contender: str) -> Cost | None:
        """None when the contender was not timed there."""
        observation = self.values(case, contender, "observation")
        if not observation:
            return None
        others = {m for c, n, m in self.rounds if c == case and n == contender} - {"observation"}
        pairs = self.pairs(case, contender, SAMPLED)
        counts = {m: self.median(case, contender, m) for m in sorted(others)}
        return Cost(
            contender=contender,
            observation=Spread.of(observation),
            over_sampled=None if pairs is None else ratio(pairs),
            step=self.median(case, BARE, "step"),
            skipped=self.median(case, contender, "skipped_step") or 0.0,
            memory=self.median(case, contender, "extra_memory"),
            counts={m: value for m, value in counts.items() if value is not None},
        )

    def pairs(self, case: Case, over: str, under: str) -> Pairs | None:
        """Times of two contenders in the rounds that both took part in.

        None when there are none, or when `under` cannot be told from nothing.
        """
        times = (self.rounds.get((case, name, "observation"), {}) for name in (over, under))
        pairs = paired(*times)
        return pairs if pairs.size and (pairs[1] > 0).all() else None

    def costs(self, case: Case) -> list[Cost]:
        """Of every contender timed there, in the order of the run."""
        found = (self.cost(case, contender) for contender in self.contenders)
        return [cost for cost in found if cost is not None]


def summarise(results: Results) -> Summary:
    """Index a run; a `ResultsError` for a number that is none."""
    rounds: dict[tuple[Case, str, str], dict[int, float]] = {}
    for row in results.rows:
        if not math.isfinite(row.value):
            raise ResultsError(
                f"round {row.round} of {row.contender} on {row.workload} has {row.measure} "
                f"{row.value}, which is not a number"
            )
        rounds.setdefault((row.case, row.contender, row.measure), {})[row.round] = row.value
    ordered = {key: dict(sorted(values.items())) for key, values in rounds.items()}
    return Summary(results.context, ordered)


def load(folder: Path) -> Summary:
    """Read a results folder; a `ResultsError` in one sentence when it cannot be used."""
    summary = summarise(read(folder))
    if not summary.contenders:
        raise ResultsError(f"{folder} holds no observation of any contender")
    return summary


def is_headline(case: Case) -> bool:
    """Is it the model that goals speak of?"""
    return (case.workload, case.dtype, case.parallel, case.ranks) == HEADLINE


def case_name(case: Case) -> str:
    """As a heading: `gpt2 fp32`, with ranks where there are several."""
    name = f"{case.workload} {case.dtype}"
    if case.parallel != "none" or case.ranks > 1:
        name += f", {case.parallel} on {case.ranks} rank{'s' if case.ranks > 1 else ''}"
    return name
