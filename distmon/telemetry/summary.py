"""From every rank's row to the metrics of the run."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from distmon.telemetry.phases import PHASES

Floats = NDArray[np.float64]
Rows = Mapping[str, Floats]
"""`rows[metric][rank]`."""

OVER_RANKS: Mapping[str, tuple[str, Callable[[Floats], float]]] = {
    "memory/allocated_bytes": ("allocated_bytes", np.max),
    "memory/reserved_bytes": ("reserved_bytes", np.max),
    "memory/peak_bytes": ("peak_bytes", np.max),
    "memory/rss_bytes": ("rss_bytes", np.max),
    "memory/retries": ("retries", np.sum),
    "memory/fragmentation": ("fragmentation", np.max),
    "hardware/utilisation": ("gpu_utilisation", np.mean),
    "hardware/power": ("power_watts", np.sum),
    "hardware/temperature": ("temperature_c", np.max),
}
"""Metrics of the run, each from one column; ranks that do not know it are left out."""


def without_waiting(rows: Rows) -> dict[str, Floats]:
    """The rows with the time in which ranks waited for each other taken out of the monitor's own.

    They send how long they were in its collectives. Who comes last waits for nobody, so the
    shortest time is what a collective costs; the rest is lateness that was there before, and that
    the next collective of the training would have waited for.
    """
    inside, there = rows["monitor_wait_seconds"], rows["failed"] == 0
    if not there.any():
        return dict(rows)
    waited = np.where(there, inside - inside[there].min(), 0.0)
    own = np.maximum(rows["monitor_seconds"] - waited, 0.0)
    return {**rows, "monitor_seconds": own, "monitor_wait_seconds": waited}


def run_summary(rows: Rows) -> dict[str, float]:
    """Speed, phases, memory and devices of the run; what no rank knows is absent."""
    return {**speed(rows), **phase_shares(rows), **_over_ranks(rows), **_fullest(rows)}


def speed(rows: Rows) -> dict[str, float]:
    """The step time of the slowest rank and what all ranks get through."""
    seconds, elapsed = float(rows["step_seconds"].max()), float(rows["elapsed_seconds"].max())
    if seconds <= 0:
        return {}
    metrics = {
        "performance/step_seconds": seconds,
        "performance/monitor_fraction": float(rows["monitor_seconds"].max()) / elapsed,
    }
    for what in ("tokens", "samples"):
        total = float(rows[what].sum())
        if total:
            metrics[f"performance/{what}_per_second"] = total / elapsed
    return metrics


def phase_shares(rows: Rows) -> dict[str, float]:
    """Share of a step that each phase takes, mean over the ranks that measured it."""
    table = np.stack([rows[f"{phase}_seconds"] for phase in PHASES])
    known = table[:, np.isfinite(table).all(0) & (table.sum(0) > 0)]
    if not known.size:
        return {}
    shares = (known / known.sum(0)).mean(1)
    return {f"performance/{p}_fraction": float(s) for p, s in zip(PHASES, shares, strict=True)}


def _over_ranks(rows: Rows) -> dict[str, float]:
    metrics = {}
    for tag, (column, combine) in OVER_RANKS.items():
        known = rows[column][np.isfinite(rows[column])]
        if known.size:
            metrics[tag] = float(combine(known))
    return metrics


def _fullest(rows: Rows) -> dict[str, float]:
    with np.errstate(divide="ignore", invalid="ignore"):
        share = rows["memory_used_bytes"] / rows["memory_total_bytes"]
    known = share[np.isfinite(share)]
    return {"hardware/memory_fraction": float(known.max())} if known.size else {}
