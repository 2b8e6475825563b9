"""How sure a ratio is: bootstrap over rounds.

In one round all contenders take turns, so what slows the machine for a while slows all of them.
Rounds are resampled with replacement, both sides of a ratio together, and the ratio of the medians
is taken anew each time: how far these lie apart says how far the ratio can be trusted. Percentile
method with a fixed seed: the same files give the same verdict.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

SEED: Final = 0
RESAMPLES: Final = 10_000

Pairs = NDArray[np.float64]
"""[2, rounds]: numerator and denominator of the rounds that both have."""


@dataclass(frozen=True)
class Interval:
    """An estimate and the limits between which it lies with the confidence asked for."""

    estimate: float
    low: float
    high: float


def paired(numerator: Mapping[int, float], denominator: Mapping[int, float]) -> Pairs:
    """By round. Times may be negative where they are differences; a ratio may then say nothing."""
    both = [round for round in numerator if round in denominator]
    return np.array([[side[round] for round in both] for side in (numerator, denominator)])


def ratio_interval(pairs: Pairs, confidence: float = 0.95) -> Interval:
    """Of median over median; at least one round, denominators above 0."""
    resampled = _resampled_ratios(pairs, np.random.default_rng(SEED))
    return _interval(ratio(pairs), resampled, confidence)


def change_interval(old: Pairs, new: Pairs, confidence: float = 0.95) -> Interval:
    """Of the ratio of `new` over the ratio of `old`, two runs that know nothing of each other."""
    generator = np.random.default_rng(SEED)
    olds = _resampled_ratios(old, generator)
    return _interval(ratio(new) / ratio(old), _resampled_ratios(new, generator) / olds, confidence)


def ratio(pairs: Pairs) -> float:
    """Median over median."""
    numerator, denominator = np.median(pairs, axis=1)
    return float(numerator / denominator)


def _resampled_ratios(pairs: Pairs, generator: np.random.Generator) -> NDArray[np.float64]:
    rounds = pairs.shape[1]
    drawn = generator.integers(rounds, size=(RESAMPLES, rounds))
    medians = np.median(pairs[:, drawn], axis=2)
    ratios: NDArray[np.float64] = medians[0] / medians[1]
    return ratios


def _interval(estimate: float, resampled: NDArray[np.float64], confidence: float) -> Interval:
    tail = (1 - confidence) / 2
    low, high = np.quantile(resampled, (tail, 1 - tail))
    return Interval(estimate, float(low), float(high))
