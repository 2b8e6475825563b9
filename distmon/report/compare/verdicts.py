"""Metrics of two runs at equal steps or equal tokens, each with a verdict."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from distmon.report.compare.bootstrap import FEWEST, mean_interval
from distmon.report.compare.compared_run import ComparedRun, Series

Axis = Literal["steps", "tokens"]
Better = Literal["lower", "higher", ""]
Verdict = Literal["better", "worse", "higher", "lower", "within noise", "too few points", "equal"]
WINDOW: Final = 0.2
"""The last part of what both runs have, by steps or tokens."""
MOST_BINS: Final = 500
SMALL_PART: Final = 1e-3
"""Of the fall of a loss; set beforehand, not on any runs."""
PARTS: Final = 5
"""Parts of a run whose means are compared with each other, about as long as the window."""
DRIFTS: Final = 3.0
"""How many times its own change, in logarithms, a run may differ from another one by chance: chosen
on six runs of `benchmarks.compare_noise`, checked on six others."""


@dataclass(frozen=True)
class Quantity:
    """A number that is compared."""

    key: str
    """Its name in `--fail-if` and in JSON."""
    metric: str
    better: Better = ""
    least: float = 0.0
    """A relative change below this is noise whatever the interval says."""
    is_steady: bool = False
    """Stays the same through a run unless the machine does something else: a change that is not
    beyond what either run changes by itself is noise."""
    falls: bool = False
    """Falls through a run: a difference that is nothing next to the fall is noise, though it may be
    a large part of what is left."""


QUANTITIES: Final = (
    Quantity("final_loss", "loss", "lower", falls=True),
    Quantity("val_loss", "val_loss", "lower", falls=True),
    Quantity("grad_norm", "monitor/grad_norm"),
    Quantity("update_ratio", "monitor/update_ratio_median"),
    Quantity("param_norm", "monitor/param_norm", least=0.05),
    Quantity("gradient_gain", "gradient_monitor/mean_gain", least=0.05),
    Quantity("lr", "train/lr"),
    Quantity("tokens_per_second", "performance/tokens_per_second", "higher", 0.02, True),
    Quantity("step_seconds", "performance/step_seconds", "lower", 0.02, True),
    Quantity("mfu", "performance/mfu", "higher", 0.02, True),
    Quantity("peak_memory", "memory/peak_bytes", "lower", 0.01),
    Quantity("host_memory", "memory/rss_bytes", "lower", 0.01),
    Quantity("monitor_fraction", "performance/monitor_fraction", "lower", 0.02, True),
)
_ALIASES: Final = {"monitor/grad_norm": "train/unclipped_grad_norm"}
"""What logs of other tools have instead."""


@dataclass(frozen=True)
class Compared:
    """One quantity of a run against the first run, over the common window."""

    quantity: Quantity
    first: float
    other: float
    change: float
    """other / first - 1."""
    interval: tuple[float, float] | None
    """Of the change."""
    verdict: Verdict
    points: int


def common_axis(first: ComparedRun, other: ComparedRun, by: Axis | None) -> Axis:
    """Return tokens where both report them and differ in tokens per step, else steps."""
    if by is not None:
        return by
    rates = [_rate(run) for run in (first, other)]
    if None in rates or not rates[0]:
        return "steps"
    return "tokens" if abs(rates[1] / rates[0] - 1) > 0.01 else "steps"  # type: ignore[operator]


def compare_quantities(first: ComparedRun, other: ComparedRun, axis: Axis) -> list[Compared]:
    """Return every quantity that both runs have."""
    found = []
    for quantity in QUANTITIES:
        pair = [_series(run, quantity.metric) for run in (first, other)]
        if all(pair):
            paired = _paired(first, other, pair[0], pair[1], axis)
            if paired is not None:
                drift = max(map(own_drift, pair)) if quantity.is_steady else 0.0
                fall = max(map(_fall, pair)) if quantity.falls else 0.0
                found.append(_compared(quantity, *paired, drift, SMALL_PART * fall))
    return found


def own_drift(series: Series) -> float:
    """Return the logarithm of the factor by which a run changes by itself, between its parts.

    The beginning of the run is left out, where caches and allocators warm up.
    """
    values = np.array([series[step] for step in sorted(series)], np.float64)
    values = values[np.isfinite(values)]
    means = [
        part.mean() for part in np.array_split(values[len(values) // 10 :], PARTS) if len(part)
    ]
    if not means or min(means) <= 0:
        return 0.0
    return math.log(max(means) / min(means))


def _compared(
    quantity: Quantity,
    a: NDArray[np.float64],
    b: NDArray[np.float64],
    drift: float,
    smallest: float,
) -> Compared:
    base, other = float(a.mean()), float(b.mean())
    size = abs(base)
    change = (other - base) / size if size else 0.0
    interval = mean_interval(b - a)
    relative = None if interval is None or not size else (interval[0] / size, interval[1] / size)
    verdict: Verdict
    if np.array_equal(a, b):
        verdict = "equal"
    elif relative is None:
        verdict = "too few points"
    elif (
        relative[0] <= 0 <= relative[1]
        or abs(change) < quantity.least
        or abs(other - base) < smallest
        or _within_drift(base, other, drift)
    ):
        verdict = "within noise"
    else:
        direction = "lower" if change < 0 else "higher"
        if quantity.better:
            verdict = "better" if direction == quantity.better else "worse"
        else:
            verdict = "lower" if change < 0 else "higher"
    return Compared(quantity, base, other, change, relative, verdict, len(a))


def _fall(series: Series) -> float:
    """Return by how much a series has fallen since its first values."""
    values = [series[step] for step in sorted(series) if math.isfinite(series[step])]
    return max(0.0, float(np.mean(values[:5])) - float(np.mean(values[-5:]))) if values else 0.0


def _within_drift(first: float, other: float, drift: float) -> bool:
    return drift > 0 and first > 0 < other and abs(math.log(other / first)) <= DRIFTS * drift


def _series(run: ComparedRun, metric: str) -> Series:
    if metric == "loss":
        return run.losses or dict(run.metrics.get("train/step_loss", {}))
    if metric == "val_loss":
        return run.val_losses
    found = run.metrics.get(metric)
    return dict(found if found else run.metrics.get(_ALIASES.get(metric, ""), {}))


def _paired(
    first: ComparedRun, other: ComparedRun, a: Series, b: Series, axis: Axis
) -> tuple[NDArray[np.float64], NDArray[np.float64]] | None:
    """Return the values of both at equal places of the window, as means of equal bins."""
    places = [_places(first, a, axis), _places(other, b, axis)]
    if not len(places[0][0]) or not len(places[1][0]):
        return None
    end = min(x[-1] for x, _ in places)
    begin = max(x[0] for x, _ in places)
    window = max(begin, end - WINDOW * (end - min(x[0] for x, _ in places)))
    # A sparse series, such as evaluations, needs more of the run; or else its end has to do.
    for start in (window, (begin + end) / 2, end - (end - begin) / 3):
        cut = [_within(x, y, start, end) for x, y in places]
        fewest = min(len(x) for x, _ in cut)
        if fewest >= FEWEST:
            break
    if fewest == 0:
        return None
    if len(cut[0][0]) == len(cut[1][0]) and np.array_equal(cut[0][0], cut[1][0]):
        return cut[0][1], cut[1][1]
    edges = np.linspace(start, end, min(fewest, MOST_BINS) + 1)
    means = [_bin_means(x, y, edges) for x, y in cut]
    both = np.isfinite(means[0]) & np.isfinite(means[1])
    return (means[0][both], means[1][both]) if both.any() else None


def _places(
    run: ComparedRun, series: Mapping[int, float], axis: Axis
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    steps = np.array([s for s, v in series.items() if np.isfinite(v)], np.float64)
    values = np.array([v for v in series.values() if np.isfinite(v)], np.float64)
    order = np.argsort(steps, kind="stable")
    steps, values = steps[order], values[order]
    if axis == "tokens" and len(steps):
        known = [0.0, *run.tokens], [0.0, *run.tokens.values()]
        inside = steps <= known[0][-1]
        return np.interp(steps[inside], *known), values[inside]
    return steps, values


def _within(
    x: NDArray[np.float64], y: NDArray[np.float64], start: float, end: float
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    keep = (x >= start) & (x <= end)
    return x[keep], y[keep]


def _bin_means(
    x: NDArray[np.float64], y: NDArray[np.float64], edges: NDArray[np.float64]
) -> NDArray[np.float64]:
    place = np.clip(np.searchsorted(edges, x, side="right") - 1, 0, len(edges) - 2)
    count = np.bincount(place, minlength=len(edges) - 1)
    total = np.bincount(place, weights=y, minlength=len(edges) - 1)
    with np.errstate(invalid="ignore"):
        return np.where(count > 0, total / np.maximum(count, 1), np.nan)


def _rate(run: ComparedRun) -> float | None:
    if not run.tokens:
        return None
    step = max(run.tokens)
    return run.tokens[step] / step if step else None
