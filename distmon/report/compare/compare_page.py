"""`distmon compare --html`: the comparison as one self-contained page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from distmon.report.compare.compared_run import ComparedRun
from distmon.report.compare.comparison import Comparison
from distmon.report.compare.verdicts import Axis
from distmon.report.downsampling import bin_edges, binned
from distmon.report.encoding import number, numbers
from distmon.report.html_page import self_contained

POINTS: Final = 1000
OVERLAID: Final = {
    "Loss": "loss",
    "Validation loss": "val_loss",
    "Gradient norm": "monitor/grad_norm",
    "Median update ratio": "monitor/update_ratio_median",
    "Learning rate": "train/lr",
    "Norm of all weights": "monitor/param_norm",
    "Tokens per second": "performance/tokens_per_second",
    "Seconds per step": "performance/step_seconds",
}
"""Title of a plot, and what it shows of every run."""


def compare_page(comparisons: Sequence[Comparison]) -> str:
    """Return the page."""
    runs = [comparisons[0].first, *(each.other for each in comparisons)]
    axis: Axis = "tokens" if all(each.axis == "tokens" for each in comparisons) else "steps"
    view = {
        "overlay": overlay_view(runs, axis),
        "comparisons": [each.to_dict(most_params=40) for each in comparisons],
    }
    return self_contained(view, ["overlay.js", "start_compare.js"])


def overlay_view(runs: Sequence[ComparedRun], axis: Axis) -> dict[str, Any]:
    """Return every plot with one line per run."""
    plots = []
    for title, metric in OVERLAID.items():
        lines = [_line(run, _series(run, metric), axis) for run in runs]
        plots.append({"title": title, "lines": lines})
    return {"runs": [run.name for run in runs], "axis": axis, "plots": plots}


def _series(run: ComparedRun, metric: str) -> Mapping[int, float]:
    if metric == "loss":
        return run.losses
    return run.val_losses if metric == "val_loss" else run.metrics.get(metric, {})


def _line(run: ComparedRun, series: Mapping[int, float], axis: Axis) -> dict[str, Any]:
    steps = np.array(sorted(series), np.float64)
    values = np.array([series[int(step)] for step in steps], np.float64)
    if axis == "tokens" and len(steps):
        steps = np.interp(steps, [0.0, *run.tokens], [0.0, *run.tokens.values()])
    edges = bin_edges(len(steps), POINTS)
    x = binned(steps, edges, "max")
    return {"x": [number(value) for value in x], "y": numbers(binned(values, edges).tolist())}
