"""The goals for the numbers, and whether a run reaches them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from .step_truth import QUANTITIES
from .summary import ParameterErrors, Summary

TOTAL_ERROR: Final = 0.02
"""Default settings: largest error of the total gradient norm at any observation."""
PARAMETER_P99: Final = 0.15
"""Default settings: p99 of the errors by parameter, in every family."""
SAMPLED_RMS: Final = 0.08
"""Sampled: rms error of the total gradient norm, in every family."""
COVERAGE: Final = 0.93
"""Sampled: share of truths within 2 standard errors, for every kind of tensor. Numbers that are
exact or unknown do not count."""


@dataclass(frozen=True)
class Verdict:
    """Whether one mode reaches one goal."""

    goal: str
    mode: str
    measured: str
    """The worst value, and where."""
    reached: bool


def verdicts(summary: Summary) -> Iterator[Verdict]:
    """Yield the verdicts on all modes.

    A number as a mode is held to both sets of goals: it is a sample, and once was the default.
    """
    for mode in summary.modes:
        if mode != "sampled":
            yield from _default_verdicts(summary, mode)
        if mode not in ("auto", "exact"):
            yield from _sampled_verdicts(summary, mode)


def _default_verdicts(summary: Summary, mode: str) -> Iterator[Verdict]:
    by_family = summary.total_errors("mode", "family")
    worst, family = max((e.worst, f) for (m, f), e in by_family.items() if m == mode)
    goal = f"1. total gradient norm within {TOTAL_ERROR:.0%} at every observation"
    yield Verdict(goal, mode, f"{worst:.2%} ({family})", worst <= TOTAL_ERROR)
    errors = summary.parameter_errors("mode", "quantity", "family")
    for quantity in QUANTITIES:
        p99, family = max(
            (e.p99, f) for (m, q, f), e in errors.items() if (m, q) == (mode, quantity)
        )
        goal = f"1. {quantity} by parameter: p99 within {PARAMETER_P99:.0%} in every family"
        yield Verdict(goal, mode, f"{p99:.2%} ({family})", p99 <= PARAMETER_P99)


def _sampled_verdicts(summary: Summary, mode: str) -> Iterator[Verdict]:
    by_family = summary.total_errors("mode", "family")
    worst, family = max((e.rms, f) for (m, f), e in by_family.items() if m == mode)
    goal = f"2. total gradient norm: rms error at most {SAMPLED_RMS:.0%} in every family"
    yield Verdict(goal, mode, f"{worst:.2%} ({family})", worst <= SAMPLED_RMS)
    kinds = summary.parameter_errors("mode", "quantity", "kind")
    for quantity in QUANTITIES:
        found = {k: e for (m, q, k), e in kinds.items() if (m, q) == (mode, quantity)}
        goal = f"2. {quantity}: 2 standard errors cover at least {COVERAGE:.0%} of every kind"
        yield _coverage_verdict(goal, mode, found)
    zeros = sum(e.zero_claims for (m, *_), e in kinds.items() if m == mode)
    goal = "2. no 0 +- 0 where the truth is not zero"
    yield Verdict(goal, mode, f"{zeros} numbers", zeros == 0)


def _coverage_verdict(goal: str, mode: str, kinds: Mapping[str, ParameterErrors]) -> Verdict:
    shares = [(e.coverage, kind, e.bars) for kind, e in kinds.items() if e.bars]
    if not shares:
        unknown = sum(e.unknown for e in kinds.values())
        return Verdict(goal, mode, f"no error bars, {unknown} unknown", unknown == 0)
    share, kind, bars = min(shares)
    return Verdict(goal, mode, f"{share:.1%} of {bars} ({kind})", share >= COVERAGE)
