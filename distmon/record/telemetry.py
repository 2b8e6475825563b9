"""Reduce the telemetry of all ranks to the metrics of the run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import isfinite

import numpy as np
from numpy.typing import NDArray

from distmon.metrics import PHASES, RUN_METRICS

Floats = NDArray[np.float64]
Rows = Mapping[str, Floats]
"""`rows[metric][rank]`."""

_REDUCE: Mapping[str, Callable[[Floats], float]] = {
    "max over ranks": np.max,
    "mean over ranks": np.mean,
    "sum over ranks": np.sum,
}


def without_waiting(rows: Rows) -> dict[str, Floats]:
    """Return the rows with the wait for other ranks subtracted from the monitor's own time.

    Ranks send the time that they spent in its collectives. The last rank to enter one does not
    wait, so the shortest time is the cost of the collective. The rest is the delay of stragglers,
    which the next collective of the training would have waited for.
    """
    inside, there = rows["monitor_wait_seconds"], rows["failed"] == 0
    if not there.any():
        return dict(rows)
    waited = np.where(there, inside - inside[there].min(), 0.0)
    own = np.maximum(rows["monitor_seconds"] - waited, 0.0)
    return {**rows, "monitor_seconds": own, "monitor_wait_seconds": waited}


def own_seconds(rows: Rows) -> Floats:
    """Return the monitor's own time by rank: of the training thread, and of its kernels."""
    return rows["monitor_seconds"] + rows.get("monitor_device_seconds", 0.0)


@dataclass(frozen=True)
class ObservationCost:
    """What the budget needs to know of one record: seconds since the record before."""

    own: float
    """Of the monitor, on the rank on which it took longest."""
    in_steps: float
    """Of those, in steps that were not observed."""
    elapsed: float


def observation_cost(rows: Rows) -> ObservationCost | None:
    """Return the cost of the slowest rank; None for a record without it."""
    elapsed = rows.get("elapsed_seconds")
    if elapsed is None or "monitor_seconds" not in rows:
        return None
    seconds = own_seconds(rows)
    slowest = int(seconds.argmax())
    in_steps = float(rows["monitor_step_seconds"][slowest])
    return ObservationCost(float(seconds[slowest]), in_steps, float(elapsed.max()))


def run_summary(rows: Rows) -> dict[str, float]:
    """Return speed, phases, memory and devices of the run; what no rank measured is absent."""
    return {**speed(rows), **phase_shares(rows), **_over_ranks(rows), **_fullest(rows)}


def speed(rows: Rows) -> dict[str, float]:
    """Return the step time of the slowest rank and the throughput of all ranks."""
    seconds, elapsed = float(rows["step_seconds"].max()), float(rows["elapsed_seconds"].max())
    if seconds <= 0:
        return {}
    metrics = {
        "performance/step_seconds": seconds,
        "performance/monitor_fraction": float(own_seconds(rows).max()) / elapsed,
    }
    for what in ("tokens", "samples"):
        total = float(rows[what].sum())
        if total:
            metrics[f"performance/{what}_per_second"] = total / elapsed
    return metrics


def phase_shares(rows: Rows) -> dict[str, float]:
    """Return the share of a step in each phase, mean over the ranks that measured it."""
    table = np.stack([rows[f"{phase}_seconds"] for phase in PHASES])
    known = table[:, np.isfinite(table).all(0) & (table.sum(0) > 0)]
    if not known.size:
        return {}
    shares = (known / known.sum(0)).mean(1)
    return {f"performance/{p}_fraction": float(s) for p, s in zip(PHASES, shares, strict=True)}


def _over_ranks(rows: Rows) -> dict[str, float]:
    """Reduce one rank metric each, over the ranks that measured it."""
    metrics = {}
    for metric in RUN_METRICS:
        if not metric.rank_metric:
            continue
        column = rows[metric.rank_metric]
        known = column[np.isfinite(column)]
        if known.size:
            metrics[metric.name] = float(_REDUCE[metric.reduction](known))
    return metrics


def _fullest(rows: Rows) -> dict[str, float]:
    with np.errstate(divide="ignore", invalid="ignore"):
        share = rows["memory_used_bytes"] / rows["memory_total_bytes"]
    known = share[np.isfinite(share)]
    return {"hardware/memory_fraction": float(known.max())} if known.size else {}


def mfu_metrics(
    flops: float, peak: float, known: Mapping[str, float], devices: int
) -> dict[str, float]:
    """Return `performance/mfu`, or `performance/mfu_over_limit` for a value above 1.

    `flops` per token and the `peak` of one device are 0 while they are unknown.
    """
    rate = known.get("performance/tokens_per_second", 0.0)
    if not (flops > 0 and peak > 0 and isfinite(rate) and rate > 0 and devices > 0):
        return {}
    value = flops * rate / (devices * peak)
    return {"performance/mfu" if value <= 1 else "performance/mfu_over_limit": value}
