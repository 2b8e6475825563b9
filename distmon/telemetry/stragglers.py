"""Which rank holds up the others, told apart from those who wait for it.

Ranks that train together take the same time for a step, so step times name nobody. The slow rank is
the one whose data, forward or optimizer phase is longer than that of the others; they make up for
it by waiting, mostly in backward, where the slow one is then the shortest. So nobody is blamed
for a long backward.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from distmon.telemetry.phases import PHASES

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
    """Ranks that wait for it: shorter here and longer where ranks meet."""


def find_stragglers(
    ranks: Mapping[str, Floats], share: float, sigmas: float, seconds: float = 0.0
) -> list[Straggler]:
    """Ranks above the median by more than `share` of a step, `sigmas` and `seconds`.

    `ranks[f"{phase}_seconds"][rank]`; a rank that told nothing has NaN or only zeros. Backward,
    where ranks meet, and `other`, with the monitor's own work in it, are nobody's fault: they have
    no `{phase}_floor_seconds`.
    """
    table = np.stack([ranks[f"{phase}_seconds"] for phase in PHASES])
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
    slow = (excess > limit) & (excess / spread > sigmas) & (_steady_excess(ranks, rows) > limit)
    for p, i in zip(*np.nonzero(slow), strict=True):
        if _is_waiting(int(p), excess[:, i]):
            continue
        others = [int(rows[j]) for j in np.flatnonzero(_waits_for(excess, int(i)))]
        found.append(
            Straggler(
                rank=int(rows[i]),
                phase=PHASES[p],
                excess_seconds=float(excess[p, i]),
                share=float(excess[p, i] / step),
                sigmas=float(excess[p, i] / spread[p, 0]),
                waiting=tuple(others),
            )
        )
    return sorted(found, key=lambda s: -s.excess_seconds)


def _steady_excess(ranks: Mapping[str, Floats], rows: NDArray[np.int64]) -> Floats:
    """By phase and rank, the excess of what nearly every step takes; 0 where it is not told.

    Other processes on a machine delay a step now and then, a slow rank is slow in all of them.
    """
    excess = np.zeros((len(PHASES), len(rows)))
    for p, phase in enumerate(PHASES):
        floor = ranks.get(f"{phase}_floor_seconds")
        if floor is not None:
            excess[p] = floor[rows] - _lower_median(floor[rows])
    return excess


def _lower_median(table: Floats) -> Floats:
    """Along the last axis; of two ranks the faster one is the measure."""
    middle = np.sort(table, axis=-1)[..., (table.shape[-1] - 1) // 2]
    return np.asarray(middle[..., None])


def _is_waiting(phase: int, excess: Floats) -> bool:
    """Whether a rank is long in forward because it came there early, to gather what ranks share."""
    return PHASES[phase] == "forward" and PHASES[int(np.argmin(excess))] == "data"


def _waits_for(excess: Floats, slow: int) -> NDArray[np.bool_]:
    """Ranks that spend longer than the slow one in the phase where it is shortest."""
    meeting = int(np.argmin(excess[:, slow]))
    waits = excess[meeting] > excess[meeting, slow] / 2
    waits[slow] = False
    return np.asarray(waits)
