"""Find stragglers: ranks that the other ranks wait for.

Ranks that synchronize take the same time for a step, so step times do not identify a straggler. A
straggler has a phase that is longer than on the other ranks and reaches the next synchronization
after them; they spend the difference waiting there. So long communication is not attributed to a
rank, nor a long backward where the two are not measured separately; and a rank that waits in
forward because it arrived early is not a straggler.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from distmon.metrics import PHASES

SINCE_SYNC = ("optimizer", "other", "data", "forward", "backward")
"""Phases in order, from one synchronization of the ranks to the next."""
Floats = NDArray[np.float64]
MAD_TO_SIGMA = 1.4826
"""Standard deviation of a normal distribution divided by its median absolute deviation."""


@dataclass(frozen=True)
class Straggler:
    """One rank that is slower than the others in one phase."""

    rank: int
    phase: str
    excess_seconds: float
    """Excess over the median rank, per step."""
    share: float
    """The excess as a share of the median step time."""
    sigmas: float
    """The excess in robust standard deviations over ranks."""
    waiting: tuple[int, ...]
    """Ranks that wait for it: the time that they save in this phase they lose in the others."""


def find_stragglers(
    ranks: Mapping[str, Floats], share: float, sigmas: float, seconds: float = 0.0
) -> list[Straggler]:
    """Return the ranks above the median by more than `share` of a step, `sigmas` and `seconds`.

    `ranks[f"{phase}_seconds"][rank]` are seconds per step; a rank without telemetry has NaN or only
    zeros. The phases `communication`, where ranks synchronize, and `other`, which contains the
    monitor's own work, have no `{phase}_floor_seconds` and are never attributed to a rank. Records
    without phases, as of older runs, have no stragglers.
    """
    known = {p: ranks[f"{p}_seconds"] for p in PHASES if f"{p}_seconds" in ranks}
    if not known:
        return []
    unknown = np.zeros_like(next(iter(known.values())))
    table = np.stack([known.get(phase, unknown) for phase in PHASES])
    reported = np.isfinite(table).all(0) & (table.sum(0) > 0)
    if reported.sum() < 2:
        return []
    rows = np.flatnonzero(reported)
    times = table[:, rows]
    excess = times - _lower_median(times)
    step = float(_lower_median(times.sum(0, keepdims=True))[0, 0])
    limit = max(share * step, seconds)
    sigma = MAD_TO_SIGMA * _lower_median(np.abs(excess))
    # Where nearly all ranks agree to the microsecond, every rank would be an outlier.
    sigma = np.maximum(sigma, 0.01 * step)
    found = []
    slow = (excess > limit) & (excess / sigma > sigmas) & (_delay(times) > excess / 2)
    slow &= _steady_excess(ranks, rows, times) > limit
    for p, i in zip(*np.nonzero(slow), strict=True):
        rest = times.sum(0) - times[p]
        waits = rest - rest[i] > excess[p, i] / 2
        if 2 * waits.sum() < len(rows) - 1:
            continue  # most of the other ranks do not wait for it
        found.append(
            Straggler(
                rank=int(rows[i]),
                phase=PHASES[p],
                excess_seconds=float(excess[p, i]),
                share=float(excess[p, i] / step),
                sigmas=float(excess[p, i] / sigma[p, 0]),
                waiting=tuple(rows[waits].tolist()),
            )
        )
    return sorted(found, key=lambda s: -s.excess_seconds)


def _delay(times: Floats) -> Floats:
    """Return, by phase and rank, the delay behind the median rank at the end of the phase.

    Times are added up since the last synchronization, so a rank that is slow in one phase and fast
    in another has no delay.
    """
    delay = np.zeros_like(times)
    elapsed = np.zeros(times.shape[1])
    for phase in SINCE_SYNC:
        p = PHASES.index(phase)
        elapsed = elapsed + times[p]
        delay[p] = elapsed - _lower_median(elapsed)
    return delay


def _steady_excess(ranks: Mapping[str, Floats], rows: NDArray[np.int64], times: Floats) -> Floats:
    """Return, by phase and rank, the excess of its fast steps over the median rank's mean step.

    Other processes on a machine delay a rank for a few steps only; a straggler is slow in nearly
    every step. 0 for phases without `{phase}_floor_seconds`.
    """
    excess = np.zeros_like(times)
    for p, phase in enumerate(PHASES):
        floor = ranks.get(f"{phase}_floor_seconds")
        if floor is not None:
            excess[p] = floor[rows] - _lower_median(times[p])
    return excess


def _lower_median(table: Floats) -> Floats:
    """Return the lower median along the last axis, so that of two ranks the faster one counts."""
    middle = np.sort(table, axis=-1)[..., (table.shape[-1] - 1) // 2]
    return np.asarray(middle[..., None])
