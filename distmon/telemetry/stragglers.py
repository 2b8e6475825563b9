"""Which rank holds up the others, told apart from those who wait for it.

Ranks that train together take the same time for a step, so step times name nobody. The slow rank is
the one whose own phase is longer than that of the others, and who comes late to where they meet
next; they make up for it by waiting there. So nobody is blamed for a long communication, or for a
long backward where the two are not told apart; and a rank that waits in forward, because it came
there early, is not late when it is done.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from distmon.telemetry.phases import PHASES

SINCE_MEETING = ("optimizer", "other", "data", "forward", "backward")
"""Phases in their order from one communication to the next."""
Floats = NDArray[np.float64]
SPREAD_TO_SIGMA = 1.4826
"""A normal distribution's standard deviation over its median absolute deviation."""


@dataclass(frozen=True)
class Straggler:
    """One rank that is slower than the others in one phase."""

    rank: int
    phase: str
    excess_seconds: float
    """Above the median rank, per step."""
    share: float
    """The excess over the median step time."""
    sigmas: float
    """The excess in robust standard deviations over ranks."""
    waiting: tuple[int, ...]
    """Ranks that wait for it: what they are faster by in this phase they lose in the others."""


def find_stragglers(
    ranks: Mapping[str, Floats], share: float, sigmas: float, seconds: float = 0.0
) -> list[Straggler]:
    """Ranks above the median by more than `share` of a step, `sigmas` and `seconds`.

    `ranks[f"{phase}_seconds"][rank]`; a rank that told nothing has NaN or only zeros.
    Communication, where ranks meet, and `other`, with the monitor's own work in it, are nobody's
    fault: they have no `{phase}_floor_seconds`. Records without phases, as of older runs, name
    nobody.
    """
    known = {p: ranks[f"{p}_seconds"] for p in PHASES if f"{p}_seconds" in ranks}
    if not known:
        return []
    unknown = np.zeros_like(next(iter(known.values())))
    table = np.stack([known.get(phase, unknown) for phase in PHASES])
    told = np.isfinite(table).all(0) & (table.sum(0) > 0)
    if told.sum() < 2:
        return []
    rows = np.flatnonzero(told)
    times = table[:, rows]
    excess = times - _lower_median(times)
    step = float(_lower_median(times.sum(0, keepdims=True))[0, 0])
    limit = max(share * step, seconds)
    spread = SPREAD_TO_SIGMA * _lower_median(np.abs(excess))
    # Where nearly all ranks agree to the microsecond, everything would be an outlier.
    spread = np.maximum(spread, 0.01 * step)
    found = []
    slow = (excess > limit) & (excess / spread > sigmas) & (_lateness(times) > excess / 2)
    slow &= _steady_excess(ranks, rows, times) > limit
    for p, i in zip(*np.nonzero(slow), strict=True):
        rest = times.sum(0) - times[p]
        waits = rest - rest[i] > excess[p, i] / 2
        if 2 * waits.sum() < len(rows) - 1:
            continue  # a rank that most of the others do not wait for holds up nobody
        found.append(
            Straggler(
                rank=int(rows[i]),
                phase=PHASES[p],
                excess_seconds=float(excess[p, i]),
                share=float(excess[p, i] / step),
                sigmas=float(excess[p, i] / spread[p, 0]),
                waiting=tuple(rows[waits].tolist()),
            )
        )
    return sorted(found, key=lambda s: -s.excess_seconds)


def _lateness(times: Floats) -> Floats:
    """By phase and rank, how much later than the median rank it is when the phase ends.

    Counted from where ranks have last met. A rank that makes up in one phase for what it lost, or
    will lose by waiting, in another is not late.
    """
    late = np.zeros_like(times)
    passed = np.zeros(times.shape[1])
    for phase in SINCE_MEETING:
        p = PHASES.index(phase)
        passed = passed + times[p]
        late[p] = passed - _lower_median(passed)
    return late


def _steady_excess(ranks: Mapping[str, Floats], rows: NDArray[np.int64], times: Floats) -> Floats:
    """By phase and rank, how much its better steps exceed the median rank's usual one; else 0.

    Other processes on a machine delay one rank or another for a few steps; a slow rank is slower
    than the others usually are in nearly every step.
    """
    excess = np.zeros_like(times)
    for p, phase in enumerate(PHASES):
        floor = ranks.get(f"{phase}_floor_seconds")
        if floor is not None:
            excess[p] = floor[rows] - _lower_median(times[p])
    return excess


def _lower_median(table: Floats) -> Floats:
    """Along the last axis; of two ranks the faster one is the measure."""
    middle = np.sort(table, axis=-1)[..., (table.shape[-1] - 1) // 2]
    return np.asarray(middle[..., None])
