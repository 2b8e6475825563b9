"""Put the numbers of one contender in one case together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from distmon.bench.contender import NONE
from distmon.bench.contenders import SAMPLED
from distmon.bench.results import UNITS, Case, Results

COLLECTIVE: Final = "all_reduce"
"""Rows under this name time a collective alone; it is no contender."""


@dataclass(frozen=True)
class Spread:
    """Percentiles over rounds."""

    p20: float
    p50: float
    p80: float
    rounds: int


@dataclass(frozen=True)
class Cost:
    """What one contender costs in one case; None for what was not measured."""

    contender: str
    wrong: str
    """What is wrong with its answer; empty when it is right."""
    observation: Spread
    over_sampled: float | None
    """Time relative to distmon sampled, in the rounds that both took part in."""
    step: float | None
    """Seconds of a bare training step, median."""
    unobserved: float
    """Seconds in a step that is not observed."""
    medians: Mapping[str, float]
    """Of the other measures by name: extra_memory, tags, log_bytes, ..."""

    def share(self, interval: int) -> float | None:
        """Return the share of the training time at this interval, unobserved steps included."""
        if self.step is None or self.step <= 0:
            return None
        return (self.observation.p50 + (interval - 1) * self.unobserved) / (interval * self.step)

    @property
    def name(self) -> str:
        """The contender, with the words `answer wrong` where it is."""
        return f"{self.contender}, answer wrong" if self.wrong else self.contender


def cost_of(results: Results, case: Case, contender: str) -> Cost | None:
    """Return the cost of one contender; None when it was not timed in this case."""
    values = results.values(case, contender, "observation")
    if not values:
        return None
    p20, p50, p80 = (float(q) for q in np.percentile(values, (20, 50, 80)))
    pairs = results.pairs(case, contender, SAMPLED.name)
    others = {name: results.median(case, contender, name) for name in UNITS}
    return Cost(
        contender=contender,
        wrong=results.wrong_answers.get((case, contender), ""),
        observation=Spread(p20, p50, p80, len(values)),
        over_sampled=ratio(pairs) if pairs.size and (pairs[1] > 0).all() else None,
        step=results.median(case, NONE.name, "step"),
        unobserved=results.median(case, contender, "unobserved_step") or 0.0,
        medians={name: value for name, value in others.items() if value is not None},
    )


def costs_of(results: Results, case: Case) -> list[Cost]:
    """Return the cost of every contender that was timed, in the order of the run."""
    found = (cost_of(results, case, contender) for contender in results.contenders)
    return [cost for cost in found if cost is not None]


def ratio(pairs: np.ndarray) -> float:
    """Return median over median."""
    over, under = np.median(pairs, axis=1)
    return float(over / under)
